"""Writes the report: one HTML file with tables and pictures, readable on a phone and offline."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from evenstep.bench import results
from evenstep.pages import template
from evenstep.reproduce import pictures
from evenstep.reproduce.plan import Experiment, Figures


def write_report(
    file: Path, experiments: Sequence[Experiment], document: Mapping[str, Any], command: str
) -> None:
    """Write the report of what has been measured so far, in place of an earlier one.

    Args:
        file: the file.
        experiments: the experiments; those that are not measured yet are named.
        document: size, machine and figures, as in `Kept.document`.
        command: the command that measured them.

    Raises:
        SaveError: the file can't be written.
    """
    results.write_text(file, page(experiments, document, command))


def page(experiments: Sequence[Experiment], document: Mapping[str, Any], command: str) -> str:
    """Return the HTML of the report."""
    figures: Figures = document["parts"]
    measured = [one for one in experiments if one.can_be_shown(figures)]
    missing = [one.title for one in experiments if not one.can_be_shown(figures)]
    missing += [part.label for one in measured for part in one.missing(figures)]

    def picture(name: str) -> str | None:
        """Return a picture as a data URL; None if its figures are missing."""
        drawn = pictures.draw(name, figures)
        encoded = base64.b64encode((drawn or "").encode()).decode()
        return drawn and f"data:image/svg+xml;base64,{encoded}"

    return template(Path(__file__).with_name("report.html.jinja"), code=_with_code).render(
        experiments=measured,
        missing=missing,
        figures=figures,
        machine=document["machine"],
        size=document["size"],
        command=command,
        picture=picture,
        titles=pictures.TITLES,
    )


def _with_code(text: str) -> Markup:
    """Return text as HTML, with code for what stands between backticks."""
    code = Markup("<code>{}</code>")
    parts = enumerate(text.split("`"))
    return Markup().join(code.format(part) if n % 2 else escape(part) for n, part in parts)
