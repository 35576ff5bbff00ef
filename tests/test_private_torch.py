"""Private names of torch: each is read in one place, and a torch without it is no wrong number."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.private_torch.names import all_names

SOURCE = Path(__file__).parents[1] / "src" / "evenstep"
OTHER_LIBRARIES = ("integrations/",)
# Not torch's: of namedtuples, of numpy, of Python, and a dataset's of Hugging Face.
NOT_TORCHS = {"_replace", "_asdict", "_make", "_rand", "_bit_generator", "_inst", "_getframe"}
NOT_TORCHS |= {"_ex_iterable", "_distributed", "_is_gil_enabled"}

pytestmark = pytest.mark.timeout(900)  # evenstep is imported once for each name that is missing

PATHS = {one.path: one for one in all_names()}
PUBLIC = [path for path, one in PATHS.items() if one.has_public_way]
REFUSED = [path for path, one in PATHS.items() if one.needed and not one.has_public_way]
LATER = [path for path, one in PATHS.items() if not one.needed and not one.has_public_way]


# ---- one place


def sources():
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if not file.startswith(("private_torch/", *OTHER_LIBRARIES)):
            yield file, ast.parse(path.read_text(encoding="utf-8"))


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined_here(trees):
    """Return the private names that evenstep itself gives to something."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def read_privately(tree, own):
    """Return the private names of others that a module reads: attributes, imports, getattr."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls") or node.attr in own
            if not is_own or "torch" in ast.unparse(node.value):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found |= set(filter(is_private, names))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name not in own:
                found.add(name)
    return found - NOT_TORCHS


def test_private_names_of_torch_are_read_in_one_package():
    trees = dict(sources())
    own = defined_here(trees.values()) - {path.rpartition(".")[2] for path in PATHS}
    assert {
        file: found for file, tree in trees.items() if (found := read_privately(tree, own))
    } == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._set_graph_executor_optimize(False)",
        "from torch._C import DispatchKey",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "module._forward_hooks",
        "getattr(node, '_saved_sparse', False)",
    ],
)
def test_a_private_name_elsewhere_would_be_found(line):
    assert read_privately(ast.parse(line), own=set())


# ---- a torch without it

PROGRAM = """
import os, sys, traceback
import torch
import evenstep

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "evenstep"]:
        del sys.modules[name]

def train(evenstep):
    from evenstep.options import Experiment
    torch.manual_seed(0)

    class Product(torch.nn.Module):  # with a buffer at an odd address, which can be moved
        def __init__(self, inputs, outputs):
            super().__init__()
            memory = torch.randn(1 + inputs * outputs).untyped_storage()
            self.register_buffer("factor", torch.empty(0).set_(memory, 1, (inputs, outputs)))

        def forward(self, x):
            return x @ self.factor

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5),
        torch.nn.ReLU(), torch.nn.Flatten(), Product(4 * 36, 17), torch.nn.Linear(17, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    X, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 3
    with evenstep.Trainer(
        model, optimizer, torch.nn.CrossEntropyLoss(), devices=["cpu:0", "cpu:1:own"], shards=4
    ) as trainer:
        for _ in range(3):
            trainer.step(X, y)
        return trainer.fingerprint()

def without(taken):
    forget()
    import evenstep.errors, importlib, types
    package = types.ModuleType("evenstep"); package.__path__ = [os.path.dirname(FILE)]
    sys.modules["evenstep"] = package  # so that names can be imported before the rest
    names = importlib.import_module("evenstep.private_torch.names")
    found = names.lookup
    def lookup(owner, name, path):
        if path in taken:
            raise AttributeError(name)
        return found(owner, name, path)
    names.lookup = lookup
    del sys.modules["evenstep"]
    import evenstep
    assert sys.modules["evenstep.private_torch.names"] is names
    return evenstep

FILE = evenstep.__file__
for line in sys.stdin:
    taken = line.split()
    if os.fork() == 0:
        try:
            print("result", train(without(taken)), flush=True)
        except BaseException as error:
            print("result", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
        os._exit(0)
    os.wait()
"""


def results_without(cases):
    """Return by case what a short training gives in a process whose torch lacks its names."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(f"{case}\n" for case in cases),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = re.findall(r"^result (.*)$", done.stdout, re.MULTILINE)
    assert len(lines) == len(cases), done.stderr
    return dict(zip(cases, lines, strict=True))


@pytest.mark.slow
def test_all_public_ways_together_give_the_same_bits():
    every = " ".join(PUBLIC)
    results = results_without(["", every, REFUSED[0]])
    assert results[every] == results[""]
    assert re.fullmatch(r"[0-9a-f]+", results[""])
    assert results[REFUSED[0]].startswith("VersionError torch ")


in_one_worker = pytest.mark.xdist_group("private names")


@pytest.fixture(scope="module")
def results():
    return results_without(["", *PUBLIC, *REFUSED, *LATER])


@in_one_worker
@pytest.mark.slow
@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_way_gives_the_same_bits(results, path):
    assert results[path] == results[""]
    assert re.fullmatch(r"[0-9a-f]+", results[""])


@in_one_worker
@pytest.mark.slow
@pytest.mark.parametrize("path", REFUSED)
def test_nothing_is_trained_without_a_needed_name(results, path):
    assert results[path].startswith("VersionError torch ")
    assert path in results[path]
    assert "Install torch" in results[path]


@in_one_worker
@pytest.mark.slow
@pytest.mark.parametrize("path", LATER)
def test_what_does_not_need_a_name_works_without_it(results, path):
    assert results[path] == results[""]
