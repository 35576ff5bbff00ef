"""The packages of the code are those of docs/architecture.md, and imports go one way only."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "evenstep"
ROW = re.compile(r"^\| (?P<order>\d+) \| `(?P<place>\w+(?:/|\.py))` \| \S.* \|$", re.MULTILINE)
MOST_IN_THE_ROOT = 8  # besides __init__
IN_A_PACKAGE = range(3, 11)
MAY_BE_SMALL = ("integrations",)  # a file for each library
COMMAND_LINE = ("cli/", "__main__.py")
LAUNCHERS_WORD = (
    "distributed/rendezvous.py"  # a launcher speaks to its processes by the environment
)
COMPARED = "devices/arithmetic.py"  # settings of libraries: compared, never followed
CUBLAS = "devices/accelerator.py"  # it has no other way to be told to be deterministic
FRESH_PROCESSES = "bench/fresh.py"  # what they inherit is cleaned first


def module_name(file):
    return ".".join(["evenstep", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
MODULES = {module_name(file): file for file in FILES}
FOLDERS = sorted({str(Path(file).parent) for file in FILES} - {"."})
TABLE = [
    (int(row["order"]), row["place"])
    for row in ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
]
ORDER = {place: order for order, place in TABLE}


def place_of(module):
    """Return the row of a module: its outermost package, or itself if it is in the root."""
    file = MODULES[module]
    return f"{file.split('/')[0]}/" if "/" in file else file


@functools.cache
def text_of(file):
    return (SOURCE / file).read_text(encoding="utf-8")


def source_of(module):
    return text_of(MODULES[module])


@functools.cache
def nodes_of(source):
    """Return the nodes of a syntax tree that say what is imported, called or read, parsed once."""
    kinds = ast.Import | ast.ImportFrom | ast.Call | ast.Attribute
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


@functools.cache
def imported(source):
    """Return the modules of evenstep that `source` imports, wherever in it."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inside}
    return {name for name in found if name.split(".")[0] == "evenstep"}


def upward_imports(module, source):
    """Return what `source`, standing in the place of `module`, imports from later packages."""
    here = place_of(module)
    return {
        name
        for name in imported(source)
        if place_of(name) != here and ORDER[place_of(name)] >= ORDER[here]
    }


def circle_in(imports):
    """Return modules that import each other in a circle; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def imports_inside(place, sources):
    """Return for each module of a package those of the same package that it imports."""
    return {
        module: {name for name in imported(source) if place_of(name) == place}
        for module, source in sources.items()
        if place_of(module) == place
    }


def forbidden(source):
    """Return what only the command line may do (read the environment), or nobody (pickle)."""
    found = set()
    for node in nodes_of(source):
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


def test_every_package_has_one_row():
    listed = [place for _, place in TABLE]
    assert sorted(listed) == sorted({place_of(module) for module in MODULES})
    assert [order for order, _ in TABLE] == list(range(1, len(TABLE) + 1))


def test_a_module_imports_from_earlier_packages():
    upward = {module: upward_imports(module, source_of(module)) for module in MODULES}
    assert not {module: names for module, names in upward.items() if names}


@pytest.mark.parametrize("place", ORDER)
def test_no_circle_of_imports_in_a_package(place):
    sources = {module: source_of(module) for module in MODULES}
    assert not circle_in(imports_inside(place, sources))


def test_a_module_says_what_it_is_for():
    said = {module: ast.get_docstring(ast.parse(source_of(module))) for module in MODULES}
    assert not [module for module, text in said.items() if not (text or "").split("\n")[0].strip()]


def test_few_modules_are_in_the_root():
    in_the_root = [file for file in FILES if "/" not in file and file != "__init__.py"]
    assert len(in_the_root) <= MOST_IN_THE_ROOT


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_is_neither_tiny_nor_crowded(folder):
    files = [path.name for path in (SOURCE / folder).glob("*.py") if path.stem != "__init__"]
    assert len(files) >= IN_A_PACKAGE.start or folder in MAY_BE_SMALL
    assert len(files) < IN_A_PACKAGE.stop


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_a_package(folder):
    assert f"{folder}/__init__.py" in FILES


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("evenstep.devices.device", "from evenstep.training.trainer import Trainer"),
        ("evenstep.shard.loss", "from evenstep.steps.executors import Cut"),
        ("evenstep.batch.rng", "from evenstep.steps import executors"),
        ("evenstep.collectives.tree", "import evenstep.engine.lanes, evenstep.batch.cut"),
        ("evenstep.training.trainer", "def late():\n    from evenstep import Trainer"),
        ("evenstep.verification", "import evenstep"),
        (
            "evenstep.errors",
            "if TYPE_CHECKING:\n    from evenstep.cli import training",
        ),
        ("evenstep", "from evenstep.cli import main"),
        ("evenstep", "from evenstep import d2l"),
    ],
)
def test_an_import_from_a_later_package_would_be_found(module, source):
    assert upward_imports(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("evenstep.engine.task", "from evenstep.engine.lanes import Lanes"),
        ("evenstep.engine.lanes", "from evenstep.engine import Handle"),
        ("evenstep.engine.graph", "def late():\n    from evenstep.engine import schedule"),
    ],
)
def test_a_circle_would_be_found(module, source):
    sources = {other: source_of(other) for other in MODULES} | {module: source}
    assert circle_in(imports_inside("engine/", sources))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("evenstep.training.trainer", "from evenstep.checkpoint import fingerprint\nimport torch"),
        ("evenstep.cli.training.setup", "import evenstep"),
        ("evenstep.engine", "from evenstep.engine.task import Task"),
    ],
)
def test_an_import_from_an_earlier_package_is_fine(module, source):
    assert imported(source)
    assert not upward_imports(module, source)


def test_only_the_command_line_reads_the_environment():
    may = (*COMMAND_LINE, LAUNCHERS_WORD, COMPARED, CUBLAS, FRESH_PROCESSES)
    others = [file for file in FILES if not file.startswith(may)]
    assert not [file for file in others if forbidden(text_of(file)) & ENVIRONMENT]


def test_nothing_is_pickled():
    assert not [file for file in FILES if forbidden(text_of(file)) & PICKLE]


# Everything else writes files through `evenstep.files.write_file`.
WRITERS = {
    "files.py": {"open"},
    "callbacks/table.py": {"open"},  # row by row
    "recording/record_file.py": {"open"},  # event by event
    "checkpoint/files.py": {"write_bytes", "save_file"},  # into a folder of its own
    "cli/app.py": {"open"},  # os.devnull, for what Python writes at its end
    "cli/terminal/files.py": {"open"},  # a stream
    "bench/pictures.py": {"savefig"},  # into memory
    "data/download.py": {"open"},  # a draft that pooch has made
}


def writing(source):
    """Return the calls in `source` that may write to a file."""
    found = set()
    for node in nodes_of(source):
        if not isinstance(node, ast.Call):
            continue
        place = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if place is not None else getattr(node.func, "id", "")
        if name in (
            "write_bytes",
            "savefig",
            "save_file",
            "mkstemp",
            "NamedTemporaryFile",
            "tofile",
        ):
            found.add(name)
        if name == "write_text" and place is not None and ast.unparse(place) != "results":
            found.add(name)
        words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
        if name in ("open", "fdopen") and any(
            isinstance(word, str) and set(word) <= set("rwxabt+") and set(word) & set("wxa+")
            for word in words
        ):
            found.add("open")
    return found


def test_files_are_written_by_one_helper():
    found = {file: writing(text_of(file)) for file in FILES}
    assert {file: calls for file, calls in found.items() if calls} == WRITERS


@pytest.mark.parametrize(
    "source",
    [
        "Path('x').write_text('')",
        "open('x', 'w')",
        "open('x', mode='ab')",
        "Path('x').open('xb')",
        "os.fdopen(3, 'w')",
        "figure.savefig('x')",
    ],
)
def test_what_writes_would_be_found(source):
    assert writing(source)


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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page):
    """Paths in backticks: `collectives/tree.py`, or `tests/support/reference.py`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert named
    assert [
        file for file in named if not ((SOURCE / file).exists() or (ROOT / file).exists())
    ] == []


def test_the_architecture_fits_on_a_page():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
