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

    Args:
        who: the class that was given them, for messages.
        experiment: as for `evenstep.Trainer`.
        layout: as for `evenstep.Trainer`.
        faults: as for `evenstep.Trainer`.
        instead: for each choice that is refused, what to do instead.

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
