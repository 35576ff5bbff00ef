"""Options of a trainer by name, put into the groups that they belong to."""

import dataclasses

import evenstep

_GROUPS = {
    "experiment": evenstep.Experiment,
    "layout": evenstep.Layout,
    "faults": evenstep.Faults,
}
_KEYWORDS = ("shards", "seed", "precision")  # of a trainer, too


def grouped(**options):
    """Return arguments of `evenstep.Trainer`; layouts in tests are merged as flat dicts."""
    found = {name: value for name, value in options.items() if name in _KEYWORDS}
    rest = {name: value for name, value in options.items() if name not in found}
    for group, kind in _GROUPS.items():
        names = {field.name for field in dataclasses.fields(kind)} & rest.keys()
        if names and group == "experiment":  # a value is given in one place only
            rest |= {name: found.pop(name) for name in _KEYWORDS if name in found}
            names |= {*_KEYWORDS} & rest.keys()
        if names:
            found[group] = kind(**{name: rest.pop(name) for name in names})
    return {**rest, **found}
