"""What every section of the page has: where and how its figures were made, and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def origin(document: Mapping[str, Any]) -> str:
    """Return the command and the machine behind a result file."""
    facts = document["machine"]
    packages = ", ".join(
        f"{name} {version}" for name, version in facts["packages"].items() if version
    )
    return (
        f"```\n{document['command']}\n```\n\n"
        f"Machine: {facts['cpu']} ({facts['cpu_capability']}), {facts['usable_cores']} usable "
        f"cores, {facts['memory_gib']} GiB, {facts['system']}; load average at the start "
        f"{facts['load_average_at_start']}. Python {facts['python']}, {packages}. "
        f"{facts['date_utc']} UTC, revision {facts['git_revision'] or 'unknown'}."
    )


def note(notes: Mapping[str, str], name: str) -> list[str]:
    """Return the hand-written note of that name as a list of none or one paragraph."""
    return [notes[name]] if name in notes else []


def joined(*parts: str | list[str]) -> str:
    """Return paragraphs with empty lines between them."""
    flat = [text for part in parts for text in ([part] if isinstance(part, str) else part)]
    return "\n\n".join(flat)
