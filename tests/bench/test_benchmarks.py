"""The pure parts of `benchmarks/`: line-ups, ratios, pages. Nothing is measured here."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import json
import sys

import pytest

from benchmarking import BENCHMARKS, FACTS

import benchmark
import measure
import write_docs
from evenstep.bench import Contender, Record, machine, run_rounds, tables
from evenstep.comparison.finding import Cause
from marks import slow
from specs import interrupts, overhead, speed, text
from specs.memory import bound_bytes


def test_a_recorded_command_names_no_place_of_the_machine():
    script = str(BENCHMARKS / "measure.py")
    out = str(BENCHMARKS / "results" / "x.json")
    assert benchmark.command_line([script, "memory", "--out", out]) == (
        "python benchmarks/measure.py memory --out benchmarks/results/x.json"
    )
    assert benchmark.command_line([script, "--out", "/secret/x.json"]).endswith("--out x.json")


def test_a_page_names_the_command_of_today():
    assert write_docs.rerun("python benchmarks/memory.py --rounds 3") == (
        "python benchmarks/measure.py memory --rounds 3"
    )
    assert write_docs.rerun("evenstep bench scaling") == "evenstep bench scaling"


@pytest.mark.parametrize("name", ["public_scripts", "book_compared"])
def test_pages_show_recorded_verdicts_in_the_words_of_today(name):
    verdicts = {cause.value for cause in Cause}
    for run in benchmark.load(name)["runs"]:
        assert (
            write_docs.in_todays_words(run["output"][0]).partition(", first in update")[0]
            in verdicts
        )


def test_words_that_did_not_change_stay():
    for line in ("look at another process", "each other", *(cause.value for cause in Cause)):
        assert write_docs.in_todays_words(line) == line


def test_a_record_is_written_run_by_run(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    record = Record("b", "python b.py", tmp_path / "new" / "b.json", settings={"rounds": 1})
    record.add({"round": 0})
    document = benchmark.load("b", tmp_path / "new")
    assert document["runs"] == [{"round": 0}]
    assert document["machine"] == FACTS
    assert benchmark.load("c", tmp_path) is None


def test_later_rounds_count_from_the_earlier_ones_and_say_when_they_were_run(tmp_path, monkeypatch):
    one = Contender(key="one", module="none", job={})
    first, later = (
        {**FACTS, "date_utc": date, "git_revision": revision}
        for date, revision in (("2026-01-01 10:00", "aaa"), ("2026-01-02 11:00", "bbb"))
    )
    monkeypatch.setattr(machine, "facts", lambda: first)
    record = Record("b", "python b.py", tmp_path / "b.json")
    run_rounds([one], 2, record, measure=lambda _: {"took": 1})
    monkeypatch.setattr(machine, "facts", lambda: later)
    more = Record("b", "python b.py --more", tmp_path / "b.json")
    more.go_on(benchmark.load("b", tmp_path))
    run_rounds([one], 1, more, measure=lambda _: {"took": 2})
    document = benchmark.load("b", tmp_path)
    assert [(run["round"], run["took"]) for run in document["runs"]] == [(0, 1), (1, 1), (2, 2)]
    assert (document["command"], document["machine"]) == ("python b.py", first)
    assert document["went_on"] == [{"date_utc": "2026-01-02 11:00", "git_revision": "bbb"}]


def test_the_lineup_has_every_contender_that_a_target_names():
    lineup = [*speed.BENCHMARK.contenders, *text.BENCHMARK.contenders]
    keys = {contender.key for contender in lineup}
    assert len(keys) == len(lineup)
    assert speed.read_ratios()
    for ratio in speed.read_ratios():
        named = {f"{ratio['network']}.{ratio[side]}" for side in ("ours", "theirs")}
        assert named <= keys, ratio["text"]


@pytest.mark.parametrize("one", measure.BENCHMARKS.values(), ids=lambda one: one.name)
def test_every_contender_has_a_key_and_runs_of_its_own(one):
    assert len({contender.key for contender in one.contenders}) == len(one.contenders)
    marks = [json.dumps(contender.marks, sort_keys=True) for contender in one.contenders]
    assert len(set(marks)) == len(marks)


@pytest.mark.parametrize("one", measure.BENCHMARKS.values(), ids=lambda one: one.name)
def test_the_committed_files_have_runs_of_every_table(one):
    document = benchmark.load(one.name)
    for table in one.tables(document).values():
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_only_chooses_by_the_beginning_of_keys():
    everyone = speed.lineup()
    chosen = measure.choose(everyone, "resnet18")
    assert {one.job["network"] for one in chosen} == {"resnet18"}
    assert [one.key for one in measure.choose(everyone, "lenet.fabric,resnet18.accel")] == [
        "lenet.fabric.2.contiguous",
        "resnet18.accelerate.2.contiguous",
    ]
    with pytest.raises(SystemExit, match="got --only alexnet: expected the beginnings of some of"):
        measure.choose(everyone, "alexnet")


def test_a_whole_key_chooses_that_contender_alone():
    key = "resnet18.evenstep.2.v8.n128"
    chosen = measure.choose(speed.lineup(), f"{key},{key}.sync")
    assert [one.key for one in chosen] == [key, f"{key}.sync"]
    assert len(measure.choose(speed.lineup(), f"{key}.")) > 1


def test_other_steps_are_those_of_every_contender_and_stand_in_the_file():
    one = measure.shortened(measure.BENCHMARKS["step_overhead"], "2", 7)
    assert {contender.job["steps"] for contender in one.contenders} == {7}
    assert one.settings["steps"] == 7


def test_numbers_have_three_digits_or_more():
    assert [tables.number(value) for value in (0.5, 12.34, 123.4, 12345.6)] == [
        "0.50",
        "12.3",
        "123",
        "12,346",
    ]


def test_a_target_is_compared_with_the_median_of_the_ratios():
    ratio = {"text": "a over b", "network": "n", "ours": "a", "theirs": "b", "at_least": "1.4"}
    runs = [*_speeds("n.a", 14.0, 30.0, 15.0), *_speeds("n.b", 10.0, 10.0, 11.0)]
    row = ["a over b", "≥ 1.40", "1.40", "1.36 to 3.00", "reached"]
    assert speed.ratio_row(ratio, runs) == row
    worse = [*_speeds("n.a", 13.9), *_speeds("n.b", 10.0)]
    assert speed.ratio_row(ratio, worse)[-1] == "**not reached**"
    assert speed.ratio_row(ratio, _speeds("n.a", 1.0))[-1] == "not measured"


def test_the_bound_on_memory_grows_with_gradients_and_activations():
    sizes = {"gradients_bytes": 10, "activations_bytes": 5}
    assert [bound_bytes(100, devices, sizes) for devices in (1, 2, 4)] == [100, 115, 145]


def test_without_files_the_page_is_its_head_and_that_no_gpu_was_measured(tmp_path):
    page = write_docs.page("benchmarks", tmp_path, {})
    assert page.startswith("# Benchmarks\n")
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## GPUs"]
    assert "Not measured yet" in page


def test_notes_are_found_by_name_and_hold_no_figures():
    assert write_docs.parse_notes(
        "For writers.\n\n## lenet\nV = 8 and 2 devices.\n\n## memory\nB.\n"
    ) == {
        "lenet": "V = 8 and 2 devices.",
        "memory": "B.",
    }
    assert write_docs.parse_notes("For writers alone.\n") == {}
    for figure in ("1.5 times", "12%", "3 ms", "80 MiB", "2× faster"):
        with pytest.raises(ValueError, match="has the figure"):
            write_docs.parse_notes(f"## lenet\nIt takes {figure}.\n")


NOTES = write_docs.parse_notes((BENCHMARKS / "notes.md").read_text())


def committed(name):
    return (write_docs.DOCS / f"{name}.md").read_text()


@pytest.mark.parametrize(  # a thousand devices are simulated for the page on plans
    "name", [slow(name) if name == "plan" else name for name in write_docs.PAGES]
)
def test_a_committed_page_is_what_the_committed_files_make(name):
    assert committed(name) == write_docs.page(name, benchmark.RESULTS, NOTES)


def test_the_books_pages_are_what_the_committed_files_make():
    found, parts = benchmark.load("book_compared"), benchmark.load("book")["parts"]
    section = f"<!-- figures -->\n{write_docs.compared(found, parts)}\n<!-- end -->"
    assert section in committed("compare")
    assert committed("book") == write_docs.book_page(benchmark.load("book"), NOTES)


def test_every_note_stands_on_a_page():
    pages = "".join(map(committed, [*write_docs.PAGES, "book"]))
    assert [name for name, note in NOTES.items() if note not in pages] == []


def test_every_claim_is_shown_by_a_test_that_exists():
    for claim, test in write_docs.claims():
        file, _, name = test.strip("`").partition("::")
        source = (BENCHMARKS.parent / file).read_text()
        assert f"\ndef {name}(" in source, f"{claim}: {test}"


def test_the_page_on_reliability_counts_the_runs_that_recovered(tmp_path):
    def run(kind, **more):
        return {"kind": kind, "same": True, "left": [], "killed": 5, "seconds": 4.0, **more}

    runs = [run("worker"), run("worker", same=False), run("worker", left=[7]), run("writer")]
    settings = {"kills": 5, "steps": 9, "checkpoint_every": 3}
    document = {"command": "python benchmarks/it.py", "machine": FACTS}
    document |= {"settings": settings, "runs": runs}
    (tmp_path / "kills.json").write_text(json.dumps(document))
    page = write_docs.page("reliability", tmp_path, {})
    assert (
        "| any process, after a random step was saved | 15 | 3 | 1 | 4.00 | 4.00 to 4.00 |" in page
    )
    assert "in the middle of a checkpoint | 5 | 1 | 1 | 4.00 | 4.00 to 4.00 |" in page


def _speeds(key, *speeds):
    return [
        {"contender": key, "round": number, "examples_per_s": speed}
        for number, speed in enumerate(speeds)
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 counts a file of its own more")
def test_a_step_stays_simple():
    """The main path of one eager step: few files, few functions, few calls."""
    counted = overhead.count_calls()
    assert counted["files"] <= 19
    assert counted["functions"] <= 120
    assert counted["calls"] <= 320
    assert counted["calls"] > counted["functions"] > counted["files"] > 5  # it did look


def test_no_private_name_is_read_from_another_package():
    assert [*overhead.private_reads()] == []


def test_lines_of_code_are_no_docstrings_and_no_comments():
    text = '"""A module."""\n\nX = (\n    1,  # one\n)\n\n\ndef f():\n    """F."""\n    return X\n'
    assert overhead._code_lines(text) == 5


@pytest.mark.slow
def test_lines_are_counted():
    lines = overhead.count_lines()
    assert lines["library"] > lines["code"] > 1000 < lines["measuring"]
    assert lines["tests"] > 1000
    assert lines["parameters"] <= 18


def test_a_table_takes_the_place_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- end -->\nafter\n")
    write_docs.insert(page, "new")
    assert page.read_text() == "before\n<!-- figures -->\nnew\n<!-- end -->\nafter\n"


@pytest.mark.parametrize(("act", "max_in_flight"), [("press", 1), ("save", 2), ("throw", 2)])
def test_trainings_that_are_interrupted_end_as_one_that_is_not(act, max_in_flight):
    job = {"layout": "two devices", "in_two_calls": False, "interrupts": 5}
    found = interrupts.measure({**job, "act": act, "more": {"max_in_flight": max_in_flight}})
    assert found["first"] == []
    assert sum(found["ends"].values()) == 5
