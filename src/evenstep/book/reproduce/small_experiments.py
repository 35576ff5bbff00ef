"""Sections 8.1 to 8.3: hybridizing, queues, waiting, memory, devices side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench.fresh import run_module
from evenstep.book.reproduce.book import EXPERIMENTS, Finding
from evenstep.book.reproduce.findings import measured, with_unit
from evenstep.book.reproduce.lineup import Measurement, Sizes, lineup
from evenstep.book.reproduce.plan import NOTHING, Experiment, Figures, Part, Row, Workplace

BOOK_CALLS_S = (0.4943, 0.2053)
"""A thousand calls of the book's small network, before and after `hybridize`."""

_HYBRID = "evenstep.book.reproduce.hybrid_calls"
_LESS = "This machine's processor is another one than the book's."


def hybridize(repeats: int) -> Experiment:
    """Return the experiment of section 8.1.2, whose calls are timed `repeats` times."""
    job = {"calls": 1000, "rounds": repeats}
    part = Part(
        key="hybridize",
        label="1000 calls of a small network, as it is and hybridized",
        measure=lambda place: run_module(_HYBRID, job),
    )
    return Experiment(
        name="hybridize",
        title="Imperative and symbolic",
        section="8.1.2",
        question="How much faster is a small network (512-256-128-2, one example) when it is "
        "called as a program instead of line by line?",
        parts=[part],
        rows=_hybridize_rows,
    )


def _hybridize_rows(figures: Figures) -> list[Row]:
    found = figures["hybridize"]
    before, after = (1000 * found[f"{way}_us"] / 1e6 for way in ("eager", "hybrid"))
    book_before, book_after = BOOK_CALLS_S
    gain = (
        "PyTorch's own calls cost less than MXNet's did, so there is less to save; "
        f"evenstep.hybridize timed what there is and chose: {found['way']}."
    )
    return [
        Row(
            text="1000 calls, line by line",
            book=with_unit(book_before, "s"),
            here=with_unit(before, "s"),
            why=_LESS,
        ),
        Row(
            text="1000 calls, hybridized",
            book=with_unit(book_after, "s"),
            here=with_unit(after, "s"),
        ),
        Row(
            text="gain",
            book=with_unit(book_before / book_after, "×"),
            here=with_unit(before / after, "×"),
            why=gain,
        ),
    ]


def engine_experiments(sizes: Sizes, rounds: int, contenders: Sequence[str]) -> list[Experiment]:
    """Return the experiments with the engine.

    Args:
        sizes: of each.
        rounds: how often each is measured, each time in a fresh process.
        contenders: "engine", and "bare" for the limit that bare threads set.
    """
    wanted = [
        one
        for one in lineup(sizes)
        if not one.key.startswith("cost")
        and ("bare" not in one.key.split(".") or "bare" in contenders)
    ]
    return [
        Experiment(
            name=name,
            title=title,
            section=section,
            question=question,
            parts=_parts([one for one in wanted if one.key.split(".")[0] == begins], rounds),
            rows=functools.partial(_engine_rows, groups),
        )
        for name, begins, title, section, question, groups in _ENGINE
    ]


def _parts(measurements: Sequence[Measurement], rounds: int) -> list[Part]:
    def measure(one: Measurement, number: int, place: Workplace) -> Mapping[str, Any]:
        return {"round": number, "key": one.key, **run_module(one.module, one.job)}

    return [
        Part(
            key=f"{one.key}.round{number}",
            label=f"{one.key}, round {number + 1} of {rounds}",
            measure=functools.partial(measure, one, number),
        )
        for number in range(rounds)
        for one in measurements
    ]


def _engine_rows(groups: Mapping[str, Mapping[str, str]], figures: Figures) -> list[Row]:
    runs = [found for found in figures.values() if "round" in found]
    rows = []
    for experiment, whys in groups.items():
        for finding in EXPERIMENTS[experiment]:
            summary = measured(finding, runs)
            if summary is not None and finding.text in whys:
                rows.append(_row(experiment, finding, summary.median, whys[finding.text]))
    return rows


def _row(experiment: str, finding: Finding, value: float, why: str) -> Row:
    kind = {"waiting.add": "sums: ", "waiting.mm": "products: "}.get(experiment, "")
    kind = {"copies.square": "square: ", "copies.thin": "thin: "}.get(experiment, kind)
    kind = {"memory.front": "batches made by the loop: ", "memory.tasks": ""}.get(experiment, kind)
    return Row(
        text=kind + finding.text,
        book=NOTHING if finding.book is None else with_unit(finding.book, finding.unit),
        here=with_unit(value, finding.unit),
        why=why,
    )


_NO_FIGURES = "The book tells of this one without figures."
_ENGINE: tuple[tuple[str, str, str, str, str, Mapping[str, Mapping[str, str]]], ...] = (
    (
        "queued",
        "queued",
        "Queued against finished",
        "8.2.1",
        "When does the program go on after it has asked for a product of two 2000 × 2000 "
        "matrices, and when is the product there?",
        {
            "queued": {
                "`submit` returned after": "Here a task is put in a queue; there, one for each "
                "operator of MXNet.",
                "the product was there after": _LESS,
                "the first over the second": "The same lesson: asking takes no time.",
            }
        },
    ),
    (
        "waiting",
        "waiting",
        "Synchronous against asynchronous",
        "8.2.3",
        "A thousand operations: waiting for each result, or once at the end?",
        {
            "waiting.add": {
                "waiting each time": _LESS,
                "waiting once, at the end": "",
                "gain": "Without waiting both devices work, as far as the memory that they "
                "share can keep up.",
            },
            "waiting.mm": {
                "gain": "A product is bound by arithmetic: without waiting both devices work."
            },
        },
    ),
    (
        "memory",
        "memory",
        "What queues cost in memory",
        "8.2.4",
        "A training whose loop never waits for a loss makes batches faster than they are used: "
        "how much memory do they take?",
        {
            "memory.tasks": {
                "growth, waiting for each loss: at the end": "PyTorch's memory here, "
                "MXNet's there.",
                "growth, no bound: at the end": "The book looks when all is done: by then the "
                "queue is empty again. Here malloc still holds what was freed.",
                "growth, no bound: peak": "At its peak the queue does hold memory.",
                "growth, `max_in_flight=2`: peak": "evenstep's bound, without waiting for losses.",
                "all submitted after, no bound": "",
            }
        },
    ),
    (
        "together",
        "together",
        "Two devices side by side",
        "8.3.1",
        "Ten products on each of two devices: one batch after the other, or both together?",
        {
            "together": {
                "one batch after the other": _NO_FIGURES,
                "both together": "",
                "gain": "Two CPU devices here; the book has a CPU and a GPU.",
                "limit: two bare threads": "What threads with nothing around them reach.",
            }
        },
    ),
    (
        "copies",
        "copies",
        "Computing while copying",
        "8.3.2",
        "Products on one device whose results are copied to another memory: after all are "
        "there, or each as soon as it is there?",
        {
            name: {
                "one after the other": _NO_FIGURES,
                "overlapped": "",
                "gain": "Two cores share one memory: a copy between CPU devices takes from the "
                "products what it gains. A GPU has an engine of its own for copies.",
                "beside: two bare threads": "",
            }
            for name in ("copies.square", "copies.thin")
        },
    ),
)
