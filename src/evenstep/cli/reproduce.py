"""`evenstep reproduce`: runs the book's experiments on this machine and writes a report."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import click
from torch.utils.data import TensorDataset

from evenstep.bench.fresh import RunFailedError
from evenstep.bench.pictures import require_matplotlib
from evenstep.cli.terminal.output import command_line, say
from evenstep.data import fashion_mnist
from evenstep.errors import InputError
from evenstep.limits import BOOK_EXPERIMENTS
from evenstep.reproduce import (
    Experiment,
    Kept,
    Workplace,
    experiments,
    run,
    write_report,
)
from evenstep.reproduce.plan import Size


def reproduce(only: str | None, *, quick: bool, data_dir: str | None, out: Path) -> None:
    """Run the experiments named in `only`, or all, and write the report into the folder `out`."""
    require_matplotlib()
    began_s = time.perf_counter()
    size: Size = "quick" if quick else "full"
    chosen = _chosen(only, experiments(size))
    report = out / "report.html"

    @functools.cache
    def data() -> tuple[TensorDataset, TensorDataset]:
        progress = sys.stderr.isatty()
        return fashion_mnist(True, data_dir, progress), fashion_mnist(False, data_dir, progress)

    def show(experiment: Experiment) -> None:
        write_report(report, experiments(size), kept.document, command_line())
        for row in experiment.rows(kept.figures):
            click.echo(f"{experiment.name}: {row.text}: {row.here} (the book: {row.book})")

    place = Workplace(data=data, folder=out / "unfinished", say=say)
    try:
        kept = Kept(out / "figures.json", size)
        out.mkdir(parents=True, exist_ok=True)
        if any(one.needs_data for one in chosen):
            data()
        run(chosen, kept, place, show)
    except OSError as error:
        raise InputError(f"got --out {out}: {error.strerror or error}") from error
    except RunFailedError as error:
        raise click.ClickException(f"a measurement failed: {error.reason}") from error
    except KeyboardInterrupt:
        say(f"stopped; the same command continues from here ({out / 'figures.json'})")
        raise
    click.echo(f"{report} (took {time.perf_counter() - began_s:.0f} s)")


def _chosen(only: str | None, known: list[Experiment]) -> list[Experiment]:
    if only is None:
        return known
    names = [name.strip() for name in only.split(",")]
    if set(names) - set(BOOK_EXPERIMENTS):
        raise InputError(f"got --only {only}: choose some of {', '.join(BOOK_EXPERIMENTS)}")
    return [one for one in known if one.name in names]
