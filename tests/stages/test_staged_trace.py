"""The trace of a network in stages: a span for each visit of a shard to a stage."""

import json

import pytest
import torch

import evenstep
from evenstep.bench.pictures import draw_stages
from evenstep.profiling.reader import read_trace
from trainers import open_trainer
from zoo import build, make_batches

STAGES = evenstep.Stages({"0": 0, "4": 1})


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_visit_is_in_the_row_of_its_stages_device(tmp_path, max_in_flight):
    options = {"devices": 4, "max_in_flight": max_in_flight}
    with open_trainer(build("dropout"), divide=STAGES, **options) as trainer:
        for batch in make_batches((33, 16)):
            trainer.step(*batch)
        trainer.waitall()
        shards = [own.shards for own in trainer.shares()]
        trainer.trace.save(tmp_path / "trace.json")
    visits = set()
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        story = event["args"]
        if event.get("cat") == "compute":
            visits.add(
                (event["tid"], *(story[key] for key in ("step", "shard", "stage", "backward")))
            )
    assert visits == {
        (2 * (shard >= 4) + stage, step, shard, stage, backward)
        for step in range(2)
        for shard in range(8)
        for stage in range(2)
        for backward in (False, True)
    }
    assert shards == [8, 8, 8, 8]
    account, _ = read_trace(tmp_path / "trace.json")
    assert [own.shards for own in account.devices] == shards
    assert [*account.stage_s] == [0, 1]


def test_an_evaluation_has_no_backward_visits():
    with open_trainer(build("dropout"), divide=STAGES) as trainer:
        trainer.predict([torch.zeros(16, 1, 6, 6)])
        spans = [one for one in trainer.trace.spans if one.category == "evaluate"]
    assert [one.story["backward"] for one in spans] == [False] * 16
    assert sorted(one.row for one in spans) == [0] * 8 + [1] * 8


def test_a_picture_of_a_step(tmp_path):
    pytest.importorskip("matplotlib")
    visits = [
        {"shard": 0, "stage": 0, "backward": False, "began_s": 0.0, "ended_s": 1.0},
        {"shard": 0, "stage": 1, "backward": False, "began_s": 1.0, "ended_s": 2.0},
        {"shard": 0, "stage": 1, "backward": True, "began_s": 2.0, "ended_s": 4.0},
        {"shard": 0, "stage": 0, "backward": True, "began_s": 4.0, "ended_s": 6.0},
    ]
    draw_stages(visits, tmp_path / "stages.svg")
    drawn = (tmp_path / "stages.svg").read_text()
    assert drawn.count("<!-- 0 -->") >= 4  # the number of the shard, in each of its bars
    assert "<!-- the bubble -->" in drawn
