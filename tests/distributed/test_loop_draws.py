"""What a loop draws, or makes itself, for its part of a batch is said once, and nothing else."""

import json

from launched import alone, launched

NAMES = {"mixed": "torch", "noised": "numpy.random", "chosen": "random"}


def lines_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


def test_what_a_loop_draws_for_a_part_of_a_batch_is_said_once_by_name(tmp_path):
    finished = launched(2, "drawing.py", tmp_path)
    first, second = (lines_of(finished, tmp_path, rank) for rank in range(2))
    assert not any(second.values())
    for loop, lines in first.items():
        assert len(lines) == (loop in NAMES or loop == "replayed"), (loop, lines)
        if loop in NAMES:
            assert f"from {NAMES[loop]}'s default generator" in lines[0]
    assert "all processes gave the same examples, inside a loop" in first["replayed"][0]


def test_a_process_alone_draws_for_whole_batches(tmp_path):
    found = lines_of(alone("drawing.py", tmp_path), tmp_path, 0)
    assert not any(found.values())
