"""The page on comparisons: its program runs, and its commands give what it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from commands import run
from evenstep.comparison import Cause

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def block(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[number]


def test_the_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block("python"), {})
    assert capsys.readouterr().out.startswith(Cause.WEIGHTS.value)


def test_the_first_sentences_of_the_page_are_those_of_the_program():
    for number, cause in enumerate((Cause.BATCH_NORM, Cause.SUM)):
        assert block("text", number).startswith(cause.value)


@pytest.mark.slow
def test_the_commands_of_the_page_give_what_it_shows(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in block("bash", 1).splitlines():
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)],
            cwd=tmp_path, env={**os.environ, "PATH": places},
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    numberless = re.compile(r"[\d.]+(?:e-\d+)?")
    shown = [numberless.sub("N", one) for one in block("text").splitlines()]
    assert [numberless.sub("N", one) for one in done.stdout.splitlines()] == shown


class Wide(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        return x.tanh() * self.wide


def trained(folder, wide=4, **options):
    """Record a small training; return the record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Wide(wide), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.record(folder, **options):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
            optimizer.step()
    return folder


def test_values_on_request_say_which_differ(tmp_path):
    one, other = (trained(tmp_path / f"{n}.rec", n, values=["1"]) for n in (1, 2))
    finding = evenstep.compare(one, other)
    assert (finding.cause, finding.place) == (Cause.KERNEL, "1")
    (line,) = (line for line in finding.evidence if "that were kept of it differ" in line)
    assert line.startswith("24 of the 24 values")
    first = float(re.search(r"the first at 0: (\S+) in", line)[1])
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    nn.Linear(4, 3)
    assert first == torch.tanh(layer(torch.randn(6, 4)))[0, 0].item()
    assert f"{2 * first!r} in {other}" in line


class Counting(nn.Module):
    """Keeps a number that nothing reads."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += self.by
        return x


def test_buffers_that_nothing_reads_are_named(tmp_path):
    for by in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), Counting(by))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with evenstep.record(tmp_path / f"{by}.rec"):
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(torch.ones(6, 4)), torch.arange(6) % 3).backward()
                optimizer.step()
    finding = evenstep.compare(tmp_path / "1.rec", tmp_path / "2.rec")
    assert (finding.cause, finding.place) == (Cause.BUFFERS, "1.count")


def test_operators_are_named(tmp_path):
    one, other = (trained(tmp_path / f"{n}.rec", n, level="operator") for n in (1, 2))
    finding = evenstep.compare(one, other)
    assert (finding.cause, finding.place) == (Cause.KERNEL, "1 > aten.mul.Tensor 0")
    calls = [call.module for call in evenstep.comparison.read_run(one).step(0)[0].calls]
    assert "0 > aten.addmm 0" in calls
    assert calls.index("1 > aten.tanh 0") < calls.index("1") < calls.index("2 > aten.addmm 0")
    assert "backward > aten.mm 0" in calls  # of the backward pass


def test_the_page_shows_the_two_runs(tmp_path):
    one, other = (trained(tmp_path / f"<{n}>.rec", n) for n in (1, 2))
    done = run("compare", one, other, "--html", tmp_path / "page.html", code=1)
    page = (tmp_path / "page.html").read_text()
    assert done.stdout.splitlines()[0].startswith(Cause.KERNEL.value)
    assert Cause.KERNEL.value in page
    assert "&lt;1&gt;.rec" in page
    assert "<1>" not in page
    rows = re.findall(r'<tr class="here"><td>(.*?)</td>', page)
    assert rows == ["1", "0"]  # the module, and the update
    assert page.count("<polyline") == 4
    done = run("compare", one, other, "--html", tmp_path / "page.html" / "page.html", code=2)
    assert "can't be written" in done.stderr
