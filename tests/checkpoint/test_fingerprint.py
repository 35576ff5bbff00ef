"""The fingerprint: one hash that depends on the training state and on nothing else."""

import hashlib

import pytest
import torch
from torch import nn

from evenstep.checkpoint.fingerprint import fingerprint, named_state, tensor_digest


class Everything(nn.Module):
    """Parameters and buffers of many dtypes, shapes and layouts."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def randn(*shape, dtype=torch.float32):
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.convolution = nn.Conv2d(3, 4, 2)
        with torch.no_grad():
            for parameter in self.convolution.parameters():
                parameter.copy_(randn(*parameter.shape))
        self.coarse = nn.Parameter(randn(5).bfloat16())
        self.wave = nn.Parameter(randn(3, dtype=torch.complex64))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("counts", torch.tensor([[1, -2], [3, 2**40]]))
        self.register_buffer("scalar", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.tensor([7], dtype=torch.uint8), persistent=False)


def make(optimizer=torch.optim.Adam):
    """Return a model and an optimizer after one update with made-up gradients."""
    model = Everything()
    optimizer = optimizer(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def lbfgs(parameters, lr):
    """Its state holds numbers, None and lists of tensors."""
    optimizer = torch.optim.LBFGS([*parameters][:1], lr, max_iter=1)
    step = optimizer.step
    optimizer.step = lambda: step(lambda: optimizer.param_groups[0]["params"][0].square().sum())
    return optimizer


def recipe(model, optimizer):
    """Compute the fingerprint as it is documented, with numpy and hashlib."""
    entries = {f"parameter/{name}": value for name, value in model.named_parameters()}
    entries |= {f"buffer/{name}": value for name, value in model.named_buffers()}
    names = {id(value): name for name, value in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            entries[f"optimizer/{names[id(parameter)]}/{key}"] = value
    digest = hashlib.sha256()
    for name, value in sorted(entries.items()):
        header = f"{name}\0{value.dtype}\0{tuple(value.shape)}\0"
        value = value.detach()
        if value.dtype == torch.bfloat16:
            value = value.view(torch.int16)
        array = value.numpy()
        digest.update(header.encode())
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes(order="C"))
    return digest.hexdigest()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, momentum, torch.optim.SGD])
def test_the_fingerprint_is_the_documented_hash(optimizer):
    state = make(optimizer)
    assert fingerprint(*state) == recipe(*state)


def test_numbers_of_an_optimizer_are_hashed_as_they_are_written():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    nn.init.zeros_(model.weight)
    optimizer.state[model.weight] = {"steps": 3, "rate": 0.1, "history": [None, {"best": True}]}
    parts = [
        b"optimizer/weight/history/0\0NoneType\0None\0",
        b"optimizer/weight/history/1/best\0bool\0True\0",
        b"optimizer/weight/rate\0float\x000.1\0",
        b"optimizer/weight/steps\0int\x003\0",
        b"parameter/weight\0torch.float32\0(1, 1)\0" + bytes(4),
    ]
    assert fingerprint(model, optimizer) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_digest_of_one_tensor_has_no_name():
    expected = hashlib.sha256(b"\0torch.int16\0(2,)\0\x01\x00\xff\xff").hexdigest()
    assert tensor_digest(torch.tensor([1, -1], dtype=torch.int16)) == expected


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, momentum, lbfgs])
def test_equal_states_have_equal_fingerprints(optimizer):
    assert fingerprint(*make(optimizer)) == fingerprint(*make(optimizer))


def flip_last_bit(tensor):
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw[-1] ^= 1
    assert raw.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


NAMES = [name for name, value in named_state(*make(lbfgs)) if isinstance(value, torch.Tensor)]
NAMES += [name for name, _ in named_state(*make(torch.optim.Adam)) if name not in NAMES]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "buffer/nothing"])
def test_one_flipped_bit_changes_the_fingerprint(name):
    state = make(torch.optim.Adam)
    if name not in dict(named_state(*state)):
        state = make(lbfgs)
    before = fingerprint(*state)
    flip_last_bit(dict(named_state(*state))[name])
    assert fingerprint(*state) != before
    flip_last_bit(dict(named_state(*state))[name])
    assert fingerprint(*state) == before


def test_every_kind_of_state_was_flipped():
    assert {name.split("/")[0] for name in NAMES} == {"parameter", "buffer", "optimizer"}
    assert "optimizer/convolution.weight/exp_avg" in NAMES
    assert "optimizer/convolution.weight/step" in NAMES
    assert "buffer/hidden" in NAMES  # not in the state dict, but training may change it


def test_values_that_compare_equal_may_have_other_bits():
    zero = torch.zeros(2)
    assert torch.equal(zero, -zero)
    assert tensor_digest(zero) != tensor_digest(-zero)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_digest(nans[0]) != tensor_digest(nans[1])


def test_dtype_shape_and_place_change_the_fingerprint():
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(16, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(16, dtype=torch.bool),
        torch.zeros(5),
        torch.zeros(0),
        0.0,
        0,
        None,
    ]
    assert len({tensor_digest(value) for value in values}) == len(values)


def other_layouts(tensor):
    padded = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    padded[..., : tensor.shape[-1]] = tensor
    yield padded[..., : tensor.shape[-1]]
    yield tensor.mT.contiguous().mT
    yield tensor.contiguous(memory_format=torch.channels_last)
    if tensor.is_complex():
        yield tensor.conj().resolve_conj().conj()
    if tensor.is_floating_point():
        yield torch._neg_view(-tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
)
def test_the_layout_in_memory_does_not_change_the_fingerprint(dtype):
    tensor = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    layouts = list(other_layouts(tensor))
    assert sum(layout.stride() != tensor.stride() for layout in layouts) == 3
    assert {tensor_digest(layout) for layout in layouts} == {tensor_digest(tensor)}


def test_channels_last_models_and_optimizers_have_the_same_fingerprint():
    model, optimizer = make()
    before = fingerprint(model, optimizer)
    model.to(memory_format=torch.channels_last)
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.ndim == 4:
                state[key] = value.contiguous(memory_format=torch.channels_last)
    assert not model.convolution.weight.is_contiguous()
    assert fingerprint(model, optimizer) == before


def test_the_order_of_creation_does_not_change_the_fingerprint():
    one, other = nn.Module(), nn.Module()
    for module, order in ((one, "abc"), (other, "cab")):
        for name in order:
            module.register_parameter(name, nn.Parameter(torch.full((2,), float(ord(name)))))
            module.register_buffer(name.upper(), torch.tensor(ord(name)))
    states = []
    for module, order in ((one, "bca"), (other, "acb")):
        optimizer = torch.optim.Adam([getattr(module, name) for name in order])
        for name in order:
            parameter = getattr(module, name)
            optimizer.state[parameter] = {"x": torch.ones(1) * ord(name), "step": ord(name)}
        states.append((module, optimizer))
    assert fingerprint(*states[0]) == fingerprint(*states[1])
    one.a.data, one.b.data = one.b.data, one.a.data
    assert fingerprint(*states[0]) != fingerprint(*states[1])


def test_a_tied_parameter_counts_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    names = [name for name, _ in named_state(model, torch.optim.SGD(model.parameters()))]
    assert names == ["parameter/0.weight"]


def test_gradients_and_flags_are_not_part_of_the_state():
    model, optimizer = make()
    before = fingerprint(model, optimizer)
    optimizer.zero_grad()
    model.eval().requires_grad_(False)
    assert fingerprint(model, optimizer) == before
