"""Values that a shard keeps outside of the model, where devices overwrite each other's."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.contract import overlap
from evenstep.errors import ContractError
from reference import assert_same_bits
from trainers import open_trainer, take_steps

KEPT = {}
V = 8


class Net(nn.Module):
    """Three layers; `see` is called with what the first of them gives."""

    kept = None

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x).tanh()
        self.see(h)
        h = self.second(h).tanh()
        return self.third(self.last_look(h))

    def see(self, h):
        """Keep nothing."""

    def last_look(self, h):
        """Use what the second layer gives."""
        return h


class InAClass(Net):
    def see(self, h):
        type(self).kept = h.detach().square().mean(1)


class InAGlobal(Net):
    def see(self, h):
        KEPT["it"] = h.detach().square().mean(1)


class ReadInForward(InAGlobal):
    def last_look(self, h):
        return h * KEPT["it"][:, None]


class ReadByTheFirstLayers(InAGlobal):
    """What is set before the first layer is read before the second one."""

    def forward(self, x):
        KEPT["it"] = x.detach().square().mean(1)
        h = self.first(x).tanh() * KEPT["it"][:, None]
        return self.third(self.second(h).tanh())


class KeptForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        KEPT["scale"] = x.detach().abs().amax(1, keepdim=True)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * KEPT["scale"]


class ReadInBackward(Net):
    def last_look(self, h):
        return KeptForBackward.apply(h)


class InTheModule(Net):
    def see(self, h):
        self.kept = h.detach().square().mean(1)


def weighted(read):
    """Return an objective whose weights are what the model has kept."""

    def objective(model, x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * read(model)).sum(), len(y)

    return objective


def plain(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def hooked(keep):
    model = Net()
    model.second.register_forward_hook(keep)
    return model


def in_a_dict(module, given, out):
    KEPT["it"] = out.detach().square().mean(1)


def in_its_module(module, given, out):
    module.kept = out.detach().square().mean(1)


def of_global(model):
    return KEPT["it"]


BAD = {
    "a hook's dict": (lambda: hooked(in_a_dict), weighted(of_global)),
    "a class": (InAClass, weighted(lambda model: InAClass.kept)),
    "a global": (InAGlobal, weighted(of_global)),
    "read in forward": (ReadInForward, plain),
    "read by the first layers": (ReadByTheFirstLayers, plain),
    "read in backward": (ReadInBackward, plain),
}
GOOD = {
    "the module": (InTheModule, weighted(lambda model: model.kept)),
    "a hook's module": (lambda: hooked(in_its_module), weighted(lambda model: model.second.kept)),
    "never read": (lambda: hooked(in_a_dict), plain),
}


def batches():
    drawn = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randn(32, 6, generator=drawn), torch.randint(4, (32,), generator=drawn)


def trained(make, objective, devices):
    torch.manual_seed(0)
    return take_steps(open_trainer(make(), objective=objective, devices=devices), batches())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", BAD)
def test_a_value_that_another_device_could_overwrite_is_refused(case, devices):
    with pytest.raises(ContractError, match="while another one is computed"):
        trained(*BAD[case], devices)


@pytest.mark.parametrize("case", GOOD)
def test_what_each_device_has_for_itself_is_right(case):
    make, objective = GOOD[case]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for X, y in batches():
        optimizer.zero_grad()
        for x, target in zip(X.chunk(V), y.chunk(V), strict=True):
            (objective(model, x, target)[0] / len(X)).backward()
        optimizer.step()
    found = [trained(make, objective, devices) for devices in (1, 2, 3)]
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[0][f"parameter/{name}"], value)


def test_a_lock_around_the_model_keeps_nobody_for_long(monkeypatch):
    monkeypatch.setattr(overlap, "_LONGEST_S", 0.2)
    lock = threading.Lock()

    def one_at_a_time(model, x, y):
        with lock:
            return plain(model, x, y)

    assert_same_bits(trained(Net, one_at_a_time, 2), trained(Net, plain, 1))


class Guarded(nn.Module):
    """Layers that all copies have in common, which nobody may use at the same time."""

    def __init__(self):
        super().__init__()
        self.lock, self.layer = threading.Lock(), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with self.lock:
            return self.layer(x)


def test_layers_behind_a_lock_that_all_copies_have_keep_nobody_for_long(monkeypatch):
    """The shard beside this one has a turn up to the end of such a layer, and so the lock."""
    monkeypatch.setattr(overlap, "_LONGEST_S", 0.2)
    guarded = Guarded()

    def again_and_again(model, x, y):
        for _ in range(3):
            x = guarded(x)
            model.first(x)
        return plain(model, x, y)

    assert_same_bits(trained(Net, again_and_again, 2), trained(Net, again_and_again, 1))


def test_the_check_leaves_no_hook():
    before = dict(nn.modules.module._global_forward_hooks)
    trained(Net, plain, 2)
    assert nn.modules.module._global_forward_hooks == before


def features(model, x):
    model(x)
    return KEPT["it"]


def kept_feature(model, x, *targets):
    model(x)
    return KEPT["it"].sum(), len(x)


EVALUATIONS = {
    "predict": lambda trainer, X, y: trainer.predict([X], features),
    "evaluate": lambda trainer, X, y: trainer.evaluate([(X, y)], {"kept": kept_feature}),
}


@pytest.mark.parametrize("call", EVALUATIONS)
def test_an_evaluation_that_reads_what_a_hook_has_kept_is_refused(call):
    ((X, y), *_) = batches()
    model = hooked(in_a_dict)
    with open_trainer(model, objective=plain) as trainer:
        with pytest.raises(ContractError, match="while another one is computed"):
            EVALUATIONS[call](trainer, X, y)
        calls = []
        model.first.register_forward_hook(lambda *_: calls.append(1))
        for _ in range(3):
            trainer.predict([X])
        assert len(calls) == 3 * V + 3  # once one shard twice, and one beside it


def test_an_evaluation_may_read_what_a_hook_keeps_in_its_module():
    ((X, _), *_) = batches()
    model = hooked(in_its_module)

    def seen(model, x):
        model(x)
        return model.second.kept

    with open_trainer(model, objective=plain) as trainer:
        found = trainer.predict([X], seen)
    model(X)
    torch.testing.assert_close(found, model.second.kept)
