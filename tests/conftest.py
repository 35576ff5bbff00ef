"""What every test shares: one intra-op thread in the test's own thread, and no leftover lanes."""

import faulthandler
import getpass
import os
import signal
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import emu
from evenstep.engine import Engine, InlineLanes, ThreadLanes
from evenstep.engine.interrupts import INTERRUPTS
from layouts import TWO
from machines import two_machines
from patience import HUNG_TESTS_ABORT

# Beside other work, an example may take any time.
settings.register_profile("evenstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("evenstep")

SHARED = Path(__file__).parents[2] / "shared"
BUILD = Path(__file__).parents[1] / "build"
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="register the emulated accelerator in this process, for tests/accelerator",
    )


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # as it is outside of tests, where it is captured
    # torch finds compiled code in its cache that was made for the vectors of another setting.
    capability = torch.backends.cpu.get_cpu_capability()
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if config.getoption("--accelerator") and not emu.missing():
        emu.load(BUILD)


def pytest_timeout_set_timer(item, settings):
    """Have a test that takes too long end its process, after printing the stacks of all threads.

    A worker's output is lost, but not what it writes to stderr; and a test that waits in C, holding
    the interpreter's lock, ends, too.
    """
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=stderr)
    return True


def pytest_timeout_cancel_timer(item):
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_enter_pdb():
    faulthandler.cancel_dump_traceback_later()


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests of an accelerator in a process that has none."""
    is_of_one = collection_path.name == "accelerator" and collection_path.parent.name == "tests"
    return True if is_of_one and not config.getoption("--accelerator") else None


def pytest_itemcollected(item):
    """What is exhaustive is slow, and so are cases of a test that is thinned, by their names.

    With a second number m, all but one in m of the slow cases are exhaustive.
    """
    if thinned := item.get_closest_marker("thinned"):
        n, m = (*thinned.args, 1)[:2]
        number = zlib.crc32(item.name.encode())
        is_slow = number % n > 0 or item.get_closest_marker("slow")
        if is_slow:
            item.add_marker(pytest.mark.slow)
        if is_slow and number // n % m > 0:
            item.add_marker(pytest.mark.exhaustive)
    if item.get_closest_marker("exhaustive"):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works():
    """A shell that starts the tests in the background has it ignored, for their processes too."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_handlers():
    """Put back the handlers of signals that a test installs; no signal is left pending."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not INTERRUPTS.pending


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("evenstep")]
    assert not left


@pytest.fixture(params=[ThreadLanes, InlineLanes])
def engine(request):
    """An open engine of two devices, with and without threads."""
    with Engine(TWO, lanes=request.param) as engine:
        yield engine


def pytest_collection_modifyitems(items):
    """Watch tests of lanes; give those with network namespaces (fixed names) to one worker."""
    for item in items:
        path = Path(item.path)
        is_pure = "schedule" in path.name or "graph" in path.name
        is_of_lanes = (path.parent.name == "engine" and not is_pure) or "in_flight" in path.name
        if is_of_lanes and not (
            item.get_closest_marker("timeout") or item.get_closest_marker("slow")
        ):
            item.add_marker(HUNG_TESTS_ABORT)
        if "machines" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("machines"))


@pytest.fixture
def machines():
    with two_machines() as names:
        yield names


@pytest.fixture
def fashion_mnist_dir():
    folder = SHARED / "data" / "fashion-mnist"
    if not folder.is_dir():
        pytest.skip("the Fashion-MNIST files are not beside this checkout (../shared/data)")
    return folder
