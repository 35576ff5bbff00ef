"""The toolkit of `evenstep bench`: contenders, rounds, fresh processes, speed-ups, pictures."""

import pytest

from evenstep.bench import (
    Record,
    Summary,
    against,
    fresh,
    lineup,
    machine,
    paired_ratios,
    pictures,
    rotated,
    running,
    scaled,
    scaling,
    side_by_side,
    summarise,
)
from evenstep.errors import InputError
from evenstep.profiling.accounting import PARTS

JOB = {"network": "lenet", "examples": 64, "shards": 8, "warmup_steps": 1, "steps": 4}
SPEEDS = {1: (10.0, 12.0), 2: (18.0, 18.0), 4: (20.0, 30.0)}


def test_every_round_starts_one_item_later_and_has_them_all():
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 3) == []


def test_a_summary_has_the_median_and_the_extremes():
    assert summarise([3.0, 1.0, 10.0]) == Summary(3.0, 1.0, 10.0, 3)
    assert summarise([1.0, 2.0]).median == 1.5


def test_ratios_pair_the_rounds_that_both_were_measured_in():
    assert paired_ratios({0: 4.0, 1: 6.0, 2: 9.0}, {2: 3.0, 0: 2.0}) == [2.0, 3.0]
    assert paired_ratios({0: 1.0}, {}) == []


def test_a_result_is_the_last_json_line_whatever_a_launcher_prints():
    assert fresh.last_json_line('W0102 launcher\n{"a": 1}\n{"b": 2}\n{not json\nbye\n') == {"b": 2}
    assert fresh.last_json_line("nothing\n") is None


def test_threads_and_allocators_are_not_inherited():
    inherited = {"PATH": "p", "OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "1", "MKL_X": ""}
    assert fresh.clean_environment(inherited) == {"PATH": "p"}


def test_a_contender_that_fails_is_run_once_more_and_the_file_says_so(monkeypatch):
    outcomes = iter([fresh.RunFailedError("aborted", ""), {"seconds": 1.0}])

    def run_module(*_, **__):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(fresh, "run_module", run_module)
    assert running.measure(lineup.plain(JOB, 1)) == {"seconds": 1.0, "attempts": 2}


def test_peers_run_with_one_thread_and_evenstep_sets_its_own():
    threads = {
        contender.label.split(",")[0]: contender.variables.get("OMP_NUM_THREADS")
        for contender in side_by_side(JOB, 3)
        if "thread" not in contender.label
    }
    assert threads == {
        "DDP": "1",
        "Accelerate": "1",
        "Lightning Fabric": "1",
        "evenstep": "1",  # processes
    }
    plain = [lineup.plain(JOB, threads).variables["OMP_NUM_THREADS"] for threads in (1, 3)]
    assert plain == ["1", "3"]
    assert lineup.devices(JOB, 3).variables == {}


def test_all_contenders_have_the_same_job_and_as_many_workers():
    contenders = side_by_side(JOB, 3)
    assert len({contender.key for contender in contenders}) == len(contenders)
    for contender in contenders:
        assert {name: contender.job[name] for name in JOB} == JOB
        assert contender.job.get("workers", 3) == 3


def test_scaling_takes_the_same_batch_and_one_that_grows():
    sizes = [(one.job["workers"], one.job["examples"]) for one in scaling(JOB, [2, 4, 6])]
    assert sizes == [(2, 64), (4, 64), (6, 64), (4, 128), (6, 192)]


def test_a_contender_whose_package_is_missing_is_named_and_left_out():
    absent = lineup.Contender(key="x", label="X", module="m", job=JOB, needs="no_such_package")
    said, plain = [], lineup.plain(JOB, 1)
    assert running.installed([plain, absent], said.append) == [plain]
    assert said == ["left out: X (no_such_package is not installed)"]


def scaling_document():
    """Two rounds on 1, 2 and 4 devices; of each second half is computed, a tenth is summed."""
    contenders = scaling(JOB, [1, 2, 4])
    spent = dict(zip(PARTS, (0.5, 0.1, 0.2, 0.1, 0.1), strict=True))
    return {
        "contenders": [contender.described() for contender in contenders],
        "runs": [
            {
                "contender": contender.key,
                "round": number,
                "examples_per_s": SPEEDS[contender.job["workers"]][number],
                "spent_s": spent,
            }
            for number in range(2)
            for contender in contenders
        ],
    }


def test_speed_ups_are_taken_within_a_round_and_efficiency_from_their_median():
    one, two, four = scaled(scaling_document(), same_batch=True)
    assert [row.devices for row in (one, two, four)] == [1, 2, 4]
    assert {row.examples for row in (one, two, four)} == {64}
    assert one.speed_up == Summary(1.0, 1.0, 1.0, 2)
    assert two.speed_up == Summary((1.8 + 1.5) / 2, 1.5, 1.8, 2)
    assert four.efficiency == pytest.approx((2.0 + 2.5) / 2 / 4)
    assert two.shares == pytest.approx(
        {"compute": 0.5, "wait_data": 0.1, "wait_others": 0.2, "sum": 0.1, "update": 0.1}
    )
    grown = scaled(scaling_document(), same_batch=False)
    assert [(row.devices, row.examples) for row in grown] == [(1, 64), (2, 128), (4, 256)]


def test_speeds_are_compared_with_one_contender_within_each_round():
    ratios = against(scaling_document(), lineup.devices(JOB, 1).key)
    assert ratios[lineup.devices(JOB, 2).key].median == pytest.approx((1.8 + 1.5) / 2)


@pytest.mark.parametrize("name", ["scaling.png", "scaling.svg"])
def test_pictures_are_drawn_in_the_format_that_the_name_asks_for(name, tmp_path):
    pictures.draw_scaling(scaling_document(), tmp_path / name)
    pictures.draw_peers(scaling_document(), tmp_path / f"peers-{name}")
    for file in tmp_path.iterdir():
        begin = file.read_bytes()[:200]
        assert begin.startswith(b"\x89PNG") if file.suffix == ".png" else b"<?xml" in begin


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"picture .*x\.docx can't be written"):
        pictures.draw_scaling(scaling_document(), tmp_path / "x.docx")


def test_a_picture_is_written_whole_and_through_no_link(tmp_path):
    (tmp_path / "other.png").write_bytes(b"keep")
    (tmp_path / "x.png").symlink_to("other.png")
    with pytest.raises(InputError, match="it is a symbolic link"):
        pictures.draw_scaling(scaling_document(), tmp_path / "x.png")
    assert (tmp_path / "other.png").read_bytes() == b"keep"
    pictures.draw_scaling(scaling_document(), tmp_path / "other.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.png", "x.png"]


def test_a_record_without_a_file_is_kept_in_memory(monkeypatch):
    monkeypatch.setattr(machine, "facts", dict)
    record = Record("scaling", "evenstep bench scaling", None, settings={"rounds": 1})
    record.add({"round": 0})
    assert record.document["runs"] == [{"round": 0}]
