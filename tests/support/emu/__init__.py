"""An emulated accelerator, harder than a GPU: devices "emu:0" to "emu:3" with streams and events.

Its memory is the host's, and its kernels are the CPU's, called later, when their stream's turn
comes. So every training has the CPU's bits, and a missing wait, a missing `record_stream`, or an
early read shows as wrong numbers on a machine without a GPU. `load` registers it in this process,
once and for good: tests that use it have processes of their own (`pytest --accelerator`).

Modes, which `configure` chooses:

* "lazy": nothing runs until a wait of the host needs it, and then only what that wait needs. The
  same every time for one thread; shows a missing wait nearly always.
* "random": now and then, a stream advances by some kernels; seeded.
* "thread": a thread for each stream, with random delays. Not the same every time.
* "eager": everything at once.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

SOURCES = Path(__file__).parent
MODES = ("lazy", "random", "thread", "eager")
DEVICES = 4
POLLING = "an event, by polling"
"""What `host_waits` counts for an event that a program has asked for before it had passed."""


def missing() -> str:
    """Return why the accelerator can't be built here; an empty text if it can."""
    return "" if shutil.which("g++") else "there is no C++ compiler (g++) to build it with"


def build(folder: Path) -> Path:
    """Return the extension, built by one call of g++ (some 20 seconds) unless it is in `folder`."""
    sources = sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = folder / f"emu-{digest.hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "emu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    torchs = Path(torch.__file__).parent
    unfinished = library.with_suffix(".new")
    command = [
        *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCES / "control.cpp")),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{torchs / 'include'}", f"-I{torchs / 'include/torch/csrc/api/include'}"),
        *(f"-L{torchs / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torchs / 'lib'}"),
        *("-lpthread", "-w", "-o", str(unfinished)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the emulated accelerator can't be built:\n{done.stderr[-3000:]}")
    unfinished.rename(library)


def load(folder: Path) -> None:
    """Register the accelerator with torch in this process, built in `folder`."""
    torch.ops.load_library(str(build(folder)))
    torch.utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_ops().shut_down)


def _ops() -> Any:
    return torch.ops.emu


# ---- for tests


def configure(mode: str = "lazy", seed: int = 0, delay_us: int = 100) -> None:
    """Wait for all kernels, forget errors and faults, and choose a mode.

    Args:
        mode: one of `MODES`.
        seed: of the order in "random", and of the delays in "thread".
        delay_us: a quarter of the longest delay of a kernel in "thread", in microseconds.
    """
    _ops().configure(mode, seed, delay_us)


def fail_after(device: int, kernels: int) -> None:
    """Let a kernel of a device fail when it runs, after `kernels` others; then every call fails."""
    _ops().fail_after(device, kernels)


def disappear(device: int, kernels: int = -1, at: str = "") -> None:
    """Let a device fall off the bus, and with it what its memory holds; then every call fails.

    Also those fail that need no kernel: views, events, new memory; what is freed stays in use.

    Args:
        device: its number.
        kernels: how many kernels still run; -1 to let it disappear now.
        at: the name of the kernels that are counted; all if it is empty.
    """
    _ops().disappear(device, kernels, at)


def stand_still(device: int, still: bool = True) -> None:
    """Let a device stop running kernels, or go on."""
    _ops().stand_still(device, still)


def slow_down(device: int, delay_us: int) -> None:
    """Let every kernel of a device take longer."""
    _ops().slow_down(device, delay_us)


def limit_memory(device: int, nbytes: int) -> None:
    """Give a device a memory of `nbytes`."""
    _ops().limit_memory(device, nbytes)


def pending(device: int) -> int:
    """Return how many kernels, copies and waits of a device have not run."""
    return int(_ops().pending(device))


def is_used(device: int) -> bool:
    """Return whether CUDA would have started on a device since the last `configure`."""
    return bool(_ops().is_used(device))


def used_streams(device: int) -> list[int]:
    """Return the streams of a device that had work, or memory, since the last `configure`.

    The default stream is number 0.
    """
    return list(_ops().used_streams(device))


def counts() -> dict[str, int]:
    """Return how many ops were queued, ran at once, were tried on zeros; how many blocks reused."""
    return dict(zip(("queued", "at once", "tried", "reused"), _ops().counts(), strict=True))


def host_waits() -> Counter[str]:
    """Return how often the host has waited for a device since the last call, by what waited."""
    return Counter(_ops().host_waits())


def host_copies() -> tuple[int, int]:
    """Return the copies between devices and the host since the last call, and their bytes."""
    copies, nbytes = _ops().host_copies()
    return copies, nbytes


@contextlib.contextmanager
def noting_places() -> Iterator[list[str]]:
    """Inside `with`, note where the host waits: the lines of each wait, innermost first."""
    places: list[str] = []
    _ops().note_places(True)
    try:
        yield places
    finally:
        _ops().note_places(False)
        places += _ops().waiting_places()


def on_the_host(state: Any) -> Any:
    """Return copies of all tensors in nested dicts and lists, in the memory of the CPU."""
    return pytree.tree_map(lambda one: one.cpu() if isinstance(one, torch.Tensor) else one, state)


# ---- torch.emu


class _DefaultGenerator:
    """The default generator of a device, as `torch.cuda.default_generators` has them."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("emu", index)

    def manual_seed(self, seed: int) -> _DefaultGenerator:
        _ops().manual_seed(self.device.index, seed)
        return self

    def get_state(self) -> torch.Tensor:
        return _ops().get_rng_state(self.device.index)

    def set_state(self, state: torch.Tensor) -> None:
        _ops().set_rng_state(self.device.index, state)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextlib.contextmanager
def _on(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _module() -> types.ModuleType:
    """Return the module `torch.emu`, with the names that `torch.cuda` has."""
    module: Any = types.ModuleType("torch.emu")
    module._lazy_init = module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module._initialized = True  # `torch.utils.checkpoint` looks at it
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: int(_ops().device_count())
    module.get_device_name = lambda device=None: "emulated accelerator"
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.device = _on
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device("emu", _index(device))
    )
    module.Event = lambda enable_timing=False, **_: torch.Event("emu", enable_timing=enable_timing)
    module.stream = lambda stream: stream
    module.empty_cache = torch.accelerator.empty_cache
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.default_generators = tuple(map(_DefaultGenerator, range(module.device_count())))
    module.manual_seed = lambda seed: module.default_generators[_index()].manual_seed(seed)
    module.initial_seed = lambda: None

    def manual_seed_all(seed: int) -> None:
        for generator in module.default_generators:
            generator.manual_seed(seed)

    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device="emu": module.default_generators[
        _index(device)
    ].get_state()
    module.set_rng_state = lambda state, device="emu": module.default_generators[
        _index(device)
    ].set_state(state)
    module.get_rng_state_all = lambda: [one.get_state() for one in module.default_generators]
    return module
