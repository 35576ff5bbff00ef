"""Checkpoints on the disk: what is written, and which are kept."""

import json
import os
import platform
import stat
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from test_codec import same

from checkpoints import FILES, TREE, names, write_checkpoint
from evenstep.checkpoint import files
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints, read_checkpoint
from evenstep.errors import InputError


def test_a_checkpoint_comes_back_exactly(tmp_path):
    folder = write_checkpoint(tmp_path / "a" / "run", TREE, step=40)
    assert folder == tmp_path / "a" / "run" / "step-00000040"
    assert names(folder) == FILES
    assert names(folder.parent) == ["step-00000040"]
    assert same(read_checkpoint(folder), TREE)
    assert same(read_checkpoint(folder.parent), TREE)
    assert same(read_checkpoint(str(folder.parent)), TREE)


def test_the_files_can_be_read_without_evenstep(tmp_path):
    folder = write_checkpoint(tmp_path, {"model": {"w": torch.ones(2)}, "lr": 0.1}, step=7)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "evenstep checkpoint"
    assert manifest["version"] == 1
    assert manifest["step"] == 7
    assert manifest["torch"] == torch.__version__
    assert manifest["state"]["lr"] == 0.1
    assert torch.equal(load_file(folder / "tensors.safetensors")["model/w"], torch.ones(2))


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0])
def test_files_and_folders_have_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path, TREE, step=0)
        plain = tmp_path / "plain"
        plain.mkdir()
        (plain / "file").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (plain, plain / "file")]
    assert stat.S_IMODE(folder.stat().st_mode) == modes[0]
    assert {stat.S_IMODE((folder / file).stat().st_mode) for file in FILES} == {modes[1]}


def test_a_folder_passes_its_group_on(tmp_path):
    tmp_path.chmod(0o2770)
    folder = write_checkpoint(tmp_path, TREE, step=0)
    assert folder.stat().st_mode & stat.S_ISGID


def test_nobody_else_may_write_to_a_folder_that_is_being_written(tmp_path, monkeypatch):
    """In a shared folder, a link could be put where the next file will be."""
    before = os.umask(0)
    seen = []
    really = files.save_file

    def save_file(tensors, path):
        seen.append(stat.S_IMODE(path.parent.stat().st_mode))
        really(tensors, path)

    monkeypatch.setattr(files, "save_file", save_file)
    try:
        write_checkpoint(tmp_path, TREE, step=0)
    finally:
        os.umask(before)
    assert seen == [0o700]


@pytest.mark.parametrize("doing", ["writing", "removing"])
def test_what_is_put_where_a_draft_was_expected_is_in_nobodys_way(tmp_path, doing):
    """Drafts have names that nobody can predict."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (victim / "tensors.safetensors").write_text("keep")
    write_checkpoint(run, TREE, step=20)
    planted = run / f".step-000000{40 if doing == 'writing' else 20}.{doing}-"
    planted = planted.with_name(f"{planted.name}{platform.node()}-{os.getpid()}")
    planted.symlink_to(victim)
    write_checkpoint(run, TREE, step=40, keep=1)
    assert names(run) == [planted.name, "step-00000040"]
    assert (victim / "tensors.safetensors").read_text() == "keep"


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        write_checkpoint(tmp_path, {"step": step}, step=step, keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000020"]
    write_checkpoint(tmp_path, {}, step=25, keep=1)
    assert names(tmp_path) == ["step-00000025"]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (100_000_000, 7, 99_999_999):
        write_checkpoint(tmp_path, step, step=step)
    listed = [path.name for path in list_checkpoints(tmp_path)]
    assert listed == ["step-00000007", "step-99999999", "step-100000000"]
    assert read_checkpoint(tmp_path) == 100_000_000


def test_a_run_that_resumed_earlier_keeps_its_new_and_all_later_checkpoints(tmp_path):
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step, step=step, keep=4)
    write_checkpoint(tmp_path, "again", step=20, keep=1)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]
    assert read_checkpoint(tmp_path / "step-00000020") == "again"


def test_a_checkpoint_that_another_training_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    """Two trainings that save in one folder, each with `keep=1`."""
    really = files._move_into_place

    def move(hidden, final):
        really(hidden, final)
        monkeypatch.setattr(files, "_move_into_place", really)
        write_checkpoint(tmp_path, "theirs", step=40, keep=1)

    monkeypatch.setattr(files, "_move_into_place", move)
    write_checkpoint(tmp_path, "mine", step=20, keep=1)
    assert names(tmp_path) == ["step-00000040"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    for tree in ("old", "new"):
        write_checkpoint(tmp_path, tree, step=20)
    assert names(tmp_path) == ["step-00000020"]
    assert read_checkpoint(tmp_path) == "new"


def test_foreign_entries_do_not_count(tmp_path):
    write_checkpoint(tmp_path, "mine", step=20)
    foreign = ["step-30", "step-000000030", "step-00000030x", "notes", ".step-00000030", "step--"]
    for name in [*foreign, f".step-00000030.writing-{platform.node()}-{os.getppid()}"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000040").write_text("a file")
    before = names(tmp_path)
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000020"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000020"
    write_checkpoint(tmp_path, "mine", step=20)
    assert names(tmp_path) == before


def ended_process():
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_only_leftovers_of_ended_processes_of_this_machine_are_removed(tmp_path):
    ended, here = ended_process(), platform.node()
    gone = [
        f".step-00000010.writing-{here}-{ended}",
        f".step-00000010.old.removing-{here}-{ended}",
        f".step-00000010.writing-{here}-{10**30}",
        f".step-00000010.writing-{here}-{ended}.0123456789abcdef",
        f".step-00000010.old.removing-{here}-{ended}.{'0' * 16}",
        f".step-00000010.writing-{here}-{os.getpid()}.{'0' * 16}",  # of one with the same ID
    ]
    stay = [f".step-00000010.writing-{here}-1", f".step-00000010.writing-x{here}-{ended}"]
    stay += [f".step-00000010.writing-{here}-1.0123456789abcdef"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.safetensors").touch()
    write_checkpoint(tmp_path, {}, step=20)
    assert names(tmp_path) == sorted([*stay, "step-00000020"])


def test_what_another_thread_writes_is_no_leftover(tmp_path):
    def look(hidden):
        write_checkpoint(tmp_path, {}, step=10)
        assert hidden.is_dir()
        return lambda state: (state, {})

    write_checkpoint(tmp_path, {}, step=20, others=look)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_a_checkpoint_that_is_being_replaced_counts_until_the_new_one_is_there(tmp_path):
    write_checkpoint(tmp_path, "old", step=20)
    aside = tmp_path / "step-00000020.old"
    (tmp_path / "step-00000020").rename(aside)
    assert list_checkpoints(tmp_path) == [aside]
    assert read_checkpoint(tmp_path) == "old"
    assert read_checkpoint(aside) == "old"
    write_checkpoint(tmp_path, "new", step=20)
    assert names(tmp_path) == ["step-00000020"]
    assert read_checkpoint(tmp_path) == "new"


@pytest.mark.parametrize(("step", "keep"), [(-1, 3), (1, 0)])
def test_impossible_numbers_are_refused(tmp_path, step, keep):
    with pytest.raises(InputError, match=f"got step {step} and keep {keep}"):
        write_checkpoint(tmp_path, {}, step=step, keep=keep)
