"""Changes to the model between two steps take effect on every device."""

import functools
import logging

import pytest
import torch
from torch import nn

from changing import CHANGES, Changing
from evenstep.errors import ContractError, ModelError
from evenstep.replicas.module_sync import ModuleWatch
from layouts import own
from reference import assert_same_bits
from trainers import LAYOUTS, open_trainer
from zoo import make_batches


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(36, 8), nn.Linear(8, 5)
        self.temperature = 1.0
        self.mask = torch.ones(36)  # no buffer
        self.factors = [1.0, {"low": (1.0, 1.0)}]
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        low, high = self.factors[1]["low"]
        x = self.dropout(self.body(x.flatten(1) * self.mask * low))
        return self.head(x) * self.temperature * high


def overwrite(model):
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def load(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def swap_storage(model):
    model.head.weight.data = model.head.weight.data * 0.5


@functools.cache
def fingerprint_without_changes():
    return fingerprint_of(1, lambda model: None)


def fingerprint_of(devices, change):
    model = Tempered()
    with open_trainer(model, devices=devices) as trainer:
        for number, (X, y) in enumerate(make_batches((16, 16, 16))):
            if number == 1:
                change(model)
            trainer.step(X, y)
        return trainer.fingerprint()


@pytest.mark.parametrize("change", [overwrite, load, swap_storage])
def test_values_written_between_steps_reach_every_device(change):
    """For other changes of the module see test_in_flight_module."""
    one = fingerprint_of(1, change)
    assert [fingerprint_of(devices, change) for devices in (3, own(2))] == [one] * 2
    assert one != fingerprint_without_changes()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.thinned(2)
def test_every_change_that_forward_can_read_reaches_every_device(change):
    one = changed(1, change)
    assert not torch.equal(one["body.weight"], unchanged()["body.weight"])
    for devices in (3, own(2)):
        assert_same_bits(changed(devices, change), one)


def changed(devices, change):
    model = Changing()
    with open_trainer(model, devices=devices) as trainer:
        for number, (X, y) in enumerate(make_batches((16, 16, 16, 16))):
            if number == 2:
                change(model)
            trainer.step(X, y)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.cache
def unchanged():
    return changed(1, lambda model: None)


def test_what_forward_keeps_does_not_make_the_copies_again():
    model = Changing()
    with open_trainer(model, devices=2) as trainer:
        batches = make_batches((16,) * 6)
        copies = [id(replica.module) for replica in trainer._replicas.all]
        for X, y in batches:
            trainer.step(X, y)
        trainer.evaluate(batches[:2], {"sum": lambda output, y: (output.sum(), len(y))})
        trainer.step(*batches[0])
        assert [id(replica.module) for replica in trainer._replicas.all] == copies
        model.cfg.scale = 0.5
        trainer.step(*batches[0])
        assert trainer._replicas.all[1].module.cfg.scale == 0.5


def test_plain_values_and_tensors_do_not_make_the_copies_again():
    model = Tempered()
    with open_trainer(model, devices=2) as trainer:
        copies = [id(replica.module) for replica in trainer._replicas.all]
        for number, (X, y) in enumerate(make_batches((16,) * 6)):
            model.temperature = 1.0 + number
            model.mask = torch.full((36,), number + 0.5)
            model.factors = [1.0, {"low": (1.0, 1.0 / (number + 1))}]
            trainer.step(X, y)
        assert [id(replica.module) for replica in trainer._replicas.all] == copies


def test_a_logger_which_copies_share_does_not_make_the_copies_again():
    model = Tempered()
    model.log = logging.LoggerAdapter(logging.getLogger("a model's"), {})
    with open_trainer(model, devices=2) as trainer:
        copies = [id(replica.module) for replica in trainer._replicas.all]
        for number, (X, y) in enumerate(make_batches((16,) * 6)):
            model.log.setLevel(number)
            trainer.step(X, y)
        assert [id(replica.module) for replica in trainer._replicas.all] == copies


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (0.0, -0.0, True),
        (float("nan"), float("nan"), False),
        (1, True, True),
        (1, 1.0, True),
        ((1, 2), (1, 2), False),
        ({1, 2}, {2, 1}, False),
        ([1, {"a": 2}], [1, {"a": 2}], False),
        ([1, {"a": 2}], [1, {"b": 2}], True),
        (torch.zeros(2), torch.zeros(2), False),
        (torch.zeros(2), -torch.zeros(2), True),
    ],
    ids=str,
)
def test_values_are_compared_by_type_and_bits(before, after, differs):
    model = nn.Module()
    model.value = before
    watch = ModuleWatch(model, keeps_results=True)
    model.value = after
    assert (watch.difference() is not None) == differs


class ReturnsItself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


def test_a_module_whose_deepcopy_returns_itself_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Sequential(ReturnsItself(36, 5)))
    with pytest.raises(ContractError, match=r"the module 1\.0 itself \(ReturnsItself\.__deepcopy"):
        open_trainer(model, devices=2)
    with open_trainer(model, devices=1) as trainer:
        trainer.step(*make_batches((16,))[0])


def test_after_waitall_the_model_may_be_written_even_past_the_version_counters():
    def run(devices):
        model = Tempered()
        with open_trainer(model, devices=devices) as trainer:
            for X, y in make_batches((16, 16)):
                trainer.step(X, y)
                trainer.waitall()
                model.head.weight.data.mul_(0.5)
            return trainer.fingerprint()

    assert len({run(devices) for devices in LAYOUTS}) == 1


def test_hooks_on_accumulated_gradients_are_refused():
    model = Tempered()
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModelError, match=r"head\.weight has a hook on its accumulated gradient"):
        open_trainer(model)
    model = Tempered()
    with open_trainer(model) as trainer:
        trainer.step(*make_batches((16,))[0])
        model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(ModelError, match="accumulated gradient"):
            trainer.step(*make_batches((16,))[0])


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_the_nodes_that_accumulate_gradients_are_refused(kind):
    def watched(model):
        weight = model.head.weight
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        return node, getattr(node, kind)(lambda *given: None)

    model = Tempered()
    _, hook = watched(model)
    batch = make_batches((16,))[0]
    with open_trainer(model) as trainer:
        with pytest.raises(ModelError, match=r"head\.weight has a hook on its accumulated"):
            trainer.step(*batch)
        hook.remove()
        trainer.step(*batch)
