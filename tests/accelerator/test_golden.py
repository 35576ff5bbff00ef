"""The golden runs on the emulated accelerator end with the recorded results of CPUs."""

import functools

import pytest
import runs
from where import environment, load

RECORDED = load().get(environment(), {})

TWO = ["emu:0", "emu:1"]
LAYOUTS = {
    "2": {"devices": TWO},
    "1": {"devices": ["emu:1"]},
    "with a CPU": {"devices": ["cpu:0", "emu:3"]},
    "in flight": {"devices": ["emu:2", "emu:0", "emu:3"], "max_in_flight": 2},
}
QUICK = {"2"}

UNFIT = {
    "zoo: recurrent": "the emulator has no fused cells, which torch uses on accelerators",
    "zoo: mixed_dtypes": "torch's optimizers use other kernels on accelerators (foreach)",
    "optimizer: NAdam": "torch's optimizers use other kernels on accelerators (foreach)",
    "sparse gradients in some shards: SGD": "the emulator has no sparse tensors",
    "optimizer: SparseAdam": "the emulator has no sparse tensors",
    "two threads a device": "the emulator's kernels have one thread each",
    "bf16": "CPUs compute the outputs of its layer by one fused op, which accelerators don't",
    "compiled": "the emulator has no compiler",
    "compiled, batch_norm, Adam": "the emulator has no compiler",
    "resumed": "has other options: see below",
    "processes: in flight 2": "see test_processes.py",
    "command line": "the emulator is not known to another process",
}
"""The runs that the emulated accelerator can't do with the CPU's bits, and why."""


@functools.cache
def on_a_cpu(name):
    return runs.RUNS[name].train(devices="cpu:0")


def cases():
    for name in runs.RUNS.keys() - UNFIT.keys():
        for layout, options in LAYOUTS.items():
            is_quick = layout in QUICK and name != "resnet18 on digits"
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(name, options, id=f"{name} [{layout}]", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options"), sorted(cases(), key=lambda case: case.id))
def test_the_result_is_the_recorded_one(name, options):
    expected = RECORDED.get(name) or on_a_cpu(name)
    assert runs.RUNS[name].train(**options) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("cpu:0", TWO, id="from a CPU to two"),
        pytest.param(TWO, "cpu:0", id="from two to a CPU"),
        pytest.param(["emu:3"], ["cpu:1:own", "emu:0", "emu:1"], id="from one to a mixture"),
    ],
)
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.thinned(2)
def test_a_training_is_resumed_on_other_devices(first, then, in_flight):
    expected = RECORDED.get("resumed") or runs.train_resumed(first=None, options={"devices": 1})
    result = runs.train_resumed(
        first={"devices": first}, options={"devices": then}, in_flight=in_flight
    )
    assert result == expected
