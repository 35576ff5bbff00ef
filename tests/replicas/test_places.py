"""Parameters and buffers at any address train to the same bits as at multiples of 64 bytes."""

import itertools
import threading

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import DeviceLostError, ModelError
from places import (
    WAYS,
    Peeled,
    Projected,
    aligned_clone,
    from_numpy,
    generator,
    in_array,
    odd_copy,
    one_vector,
    one_vector_kept,
)
from reference import assert_same_bits, bits_of, plain_outputs, reference_training, whole_state
from trainers import open_trainer, sgd

LAYOUTS = [1, 2, ["cpu:0", "cpu:1:own"], ["cpu:0:own", "cpu:1:own"]]
OPTIONS = {"shards": 4, "memory_format": "contiguous"}


def build():
    torch.manual_seed(0)
    return nn.Sequential(Peeled(13, 9), nn.Tanh(), Peeled(9, 5), Projected(5))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(12, 13), torch.randint(0, 5, (12,))) for _ in range(3)]


def reference(model):
    def make(own):
        return torch.optim.SGD(own, 0.1, momentum=0.9)

    return reference_training(aligned_clone(model), make, batches(), shards=4)[0]


def opened(model, **options):
    return open_trainer(model, **OPTIONS, **options)


def train(model, devices=2, **options):
    with opened(model, devices=devices, **options) as trainer:
        for X, y in batches():
            trainer.step(X, y)
    return whole_state(model, trainer.optimizer)


every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
everywhere = pytest.mark.parametrize("devices", LAYOUTS, ids=str)


@everywhere
@every_way
@pytest.mark.thinned(2)
def test_parameters_at_any_address_train_to_the_same_bits(way, devices):
    model = build()
    expected = reference(model)
    kept = way(model, generator(LAYOUTS.index(devices)))
    assert any(one.data_ptr() % 64 for one in model.parameters())
    assert_same_bits(train(model, devices), expected)
    del kept


def odd(tensors):
    return [one.data_ptr() % 64 for one in tensors]


def test_a_vector_that_nobody_holds_is_divided_and_one_that_is_held_stays_tied():
    divided = build()
    one_vector(divided, generator(0))
    train(divided, 2)
    assert not any(odd(divided.parameters()))

    tied = build()
    flat = one_vector_kept(tied, generator(0))
    train(tied, 2)
    assert torch.equal(
        flat[-sum(map(torch.Tensor.numel, tied.parameters())) :],
        torch.cat([one.detach().flatten() for one in tied.parameters()]),
    )
    assert any(odd(tied.parameters()))


def test_a_note_says_where_devices_compute_on_copies():
    def notes(way):
        model = build()
        kept = way(model, generator(0))
        trainer = open_trainer(model, devices=1)
        del kept
        return " ".join(trainer.notes)

    assert "0.weight and 3 more of the model" in notes(one_vector_kept)
    assert not notes(one_vector)
    assert not notes(lambda model, rng: None)


def test_a_model_that_cannot_be_copied_says_which_tensor_needs_a_copy():
    class Locked(nn.Sequential):
        def __deepcopy__(self, memo):
            raise TypeError("it has a lock")

    model = Locked(*build())
    flat = one_vector_kept(model, generator(0))
    with pytest.raises(ModelError, match=r"can't be copied") as caught:
        open_trainer(model, devices=1)
    assert "since 0.weight, 0.bias, 2.weight" in " ".join(caught.value.__notes__)
    del flat


def test_numpy_arrays_stay_tied():
    model = build()
    arrays = from_numpy(model, generator(0))
    train(model, ["cpu:0", "cpu:1:own"])
    for one, array in zip(model.parameters(), arrays, strict=True):
        assert torch.equal(one.detach(), torch.from_numpy(array))


def test_two_parameters_that_overlap_in_memory_stay_tied():
    model = build()
    memory = torch.empty(3 + 13 * 9)
    model[0].weight.data = memory[3:].view(9, 13).copy_(model[0].weight.detach())
    model[2].weight.data = memory[3 : 3 + 45].view(5, 9)
    del memory
    train(model, 2)
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr()


def in_a_vector(model):
    """Give the buffer an odd address in a vector, and return the vector."""
    vector = torch.randn(7 + 25)
    model[3].basis = vector[7:].view(5, 5)
    return vector


def in_a_lost_vector(model):
    model[3].basis = odd_copy(torch.randn(5, 5))


def in_numpy(model):
    model[3].basis = in_array(torch.randn(5, 5))


def assigned(model):
    state = {name: odd_copy(one) for name, one in model[3].state_dict().items()}
    model[3].load_state_dict(state, assign=True)


BUFFERS = [in_a_vector, in_a_lost_vector, in_numpy, assigned]


@everywhere
@pytest.mark.parametrize("place", BUFFERS, ids=lambda place: place.__name__)
@pytest.mark.thinned(2)
def test_buffers_at_any_address_train_to_the_same_bits(place, devices):
    torch.manual_seed(5)
    model = build()
    kept = place(model)
    expected = reference(model)
    assert_same_bits(train(model, devices), expected)
    del kept


@everywhere
def test_a_fixed_array_in_an_attribute_has_the_same_bits_on_all_devices(devices):
    def build_with(place):
        model = build()
        basis = model[3].basis.clone()
        del model[3].basis
        model[3].basis = place(basis)
        return model

    assert_same_bits(train(build_with(in_array), devices), reference(build_with(torch.clone)))


@everywhere
@pytest.mark.parametrize("held", [False, True])
def test_parameters_and_buffers_that_get_odd_addresses_between_steps(devices, held):
    model, kept = build(), []
    with opened(model, devices=devices) as trainer:
        for step, (X, y) in enumerate(batches()):
            trainer.step(X, y)
            model[0].weight.data = odd_copy(model[0].weight, 1 + step)
            model[3].basis = odd_copy(model[3].basis, 2 + step)
            kept += [model[0].weight.data, model[3].basis.data] if held else []
    assert_same_bits(whole_state(model, trainer.optimizer), reference(build()))


@everywhere
def test_steps_in_flight_and_buffers_that_hooks_set(devices):
    def move(model):
        model[3].basis = odd_copy(model[3].basis)

    model = build()
    one_vector(model, generator(1))
    found = train(model, devices, max_in_flight=2, after_update=move)
    assert_same_bits(found, reference(build()))


@pytest.mark.parametrize(("way", "devices"), [*zip(WAYS, [*LAYOUTS, 2], strict=True)])
def test_evaluation_and_prediction(way, devices):
    model = build()
    plain = aligned_clone(model)
    kept = way(model, generator(3))
    batch = batches()[0][0]
    with opened(model, devices=devices) as trainer:
        found = trainer.predict([(batch,)])
        other = trainer.predict([(batch,)], model=plain)
    shards = [plain_outputs(plain, part.clone()) for part in batch.split(3)]
    assert bits_of(found) == bits_of(other) == bits_of(torch.cat(shards))
    del kept


@every_way
def test_resuming_with_a_fresh_model(way, tmp_path):
    with opened(build()) as trainer:
        trainer.step(*batches()[0])
        trainer.save(tmp_path)
    fresh = build()
    kept = way(fresh, generator(4))
    given = tmp_path, fresh, sgd(fresh), nn.CrossEntropyLoss()
    with evenstep.Trainer.load(*given, devices=2) as trainer:
        for X, y in batches()[1:]:
            trainer.step(X, y)
    assert_same_bits(whole_state(fresh, trainer.optimizer), reference(build()))
    del kept


def test_a_device_that_is_lost_with_the_copies_that_others_share():
    """Three devices compute on one copy of a vector's parameters, which the first one holds."""
    is_broken = threading.Event()

    class Breaks(nn.Identity):
        def forward(self, x):
            if is_broken.is_set() and threading.current_thread().name == "evenstep cpu:0":
                raise DeviceLostError("the device fell off the bus")
            return x

    def build_with():
        return nn.Sequential(*build(), Breaks())

    def trained(model, devices, break_in=None):
        with opened(model, devices=devices, check="off") as trainer:
            trainer.on_shard = lambda shard, value: None  # every device gets shards
            for number, (X, y) in enumerate(batches() * 3):
                if number == break_in:
                    is_broken.set()
                trainer.step(X, y)
        return whole_state(model, trainer.optimizer)

    expected = trained(build_with(), 1)
    model = build_with()
    flat = one_vector_kept(model, generator(1))
    assert_same_bits(trained(model, 3, break_in=3), expected)
    del flat


def test_new_odd_addresses_in_each_step_cost_no_new_check():
    model, reports = build(), []
    with opened(model) as trainer:
        for step, (X, y) in enumerate([batches()[0]] * 4):
            trainer.step(X, y)
            reports.append(trainer.contract)
            one_vector(model, generator(step))
            model[3].basis = odd_copy(model[3].basis)
        trainer.step(*batches()[0])
    assert reports[2] is reports[1]  # steps 1, 2 and 4 are checked
    assert not any(odd([*model.parameters(), *model.buffers()]))


OTHERS = {
    "stages": {"devices": 2, "divide": evenstep.Stages({"0": 0, "2": 1})},
    "stages in flight": {"devices": 2, "divide": evenstep.Stages("balanced"), "max_in_flight": 2},
    "owners": {"devices": ["cpu:0", "cpu:1:own"], "divide": evenstep.Owners()},
    "side by side": {"devices": 2, "side_by_side": True},
}


# Each layout with a vector that stays tied and one that does not; each way in one layout.
@pytest.mark.parametrize(
    ("way", "options"),
    [
        *itertools.product([one_vector, one_vector_kept], OTHERS),
        *zip(WAYS[2:], OTHERS, strict=False),
    ],
)
def test_other_layouts(way, options):
    model = build()
    kept = way(model, generator(6))
    assert_same_bits(train(model, **OTHERS[options]), reference(build()))
    del kept


@every_way
def test_slices(way):
    def sliced():
        model = build()
        model[1] = evenstep.nn.slice_(nn.Linear(9, 9), 3)
        return model

    torch.manual_seed(0)
    model = sliced()
    expected = train(aligned_clone(model), 1)
    kept = way(model, generator(6))
    assert_same_bits(train(model, ["cpu:0", "cpu:1:own"], divide=evenstep.Slices()), expected)
    del kept
