"""One module knows what kind of accelerator there is; a kind that lacks something is refused."""

import os
import re
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.devices import accelerator, find_devices
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
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
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


@pytest.fixture
def _nvidia(monkeypatch):
    """A machine with CUDA, as far as devices are looked for, that has not started."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("Event", "Stream"):  # which would start it
        monkeypatch.setattr(torch, name, lambda device: os.environ["CUBLAS_WORKSPACE_CONFIG"])


@pytest.mark.usefixtures("_nvidia")
def test_matrix_products_are_made_deterministic_before_cuda_starts(monkeypatch):
    find_devices("cuda:0")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    find_devices("cuda:0")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.usefixtures("_nvidia")
def test_cuda_that_has_started_without_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(DeviceError, match="above `import torch`"):
        find_devices("cuda:0")
    find_devices("cpu:0")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_no_other_kind_of_device_needs_that_setting(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    accelerator.ask_for_deterministic_products("xpu")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
