"""The options of a trainer that another library's trainer takes too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from evenstep.errors import InputError, shown
from evenstep.options import Experiment, Faults, Layout
from evenstep.training.setup.arguments import check_options


def options_for(
    who: str,
    experiment: Experiment | None,
    layout: Layout | None,
    faults: Faults | None,
    instead: Mapping[str, str],
) -> tuple[Experiment, Layout, Faults]:
    """Return the groups of options; refuse choices that belong to the other library.

    `who` was given them; `instead` says for each choice that is refused what to do instead.

    Raises:
        InputError: a group has a different type, or makes one of these choices.
    """
    groups = check_options(experiment, layout, faults)
    for group in groups:
        default = type(group)()
        for name in (field.name for field in dataclasses.fields(group)):
            value = getattr(group, name)
            if name in instead and value != getattr(default, name):
                raise InputError(f"{who} got {name}={shown(value)}: {instead[name]}")
    return groups


def refuse_other_experiment(
    who: str, here: Experiment, checkpoint: str, saved: Mapping[str, object]
) -> None:
    """Refuse to resume with choices that the result depends on and that were others."""
    for name, value in dataclasses.asdict(here).items():
        if saved.get(name, value) != value:
            raise InputError(
                f"{checkpoint} was trained with {name}={saved[name]!r}, but {who} has "
                f"{name}={value!r}: the result would match neither; give the saved value"
            )
