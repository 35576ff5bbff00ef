"""The reference page of `Trainer`: its methods and properties, by what a reader wants to do."""

from __future__ import annotations

import ast
from pathlib import Path

NAME = "evenstep.Trainer"
CLASS = ""  # the class itself, among its members
GROUPS = {
    "Make and open": (CLASS, "open", "close"),
    "Train": ("step", "backward", "epoch", "waitall", "steps_done", "cursor"),
    "Evaluate and predict": ("evaluate", "predict", "batches"),
    "Look": ("fingerprint", "within_rounding", "shares", "busy_s", "trace"),
    "Save, load and move": ("save", "wait_for_save", "load", "ask_to_stop", "should_stop"),
    "Advanced": (
        *("position", "facts", "contract", "hybridized", "compile_s", "stages", "exchanged"),
    ),
}
OPENING = (
    "The examples use the names of the first one, inside its `with` block, and `X, y`, a batch of "
    "the loader. Those that make a trainer of their own stand after it."
)


def trainer_page(module: Path) -> str:
    """Return the page, from the module that defines the class.

    Raises:
        ValueError: a public member is in no group, or a group has a member that does not exist.
    """
    shown = {member for members in GROUPS.values() for member in members if member != CLASS}
    public = public_members(module, "Trainer")
    if shown != public:
        raise ValueError(f"the groups of the page of {NAME} lack or invent {shown ^ public}")
    parts = [OPENING, table()]
    for title, members in GROUPS.items():
        parts += [f"## {title}", *map(documented, members)]
    return "\n\n".join(parts)


def public_members(module: Path, name: str) -> set[str]:
    """Return the public methods and properties that a class in a module defines."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            return {one for one in names if not one.startswith("_")}
    raise ValueError(f"{module} has no class {name}")


def table() -> str:
    """Return the groups and links to their members."""
    rows = [
        f"| {title} | {', '.join(f'[`{label(one)}`][{full(one)}]' for one in members)} |"
        for title, members in GROUPS.items()
    ]
    return "\n".join(["| to | methods and properties |", "| --- | --- |", *rows])


def documented(member: str) -> str:
    """Return the directive that shows the docstring of a member."""
    if member == CLASS:  # its arguments are listed, with their defaults
        more = "members: false, separate_signature: false, show_signature: false"
    else:
        more = "show_root_full_path: false"
    return f"::: {full(member)}\n    options: {{heading_level: 3, {more}}}"


def full(member: str) -> str:
    """Return the full name of a member."""
    return f"{NAME}.{member}".rstrip(".")


def label(member: str) -> str:
    """Return the text of a link to a member."""
    return member or "Trainer"
