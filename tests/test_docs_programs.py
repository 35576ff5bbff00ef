"""The programs of the documentation's own pages, run as they stand there.

Those of docs/recipes.md are run by test_recipes.py.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evenstep

DOCS = Path(__file__).parents[1] / "docs"
SECTION = re.compile(r"^##+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections(page):
    """Return the sections of a page, by title; what stands before the first is called ""."""
    first, *parts = SECTION.split((DOCS / page).read_text(encoding="utf-8"))
    return {"": first, **dict(zip(parts[::2], parts[1::2], strict=True))}


def blocks(text, language):
    return [code for kind, code in BLOCK.findall(text) if kind == language]


def run(code, name="program"):
    namespace = {"__name__": name}
    exec(compile(code, f"<{name}>", "exec"), namespace)
    return namespace


@pytest.mark.slow  # eight short trainings of LeNet
@pytest.mark.timeout(600)
def test_start_runs_from_top_to_bottom():
    run("\n".join(blocks((DOCS / "start.md").read_text(encoding="utf-8"), "python")))


EVERYDAY = sections("everyday.md")


@pytest.mark.slow  # short trainings of LeNet
@pytest.mark.parametrize(
    "title", [title for title, text in EVERYDAY.items() if title and blocks(text, "python")]
)
def test_a_section_of_everyday_training_runs_by_itself(title, capsys):
    run("\n".join(blocks(EVERYDAY[""] + EVERYDAY[title], "python")))
    if title.startswith("EMA"):
        found = re.search(r"'accuracy': (0\.\d+)", capsys.readouterr().out)
        assert float(found.group(1)) > 0.3  # the average has learned


@pytest.mark.slow  # two short trainings of LeNet
@pytest.mark.timeout(600)
def test_the_commands_of_start_print_one_fingerprint(tmp_path):
    lines = "\n".join(blocks(sections("start.md")["Train from the command line"], "bash"))
    commands = [shlex.split(line) for line in lines.splitlines()]
    assert [words[0] for words in commands] == ["evenstep", "evenstep"]
    printed = []
    for _, *words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "evenstep", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r"^(?:fingerprint|test accuracy) .*", done.stdout, re.MULTILINE))
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]


def test_concepts_run_from_top_to_bottom():
    programs = blocks((DOCS / "concepts.md").read_text(encoding="utf-8"), "python")
    assert len(programs) >= 4
    run("\n".join(programs))


def test_plans_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("\n".join(blocks((DOCS / "plan.md").read_text(encoding="utf-8"), "python")))
    assert re.fullmatch(r"\d+\.\d+ \('.+',?\)", capsys.readouterr().out.splitlines()[-1])


def test_portable_arithmetic_prints_a_fingerprint(capsys):
    run("\n".join(blocks((DOCS / "portable.md").read_text(encoding="utf-8"), "python")))
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


def test_debugging_prints_what_the_page_shows(capsys):
    page = (DOCS / "debugging.md").read_text(encoding="utf-8")
    run("\n".join(blocks(page, "python")))
    shown = quoted("".join(blocks(page, "text")))
    assert re.fullmatch(shown, capsys.readouterr().out.strip(), re.DOTALL)


# The programs of the FAQ that raise, and the messages that the page quotes.

FAQ = sections("faq.md")
RAISING = [title for title, text in FAQ.items() if title and blocks(text, "python")]


def said(error):
    return f"{type(error).__name__}: {error}"


def quoted(text):
    """Return a pattern of a quoted message, where ... stands for anything."""
    return ".*".join(re.escape(part) for part in text.strip().split("..."))


def test_the_faq_quotes_messages():
    assert len(RAISING) >= 7


def test_the_faq_has_every_error():
    table = FAQ["Which error means what"]
    for name, value in vars(evenstep.errors).items():
        if isinstance(value, type) and issubclass(value, evenstep.errors.EvenstepError):
            assert f"`{name}`" in table or name == "EvenstepError"


@pytest.mark.parametrize("title", RAISING)
def test_a_program_of_the_faq_raises_what_the_page_quotes(title):
    (program,) = blocks(FAQ[title], "python")
    (message,) = blocks(FAQ[title], "text")
    with pytest.raises(Exception, match=r"\S") as found:  # which one, the page says
        run("\n".join([*blocks(FAQ[""], "python"), program]))
    assert re.fullmatch(quoted(message), said(found.value), re.DOTALL)


# The diffs: the lines of the old program, and those of the new one, each run.

DIFFS = {
    title: blocks(text, "diff")[0]
    for title, text in sections("coming_from.md").items()
    if blocks(text, "diff")
}
NEEDED = {"Accelerate": "accelerate", "Lightning": "lightning"}
SLOW = {
    "Lightning": [
        pytest.mark.slow,  # the import of Lightning
        pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    ]
}


def side(diff, sign):
    """Return one of the two programs of a diff."""
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(line[1:] for line in lines) + "\n"


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=SLOW.get(title, ())) for title in DIFFS]
)
def test_the_new_program_gives_the_same_bits_on_any_devices(title, capsys):
    if title in NEEDED:
        pytest.importorskip(NEEDED[title], reason=f"pip install {NEEDED[title]}")
    program = side(DIFFS[title], "+")
    assert program.count('devices="auto"') == 1
    weights, printed = [], []
    for devices in ('"auto"', "1", "2", '["cpu:0", "cpu:1:own"]'):
        capsys.readouterr()
        namespace = run(program.replace('"auto"', devices))
        weights.append(namespace["model"].state_dict())
        printed.append(capsys.readouterr().out.splitlines()[-1])
    assert printed[0].startswith("loss ")
    assert len(set(printed)) == 1
    for other in weights[1:]:
        assert all(map(torch.equal, weights[0].values(), other.values()))


@pytest.mark.slow  # a fresh interpreter for each
@pytest.mark.timeout(310)
@pytest.mark.parametrize("title", DIFFS)
def test_the_old_program_runs(title, tmp_path):
    if title in NEEDED:
        pytest.importorskip(NEEDED[title], reason=f"pip install {NEEDED[title]}")
    old, program = side(DIFFS[title], "-"), tmp_path / "old.py"
    assert "evenstep" not in old
    # Nothing else runs MXNet's programs any more.
    program.write_text(
        re.sub(r"^(import|from) mxnet", r"\1 evenstep.mxnet", old, flags=re.MULTILINE)
    )
    launcher = (
        ["-m", "torch.distributed.run", "--standalone"] if "init_process" in DIFFS[title] else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout
