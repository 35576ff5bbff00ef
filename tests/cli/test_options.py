"""The tables of options: what is derived from them for click, the run file and the trainer."""

import ast
import dataclasses
import inspect
from pathlib import Path

import evenstep
from evenstep import Experiment, Trainer
from evenstep.cli.options.table import Scope
from evenstep.cli.options.training import ExperimentOptions, LayoutOptions
from evenstep.cli.training.setup import layout_arguments

SOURCE = Path(evenstep.__file__).parent


def arguments(table, scope):
    return {one.argument for one in table.options() if one.scope is scope and one.argument}


def test_every_choice_of_the_trainers_experiment_is_an_option():
    """Except for those that belong to code of the user's own."""
    names = {field.name for field in dataclasses.fields(Experiment)} - {
        "separable",
        "buffers",
        "batch_dim",
    }
    assert arguments(ExperimentOptions, Scope.CHECKPOINT) == names


def test_options_set_arguments_that_the_trainer_has():
    given = ExperimentOptions().trainer_arguments()
    assert Experiment(**given) == Experiment()
    assert layout_arguments(LayoutOptions()).keys() <= set(inspect.signature(Trainer).parameters)


OTHERS = {
    "devices": "1",
    "max_in_flight": 2,
    "stages": "balanced",
    "owners": True,
    "peer_timeout_s": 5.0,
    "allow_rounding": True,
}


def test_every_option_of_a_layout_reaches_the_trainer():
    options = {one.argument: one.name for one in LayoutOptions.options() if one.argument}
    assert options.keys() == OTHERS.keys()
    for argument, name in options.items():
        other = LayoutOptions(**{name: OTHERS[argument]})
        assert layout_arguments(other) != layout_arguments(LayoutOptions())


def test_only_options_of_the_experiment_are_kept():
    assert {one.scope for one in LayoutOptions.options()} == {Scope.LAYOUT}
    assert Scope.LAYOUT not in {one.scope for one in ExperimentOptions.options()}


def test_given_options_alone_are_asked_of_a_checkpoint():
    table = ExperimentOptions(shards=4, seed=1, given=frozenset({"shards", "lr"}))
    assert table.trainer_arguments(given_only=True) == {"shards": 4}
    assert table.trainer_arguments()["seed"] == 1


def test_only_the_command_line_imports_what_draws_on_a_terminal():
    importing = {
        file for file in SOURCE.rglob("*.py") if imported(file) & {"click", "rich", "tqdm"}
    }
    assert {file.relative_to(SOURCE).parts[0] for file in importing} == {"cli", "callbacks"}
    (views,) = (file for file in importing if file.parent.name == "callbacks")
    assert imported(views) & {"click", "rich", "tqdm"} == {"tqdm"}  # by `ProgressBar` only


def imported(file):
    """Return the packages that a file imports, at module level or in functions."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}
