"""One result on every way of splitting, by bits: data, stages, slices, owners, mixed at random."""

import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from evenstep.metrics import accuracy
from grouping import grouped
from launched import alone, torchrun
from layouts import mixed, own, shared
from patience import HUNG_TESTS_ABORT
from reference import assert_same_bits, plain_outputs, reference_step, whole_state
from zoo import CLASSES, build, make_batches

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, CLASSES),
    )


def sliced():
    return evenstep.nn.slice_(chain(), 2, layers=["4", "6"])


def sliced_by_inputs():
    return evenstep.nn.slice_(chain(), 4, along="inputs", layers=["4", "6"])


MODELS = {
    "chain": chain,
    "sliced": sliced,
    "sliced by inputs": sliced_by_inputs,
    "recurrent": functools.partial(build, "recurrent"),
    "tied": functools.partial(build, "tied"),
}


@st.composite
def layouts(draw, name):
    """Return the options of a trainer that its result does not depend on."""
    ways = ["data", "stages", *(["slices"] if "sliced" in name else [])]
    way, memory = draw(st.sampled_from(ways)), draw(st.sampled_from([shared, own]))
    options = {"max_in_flight": draw(st.integers(1, 2))}
    if way == "stages":
        count = draw(st.integers(2, 3 if name != "recurrent" else 2))
        by = draw(st.sampled_from(["", ":time"]))
        memory = shared if name == "tied" else memory
        options |= {"devices": memory(count * draw(st.integers(1, 2)))}
        options |= {"divide": evenstep.Stages(f"balanced:{count}{by}")}
    elif way == "slices":
        options = {
            "devices": draw(st.sampled_from([shared, mixed]))(3),
            "divide": evenstep.Slices(),
        }
    else:
        options |= {"devices": memory(draw(st.integers(1, 3)))}
    if draw(st.booleans()):
        options["divide"] = (*filter(None, [options.get("divide")]), evenstep.Owners())
    return options


@st.composite
def trainings(draw):
    """Return a model's name, the number of shards, the sizes of batches, and two layouts."""
    name, shards = draw(st.sampled_from(sorted(MODELS))), draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(2 * shards, 24), min_size=1, max_size=3))
    return name, shards, tuple(sizes), draw(layouts(name)), draw(layouts(name))


@functools.cache
def reference_of(name, shards, sizes):
    """Return the state and losses of the sequential reference, and what its model then predicts."""
    batches, model = make_batches(sizes), MODELS[name]()
    optimizer = ADAM(model.parameters())
    losses = [
        reference_step(model, optimizer, *batch, shards=shards, step=step)
        for step, batch in enumerate(batches)
    ]
    state, (X, _) = whole_state(model, optimizer), batches[0]
    pieces = [X[piece] for piece in np.array_split(np.arange(len(X)), shards)]
    return state, losses, torch.cat([plain_outputs(model, piece.clone()) for piece in pieces])


@settings(max_examples=25)
@given(training=trainings())
@HUNG_TESTS_ABORT
def test_any_mixture_of_layouts_gives_the_bits_of_the_reference(training):
    """The first steps in one layout, the last one in another."""
    name, shards, sizes, *ways = training
    batches = make_batches(sizes)
    expected, expected_losses, expected_outputs = reference_of(name, shards, sizes)
    model, losses = MODELS[name](), []
    optimizer = ADAM(model.parameters())
    for way, part in zip(ways, (batches[:-1], batches[-1:]), strict=True):
        options = {"memory_format": "contiguous", "shards": shards, **way}
        trainer = evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options))
        trainer.position = trainer.position._replace(steps_done=len(losses), batch=len(losses))
        with trainer:
            losses += [float(loss) for loss in [trainer.step(*batch) for batch in part]]
            values = trainer.evaluate(batches[:1], {"accuracy": accuracy})
            outputs = trainer.predict([batches[0][0]])
    assert_same_bits(whole_state(model, optimizer), expected)
    assert losses == expected_losses
    assert torch.equal(outputs, expected_outputs)
    assert values["accuracy"] == float((outputs.argmax(1) == batches[0][1]).double().mean())


STAGED, OWNED = {"devices": 2, "stages": {"0": 0, "4": 1}}, {"owners": True}
ARRANGEMENTS = [
    (1, STAGED),
    (1, {"devices": 1}),
    (2, {"devices": 1, **OWNED}),
    (1, {**STAGED, "devices": 4, "max_in_flight": 2}),
    (2, {**STAGED, **OWNED}),
    (1, {"devices": 3, **OWNED}),
]
"""The number of processes, and what each is given."""


@pytest.mark.slow
def test_kills_and_resumes_across_arrangements(tmp_path):
    """Every arrangement takes one step, and is killed in the next one, but for the last."""
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.mkdir()
    whole.mkdir()
    count = len(ARRANGEMENTS)
    finished = alone("rearranged.py", plain, count, 0, json.dumps({"devices": 1}))
    assert finished.returncode == 0, finished.stderr
    for number, (processes, options) in enumerate(ARRANGEMENTS):
        is_last = number == count - 1
        given = count, 0 if is_last else number + 2, json.dumps(options)
        start = alone if processes == 1 else functools.partial(torchrun, processes)
        finished = start("rearranged.py", whole, *given)
        assert (finished.returncode == 0) == is_last, finished.stderr
        assert len([*(whole / "checkpoints").glob("step-*")]) == min(number + 1, 3)
    assert (whole / "0.json").read_text() == (plain / "0.json").read_text()
