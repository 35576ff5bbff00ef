"""Parameters and buffers that can't be written in place, and parameters that take another form."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.errors import ContractError, ModelError
from layouts import own
from reference import assert_same_bits
from trainers import open_trainer, state_of

X, Y = torch.randn(24, 12, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 5


# What torch says about the tensors of this file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse [CB]S[RC]", "ignore:torch.quantize_per_tensor"
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 160), nn.Tanh(), nn.Linear(160, 5))


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.ones(12)


BUFFERS = {
    "expanded": lambda: torch.ones(1).expand(12),
    "sparse_coo": lambda: torch.eye(12).to_sparse(),
    "sparse_csr": lambda: torch.eye(12).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(12), 0.1, 0, torch.quint8),
    "inference_mode": made_in_inference_mode,
}


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_cant_be_written_is_refused_by_name(kind, max_in_flight):
    model = net()
    model[0].register_buffer("mask", BUFFERS[kind]())
    with pytest.raises(ModelError, match=rf"buffer 0\.mask.*{kind}"):
        open_trainer(model, max_in_flight=max_in_flight)


def test_an_expanded_parameter_is_refused_by_name():
    model = net()
    model[0].bias = nn.Parameter(torch.ones(1).expand(160))
    with pytest.raises(ModelError, match=r"parameter 0\.bias.*contiguous"):
        open_trainer(model)


def other_dtype(model):
    model.double()


def other_shape(model):
    for name in ("weight", "bias"):
        first = getattr(model[0], name)
        first.data = first.data[:80]
    model[2].weight.data = model[2].weight.data[:, :80]


def other_strides(model):
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def objective(model, X, y):
    output = model(X.to(model[0].weight.dtype))
    return F.cross_entropy(output, y, reduction="sum"), len(y)


def trained(change, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_trainer(model, optimizer=optimizer, objective=objective, **options) as trainer:
        for number in range(4):
            if number == 2:
                trainer.waitall()
                change(model)
            trainer.step(X, Y)
        trainer.waitall()
        return copy.deepcopy(state_of(trainer))


def gaps_in_memory(model):
    weight = model[0].weight
    weight.data = weight.data.repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize("change", [other_dtype, other_shape, other_strides, gaps_in_memory])
def test_every_device_follows_parameters_with_data_of_another_form(change):
    alone = trained(change, devices=1)
    for devices, max_in_flight in ((3, 1), (own(2), 1), (1, 2), (own(2), 2)):
        state = trained(change, devices=devices, max_in_flight=max_in_flight)
        assert_same_bits(state, alone)


def compressed(layout):
    """Return what makes a sparse tensor of a dense one in this layout."""
    blocks = {torch.sparse_bsr: {"blocksize": (2, 2)}, torch.sparse_bsc: {"blocksize": (2, 2)}}
    return lambda dense: dense.to_sparse(layout=layout, **blocks.get(layout, {}))


SPARSE = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]


class Graph(nn.Module):
    """Averages over the neighbours in a graph, whose sparse matrix is a plain attribute."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 5)
        self.neighbours = compressed(layout)(torch.eye(12).roll(1, 0))

    def forward(self, x):
        return self.layer((self.neighbours @ x.T).T)


def set_neighbours(model):
    model.neighbours = compressed(model.neighbours.layout)(model.neighbours.to_dense() * 2)


def write_neighbours(model):
    values = model.neighbours._values if model.neighbours.is_sparse else model.neighbours.values
    values().mul_(2)


def leave(model):
    """Change nothing."""


@pytest.mark.parametrize("change", [leave, set_neighbours, write_neighbours])
@pytest.mark.parametrize("layout", SPARSE, ids=str)
@pytest.mark.thinned(2)
def test_a_sparse_matrix_in_a_plain_attribute(layout, change, caplog):
    def run(devices):
        model = Graph(layout)
        with open_trainer(model, devices=devices) as trainer:
            for number in range(3):
                if number == 1:
                    change(model)
                trainer.step(X, Y)
            return trainer.fingerprint()

    assert len({run(devices) for devices in (1, 2, own(2))}) == 1
    assert "could not be checked" not in caplog.text


@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_a_sparse_matrix_that_forward_changes_is_noticed(layout):
    class Restless(Graph):
        def forward(self, x):
            output = super().forward(x)
            self.neighbours = compressed(self.neighbours.layout)(self.neighbours.to_dense() * 0.5)
            return output

    model = Restless(layout)
    with (
        open_trainer(model, devices=1) as trainer,
        pytest.raises(ContractError, match=r"has changed model\.neighbours"),
    ):
        trainer.step(X, Y)
