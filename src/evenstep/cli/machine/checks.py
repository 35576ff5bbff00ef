"""What `evenstep doctor` finds: pure functions from facts about a machine to findings.

A finding says what is the matter, what follows from it, and how to fix it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeAlias

from evenstep.devices.arithmetic import GPU_VARIABLES, VARIABLES
from evenstep.private_torch.names import RECOMMENDED_TORCH, TESTED_TORCH, PrivateName

Kind: TypeAlias = Literal["results", "speed"]

_BUSY_CORES = 0.25
_GIB = 1 << 30
_LEAST_FREE_BYTES, _LEAST_SHARED_BYTES = _GIB, _GIB // 4
_PSTATE_DRIVERS = ("intel_pstate", "amd-pstate-epp")  # their "powersave" is a normal setting

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
ROUNDING = ("ATEN_CPU_CAPABILITY", *VARIABLES, *(name for name in GPU_VARIABLES if name != _CUBLAS))
"""Environment variables that change which kernels libraries choose, or how these round."""

PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Environment variables by which OpenMP binds threads to cores."""

SHARED = "/dev/shm"  # noqa: S108 (its size is read)
_UNBOUND = ("", "false", "none", "disabled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What was read about the machine and the software.

    Attributes:
        system: the operating system, such as "Linux".
        has_lock: whether Python has its global lock.
        evenstep: version of the installed evenstep; None if it runs from its sources alone.
        torch: version of torch.
        torch_lacks: private names of torch that evenstep reads, and this version lacks.
        packages: versions of the optional packages that are installed, by name.
        has_compiler: whether there is a C++ compiler.
        cores: number of cores that this process may use.
        cores_used_by_others: how many of these other programs use; None if unknown.
        free_bytes: memory that is free; None if unknown.
        shared_bytes: size of /dev/shm; None if there is none.
        governors: driver and governor of the clock rate, for each kind of core.
        is_on_battery: whether the machine runs on its battery.
        gpus: names of the GPUs that torch can use.
        has_nvidia_driver: whether the driver of an NVIDIA GPU is loaded.
        environment: the environment variables.
    """

    system: str
    has_lock: bool
    evenstep: str | None
    torch: str
    torch_lacks: tuple[PrivateName, ...] = ()
    packages: Mapping[str, str]
    has_compiler: bool
    cores: int
    cores_used_by_others: float | None
    free_bytes: int | None
    shared_bytes: int | None
    governors: tuple[tuple[str, str], ...]
    is_on_battery: bool
    gpus: tuple[str, ...]
    has_nvidia_driver: bool
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that would change results or slow trainings down, and how to fix it."""

    kind: Kind
    text: str
    fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that evenstep can do only with further packages.

    Attributes:
        name: what it is.
        extra: evenstep's extra that brings the packages.
        packages: the packages.
    """

    name: str
    extra: str
    packages: tuple[str, ...]


FEATURES = (
    Feature(name="pictures (bench --plot, reproduce)", extra="bench", packages=("matplotlib",)),
    Feature(
        name="other libraries (bench peers)",
        extra="bench",
        packages=("accelerate", "lightning-fabric"),
    ),
    Feature(name="TensorBoard (train --log-dir)", extra="tensorboard", packages=("tensorboard",)),
    Feature(name="export to ONNX", extra="onnx", packages=("onnx", "onnxscript", "onnxruntime")),
    Feature(
        name="Hugging Face's Trainer",
        extra="transformers",
        packages=("transformers", "accelerate"),
    ),
    Feature(name="Lightning's Trainer", extra="lightning", packages=("lightning",)),
    Feature(
        name="the notebooks",
        extra="notebooks",
        packages=("ipykernel", "jupyterlab", "matplotlib"),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureState:
    """Whether a feature can be used: what is missing for it, and how to get that."""

    name: str
    missing: tuple[str, ...]
    fix: str


def feature_states(facts: MachineFacts) -> list[FeatureState]:
    """Return for each feature what is missing."""
    compiler = FeatureState(
        name="compiled shards (train --compile)",
        missing=() if facts.has_compiler else ("a C++ compiler",),
        fix="install one, such as Debian's package g++",
    )
    packaged = [
        FeatureState(
            name=feature.name,
            missing=tuple(name for name in feature.packages if name not in facts.packages),
            fix=install_line(feature.extra, is_installed=facts.evenstep is not None),
        )
        for feature in FEATURES
    ]
    return [*packaged, compiler]


def install_line(extra: str, *, is_installed: bool) -> str:
    """Return the command that installs the packages of an extra.

    Where evenstep is installed, even from a checkout, pip takes its name for what is installed.
    """
    if is_installed:
        return f"pip install 'evenstep[{extra}]'"
    return f"pip install '.[{extra}]' in the folder of evenstep's pyproject.toml"


def findings(facts: MachineFacts) -> list[Finding]:
    """Return what would change results, and then what would slow trainings down."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.kind != "results")


def _check_torch(facts: MachineFacts) -> Iterator[Finding]:
    here, oldest, newest = map(_minor, (facts.torch, TESTED_TORCH[0], TESTED_TORCH[-1]))
    if here < oldest:
        yield _untested(facts.torch, f"older than {TESTED_TORCH[0]}, the oldest")
    if here > newest:
        yield _untested(facts.torch, f"newer than {TESTED_TORCH[-1]}, the newest")
    for lacking in facts.torch_lacks:
        if not lacking.is_in_recommended:  # no version is better
            continue
        what = (
            f"torch {facts.torch} lacks {lacking.path}, which evenstep reads to {lacking.purpose}"
        )
        fix = f"pip install torch=={RECOMMENDED_TORCH}, or a newer evenstep"
        if lacking.has_public_way:
            yield _speed(f"{what}: a slower public way is used instead", fix)
        else:
            fails = "no trainer can be built" if lacking.needed else "what needs it will fail"
            yield _results(f"{what}: {fails}", fix)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _untested(version: str, which: str) -> Finding:
    return _results(
        f"torch {version} is {which} that evenstep is tested with",
        f"pip install torch=={RECOMMENDED_TORCH}",
    )


def _check_system(facts: MachineFacts) -> Iterator[Finding]:
    if facts.system != "Linux":
        yield _results(
            f"evenstep has been tested on Linux only, and this is {facts.system}",
            "evenstep verify shows whether results agree here",
        )
    if not facts.has_lock:
        yield _results(
            "this Python has no global lock, for which evenstep's threads were written: no result "
            "is promised without it",
            "an ordinary Python, or PYTHON_GIL=1",
        )


def _check_rounding(facts: MachineFacts) -> Iterator[Finding]:
    for name in ROUNDING:
        if name in facts.environment:
            yield _results(
                f"{name}={facts.environment[name]} changes how libraries compute: results differ "
                f"from those of machines where it is not set",
                f"unset {name}, or set it on all machines whose results are compared",
            )


def _check_gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.gpus and _CUBLAS not in facts.environment:
        yield _results(
            f"{_CUBLAS} is not set, so matrix products on GPUs are not deterministic. evenstep "
            "sets it, and refuses GPUs that a script has used before without it",
            f"export {_CUBLAS}=:4096:8",
        )
    if len(set(facts.gpus)) > 1:
        yield _results(
            f"the GPUs are of different models ({', '.join(sorted(set(facts.gpus)))}), which round "
            f"differently: results are equal within rounding, not bit for bit",
            "choose GPUs of one model, such as --devices cuda:0,cuda:1",
        )
    if facts.has_nvidia_driver and not facts.gpus:
        yield _speed(
            f"there is an NVIDIA driver, but torch {facts.torch} can use no GPU",
            "install a build of torch for CUDA; pytorch.org shows the command",
        )


def _check_pinning(facts: MachineFacts) -> Iterator[Finding]:
    for name, value in _pinning(facts).items():
        yield _speed(
            f"{name}={value} binds threads to cores: the threads of all devices then share the "
            f"first core",
            f"unset {name}",
        )


def _check_spinning(facts: MachineFacts) -> Iterator[Finding]:
    if facts.environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield _speed(
            "OMP_WAIT_POLICY=active keeps a core busy for every thread that waits",
            "unset OMP_WAIT_POLICY",
        )


def _check_cores(facts: MachineFacts) -> Iterator[Finding]:
    if facts.cores == 1 and not _pinning(facts):
        yield _speed(
            "this process may use one core: several CPU devices are no faster than one",
            "allow it more cores (taskset, the CPU limit of the container)",
        )
    used = facts.cores_used_by_others
    if used is not None and used >= _BUSY_CORES:
        yield _speed(
            f"other programs use {used:.1f} of {facts.cores} cores",
            "end them, or leave cores to them with a smaller --devices",
        )


def _check_power(facts: MachineFacts) -> Iterator[Finding]:
    for driver, governor in facts.governors:
        if governor == "powersave" and driver not in _PSTATE_DRIVERS:
            yield _speed(
                "the governor powersave keeps cores at their lowest clock rate",
                "sudo cpupower frequency-set -g performance",
            )
    if facts.is_on_battery:
        yield _speed("the machine runs on its battery, which slows cores down", "plug it in")


def _check_memory(facts: MachineFacts) -> Iterator[Finding]:
    if facts.free_bytes is not None and facts.free_bytes < _LEAST_FREE_BYTES:
        yield _speed(
            f"only {facts.free_bytes / _GIB:.1f} GiB of memory are free: a training that needs "
            f"more will swap to disk",
            "end other programs, or use a smaller model or batch",
        )
    if facts.shared_bytes is not None and facts.shared_bytes < _LEAST_SHARED_BYTES:
        yield _speed(
            f"{SHARED} has {facts.shared_bytes / 2**20:,.0f} MiB, and the workers of a DataLoader "
            f"pass their batches through it: they fail when it is full",
            "start the container with --shm-size=1g, or use no workers",
        )


def _pinning(facts: MachineFacts) -> dict[str, str]:
    """Return the variables that bind threads to cores."""
    values = {name: facts.environment.get(name, "") for name in PINNING}
    return {name: value for name, value in values.items() if value.lower() not in _UNBOUND}


def _results(text: str, fix: str) -> Finding:
    return Finding(kind="results", text=text, fix=fix)


def _speed(text: str, fix: str) -> Finding:
    return Finding(kind="speed", text=text, fix=fix)


_CHECKS: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    *(_check_torch, _check_system, _check_rounding, _check_gpus),
    *(_check_pinning, _check_spinning, _check_cores, _check_power, _check_memory),
)
