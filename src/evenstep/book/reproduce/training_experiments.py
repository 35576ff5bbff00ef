"""Sections 8.4 and 8.5: training on several devices, and what sixteen would do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.book.reproduce.findings import with_unit
from evenstep.book.reproduce.plan import NOTHING, Experiment, Figures, Part, Row, Workplace
from evenstep.book.reproduce.training import Training, first_steps, train

BOOK_LENET = {1: (0.10, 0.60, 0.75, 0.68), 2: (0.10, 0.69, 0.74, 0.74)}
"""Test accuracy after each epoch, by the number of GPUs (section 8.4.6, batch 256, rate 0.2)."""
BOOK_LENET_EPOCH_S = {1: 1.4, 2: 2.5}
BOOK_RESNET = {1: (0.89, 0.91, 0.91, 0.92), 2: (0.69, 0.86, 0.89, 0.90)}
"""Likewise of ResNet-18 (8.5.2): batch 256 and rate 0.1 on one GPU, 512 and 0.2 on two."""
BOOK_RESNET_EPOCH_S = {1: 13.0, 2: 6.7}
BOOK_PYTORCH_RESNET = {1: 0.93, 2: 0.67}
"""Of the same two after ten epochs, in the book's PyTorch edition."""

_LENET = Training(network="lenet", devices=1, batch_size=256, lr=0.2, epochs=10, init="book")
_LENET_MENDED = dataclasses.replace(
    _LENET, init="he", lr=0.05, momentum=0.9, base_batch_size=256, decays=True
)
_RESNET = Training(
    network="resnet18",
    devices=1,
    batch_size=256,
    lr=0.1,
    epochs=4,
    init="book",
    precision="bf16",
)
_RESNET_TWO = dataclasses.replace(_RESNET, devices=2, batch_size=512, lr=0.2)
_RESNET_MENDED = dataclasses.replace(
    _RESNET_TWO,
    init="torch",
    lr=0.1,
    base_batch_size=256,
    warmup_epochs=1,
    decays=True,
)
_SIXTEEN = dataclasses.replace(
    _LENET_MENDED, devices=2, shards=16, batch_size=16 * 256, lr=0.1, momentum=0.0
)
_EPOCH = 60_000  # examples of Fashion-MNIST
_FIRST_STEPS = 20
_FIRST_DEVICES = (1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortened:
    """How much of each training a quick run does.

    Attributes:
        examples: of each network, the first of the data set, to train on.
        test_examples: likewise, to test with.
        epochs: of each network.
        steps: whose fingerprints are compared on one, two and three devices.
    """

    examples: Mapping[str, int]
    test_examples: Mapping[str, int]
    epochs: int
    steps: int


QUICK = Shortened(
    examples={"lenet": 10_240, "resnet18": 1024},
    test_examples={"lenet": 2000, "resnet18": 256},
    epochs=2,
    steps=1,
)


def lenet(short: Shortened | None) -> Experiment:
    """Return section 8.4's experiment: LeNet on one device and on two."""
    trainings = {
        f"lenet.{name}.{devices}": dataclasses.replace(one, devices=devices)
        for name, one in (
            ("book", _LENET),
            ("mended", _LENET_MENDED),
        )
        for devices in (1, 2)
    }
    return Experiment(
        name="lenet",
        title="LeNet on one device and on two",
        section="8.4.6",
        question="The same batch of 256 and the same rate of 0.2: is it faster on two devices, and "
        "does it learn the same?",
        parts=_parts(trainings, short),
        rows=functools.partial(_lenet_rows, _told(short)),
        pictures=("lenet_accuracies", "speed_ups", "lanes"),
        needs_data=True,
    )


def resnet18(short: Shortened | None) -> Experiment:
    """Return section 8.5's experiment: ResNet-18 on one device and on two."""
    trainings = {
        "resnet18.book.1": _RESNET,
        "resnet18.book.2": _RESNET_TWO,
        "resnet18.mended.2": _RESNET_MENDED,
    }
    steps = _FIRST_STEPS if short is None else short.steps
    mended = _shortened(_RESNET_MENDED, short)
    firsts = [
        Part(
            key=f"resnet18.first.{devices}",
            label=f"the first {_counted(steps, 'step')} on {_counted(devices, 'device')}",
            measure=functools.partial(_first, dataclasses.replace(mended, devices=devices), steps),
        )
        for devices in _FIRST_DEVICES
    ]
    return Experiment(
        name="resnet18",
        title="ResNet-18 on one device and on two",
        section="8.5.2",
        question="Twice the devices, twice the batch (512), twice the rate (0.2): the book's two "
        "editions end at 0.90 and at 0.67. Which is it, and what mends it? (bf16 autocast)",
        parts=[*firsts, *reversed(_parts(trainings, short))],
        rows=functools.partial(_resnet_rows, _told(short), steps),
        pictures=("resnet18_accuracies",),
        later=("resnet18.book.1", "resnet18.book.2"),
        needs_data=True,
    )


def sixteen(short: Shortened | None) -> Experiment:
    """Return the experiment of 8.5's first exercise: what sixteen devices would do."""
    trainings = {
        "sixteen.one": dataclasses.replace(_SIXTEEN, shards=8, batch_size=256),
        "sixteen.same_rate": dataclasses.replace(_SIXTEEN, base_batch_size=16 * 256),
        "sixteen.linear": dataclasses.replace(_SIXTEEN, warmup_epochs=2),
        "sixteen.root": dataclasses.replace(_SIXTEEN, warmup_epochs=2, rule="sqrt"),
    }
    return Experiment(
        name="sixteen",
        title="What sixteen devices would do",
        section="8.5, exercise 1",
        question="Sixteen devices with 256 examples each: a batch of 4,096, V = 16. The result on "
        "sixteen devices is the result here, bit for bit; with which rate does it learn?",
        parts=_parts(trainings, short),
        rows=functools.partial(_sixteen_rows, _told(short)),
        pictures=("sixteen_accuracies",),
        needs_data=True,
    )


def _parts(trainings: Mapping[str, Training], short: Shortened | None) -> list[Part]:
    return [
        Part(
            key=key,
            label=_label(key, training),
            measure=functools.partial(_train, key, _shortened(training, short)),
        )
        for key, training in trainings.items()
    ]


def _train(key: str, training: Training, place: Workplace) -> Mapping[str, object]:
    return {
        **train(training, place.data(), place.folder / key, place.tell),
        "training": dataclasses.asdict(training),
    }


def _first(training: Training, steps: int, place: Workplace) -> Mapping[str, object]:
    return first_steps(training, place.data(), steps)


def _shortened(training: Training, short: Shortened | None) -> Training:
    if short is None:
        return training
    return dataclasses.replace(
        training,
        epochs=min(training.epochs, short.epochs),
        examples=short.examples[training.network],
        test_examples=short.test_examples[training.network],
        warmup_epochs=min(training.warmup_epochs, short.epochs - 1),
    )


def _lenet_rows(told: str, figures: Figures) -> list[Row]:
    one, two = figures["lenet.book.1"], figures["lenet.book.2"]
    good, good_two = figures["lenet.mended.1"], figures["lenet.mended.2"]
    same = "Shards, not devices, decide the sum: every digit and every bit is the same."
    return [
        _accuracy("the book's rate, one device", one, BOOK_LENET[1][-1], told, at=4),
        _accuracy("the book's rate, two devices", two, BOOK_LENET[2][-1], same, at=4),
        _accuracy(
            "the same to the end",
            two,
            None,
            "Weights from N(0, 0.01²) are too small: the first epochs learn nothing.",
        ),
        _fingerprints("one device and two, the book's rate", [one, two]),
        _accuracy(
            "weights after He, momentum 0.9, falling rate; one device",
            good,
            None,
            "The remedy: weights that keep the size of what flows through them, and a rate that "
            "falls.",
        ),
        _accuracy("the same on two devices", good_two, None, same),
        _fingerprints("one device and two, mended", [good, good_two]),
        _epoch("one device", one, BOOK_LENET_EPOCH_S[1], "CPU cores here, GPUs there."),
        _epoch("two devices", two, BOOK_LENET_EPOCH_S[2], ""),
        Row(
            text="two devices over one",
            book=with_unit(BOOK_LENET_EPOCH_S[1] / BOOK_LENET_EPOCH_S[2], "×"),
            here=with_unit(_epoch_s(one) / _epoch_s(two), "×"),
            why="LeNet is too small for two GPUs: the book waits for copies and sums. Here both "
            "devices share the memory, and sums go along with the backward pass.",
        ),
    ]


def _resnet_rows(told: str, steps: int, figures: Figures) -> list[Row]:
    one, two = figures.get("resnet18.book.1"), figures.get("resnet18.book.2")
    good = figures["resnet18.mended.2"]
    rows = [
        Row(
            text=f"fingerprint after {_counted(steps, 'step')} on 1, 2 and 3 devices",
            here=_same([figures[f"resnet18.first.{devices}"] for devices in _FIRST_DEVICES]),
            why="Not known there; the promise here.",
        )
    ]
    if one is not None:
        rows.append(_accuracy("batch 256, rate 0.1", one, BOOK_RESNET[1][-1], told))
        rows.append(_epoch("batch 256, one device", one, BOOK_RESNET_EPOCH_S[1], "CPU cores."))
    if two is not None:
        pytorch = BOOK_PYTORCH_RESNET[2]
        why = (
            f"The book's PyTorch edition ends at {pytorch} after ten epochs: a rate of 0.2 from "
            "the first step makes the accuracy shake. Which end it takes is decided by the last "
            "steps."
        )
        rows.append(_accuracy("batch 512, rate 0.2", two, BOOK_RESNET[2][-1], why))
        rows.append(_epoch("batch 512, two devices", two, BOOK_RESNET_EPOCH_S[2], ""))
    rows.append(
        _accuracy(
            "batch 512, rate 0.2 warmed up over an epoch, then falling",
            good,
            BOOK_RESNET[2][-1],
            "The remedy for the same batch: `evenstep.scale_lr` with warm-up and decay.",
        )
    )
    return rows


def _sixteen_rows(told: str, figures: Figures) -> list[Row]:
    texts = {
        "one": ("batch 256 (one device's), rate 0.1", told),
        "same_rate": (
            "batch 4,096, rate 0.1",
            "A sixteenth of the steps, each as small as before: it learns less.",
        ),
        "linear": (
            "batch 4,096, rate 1.6 (the linear rule), warmed up over two epochs",
            "Sixteen times the rate is more than a LeNet without batch normalisation stands, "
            "warmed up or not.",
        ),
        "root": (
            "batch 4,096, rate 0.4 (the square-root rule), warmed up over two epochs",
            "The remedy here: the rate grows with the root of the batch, and more of what was lost "
            "comes back.",
        ),
    }
    return [
        _accuracy(text, figures[f"sixteen.{name}"], None, why)
        for name, (text, why) in texts.items()
    ]


def _accuracy(
    text: str,
    found: Mapping[str, Sequence[float]],
    book: float | None,
    why: str,
    *,
    at: int | None = None,
) -> Row:
    accuracies = found["accuracies"][:at]
    return Row(
        text=f"{text}: accuracy after {_counted(len(accuracies), 'epoch')}",
        book=NOTHING if book is None else f"{book:.2f}",
        here=f"{accuracies[-1]:.4f}",
        why=why,
    )


def _epoch(text: str, found: Mapping[str, Any], book: float, why: str) -> Row:
    return Row(
        text=f"{text}: seconds for {_EPOCH:,} examples",
        book=with_unit(book, "s"),
        here=with_unit(_epoch_s(found), "s"),
        why=why,
    )


def _epoch_s(found: Mapping[str, Any]) -> float:
    """Return the seconds of an epoch, as long as the book's."""
    examples = found["training"]["examples"] or _EPOCH
    seconds: list[float] = found["seconds"]
    return sum(seconds) / len(seconds) * _EPOCH / examples


def _fingerprints(text: str, found: Sequence[Mapping[str, object]]) -> Row:
    return Row(text=f"fingerprint, {text}", here=_same(found), why="")


def _same(found: Sequence[Mapping[str, object]]) -> str:
    prints = [str(one["fingerprint"])[:12] for one in found]
    return f"equal: {prints[0]}…" if len(set(prints)) == 1 else f"DIFFERENT: {', '.join(prints)}"


def _told(short: Shortened | None) -> str:
    if short is None:
        return "Other first weights and another order of the examples than the book's."
    return "Quick run: few examples and epochs; accuracies are no result."


def _label(key: str, training: Training) -> str:
    return f"{key} (batch {training.batch_size}, {_counted(training.devices, 'device')})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
