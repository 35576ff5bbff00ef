"""The reference page of `Trainer`: its methods and properties, by what a reader wants to do."""

from __future__ import annotations

import ast
import json
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
    if shown != public.keys():
        raise ValueError(f"the groups of the page of {NAME} lack or invent {shown ^ public.keys()}")
    parts = [OPENING, table()]
    for title, members in GROUPS.items():
        shows = [documented(one, is_called=one in public and not public[one]) for one in members]
        parts += [f"## {title}", *shows]
    return "\n\n".join(parts)


def public_members(module: Path, name: str) -> dict[str, bool]:
    """Return the public methods and properties of a class, and whether each is a property."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                one.name: any("property" in ast.unparse(how) for how in one.decorator_list)
                for one in node.body[::-1]  # a property's getter stands before its setter
                if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")
            }
    raise ValueError(f"{module} has no class {name}")


def table() -> str:
    """Return the groups and links to their members."""
    rows = [
        f"| {title} | {', '.join(f'[`{label(one)}`][{full(one)}]' for one in members)} |"
        for title, members in GROUPS.items()
    ]
    return "\n".join(["| to | methods and properties |", "| --- | --- |", *rows])


def documented(member: str, *, is_called: bool) -> str:
    """Return the directive that shows the docstring of a member; the signature if it is called."""
    settings = {"heading_level": 3, "separate_signature": is_called, "show_signature": is_called}
    if member == CLASS:  # its arguments are listed, with their defaults
        settings |= {"members": False}
    else:
        settings |= {"show_root_full_path": False}
    return f"::: {full(member)}\n    options: {json.dumps(settings)}"


def full(member: str) -> str:
    """Return the full name of a member."""
    return f"{NAME}.{member}".rstrip(".")


def label(member: str) -> str:
    """Return the text of a link to a member."""
    return member or "Trainer"
