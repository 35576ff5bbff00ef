"""`evenstep compare`: says where two recorded runs part first, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from evenstep.bench.results import write_text
from evenstep.comparison import find_cause, lines_of, read_run
from evenstep.comparison.finding import HARMLESS
from evenstep.comparison.page import page_of
from evenstep.errors import InputError, SaveError


def compare(one: Path, other: Path, *, as_json: bool, page: Path | None) -> bool:
    """Print why two runs differ; return whether they are equal within rounding.

    Raises:
        InputError: one of them is no record, or damaged, or the page can't be written.
    """
    ours, theirs = read_run(one), read_run(other)
    finding = find_cause(ours, theirs)
    if page is not None:
        try:
            write_text(page, page_of(finding, ours, theirs))
        except SaveError as error:  # whose exit code would say that there is a cause
            raise InputError(str(error)) from error
    if as_json:
        found = dataclasses.asdict(finding)
        found |= {"cause": finding.cause.name.lower(), "sentence": finding.cause.value}
        click.echo(json.dumps(found, indent=1))
    else:
        for line in lines_of(finding, ours, theirs):
            click.echo(line)
    return finding.cause in HARMLESS
