"""The book's experiments with the engine: what it printed, and what is to be reached here.

The book is Dive into Deep Learning with MXNet, sections 8.2 ("Asynchronous Computation") and 8.3
("Automatic Parallelism"). Section 8.3 prints no figures.
"""

from __future__ import annotations

import dataclasses

MIB = 2**20
MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A row: a figure of one measurement, or one over another of the same round.

    Attributes:
        text: what it is.
        figure: "key:field" of a measurement.
        over: what the figure is divided by; None for nothing.
        scale: what it is multiplied with for `unit`.
        unit: of what is shown.
        book: what the book printed, in `unit`; None if it doesn't.
        at_least: the target; None for none. With `at_most` a row has one target, or is told for
            information.
        at_most: likewise.
    """

    text: str
    figure: str
    over: str | None = None
    scale: float = 1.0
    unit: str
    book: float | None = None
    at_least: float | None = None
    at_most: float | None = None


def _seconds(text: str, figure: str, book: float | None = None) -> Finding:
    return Finding(text=text, figure=f"{figure}:seconds", unit="s", book=book)


def _gain(
    text: str, slow: str, fast: str, *, book: float | None = None, at_least: float | None = None
) -> Finding:
    return Finding(
        text=text,
        figure=f"{slow}:seconds",
        over=f"{fast}:seconds",
        unit="×",
        book=book,
        at_least=at_least,
    )


def _copies(key: str) -> tuple[Finding, ...]:
    engine, bare = f"{key}.engine", f"{key}.bare"
    parts = (("the products", "compute_s"), ("then the copies", "copy_s"))
    return (
        *(Finding(text=text, figure=f"{engine}.apart:{part}", unit="s") for text, part in parts),
        _seconds("one after the other", f"{engine}.apart"),
        _seconds("overlapped", f"{engine}.together"),
        _gain("gain", f"{engine}.apart", f"{engine}.together", at_least=1.0),
        Finding(
            text="limit: both parts over the longer one",
            figure=f"{engine}.apart:most_gain",
            unit="×",
        ),
        _gain("beside: two bare threads", f"{bare}.apart", f"{bare}.together"),
    )


def _waiting(key: str, *, at_least: float, book: tuple[float, float] | None) -> tuple[Finding, ...]:
    engine, bare = f"{key}.engine", f"{key}.bare"
    each, end = book or (None, None)
    return (
        _seconds("waiting each time", f"{engine}.each", each),
        _seconds("waiting once, at the end", f"{engine}.end", end),
        _gain(
            "gain",
            f"{engine}.each",
            f"{engine}.end",
            book=book and book[0] / book[1],
            at_least=at_least,
        ),
        _gain("limit: two bare threads over one", f"{bare}.each", f"{bare}.end"),
    )


def _growth(maker: str, way: str, text: str, book: float | None = None) -> tuple[Finding, ...]:
    key = f"memory.{maker}.{way}"
    return (
        Finding(text=f"{text}: peak", figure=f"{key}:peak_growth_bytes", scale=1 / MIB, unit="MiB"),
        Finding(
            text=f"{text}: at the end",
            figure=f"{key}:end_growth_bytes",
            scale=1 / MIB,
            unit="MiB",
            book=None if book is None else book * MB / MIB,
        ),
    )


def _made(maker: str, way: str, text: str, book: float | None = None) -> Finding:
    return Finding(text=text, figure=f"memory.{maker}.{way}:made_s", unit="s", book=book)


def _memory(maker: str, *, of_book: bool) -> tuple[Finding, ...]:
    """The book prints growth once all is done, in MB, and when the last batch was made."""
    grown, made = ((4.648, 0.016), (26.867962, 0.166682)) if of_book else ((None,) * 2,) * 2
    return (
        *_growth(maker, "waits", "growth, waiting for each loss", grown[0]),
        *_growth(maker, "none", "growth, no bound", grown[1]),
        *_growth(maker, "two", "growth, `max_in_flight=2`"),
        Finding(
            text="peak growth, no bound over `max_in_flight=2`",
            figure=f"memory.{maker}.none:peak_growth_bytes",
            over=f"memory.{maker}.two:peak_growth_bytes",
            unit="×",
            at_least=1.0,
        ),
        _made(maker, "waits", "all submitted after, waiting for each loss", made[0]),
        _made(maker, "none", "all submitted after, no bound", made[1]),
        _made(maker, "two", "all submitted after, `max_in_flight=2`"),
    )


EXPERIMENTS: dict[str, tuple[Finding, ...]] = {
    "queued": (
        Finding(
            text="`submit` returned after",
            figure="queued:queued_s",
            scale=1e3,
            unit="ms",
            book=1.4,
        ),
        Finding(
            text="the product was there after",
            figure="queued:finished_s",
            scale=1e3,
            unit="ms",
            book=1.4 + 351.7,  # "queued" and, from there on, "finished"
        ),
        Finding(
            text="the first over the second",
            figure="queued:queued_s",
            over="queued:finished_s",
            scale=100,
            unit="%",
            book=100 * 1.4 / (1.4 + 351.7),
            at_most=1.0,
        ),
    ),
    # 1.09 is what MXNet 1.9.1 gained on a machine of the kind that this was first measured on.
    "waiting.add": _waiting("waiting.add", at_least=1.09, book=(7.3877, 3.5370)),
    "waiting.mm": _waiting("waiting.mm", at_least=1.7, book=None),
    "together": (
        _seconds("one batch after the other", "together.engine.apart"),
        _seconds("both together", "together.engine.together"),
        _gain("gain", "together.engine.apart", "together.engine.together", at_least=1.75),
        _gain("limit: two bare threads", "together.bare.apart", "together.bare.together"),
    ),
    "copies.square": _copies("copies.square"),
    "copies.thin": _copies("copies.thin"),
    "memory.front": _memory("front", of_book=False),
    "memory.tasks": _memory("tasks", of_book=True),
    "cost": (
        Finding(
            text="a task, from `submit` to the end of all",
            figure="cost.engine:task_us",
            unit="µs",
            at_most=30.0,
        ),
        Finding(text="of which in `submit`", figure="cost.engine:submit_us", unit="µs"),
        Finding(
            text="a task that takes the result of the one before",
            figure="cost.chain:task_us",
            unit="µs",
        ),
        Finding(text="a call in `ThreadPoolExecutor(2)`", figure="cost.pool:task_us", unit="µs"),
        Finding(
            text="the engine over `ThreadPoolExecutor(2)`",
            figure="cost.engine:task_us",
            over="cost.pool:task_us",
            unit="×",
        ),
    ),
}
