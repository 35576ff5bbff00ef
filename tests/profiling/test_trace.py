"""Traces: what Perfetto and chrome://tracing can open, of the newest spans."""

import gc
import json
import threading
import tracemalloc

import pytest
import torch

from evenstep.engine import Engine, InlineLanes, ThreadLanes
from evenstep.errors import SaveError
from evenstep.profiling.clock import NodeTime, ShardTime, StepClock, Timekeeper
from evenstep.profiling.trace import Span, Trace
from patience import HUNG_TESTS_ABORT

pytestmark = HUNG_TESTS_ABORT

ROWS = ["cpu:0", "cpu:1", "copy cpu:0", "copy cpu:1"]


def span(name, *, row=0, began_s=1.0, ended_s=1.5, **story):
    return Span(row, name, "compute", began_s, ended_s, story or None)


def saved(trace, folder):
    trace.save(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_an_empty_trace_is_whole_json(tmp_path):
    trace = saved(Trace(ROWS), tmp_path)
    assert events(trace, "X") == []
    assert trace["otherData"] == {"program": "evenstep", "dropped_spans": 0}


def test_every_lane_has_a_named_row_in_its_order(tmp_path):
    trace = saved(Trace(ROWS), tmp_path)
    rows = events(trace, "M")
    names = {e["tid"]: e["args"]["name"] for e in rows if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in rows if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(names, key=order.__getitem__)] == ROWS


def test_a_span_is_a_complete_event_in_microseconds_since_the_first(tmp_path):
    trace = Trace(ROWS)
    trace.add(span("late", row=3, began_s=12.0, ended_s=12.25, step=7, shard=2))
    trace.add(span("early", row=0, began_s=10.0, ended_s=10.0))
    late, early = events(saved(trace, tmp_path), "X")
    assert late == {
        "ph": "X",
        "name": "late",
        "cat": "compute",
        "pid": 1,
        "tid": 3,
        "ts": 2e6,
        "dur": 0.25e6,
        "args": {"step": 7, "shard": 2},
    }
    assert (early["ts"], early["dur"], early["args"]) == (0, 0, {})


def test_rows_beside_the_lanes_come_after_them(tmp_path):
    trace = Trace(ROWS)
    for row in ("steps", 1, "steps", "loader"):
        trace.add(span("s", row=row))
    trace = saved(trace, tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert [names[e["tid"]] for e in events(trace, "X")] == ["steps", "cpu:1", "steps", "loader"]
    assert list(names.values()) == [*ROWS, "steps", "loader"]


def test_memory_is_bounded_and_what_was_dropped_is_counted(tmp_path):
    trace = Trace(ROWS, limit=3)
    for number in range(10):
        trace.add(span(str(number)))
        assert trace.dropped == max(0, number - 2)
    assert [span.name for span in trace.spans] == ["7", "8", "9"]
    assert saved(trace, tmp_path)["otherData"]["dropped_spans"] == 7


ODD = [
    Span("steps", "step 12", "step", 1.0, 2.0, {"step": 12}),
    Span(3, "copy shards [2,10)", "copy", 1.0, 2.0, {"step": 0, "stolen": True, "late": False}),
    Span(0, "007 of {0} at 3.50, -1", "compute", 0.1, 0.3, None),
    Span(0, "12345678901234567890", "compute", 1.0, 1.0, {"step": -5}),
    Span(1, "", "", 1.0, 2.0, {"x": 2**40}),
    Span(1, "shard 1", "compute", 1.0, 2.0, {"x": 0.5, "y": "text", "z": None}),
    Span(1, "1 2 3 4 5 6 7", "compute", 1.0, 2.0, {"step": 1}),
]


def test_spans_come_back_as_they_were_added():
    trace = Trace(ROWS)
    for _ in range(300):  # more than a block
        for one in ODD:
            trace.add(one)
    assert repr(trace.spans) == repr(ODD * 300)  # where True is not 1


def test_names_without_end_are_dropped_as_objects_are():
    trace = Trace(ROWS)
    for number in range(1500):
        trace.add(span("x" * number))
    assert [len(one.name) for one in trace.spans][-1000:] == [*range(500, 1500)]


def test_a_full_trace_of_steps_takes_less_than_5_mb_in_few_objects():
    trace = Trace(ROWS)
    timekeeper = Timekeeper(trace, ROWS[:2])

    def take(steps):
        for number in range(steps):
            shards = [ShardTime(0, shard, shard == 7, 1.0, 2.0) for shard in range(8)]
            nodes = [NodeTime(1, 0, 2, 1.0, 2.0) for _ in range(5)]
            clock = StepClock(1.0, shards, nodes, (0, 2.0, 2.5))
            timekeeper.ended.append((number, clock))
            timekeeper.add_up()
        gc.collect()
        return len(gc.get_objects())

    objects = take(10)
    tracemalloc.start()
    try:
        more_objects = take(6000)
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert trace.dropped
    assert more_objects - objects < 500
    assert nbytes < 4.5e6  # and what the 1,000 spans take that are kept as objects


def test_a_story_may_hold_what_json_does_not_know(tmp_path):
    trace = Trace(ROWS)
    trace.add(span("s", device=torch.device("cpu"), folder=tmp_path))
    (event,) = events(saved(trace, tmp_path), "X")
    assert event["args"] == {"device": "cpu", "folder": str(tmp_path)}


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path):
    saved(Trace(ROWS), tmp_path)
    trace = Trace(ROWS)
    trace.add(span("s"))
    assert len(events(saved(trace, tmp_path), "X")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("name", ["missing/trace.json", "file/trace.json", "folder", "x" * 256])
def test_a_trace_that_cannot_be_written_is_a_save_error(tmp_path, name):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SaveError, match="the trace could not be written to"):
        Trace(ROWS).save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("broken", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path, monkeypatch, broken):
    file = tmp_path / "trace.json"
    file.write_text("old")

    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, no_space)
    with pytest.raises(SaveError, match=r"trace\.json: No space left on device"):
        Trace(ROWS).save(file)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_spans_may_be_read_while_lanes_add_some():
    trace = Trace(ROWS, limit=100)
    done = threading.Event()

    def add():
        while not done.is_set():
            trace.add(span("s"))

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(200):
            assert len(trace.spans) <= 100
            assert trace.dropped >= 0
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
def test_an_engine_notes_what_ran_where(tmp_path, lanes):
    with Engine(["cpu:0", "cpu:1"], lanes=lanes) as engine:
        one = engine.submit(int, "1", device="cpu:1", name="one", story={"step": 3})
        engine.copy(one, "cpu:0").result()
        with pytest.raises(ZeroDivisionError):
            engine.submit(divmod, one, 0, device="cpu:0").result()
    trace = saved(engine.trace, tmp_path)
    rows = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert list(rows.values()) == ROWS
    ran = [(rows[e["tid"]], e["name"], e["cat"]) for e in events(trace, "X")]
    assert ran[:3] == [
        ("cpu:1", "one", "compute"),
        ("copy cpu:0", "copy to cpu:0", "copy"),
        ("cpu:0", "divmod", "compute"),
    ]
    assert events(trace, "X")[0]["args"] == {"step": 3}
    assert all(event["dur"] >= 0 for event in events(trace, "X"))
