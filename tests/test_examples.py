"""The programs in `examples/` do what they say, and are as short as they claim to be."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

from evenstep.data import digits

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_from_scratch_has_the_same_bits_on_any_number_of_devices(monkeypatch, capsys):
    example = load("from_scratch")
    monkeypatch.setattr(example, "EPOCHS", 2)
    one, two, three = (example.main(count) for count in (1, 2, 3))
    for ours, theirs, others in zip(one, two, three, strict=True):
        assert ours.equal(theirs)
        assert ours.equal(others)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[2] for line in lines[:2]] == [
        line.split(", ")[2] for line in lines[2:4]
    ]
    assert float(lines[1].split()[-1]) > 0.8  # of ten classes


def test_from_scratch_with_another_order_of_the_sum_has_other_bits(monkeypatch):
    example = load("from_scratch")
    few = TensorDataset(*(tensor[:128] for tensor in digits(train=False).tensors))
    monkeypatch.setattr(example, "digits", lambda train=True: few)  # two steps are enough
    monkeypatch.setattr(example, "EPOCHS", 1)
    one = example.main(1)
    monkeypatch.setattr(example, "tree_sum", lambda values, add: sum(reversed(values)))
    other = example.main(1)
    assert not all(ours.equal(theirs) for ours, theirs in zip(one, other, strict=True))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_concise_ends_above_95_percent_and_with_one_fingerprint():
    one, two = (
        subprocess.run(
            [sys.executable, EXAMPLES / "concise.py", devices],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for devices in ("cpu:0", "cpu:0,cpu:1")
    )
    assert one[:-1] == two[:-1]
    assert one[-1].split()[:2] == two[-1].split()[:2]
    assert two[-1].split()[-2:] == ["cpu:0,", "cpu:1"]
    assert float(two[-2].split()[-1]) > 0.95


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rates_by_stage_end_with_one_fingerprint():
    one, two = (
        subprocess.run(
            [sys.executable, EXAMPLES / "by_stage_rates.py", devices],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for devices in ("cpu:0", "cpu:0,cpu:1")
    )
    assert one == two
    assert one.startswith("rates 0.012 0.017 0.024 0.034 0.049 0.070 0.100\n")


@pytest.mark.slow
def test_a_large_batch_learns_less_at_the_same_rate_and_more_at_a_larger_one():
    example = load("large_batch")
    rows = [example.accuracy_after(10, *choices)[-1] for _, *choices in example.ROWS]
    small, same, *scaled = rows
    assert same < small - 0.05
    assert max(scaled) > same + 0.05  # which of them learns most depends on rounding


@pytest.mark.slow
def test_batch_normalisation_of_either_kind_is_the_same_on_any_devices(monkeypatch):
    example = load("batchnorm")
    monkeypatch.setattr(example, "EPOCHS", 2)
    found = {}
    for batch_norm in ("shard", "sync"):
        for shards in (2, 16):
            one, three = (example.train(batch_norm, shards, devices) for devices in (1, 3))
            assert one == three
            found[batch_norm, shards] = one[0]
    assert len({*found.values()}) > 1
    assert min(found["sync", 2], found["sync", 16]) > 0.9


@pytest.mark.parametrize(("name", "most"), [("from_scratch", 80), ("concise", 30)])
def test_an_example_is_short(name, most):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < most


def test_two_records_are_compared_and_what_differs_is_named(tmp_path, capsys):
    example, paths = load("compare_runs"), [tmp_path / "1.json", tmp_path / "2.json"]
    record = {"devices": ["cpu:0"], "test_accuracy": 0.96, "examples_per_second": 1000.0}
    facts = {"layers": {"layer 1": "ReLU()"}, "arithmetic": {"the processor": "AVX2"}}
    for path, fingerprint, kind in zip(paths, "ab", ("AVX2", "AVX512"), strict=True):
        found = {**facts, "arithmetic": {"the processor": kind}}
        path.write_text(json.dumps({**record, "fingerprint": fingerprint, "facts": found}))
    assert example.main([paths[0], paths[0]]) == 0
    assert "the same weights, bit for bit" in capsys.readouterr().out
    assert example.main(paths) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == ["NOT the same weights", "  arithmetic, the processor: AVX2 and AVX512"]
