"""Sliced layers, by bits: against torch's own with one slice, against explicit slices with more."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import ModelError
from evenstep.nn import SlicedConv2d, SlicedEmbedding, SlicedLinear, slice_
from reference import assert_same_bits, bits_of
from slicing import Found, crew_of, reference, run_layer, sliced_model

DIRECTIONS = st.sampled_from(["outputs", "inputs"])
CREWS = st.sampled_from(
    [["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1:own"], ["cpu:0:own", "cpu:1:own", "cpu:2"]]
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
FEW = settings(max_examples=40)


def assert_same(found, expected):
    for name, one, other in zip(Found._fields, found, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert bits_of(one) == bits_of(other), name


def assert_equals_slices(layer, x, slices, along, crew):
    """Compare a layer, cut in place, with the reference, whose slices are explicit."""
    with torch.no_grad():
        dy = torch.randn_like(layer(x))
    expected = reference(copy.deepcopy(layer), x, dy, slices, along)
    sliced = slice_(layer, slices, along=along)
    with crew_of(crew):
        found = run_layer(sliced, x, dy)
    if found.x is not None:
        expected = (expected[0], expected[1].reshape(x.shape), *expected[2:])
    assert_same(found, expected)


@FEW
@given(
    sizes=st.lists(st.integers(1, 5), max_size=3),
    features=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    slices=st.integers(2, 7),
    along=DIRECTIONS,
    bias=st.booleans(),
    dtype=DTYPES,
    crew=CREWS,
    seed=st.integers(0, 99),
)
def test_a_linear_layer_of_any_shape(sizes, features, slices, along, bias, dtype, crew, seed):
    torch.manual_seed(seed)
    inputs, outputs = features
    if along == "outputs":
        outputs *= slices
    else:
        inputs *= slices
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(*sizes, inputs, dtype=dtype)
    assert_equals_slices(layer, x, slices, along, crew)


@st.composite
def convolutions(draw):
    """Return (layer, x, slices, along), with zero padding."""
    torch.manual_seed(draw(st.integers(0, 99)))
    slices, along = draw(st.integers(2, 6)), draw(DIRECTIONS)
    groups, inputs, outputs = 1, draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if along == "inputs":
        inputs *= slices
    else:
        wide, narrow = draw(st.sampled_from([(slices, 1), (1, slices), (2 * slices, slices)]))
        groups = draw(st.sampled_from([1, wide]))
        inputs, outputs = inputs * groups, outputs * groups * max(1, slices // groups) * narrow
        if groups == 1:
            outputs *= slices
        elif groups % slices and slices % groups:
            groups = 1
    layer = nn.Conv2d(
        inputs,
        outputs,
        draw(st.sampled_from([1, 2, 3, (1, 3)])),
        stride=draw(st.sampled_from([1, 2, (2, 1)])),
        padding=draw(st.sampled_from([0, 1, (0, 2)])),
        dilation=draw(st.sampled_from([1, 2])),
        groups=groups,
        bias=draw(st.booleans()),
    )
    x = torch.randn(draw(st.integers(1, 3)), inputs, draw(st.integers(5, 8)), 6)
    if draw(st.booleans()):
        layer, x = (one.to(memory_format=torch.channels_last) for one in (layer, x))
    return layer, x, slices, along


@FEW
@given(case=convolutions(), crew=CREWS)
def test_a_convolution_of_any_shape(case, crew):
    assert_equals_slices(*case, crew)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own layer warns of a copy
@pytest.mark.parametrize("along", ["outputs", "inputs"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, (2, 1), "same", "valid"])
@pytest.mark.parametrize("kernel", [3, 2])
def test_a_convolution_pads_as_torch_does(along, mode, padding, kernel):
    """Against the same layer on images that were padded before."""
    torch.manual_seed(0)
    layer = SlicedConv2d(
        4, 4, kernel, padding=padding, padding_mode=mode, slices=2, along=along, dtype=torch.float64
    )
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    plain = nn.Conv2d(4, 4, kernel, padding=padding, padding_mode=mode, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    assert layer(x).shape == plain(x).shape


@FEW
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    slices=st.integers(2, 5),
    along=DIRECTIONS,
    has_padding=st.booleans(),
    by_freq=st.booleans(),
    crew=CREWS,
    seed=st.integers(0, 99),
)
def test_an_embedding_equals_torchs_own(shape, slices, along, has_padding, by_freq, crew, seed):
    """No slice rounds: neither features nor rows are added to anything but zeros."""
    torch.manual_seed(seed)
    rows, features = 3 * slices, 2 * slices
    padding = int(torch.randint(-rows, rows, ())) if has_padding else None
    by_freq = by_freq and along == "outputs"
    layer = nn.Embedding(rows, features, padding, scale_grad_by_freq=by_freq)
    x, dy = torch.randint(rows, shape), torch.randn(*shape, features)
    expected = run_layer(copy.deepcopy(layer), x, dy)
    with crew_of(crew):
        assert_same(run_layer(slice_(layer, slices, along=along), x, dy), expected)


KINDS = {
    "linear": (lambda: nn.Linear(6, 4), lambda: torch.randn(3, 2, 6)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1), lambda: torch.randn(2, 4, 5, 5)),
    "groups": (lambda: nn.Conv2d(4, 4, 2, groups=2, padding_mode="circular", padding=1),
               lambda: torch.randn(4, 5, 5)),
    "embedding": (lambda: nn.Embedding(8, 4, 2, max_norm=1.0), lambda: torch.randint(8, (3, 4))),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("along", ["outputs", "inputs"])
def test_one_slice_is_torchs_own_layer(kind, along):
    torch.manual_seed(0)
    make, make_input = KINDS[kind]
    layer, x = make(), make_input()
    dy = torch.randn_like(layer(x))
    expected = run_layer(copy.deepcopy(layer), x, dy)
    assert_same(run_layer(slice_(layer, 1, along=along), x, dy), expected)


@pytest.mark.parametrize("slices", [2, 3, 6])
@pytest.mark.parametrize("along", ["outputs", "inputs"])
@pytest.mark.thinned(2)
def test_gradients_in_double_precision(slices, along):
    torch.manual_seed(0)
    inputs = torch.randn(2, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    options = {"slices": slices, "along": along, "dtype": torch.float64}
    conv = SlicedConv2d(6, 6, 2, **options)
    linear = SlicedLinear(6, 6, **options)
    rows = inputs.detach()[0, :, 0].requires_grad_()
    for layer, x in ((conv, inputs), (linear, rows.T.contiguous().detach().requires_grad_())):
        given_ = (x, *layer.parameters())
        call = lambda x, *parameters, layer=layer: layer(x)  # noqa: E731
        assert torch.autograd.gradcheck(call, given_)
        assert torch.autograd.gradgradcheck(call, given_)
    table = SlicedEmbedding(6, 6, **options)
    tokens = torch.tensor([[0, 5, 2], [2, 2, 1]])
    weight = table.weight
    assert torch.autograd.gradcheck(lambda weight: table(tokens), (weight,))
    assert torch.autograd.gradgradcheck(lambda weight: table(tokens), (weight,))


def test_a_gradient_of_gradients_has_the_same_bits_with_helpers():
    found = []
    for crew in (["cpu:0"], ["cpu:0", "cpu:1", "cpu:2"]):
        torch.manual_seed(0)
        layer = SlicedLinear(8, 8, slices=4)
        x = torch.randn(3, 8, requires_grad=True)
        with crew_of(crew):
            (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
            slope.square().sum().backward()
        found.append({"x": x.grad, "weight": layer.weight.grad})
    assert_same_bits(found[1], found[0])


def outcome(model, x, crew, precision=None):
    with crew_of(crew), torch.autocast("cpu", precision or torch.bfloat16, precision is not None):
        total = F.cross_entropy(model(x), torch.arange(len(x)) % 5)
    with crew_of(crew):
        total.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    return {"loss": total.detach(), **gradients}


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("slices", [2, 4])
def test_any_crew_gives_the_bits_of_the_calling_thread(slices, precision):
    torch.manual_seed(1)
    x = torch.randn(7, 36)
    expected = outcome(sliced_model(slices), x, ["cpu:0"], precision)
    for crew in (
        ["cpu:0", "cpu:1"],
        ["cpu:0", "cpu:1:own"],
        ["cpu:0", "cpu:1:own", "cpu:2:own"],
        [f"cpu:{n}" for n in range(6)],
    ):
        assert_same_bits(outcome(sliced_model(slices), x, crew, precision), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant):
    torch.manual_seed(1)
    x = torch.randn(5, 36)
    expected = outcome(sliced_model(), x, ["cpu:0"])
    for crew in (["cpu:0"], ["cpu:0", "cpu:1:own"]):
        model = sliced_model()

        def recomputed(x, model=model):
            return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

        with crew_of(crew):
            F.cross_entropy(recomputed(x.clone()), torch.arange(5) % 5).backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        assert_same_bits(found, {name: expected[name] for name in found})


def test_autocast_casts_as_it_does_for_torchs_own_layers():
    layer, x = SlicedLinear(4, 4, slices=2), torch.randn(3, 4)
    table = SlicedEmbedding(4, 4, slices=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert layer.double()(x.double()).dtype is torch.float64
        assert table(torch.arange(4)).dtype is torch.float32


def test_inputs_with_any_strides_and_places_in_memory():
    """A slice is computed from tensors as if they had been made by themselves."""
    torch.manual_seed(0)
    layer = SlicedLinear(8, 8, slices=2)
    x = torch.randn(5, 8)
    dy = torch.randn(5, 8)
    expected = run_layer(layer, x, dy)
    odd = torch.empty(5 * 8 + 1)[1:].view(5, 8).copy_(x)
    across = x.t().contiguous().t()
    for other in (odd, across):
        layer.zero_grad()
        output = layer(other)
        output.backward(dy.t().contiguous().t())
        assert bits_of(output) == bits_of(expected.output)
        assert bits_of(layer.weight.grad) == bits_of(expected.weight)


def test_copies_and_state():
    model = sliced_model()
    plain = nn.Linear(128, 16)
    plain.load_state_dict(model.query.state_dict())
    assert [*model.query.state_dict()] == ["weight", "bias"]
    assert repr(model.value) == (
        "SlicedLinear(in_features=128, out_features=16, bias=True, slices=4, along='inputs')"
    )
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(again) == repr(model)
        x = torch.randn(3, 36)
        assert torch.equal(again(x), model(x))


def test_rows_outside_of_an_embedding_are_refused():
    for along in ("outputs", "inputs"):
        table = SlicedEmbedding(4, 4, slices=2, along=along)
        for row in (-1, 4):
            with pytest.raises(IndexError, match="out of range"):
                table(torch.tensor([0, row]))
        assert table(torch.empty(0, dtype=torch.int64)).shape == (0, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlicedLinear(4, 6, slices=4), "4 does not divide its out_features=6"),
        (lambda: SlicedLinear(6, 4, slices=4, along="inputs"), "divide its in_features=6"),
        (lambda: SlicedLinear(4, 4, slices=0), "got slices=0: give an integer of at least 1"),
        (lambda: SlicedLinear(4, 4, slices=2, along="rows"), "got along='rows': give 'outputs'"),
        (lambda: SlicedLinear(4, 4, slices=2, dtype=torch.complex64), "its weight is complex"),
        (lambda: SlicedConv2d(4, 6, 3, slices=4), "does not divide its out_channels=6"),
        (lambda: SlicedConv2d(4, 4, 3, groups=2, slices=2, along="inputs"), "cut its outputs"),
        (lambda: SlicedConv2d(6, 12, 3, groups=6, slices=4), "parts of several of its 6 groups"),
        (lambda: SlicedEmbedding(4, 6, slices=4), "does not divide its embedding_dim=6"),
        (lambda: SlicedEmbedding(6, 4, slices=4, along="inputs"), "divide its num_embeddings=6"),
        (lambda: SlicedEmbedding(4, 4, slices=2, max_norm=1.0), "has max_norm=1.0"),
        (lambda: SlicedEmbedding(4, 4, slices=2, sparse=True), "has sparse=True"),
        (lambda: SlicedEmbedding(4, 4, slices=2, along="inputs", scale_grad_by_freq=True),
         "has scale_grad_by_freq=True, which along='inputs' does not support"),
    ],
)  # fmt: skip
def test_what_cant_be_cut_is_refused_in_a_line(make, message):
    with pytest.raises(ModelError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
