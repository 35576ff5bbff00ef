"""The promise, by bits: any layout against the plain sequential reference."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from evenstep.engine import InlineLanes
from layouts import LAYOUTS, own, shared
from reference import assert_same_bits, plain_training, reference_training, whole_state
from trainers import train
from zoo import ZOO, Recomputed, SparseInPlaces, build, make_batches

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
FEW = ("1 shared", "2 shared", "3 own", "3 mixed")
"""Layouts of each kind, for what has no other reason to depend on them."""


@functools.cache
def reference_of(name, sizes, shards, make_optimizer):
    """Return the state and the losses of the reference; many layouts are compared with them."""
    return reference_training(build(name), make_optimizer, make_batches(sizes), shards=shards)


def assert_equals_reference(name, sizes, devices, shards, make_optimizer=MOMENTUM, max_in_flight=1):
    expected, expected_losses = reference_of(name, tuple(sizes), shards, make_optimizer)
    batches = make_batches(sizes)
    options = {"devices": devices, "shards": shards, "max_in_flight": max_in_flight}
    state, losses = train(build(name), make_optimizer, batches, **options)
    assert_same_bits(state, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.thinned(6)
def test_every_model_on_every_layout_equals_the_reference(name, layout, max_in_flight):
    for shards, sizes in ((7, (21, 19)), (8, (33, 16, 30, 24))):
        assert_equals_reference(name, sizes, LAYOUTS[layout], shards, ADAM, max_in_flight)


@pytest.mark.parametrize("shards", [1, 2, 7, 8])
@pytest.mark.parametrize("last", range(1, 18))
@pytest.mark.thinned(3)
def test_last_batches_of_every_awkward_size(shards, last):
    for devices in (shared(2), own(3)):
        assert_equals_reference("dropout", (16, last), devices, shards, ADAM)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([name for name in ZOO if name != "batch_norm"]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shards=st.integers(1, 17),
    layout=st.sampled_from(sorted(LAYOUTS)),
    make_optimizer=st.sampled_from([MOMENTUM, ADAM]),
    max_in_flight=st.integers(1, 4),
)
def test_any_sizes_and_shards(name, sizes, shards, layout, make_optimizer, max_in_flight):
    assert_equals_reference(name, sizes, LAYOUTS[layout], shards, make_optimizer, max_in_flight)


@settings(max_examples=15, deadline=None)
@given(
    shards=st.integers(1, 9),
    per_shard=st.integers(2, 5),
    extra=st.integers(0, 8),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_batch_norm_with_any_sizes(shards, per_shard, extra, layout):
    sizes = (shards * per_shard + extra % shards, shards * 2)
    assert_equals_reference("batch_norm", sizes, LAYOUTS[layout], shards)


@pytest.mark.parametrize(
    "name", sorted(ZOO.keys() - {"noisy", "dropout", "recurrent", "attention"})
)
@pytest.mark.parametrize("devices", [1, 2])
def test_one_shard_is_a_plain_pytorch_loop(name, devices):
    batches = make_batches((12, 12, 7))
    plain = build(name)
    optimizer = MOMENTUM(plain.parameters())
    plain_losses = plain_training(plain, optimizer, batches)
    state, losses = train(build(name), MOMENTUM, batches, devices=devices, shards=1)
    assert_same_bits(state, whole_state(plain, optimizer))
    assert losses == plain_losses


@pytest.mark.parametrize("name", ["convolution", "batch_norm"])
@pytest.mark.parametrize("options", [{"memory_format": "channels_last"}, {"precision": "bf16"}])
def test_layout_and_precision_keep_the_promise(name, options):
    batches = make_batches((32, 21))
    states = [
        train(build(name), MOMENTUM, batches, devices=LAYOUTS[layout], **options)[0]
        for layout in FEW
    ]
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("name", ["convolution", "tied", "dropout"])
def test_bf16_equals_the_reference_under_autocast(name):
    batches = make_batches((32, 21))
    expected, _ = reference_training(
        build(name), MOMENTUM, batches, shards=8, autocast=torch.bfloat16
    )
    for devices in (1, 2, own(3)):
        state, _ = train(build(name), MOMENTUM, batches, devices=devices, precision="bf16")
        assert_same_bits(state, expected)


@pytest.mark.parametrize("devices", [1, 2, own(3)])
def test_bf16_outputs_of_a_random_model_are_those_of_torch_itself(devices):
    """Torch computes this layer by one fused op, whose inner products follow autocast."""
    model = build("attention")
    optimizer = MOMENTUM(model.parameters())
    images, _ = make_batches((16,))[0]
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=devices, precision="bf16", shards=1
    ) as trainer:
        for batch in make_batches((8, 8)):
            trainer.step(*batch)  # draws: from now on shards have random numbers of their own
        outputs = trainer.predict([images])
        trained = copy.deepcopy(trainer.model)
    trained.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = trained(images)
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize("layout", ["1 shared", "2 shared", "3 own"])
def test_a_buffer_that_only_some_shards_write_is_averaged_shard_by_shard(layout):
    """A node whose shards all left it alone stands for their sum in the tree, not for a product."""
    assert_equals_reference("branching", (5, 27), LAYOUTS[layout], 8)


def test_a_weight_with_sparse_gradients_in_some_shards_and_dense_ones_in_others():
    batches = make_batches((61, 64))
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    states = [
        train(SparseInPlaces(), make_optimizer, batches, devices=devices, shards=16)[0]
        for devices in (1, 2, 3, 16, own(4))
    ]
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("layout", FEW)
def test_a_backward_pass_that_adds_to_a_gradient_twice(layout):
    """Onto the sum of the shards to the left this would be (left + a) + b, not left + (a + b)."""
    batches = make_batches((40, 33, 40))
    expected, expected_losses = reference_training(Recomputed(), ADAM, batches, shards=8)
    state, losses = train(Recomputed(), ADAM, batches, devices=LAYOUTS[layout])
    assert_same_bits(state, expected)
    assert losses == expected_losses


def test_inline_lanes_give_the_same_bits():
    batches = make_batches((33, 16))
    expected, _ = reference_training(build("recurrent"), ADAM, batches, shards=8)
    state, _ = train(build("recurrent"), ADAM, batches, devices=3, lanes=InlineLanes)
    assert_same_bits(state, expected)


def test_the_callers_threads_do_not_matter():
    batches = make_batches((64,))
    expected, _ = reference_training(build("convolution"), ADAM, batches, shards=8)
    torch.set_num_threads(2)
    state, _ = train(build("convolution"), ADAM, batches, devices=2)
    assert torch.get_num_threads() == 2
    assert_same_bits(state, expected)


def test_the_default_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = build("noisy")
    torch.set_rng_state(before)
    train(model, ADAM, make_batches((16, 16)), devices=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_shards_are_another_experiment():
    """The comparison can fail: V moves bits, and so would another order of the sum."""
    batches = make_batches((64,))
    eight, _ = train(build("convolution"), MOMENTUM, batches, devices=1, shards=8)
    two, _ = train(build("convolution"), MOMENTUM, batches, devices=1, shards=2)
    with pytest.raises(AssertionError):
        assert_same_bits(eight, two)
