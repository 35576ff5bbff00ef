"""Any command line ends with a result or with one line: no traceback, no hang, no memory."""

import os
import sys

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.cli import main
from evenstep.errors import DataError
from fuzzing import ABSURD_NUMBERS, LIMIT_S, limited

# What would start processes, or load from the network, or take hours by design.
_COMPILING_S = 60  # C++ is compiled, once for each shape
_BOUNDS = {"steps": "1", "rounds": "1", "seconds": "0.01"}
_SMALL = {"model": "mlp", "devices": "1", "batch_size": "64"}
_NEVER_IN_RANGE = {"processes", "workers"}
_FAR_TOO_LONG = {str(10**6), "40000", "100000"}  # as numbers of steps

_TEXTS = [
    *("", " ", "-", "--", ".", "..", "x", "x" * 300, "x" * 5000, "é", "\udcff", "%s", "{}"),
    *("mlp", "lenet", "a:b", ":", "os:getcwd", "cli_models:Net", "cli_models:raises", "1,28,28"),
    *("1", "1,2", "1,,2", "2,1", "0", "auto", "cpu", "cpu:0", "cpu:0,cpu:0", "cuda:99"),
    *("cpu:0:own", "cpu:0+cpu:1,1", "here", "here/x", "here.json", "no/such/x", "numbers"),
    *("9" * 5000, "١"),
]  # fmt: skip
_NUMBERS = [*map(str, ABSURD_NUMBERS[:8]), "9" * 5000, "nan", "inf", "-inf", "1e300", "1e-300", ""]


def commands(group=main, path=()):
    """Return every command with its path: those that are added later, too."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def values_of(parameter):
    """Return a strategy for the texts of a parameter, good and bad, by its type."""
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return st.sampled_from([*kind.choices, *_TEXTS[:6]])
    if isinstance(kind, click.types._NumberRangeBase):
        limits = [limit for limit in (kind.min, kind.max) if limit is not None]
        near = {limit + by for limit in limits for by in (-1, 0, 1)}
        if parameter.name in _NEVER_IN_RANGE:
            near = {value for value in near if not kind.min <= value <= kind.max}
        if parameter.name == "threads":
            near -= {kind.max - 1, kind.max}  # memory and time grow with the number of threads
        numbers = [*map(str, sorted(near)), *_NUMBERS]
        if parameter.name == "steps":
            far = {str(value) for value in near if value > 1} | _FAR_TOO_LONG
            numbers = [number for number in numbers if number not in far]
        return st.sampled_from(numbers)
    return st.sampled_from(_TEXTS)


@st.composite
def command_lines(draw, *, without=()):
    path, command = draw(st.sampled_from(sorted(commands())))
    line = list(path)
    known = {parameter.name: parameter for parameter in command.params}
    line += [
        part
        for name, value in _SMALL.items()
        if name in known and name != "devices"
        for part in (known[name].opts[0], value)
    ]
    chosen = (
        draw(st.lists(st.sampled_from(sorted(known.keys() - without)), max_size=4, unique=True))
        if known
        else []
    )
    for name in chosen:
        parameter = known[name]
        if isinstance(parameter, click.Argument):
            line.append(draw(values_of(parameter)))
        elif parameter.is_flag:
            line.append(parameter.opts[0])
        else:
            line += [parameter.opts[0], draw(values_of(parameter))]
    for name, value in _BOUNDS.items():
        if name in known and name not in chosen:
            line += [known[name].opts[0], value]
    line += draw(st.lists(st.sampled_from(["extra", "--what", "-x", "--help"]), max_size=1))
    return line


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """A folder to run in, and no processes, no network, no experiments of hours."""

    def stop(*arguments, **options):
        raise click.ClickException("not in this test")

    def no_data(*arguments, **options):
        raise DataError("not in this test")

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        (folder / "here").mkdir()
        (folder / "here.json").write_text("{}")
        (folder / "numbers").write_bytes(bytes(range(256)))
        patch.setattr("evenstep.cli.bench.steps_for", stop)
        patch.setattr("evenstep.cli.bench._run", stop)
        patch.setattr("evenstep.cli.reproduce.run", stop)
        patch.setattr("evenstep.cli.reproduce.fashion_mnist", no_data)
        patch.setattr("evenstep.cli.training.setup.fashion_mnist", no_data)
        patch.setattr("evenstep.cli.training.command.launch", stop)
        patch.setattr(
            "evenstep.cli.training.command._DEFAULT_EPOCHS", {"digits": 1, "fashion-mnist": 1}
        )
        train_once()
        yield folder


def train_once(*options):
    """What is imported is no command's own."""
    CliRunner().invoke(main, ["train", "--model", "mlp", "--steps", "1", *options])


def judge(line):
    with limited(line, _COMPILING_S if "--compile" in line else LIMIT_S):
        result = CliRunner().invoke(main, line)
    ended_on_purpose = result.exception is None or isinstance(result.exception, SystemExit)
    if not ended_on_purpose:
        raise AssertionError(line) from result.exception
    assert result.exit_code in (0, 1, 2), line
    assert "Traceback" not in result.output, line
    if result.exit_code:
        ours = [one for one in result.stderr.splitlines() if one.startswith("evenstep: ")]
        assert len(ours) <= 1, line
        assert ours or "verify" in line, line  # verify prints a verdict and fails


def fuzzer(examples, *, derandomize, without=()):
    @settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(command_lines(without=without))
    def run(line):
        judge(line)

    return run


@pytest.mark.timeout(60, method="thread")
def test_some_command_lines_end_with_a_result_or_one_line(bounded):
    fuzzer(16, derandomize=True, without={"compile"})()


@pytest.mark.slow
@pytest.mark.timeout(900, method="thread")
def test_many_command_lines_end_with_a_result_or_one_line(bounded):
    train_once("--compile")
    fuzzer(1500, derandomize=False)()


B = "9" * 30

ABSURD = {
    "train --threads 100000": "is not in the range 1<=x<=1024",
    "train --threads 1024 --devices 2": "2048 intra-op threads in all",
    "train --devices 40000": "use at most 1024 in one process",
    f"train --devices {B}": "got device '999",
    f"train --devices cpu:{B}": "got device 'cpu:999",
    f"train --shards {B}": "is not in the range 1<=x<=65536",
    f"train --batch-size {B}": "is not in the range 1<=x<=2147483647",
    "train --batch-size 5000 --drop-last": "so no batch is left",
    "train --timeout 1e300": "is not in the range 0<x<=31536000",
    "train --timeout nan": "nan is not a finite number",
    "train --timeout -1": "is not in the range",
    "train --lr 1e300": "is not in the range",
    f"train --processes {B}": "is not in the range 1<=x<=1024",
    f"train --in-flight {B}": "is not in the range 1<=x<=1000",
    f"train --steps {B}": "is not in the range",
    f"train --json {'x' * 5000}": "expected a file in an existing folder",
    "verify --devices 1,40000": "use at most 1024 in one process",
    "verify --devices 1,-2": "got -2 devices",
    f"bench scaling --devices 1,{B}": "expected whole numbers",
    "bench scaling --devices 1,40000": "give at most 1024",
    "bench scaling --shape 100000,100000": "at most 1073741824 numbers",
    "bench scaling --seconds nan": "is not a finite number",
    f"bench peers --workers {B}": "is not in the range 2<=x<=1024",
}


@pytest.mark.parametrize("line", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.thinned(3)
def test_absurd_numbers_get_one_line_at_once(bounded, line):
    with limited(line):
        result = CliRunner().invoke(main, line.split(" "))
    assert result.exit_code == 2, result.output
    (ours,) = [one for one in result.stderr.splitlines() if one.startswith("evenstep: ")]
    assert ABSURD[line] in ours
    assert os.listdir(bounded)  # the folder that it ran in is there
