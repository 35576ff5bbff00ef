"""What several processes call: loops that differ from one step a batch, calls of one alone."""

import json
import re

import pytest

from launched import alone, launched
from marks import slow

LIMIT_S = 8.0  # less than the time limit of a wait


def of_rank(out, rank):
    return json.loads((out / f"{rank}.json").read_text())


def ends(out, call, in_flight=1, processes=2):
    """Return for each process the seconds, the error, the steps done, and the fingerprint."""
    launched(processes, "loops.py", out, call, in_flight)
    return [of_rank(out, rank) for rank in range(processes)]


@pytest.mark.slow
def test_loops_give_what_they_give_in_one_process(tmp_path):
    """Loops that skip batches, repeat them, evaluate in between, or break off."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    alone("loops.py", tmp_path / "one")
    finished = launched(2, "loops.py", tmp_path / "two")
    assert finished.returncode == 0, finished.stderr
    expected = of_rank(tmp_path / "one", 0)
    assert expected.keys() >= {"skipping", "skipping_fetched", "repeating", "evaluating"}
    for rank in range(2):
        assert of_rank(tmp_path / "two", rank) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (
            "one_skips",
            r"PeerError: rank \d is at step 3 \(epoch 0, batch \d, .*, but rank \d .* is at step 3 "
            r"\(epoch 0, batch \d",
        ),
        slow(
            "one_begins_behind",
            r"InputError: the processes disagree about the data: the next batch is \[0, 3\] on "
            r"rank 1 .*, but \[0, 2\] on rank 0",
        ),
    ],
)
def test_processes_at_different_places_in_the_data_are_refused(tmp_path, call, pattern):
    for seconds, text, *_ in ends(tmp_path, call):
        assert re.search(pattern, text)
        assert seconds < LIMIT_S


# Whole batches, which must be the same in all processes


@pytest.mark.parametrize(
    ("call", "in_flight", "step", "who"),
    [
        ("distributed_sampler", 1, 0, r"rank 1 \(on \S+\) was given"),
        slow("unseeded_shuffle", 2, 0, r"rank 1 \(on \S+\) was given"),
        slow("one_of_three_shuffles", 1, 0, r"rank 2 \(on \S+\) was given"),
        slow("other_later", 2, 5, r"rank 1 \(on \S+\) was given"),
        slow("other_shared", 1, 0, r"rank 1 \(on \S+\) was given"),
    ],
    ids=str,
)
def test_another_batch_in_one_process_is_refused_in_all(tmp_path, call, in_flight, step, who):
    found = ends(tmp_path, call, in_flight, processes=3 if "three" in call else 2)
    for seconds, text, steps_done, _ in found:
        assert re.match(rf"ContractError: in step {step} {who}", text)
        assert "DistributedSampler" in text
        assert "trainer.epoch(loader)" in text
        assert steps_done == step
        assert seconds < LIMIT_S
    assert len({text for _, text, *_ in found}) == 1
    assert len({fingerprint for *_, fingerprint in found}) == 1


@pytest.mark.parametrize(
    ("call", "place"),
    [("evaluate_others", "batch 0 of evaluate"), slow("predict_others", "batch 2 of predict")],
    ids=str,
)
@pytest.mark.slow
def test_another_batch_to_evaluate_in_one_process_is_refused_in_all(tmp_path, call, place):
    texts = {text for _, text, *_ in ends(tmp_path, call)}
    (text,) = texts
    assert re.match(
        rf"ContractError: in {place} rank 1 \(on \S+\) was given a different batch", text
    )
    assert "DistributedSampler" in text


# Calls that every process must make


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        slow(
            "save_in_one",
            r"rank 0 \(on \S+\) is in save, but rank 1 \(on \S+\) is in step 3: every process must "
            r"call save$",
        ),
        slow(
            "evaluate_in_one",
            r"rank 0 .* in evaluate, but rank 1 .* in step 3: every process must call evaluate$",
        ),
        slow(
            "evaluate_loader_in_one",
            r"rank 0 .* in step 3, but rank 1 .* in evaluate: every process must call evaluate$",
        ),
        slow(
            "predict_in_one",
            r"rank 0 .* in predict, but rank 1 .* in save: every process must make the same calls "
            r"in the same order$",
        ),
        slow(
            "fewer_batches",
            r"rank 0 .* in step 0, but rank 1 .* in evaluate: every process must call evaluate$",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_flight", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_call_of_one_process_alone_is_named_in_all(tmp_path, call, pattern, in_flight):
    for seconds, text, *_ in ends(tmp_path, call, in_flight):
        assert re.match(f"PeerError: {pattern}", text)
        assert seconds < LIMIT_S


@pytest.mark.slow
def test_a_call_of_one_process_at_the_end_of_the_others_is_named_in_all(tmp_path):
    for seconds, text, *_ in ends(tmp_path, "save_in_one_at_the_end"):
        assert re.match(
            r"PeerError: rank 0 \(on \S+\) is in save, but rank 1 \(on \S+\) is in the end of the "
            r"trainer's `with`: every process must call save$",
            text,
        )
        assert seconds < LIMIT_S


@pytest.mark.parametrize(
    ("way", "width", "processes", "rounds", "messages"),
    [
        ("memory", 8, 2, 1, 0),
        ("memory", 300, 2, 2, 0),  # each process adds up a chunk, and a round ends that
        ("network", 8, 3, 1, 2 * 2),  # to each other process: a report, and gradients
        ("network", 300, 2, 1, 2),  # of two processes, none sends more bytes in one round
        ("network", 600, 2, 1, 3),  # a report, a chunk, and the sum of a chunk
    ],
)
def test_a_step_takes_as_few_messages_and_calls_of_threads_as_it_can(
    tmp_path, way, width, processes, rounds, messages
):
    finished = launched(processes, "counted.py", tmp_path, way, width)
    assert finished.returncode == 0, finished.stderr
    for rank in range(processes):
        assert of_rank(tmp_path, rank) == {
            "rounds through memory": rounds * (way == "memory"),
            "rounds through the network": rounds * (way == "network"),
            "messages": messages,
            "calls of lanes": 1,
            "calls of other threads": 0,
        }
