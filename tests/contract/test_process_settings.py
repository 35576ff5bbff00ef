"""Settings of the process that a shard changes, which other threads compute with, are refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

import evenstep
from checked import X, Y, net, train
from evenstep.errors import ContractError
from taking_turns import in_turn
from trainers import sgd

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of mkldnn.flags


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def threads():
    torch.set_num_threads(3)
    yield


SETTINGS = {
    "kernels of scaled_dot_product_attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "mkldnn.enabled": lambda: torch.backends.mkldnn.flags(enabled=False),
    "the default dtype": default_dtype,
    "number of intra-op threads and left it at 3 instead of 1": threads,
    r"parametrize.cached\(\)": parametrize.cached,
    "cache of cast weights": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=True),
    "torch.backends.cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
}


def objective_with(setting):
    def objective(model, X, y):
        with setting():
            output = model(X)
        return F.cross_entropy(output, y, reduction="sum"), len(y)

    return objective


@in_turn("name", SETTINGS)
def test_a_setting_that_a_shard_changes_is_refused_by_name(name, devices):
    model = net()
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(ContractError, match=name):
        train(model, objective_with(SETTINGS[name]), devices=devices)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cuda.flash_sdp_enabled()


@in_turn(
    "name", sorted(SETTINGS.keys() - {"cache of cast weights"})
)  # ops behind autocast don't see it
def test_a_setting_that_a_hook_changes_in_the_backward_pass_is_refused(name, devices):
    """Without Python code in it, no setting can change in a backward pass: none is looked at."""

    def objective(model, X, y):
        output = model(X)

        def changed(gradient):
            with SETTINGS[name]():
                return gradient * 2

        output.register_hook(changed)
        return F.cross_entropy(output, y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=name.replace(" and left it at 3 instead of 1", "")):
        train(net(), objective, devices=devices)


def test_after_a_refusal_the_lane_has_its_own_number_of_threads_again():
    model = net()
    found = []

    def objective(model, X, y):
        if not found:
            torch.set_num_threads(3)
        found.append(torch.get_num_threads())
        return F.cross_entropy(model(X), y, reduction="sum"), len(y)

    with evenstep.Trainer(model, sgd(model), objective=objective, devices=1) as trainer:
        with pytest.raises(ContractError, match="intra-op threads"):
            trainer.step(X, Y)
        trainer.step(X, Y)
        assert set(found[1:]) == {1}


def test_a_setting_that_stays_what_it_was_is_fine():
    def objective(model, X, y):
        with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled):
            return F.cross_entropy(model(X), y, reduction="sum"), len(y)

    train(net(), objective, devices=2)
