"""Portable arithmetic around code and in trainers: what it reaches, and what it refuses."""

import functools
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import evenstep
from evenstep import Layout, Owners, Stages
from evenstep.arithmetic import is_portable_here, native
from evenstep.arithmetic.compile import LIBRARIES, compiler
from evenstep.engine import InlineLanes
from evenstep.errors import ContractError, InputError, ModelError

PORTABLE = evenstep.Experiment(shards=4, arithmetic="portable")


def trainer(**options):
    with evenstep.portable(seed=0):
        model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"experiment": PORTABLE, "devices": 1, **options}
    return evenstep.Trainer(model, optimizer, nn.MSELoss(), **options)


BATCH = (torch.arange(24.0).view(8, 3) / 7, torch.arange(8.0).view(8, 1))


LAYOUTS = {
    "two devices": {"devices": 2},
    "no threads": {"devices": 2, "layout": Layout(lanes=InlineLanes)},
    "side by side": {"devices": 2, "layout": Layout(side_by_side=True)},
    "stages": {"devices": 2, "layout": Layout(divide=Stages("balanced"))},
    "owners": {"devices": 2, "layout": Layout(divide=Owners())},
    "steps in flight": {"devices": ["cpu:0", "cpu:1:own"], "max_in_flight": 3},
}


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
}


def fingerprint(optimizer, **options):
    with evenstep.portable(seed=0):
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    given = model, OPTIMIZERS[optimizer](model.parameters()), nn.MSELoss()
    with evenstep.Trainer(*given, experiment=PORTABLE, **options) as one:
        for _ in range(2):
            one.step(*BATCH)
        return one.fingerprint()


on_one_device = functools.cache(functools.partial(fingerprint, devices=1))


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        *(("SGD", layout) for layout in LAYOUTS),
        *(("LBFGS", layout) for layout in LAYOUTS if layout != "owners"),  # one vector for all
    ],
)
def test_every_layout_computes_so(optimizer, layout):
    assert fingerprint(optimizer, **LAYOUTS[layout]) == on_one_device(optimizer)


def test_what_has_no_kernel_is_refused_by_name():
    with evenstep.portable(), pytest.raises(ModelError, match=r"linalg_eigh.* of float32 is not"):
        torch.linalg.eigh(torch.eye(3))


@pytest.fixture
def _without_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("_without_libraries")
def test_without_its_c_part_evenstep_says_how_to_compile_it():
    line = "python -m evenstep.arithmetic.compile"
    with pytest.raises(InputError, match=line), evenstep.portable():
        pass
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match=line):
        evenstep.Trainer(
            model, torch.optim.SGD(model.parameters()), nn.MSELoss(), experiment=PORTABLE
        )
    with evenstep.Trainer(model, torch.optim.SGD(model.parameters()), nn.MSELoss()) as one:
        one.step(*BATCH)


@pytest.mark.slow
def test_the_c_part_compiles_without_a_warning(tmp_path):
    code = f"""
from pathlib import Path
from evenstep.arithmetic import compile
compile.FLAGS += ("-Werror",)
compile.compile_all(Path({str(tmp_path)!r}))
"""
    if compiler() is None:
        pytest.skip("there is no C compiler")
    subprocess.run([sys.executable, "-c", code], check=True)
    made, ours = (sorted(path.stem for path in at.glob("*.so")) for at in (tmp_path, LIBRARIES))
    assert made == ours


@pytest.mark.parametrize("variant", ["sse", "avx512"])
def test_a_variant_that_this_processor_cannot_run_is_refused(variant):
    if variant in native.runnable():
        pytest.skip("this processor runs all variants")
    environment = {**os.environ, "EVENSTEP_PORTABLE": variant}
    code = "from evenstep.arithmetic import native; native.library()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"EVENSTEP_PORTABLE={variant}: expected one of plain" in done.stderr


def test_an_unlisted_function_of_integers_is_refused():
    """It would round, as the same function of float32 does."""
    with evenstep.portable():
        assert torch.equal(torch.bitwise_left_shift(torch.tensor(3), 2), torch.tensor(12))
        with pytest.raises(ModelError, match="i0 of int64 is not portable"):
            torch.special.i0(torch.tensor([1, 2]))


def test_what_has_no_place_in_a_tensor_is_refused_as_in_torch():
    with evenstep.portable():
        for call in (
            lambda: torch.tensor([1, 2]).exp_(),
            lambda: torch.tensor([1, 2]).add_(torch.tensor([0.5])),
            lambda: torch.exp(torch.tensor([1.0]), out=torch.tensor([1])),
        ):
            with pytest.raises(RuntimeError, match="can't be cast"):
                call()


def test_a_number_minus_integers():
    with evenstep.portable():
        assert torch.equal(1.5 - torch.tensor([1, 2]), torch.tensor([0.5, -0.5]))
        assert torch.equal(2 - torch.tensor([1, 2]), torch.tensor([1, 0]))
        assert (2 - torch.tensor([1, 2])).dtype is torch.int64


def test_half_precision_writes_only_what_the_operation_writes():
    target, other = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    with evenstep.portable():
        target.add_(other, alpha=0.5)
    assert torch.equal(target, torch.full((3,), 1.5))
    assert (target._version, other._version) == (1, 0)


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(InputError, match="got seed="), evenstep.portable(seed=seed):
        pass


def test_a_thread_that_flushes_denormals_is_refused():
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(InputError, match="set_flush_denormal"), evenstep.portable():
            pass
        torch.set_flush_denormal(False)
        with evenstep.portable():
            assert torch.tensor(2.0**-140).mul(1.0).item() == 2.0**-140
        one = trainer()
        torch.set_flush_denormal(True)
        with pytest.raises(InputError, match="set_flush_denormal"):
            trainer()
    finally:
        torch.set_flush_denormal(False)
    with one:
        one.step(*BATCH)


def test_complex_numbers_are_refused_where_they_round():
    """torch's products of complex numbers depend on the processor; their moves don't."""
    z = torch.tensor([1 + 2j, 3 - 1j])
    with evenstep.portable():
        assert torch.equal(z.flip(0).real, torch.tensor([3.0, 1.0]))
        for function in (lambda: z * z, lambda: z.mul_(z), lambda: z / z, lambda: z.abs()):
            with pytest.raises(ModelError, match="of complex64 is not portable"):
                function()


def test_nothing_is_portable_outside():
    with evenstep.portable():
        assert is_portable_here()
        other = []
        thread = threading.Thread(target=lambda: other.append(is_portable_here()))
        thread.start()
        thread.join()
    assert other == [False]
    assert not is_portable_here()


def test_a_seed_is_for_what_is_inside():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with evenstep.portable(seed=0):
        first = torch.randn(100)
    assert torch.equal(torch.get_rng_state(), before)
    with evenstep.portable(seed=0):
        assert torch.equal(torch.randn(100), first)
    with evenstep.portable(seed=1):
        assert not torch.equal(torch.randn(100), first)


def test_every_lane_of_a_trainer_is_portable():
    seen = []

    def objective(model, x, y):
        seen.append(is_portable_here())
        total = ((model(x) - y) ** 2).sum()
        return total, len(x)

    def note(model):
        seen.append(is_portable_here())

    with _with_objective(objective, note) as one:
        one.step(*BATCH)
        assert one.evaluate([BATCH], {"here": lambda *_: (is_portable_here(), 1)}) == {"here": 1}
    assert seen
    assert all(seen)


def _with_objective(objective, note):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evenstep.Trainer(
        model,
        optimizer,
        objective=objective,
        experiment=PORTABLE,
        devices=2,
        before_update=note,
        after_update=note,
    )


@pytest.mark.parametrize("options", [{"compile": True}, {"precision": "bf16"}])
def test_what_has_kernels_of_its_own_is_refused(options):
    experiment = evenstep.Experiment(arithmetic="portable", **options)
    with pytest.raises(InputError, match="arithmetic='portable'"):
        trainer(experiment=experiment)


def test_a_portable_block_needs_a_portable_trainer():
    with (
        trainer(experiment=evenstep.Experiment(shards=4)) as one,
        evenstep.portable(),
        pytest.raises(ContractError, match=r'Experiment\(arithmetic="portable"\)'),
    ):
        one.step(*BATCH)
    with evenstep.portable(), trainer() as one:
        inside = float(one.step(*BATCH))
    with trainer() as one:
        assert float(one.step(*BATCH)) == inside


def test_the_users_own_step_must_be_portable():
    with trainer() as one:
        optimizer = one.optimizer
        one.backward(*BATCH)
        with pytest.raises(ContractError, match=re.escape("with evenstep.portable(): ")):
            optimizer.step()
        with evenstep.portable():
            optimizer.step()
        own = one.fingerprint()
    with trainer() as one:
        one.step(*BATCH)
        assert one.fingerprint() == own
