"""The book's ResNet-18 on one device and on two: each remedy leads to the next difference."""

import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.comparison import Cause, compare
from evenstep.comparison.finding import HARMLESS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "book_resnet18.py"
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL, LARGE = ("--batch-size", "8", "--lr", "0.1"), ("--batch-size", "16", "--lr", "0.2")
ONE_BATCH = ("--seed", "0", *LARGE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("one", "other", "causes"),
    [
        ((*SMALL,), (*TWO, *SMALL), {Cause.WEIGHTS}),
        (("--seed", "0", *SMALL), (*TWO, "--seed", "0", *LARGE), {Cause.MORE_ROWS}),
        (ONE_BATCH, (*TWO, *ONE_BATCH), {Cause.BATCH_NORM}),
        ((*ONE_BATCH, "--norm", "group"), (*TWO, *ONE_BATCH, "--norm", "group"), {*HARMLESS}),
        ((*ONE_BATCH, "--evenstep", "1"), (*ONE_BATCH, "--evenstep", "2"), {Cause.NOTHING}),
    ],
    ids=["as it is", "seeded", "one batch", "group norm", "evenstep"],
)
def test_each_remedy_leads_to_the_next_difference(tmp_path, fashion_mnist_dir, one, other, causes):
    records = [tmp_path / "one.rec", tmp_path / "two.rec"]
    for path, given in zip(records, (one, other), strict=True):
        launcher = TWO if given[: len(TWO)] == TWO else ()
        options = (*given[len(launcher) :], "--data-dir", fashion_mnist_dir)
        command = ("record", "--out", path, "--steps", 2, *launcher, SCRIPT, *options)
        done = subprocess.run(
            [sys.executable, "-m", "evenstep", *map(str, command)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    finding = compare(*records)
    assert finding.cause in causes, finding
    if Cause.MORE_ROWS in causes:
        assert "the learning rate is 0.1 and 0.2" in finding.evidence
