"""One module knows what kind of accelerator there is; a kind that lacks something is refused."""

import re
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.devices import find_devices
from evenstep.errors import DeviceError

SOURCES = Path(evenstep.__file__).parent
HARDWARE = re.compile(
    r"torch\.(cuda|xpu|mps|mtia|hpu)\b|\.is_cuda|== \"cuda\"|\bkind [!=]= \"cpu\""
)
THE_PLACE = "devices/accelerator.py"


def uses_of_hardware(path):
    lines = path.read_text().splitlines()
    return [line.strip() for line in lines if HARDWARE.search(line)]


def test_nothing_but_one_module_names_a_kind_of_accelerator():
    found = {
        str(path.relative_to(SOURCES)): uses_of_hardware(path) for path in SOURCES.rglob("*.py")
    }
    assert found.pop(THE_PLACE)
    assert found.pop("devices/device.py") == ['is_cpu = self.kind == "cpu"']
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.synchronize()", "if tensor.is_cuda:", 'device.kind == "cuda"', 'kind != "cpu"'],
)
def test_the_search_finds(line, tmp_path):
    (tmp_path / "module.py").write_text(f"    {line}\n")
    assert uses_of_hardware(tmp_path / "module.py") == [line]


@pytest.fixture
def mac(monkeypatch):
    """A machine whose accelerator lacks default generators."""

    class Module:
        @staticmethod
        def device_count():
            return 1

        is_available = device_count

    monkeypatch.setattr(torch, "get_device_module", lambda kind: Module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))


@pytest.mark.usefixtures("mac")
def test_a_kind_without_generators_is_refused_by_name():
    with pytest.raises(
        DeviceError, match=r"on mps devices, for which torch lacks torch\.mps\.default_generators"
    ):
        find_devices("mps:0")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("wanted", ["auto", 2])
def test_a_kind_that_lacks_something_is_not_chosen_for_the_user(wanted):
    assert {device.kind for device in find_devices(wanted)} == {"cpu"}
