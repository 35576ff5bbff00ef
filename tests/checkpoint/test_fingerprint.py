"""The fingerprint: one hash that depends on the training state and on nothing else."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.checkpoint.fingerprint import (
    digests,
    fingerprint,
    fingerprint_2,
    named_state,
    tensor_digest,
)


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


def flip_last_bit(tensor):
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw[-1] ^= 1
    assert raw.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("optimizer", "moment"),
    [
        (torch.optim.Adam, "convolution.weight/exp_avg"),
        (momentum, "convolution.weight/momentum_buffer"),
        (lbfgs, "coarse/d"),
    ],
)
def test_one_flipped_bit_changes_the_fingerprint_of_either_version(optimizer, moment):
    state, flipped = make(optimizer), []
    before = fingerprint(*state), fingerprint_2(*state)
    for name, value in named_state(*state):
        if isinstance(value, torch.Tensor) and value.numel():
            flip_last_bit(value)
            assert fingerprint(*state) != before[0], name
            assert fingerprint_2(*state) != before[1], name
            flip_last_bit(value)
            assert (fingerprint(*state), fingerprint_2(*state)) == before, name
            flipped.append(name)
    assert {"parameter/coarse", "buffer/scalar", f"optimizer/{moment}"} <= {*flipped}
    assert "buffer/hidden" in flipped  # not in the state dict, but training may change it


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


# ---- version 2: the settings of the optimizer, and what else decides the next step


class Scaled(nn.Module):
    """Multiplies by numbers that are neither parameters nor buffers."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = scale
        self.table = {"mean": torch.zeros(3), "names": ["a", None]}

    def get_extra_state(self):
        return {"scale": self.scale, "table": self.table}

    def set_extra_state(self, state):
        self.scale, self.table = state["scale"], state["table"]


def scaled(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(2, 1))
    settings = {"lr": 0.1, "momentum": 0.9, **settings}
    return model, torch.optim.SGD(
        [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.5}],
        **settings,
    )


def test_version_2_is_the_documented_hash():
    model = Scaled()
    optimizer = torch.optim.Adam([model.weight], lr=torch.tensor(0.5), betas=(0.9, 0.99))
    optimizer.state["steps of all"] = 3
    optimizer.param_groups = [
        {"params": [model.weight], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None}
    ]
    parts = [
        b"extra//scale\0float\x002.0\0",
        b"extra//table/mean\0torch.float32\0(3,)\0" + bytes(12),
        b"extra//table/names/0\0str\0'a'\0",
        b"extra//table/names/1\0NoneType\0None\0",
        b"group/0/betas/0\0float\x000.9\0",
        b"group/0/betas/1\0float\x000.99\0",
        b"group/0/fused\0NoneType\0None\0",
        b"group/0/lr\0torch.float32\0()\0\0\0\0?",
        b"group/0/params/0\0str\0'weight'\0",
        b"optimizer/steps of all\0int\x003\0",
        b"parameter/weight\0torch.float32\0(2,)\0" + 2 * b"\0\0\x80?",
    ]
    assert fingerprint_2(model, optimizer) == hashlib.sha256(b"".join(parts)).hexdigest()


def set_in_group(**values):
    return lambda model, optimizer: optimizer.param_groups[1].update(values)


CHANGES = {
    "a rate": set_in_group(lr=0.25),
    "momentum": set_in_group(momentum=0.0),
    "a flag": set_in_group(nesterov=True),
    "weight decay": set_in_group(weight_decay=1e-4),
    "a key more": set_in_group(initial_lr=0.5),
    "the order of groups": lambda model, optimizer: optimizer.param_groups.reverse(),
    "a parameter less": lambda model, optimizer: optimizer.param_groups[1]["params"].pop(),
    "the order of parameters": lambda model, o: o.param_groups[1]["params"].reverse(),
    "state of the whole": lambda model, optimizer: optimizer.state.update(steps=1),
    "an extra number": lambda model, optimizer: setattr(model[0], "scale", 3.0),
    "an extra tensor": lambda model, optimizer: model[0].table["mean"].add_(1),
    "an extra list": lambda model, optimizer: model[0].table["names"].append("b"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_version_2_sees_what_decides_the_next_step(name):
    state = scaled()
    one, two, entries = fingerprint(*state), fingerprint_2(*state), digests(*state)
    CHANGES[name](*state)
    assert fingerprint(*state) == one, "version 1 stays what it was"
    assert fingerprint_2(*state) != two
    assert digests(*state) != entries


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.1, np.float64(0.1)), (3, np.int64(3)), ((1, 2), [1, 2]), (True, np.bool_(True))],
    ids=["float", "int", "sequence", "bool"],
)
def test_numbers_that_a_checkpoint_gives_back_as_another_type_are_equal(one, other):
    assert fingerprint_2(*scaled(dampening=one)) == fingerprint_2(*scaled(dampening=other))


def test_what_has_no_value_to_compare_has_its_type():
    """The address of a function differs from process to process."""
    states = scaled(), scaled()
    for number, (_, optimizer) in enumerate(states):
        optimizer.param_groups[0]["rule"] = lambda number=number: number
    assert fingerprint_2(*states[0]) == fingerprint_2(*states[1])
    states[0][1].param_groups[0]["rule"] = None
    assert fingerprint_2(*states[0]) != fingerprint_2(*states[1])


class Outer(torch.optim.SGD):
    def __init__(self, parameters, lr):
        parameters = [*parameters]
        super().__init__(parameters, lr)
        self.inner = torch.optim.SGD(parameters, lr / 2, momentum=0.9)


def test_the_settings_of_an_optimizer_inside_another_one_count():
    model, optimizer = make(Outer)
    before = fingerprint_2(model, optimizer)
    optimizer.inner.param_groups[0]["lr"] *= 2
    assert fingerprint_2(model, optimizer) != before
