"""The rooms of the code are those of docs/architecture.md, and imports go downwards only."""

import ast
import collections
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "evenstep"
ROW = re.compile(r"^\| (?P<floor>\d) \| `(?P<file>[\w/]+\.py)` \| \S.* \|$", re.MULTILINE)
FACADE_FLOOR = 6
COMMAND_LINE = ("cli", "__main__")
LAUNCHERS_WORD = "processes/world.py"  # a launcher speaks to its processes by the environment
FRESH_PROCESSES = "bench/fresh.py"  # what they inherit is cleaned first


def module_name(file):
    return ".".join(["evenstep", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
MODULES = {module_name(file): file for file in FILES}
TABLE = [
    (int(row["floor"]), row["file"])
    for row in ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
]


@functools.cache
def places():
    """Return where each module stands: (floor, row). A folder's exports follow its last file."""
    found = {}
    for number, (floor, file) in enumerate(TABLE):
        found[module_name(file)] = (floor, number)
        if "/" in file:
            found[module_name(file).rpartition(".")[0]] = (floor, number + 0.5)
    found["evenstep"] = (FACADE_FLOOR, float("inf"))
    return found


def imported(source):
    """Return the modules of evenstep that `source` imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inside}
    return {name for name in found if name.split(".")[0] == "evenstep"}


def upward_imports(module, source):
    """Return what `source`, standing in the place of `module`, imports from above."""
    return {name for name in imported(source) if not places()[name] < places()[module]}


def forbidden(source):
    """Return what only the command line may do (read the environment), or nobody (pickle)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
PICKLE = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLE |= {"torch.load", "torch.save", "numpy.load", "np.load"}
# torch.distributed pickles what these send.
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
OBJECTS += ("send_object_list", "recv_object_list")
PICKLE |= {f"{place}.{name}" for place in ("dist", "torch.distributed") for name in OBJECTS}


def test_every_file_has_one_place():
    listed = [file for _, file in TABLE]
    twice = [file for file, count in collections.Counter(listed).items() if count > 1]
    assert not twice
    assert sorted(listed) == [file for file in FILES if not file.endswith("__init__.py")]


def test_the_table_goes_upwards():
    floors = [floor for floor, _ in TABLE]
    assert floors == sorted(floors)
    assert set(floors) == set(range(9))


def test_a_folder_is_in_one_piece():
    folders = [str(Path(file).parent) for _, file in TABLE]
    for folder in set(folders) - {"."}:
        first = folders.index(folder)
        assert folders[first : first + folders.count(folder)] == [folder] * folders.count(folder)
        assert len({floor for floor, file in TABLE if str(Path(file).parent) == folder}) == 1


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_below(module):
    assert not upward_imports(module, (SOURCE / MODULES[module]).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("evenstep.devices", "from evenstep.trainer import Trainer"),
        ("evenstep.compute", "from evenstep.runner import Cut"),
        ("evenstep.rng", "from evenstep import runner"),
        ("evenstep.rng", "import evenstep.engine.lanes, evenstep.sharding"),
        ("evenstep.trainer", "def late():\n    from evenstep import Trainer"),
        ("evenstep.verify", "import evenstep"),
        ("evenstep.engine.lanes", "from evenstep.engine import Handle"),
        ("evenstep.errors", "if TYPE_CHECKING:\n    from evenstep.records import TrainRecord"),
        ("evenstep", "from evenstep.cli import main"),
    ],
)
def test_an_import_from_above_would_be_found(module, source):
    assert upward_imports(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("evenstep.trainer", "from evenstep import fingerprint as fingerprints\nimport torch"),
        ("evenstep.cli.setup", "import evenstep"),
        ("evenstep.engine", "from evenstep.engine.task import Task"),
    ],
)
def test_an_import_from_below_is_fine(module, source):
    assert imported(source)
    assert not upward_imports(module, source)


@pytest.mark.parametrize("file", FILES)
def test_only_the_command_line_reads_the_environment(file):
    found = forbidden((SOURCE / file).read_text(encoding="utf-8"))
    if not file.startswith(COMMAND_LINE) and file not in (LAUNCHERS_WORD, FRESH_PROCESSES):
        assert not found & ENVIRONMENT


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_pickled(file):
    assert not forbidden((SOURCE / file).read_text(encoding="utf-8")) & PICKLE


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['X']",
        "from os import environ",
        "import os\ndef f():\n    return os.getenv('X', '')",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "from torch import save as keep",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
    ],
)
def test_what_is_forbidden_would_be_found(source):
    assert forbidden(source) & (ENVIRONMENT | PICKLE)
