"""Checkpoints on the disk: written whole or not at all, and refused if anything is damaged."""

import ast
import errno
import json
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_codec import DTYPES, random_tensor, same

import evenstep.checkpoint.codec
import evenstep.checkpoint.files
from evenstep.checkpoint import files
from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints, read_checkpoint
from evenstep.errors import CheckpointError, InputError, SaveError

TREE = {
    "experiment": {"shards": 8, "seed": 0, "precision": "fp32"},
    "cursor": {"epoch": 1, "step": 40, "loss": float("nan")},
    "model": {f"{dtype}": random_tensor(dtype, 2, 3) for dtype in DTYPES},
    "optimizer": {"state": {0: {"step": torch.tensor(40.0)}}, "betas": (0.9, 0.999)},
    "scheduler": None,
}
FILES = ["manifest.json", "tensors.safetensors"]


def write_checkpoint(folder, tree, **options):
    return files.write_checkpoint(folder, encode(tree), **options)


def names(folder):
    return sorted(entry.name for entry in Path(folder).iterdir())


def test_a_checkpoint_comes_back_exactly(tmp_path):
    folder = write_checkpoint(tmp_path / "a" / "run", TREE, step=40)
    assert folder == tmp_path / "a" / "run" / "step-00000040"
    assert names(folder) == FILES
    assert names(folder.parent) == ["step-00000040"]
    assert same(read_checkpoint(folder), TREE)
    assert same(read_checkpoint(folder.parent), TREE)
    assert same(read_checkpoint(str(folder.parent)), TREE)


@pytest.mark.parametrize("tree", [{}, None, [1, (2.5, "three")], torch.ones(3), torch.ones(0)])
def test_any_tree_can_be_stored(tmp_path, tree):
    assert same(read_checkpoint(write_checkpoint(tmp_path, tree, step=0)), tree)


def test_the_files_can_be_read_without_evenstep(tmp_path):
    folder = write_checkpoint(tmp_path, {"model": {"w": torch.ones(2)}, "lr": 0.1}, step=7)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "evenstep checkpoint"
    assert manifest["version"] == 1
    assert manifest["step"] == 7
    assert manifest["torch"] == torch.__version__
    assert manifest["state"]["lr"] == 0.1
    assert torch.equal(load_file(folder / "tensors.safetensors")["model/w"], torch.ones(2))


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path):
    folder = write_checkpoint(tmp_path, TREE, step=0)
    modes = {stat.S_IMODE((folder / file).stat().st_mode) for file in FILES}
    plain = tmp_path / "plain"
    plain.touch()
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0])
def test_a_folder_has_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path, TREE, step=0)
        plain = tmp_path / "plain"
        plain.mkdir()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


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


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
SCHEDULES = torch.optim.lr_scheduler
SCHEDULERS = {
    "plateau": lambda o: SCHEDULES.ReduceLROnPlateau(o, patience=1),
    "multistep": lambda o: SCHEDULES.MultiStepLR(o, [2, 2, 4]),
    "onecycle": lambda o: SCHEDULES.OneCycleLR(
        o, max_lr=0.5, total_steps=20, cycle_momentum=not isinstance(o, torch.optim.Adagrad)
    ),
    "warm restarts": lambda o: SCHEDULES.CosineAnnealingWarmRestarts(o, T_0=2),
    "sequential": lambda o: SCHEDULES.SequentialLR(
        o, [SCHEDULES.LinearLR(o, total_iters=2), SCHEDULES.ExponentialLR(o, 0.9)], [2]
    ),
}


class Run:
    """A small training, uninterrupted or resumed from a checkpoint."""

    def __init__(self, optimizer, scheduler):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    def train(self, first, last):
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(8.0).view(2, 4) / 8).square().mean() + step
            loss.backward()
            self.optimizer.step()
            plateau = isinstance(self.scheduler, SCHEDULES.ReduceLROnPlateau)
            self.scheduler.step(*([loss.item()] if plateau else []))

    def state(self):
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_resumes_from_its_checkpoint_bit_for_bit(tmp_path, optimizer, scheduler):
    unbroken = Run(optimizer, scheduler)
    unbroken.train(0, 3)
    write_checkpoint(tmp_path, unbroken.state(), step=3)
    resumed = Run(optimizer, scheduler)
    state = read_checkpoint(tmp_path)
    assert same(state, unbroken.state())
    resumed.load(state)
    unbroken.train(3, 6)
    resumed.train(3, 6)
    assert same(resumed.state(), unbroken.state())


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


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    for tree in ("old", "new"):
        write_checkpoint(tmp_path, tree, step=20)
    assert names(tmp_path) == ["step-00000020"]
    assert read_checkpoint(tmp_path) == "new"


def test_foreign_entries_do_not_count(tmp_path):
    write_checkpoint(tmp_path, "mine", step=20)
    foreign = ["step-30", "step-000000030", "step-00000030x", "notes", ".step-00000030", "step--"]
    for name in [*foreign, f".step-00000030.writing-{platform.node()}-{os.getpid()}"]:
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
    ]
    stay = [f".step-00000010.writing-{here}-1", f".step-00000010.writing-x{here}-{ended}"]
    stay += [f".step-00000010.writing-{here}-1.0123456789abcdef"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.safetensors").touch()
    write_checkpoint(tmp_path, {}, step=20)
    assert names(tmp_path) == sorted([*stay, "step-00000020"])


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


# ---- damage found when a checkpoint is read


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run"), TREE, step=40)


def assert_refused(folder, path, change):
    """Check that `path` with `change(bytes)` is refused in a line that names it."""
    whole = path.read_bytes()
    changed = change(whole)
    assert changed != whole
    path.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
            read_checkpoint(folder)
        assert "\n" not in str(caught.value)
    finally:
        path.write_bytes(whole)


def flip(place, mask):
    return lambda whole: whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_flipped_byte_is_found(written, data):
    path = written / data.draw(st.sampled_from(FILES))
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    assert_refused(written, path, flip(place, data.draw(st.integers(1, 255))))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_truncation_and_addition_is_found(written, data):
    path = written / data.draw(st.sampled_from(FILES))
    length = data.draw(st.integers(0, path.stat().st_size - 1))
    assert_refused(written, path, lambda whole: whole[:length])
    assert_refused(written, path, lambda whole: whole + whole[length:])


def test_every_letter_of_the_manifest_counts(written):
    """Even those that mean the same in JSON: blanks, line ends, the case of hexadecimals."""
    path = written / "manifest.json"
    for place, letter in enumerate(path.read_bytes()):
        if chr(letter).isalpha() or chr(letter).isspace():
            swapped = {ord(" "): ord(" ") ^ ord("\t"), ord("\n"): ord("\n") ^ ord("\r")}
            assert_refused(written, path, flip(place, swapped.get(letter, 0x20)))


@pytest.fixture
def two(tmp_path):
    """Checkpoints of the steps 20 and 40."""
    for step in (20, 40):
        write_checkpoint(tmp_path, TREE, step=step)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_with_the_earlier_checkpoint(two, file):
    (two / "step-00000040" / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(two)
    line = f"{two / 'step-00000040'} lacks {file}; use the earlier {two / 'step-00000020'}"
    assert str(caught.value) == line
    assert same(read_checkpoint(two / "step-00000020"), TREE)


def test_damage_to_the_first_checkpoint_says_that_there_is_no_earlier_one(two):
    (two / "step-00000020" / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"has 0 bytes, but .* there is no earlier one beside it"
    ):
        read_checkpoint(two / "step-00000020")


def test_a_checkpoint_that_does_not_exist_is_named(two):
    with pytest.raises(CheckpointError, match=r"step-00000030 is not there; use the earlier .*20"):
        read_checkpoint(two / "step-00000030")


@pytest.mark.parametrize("text", ["{}", "[1]", '{"format": "pt"}', "1", '"evenstep checkpoint"'])
def test_a_foreign_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is not the manifest of an evenstep"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_manifest_that_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is truncated, damaged or not even"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("nbytes", [1 << 28, 1 << 42], ids=["too long", "terabytes"])
def test_a_manifest_that_promises_too_much_is_refused_before_it_is_read(two, nbytes):
    path = two / "step-00000040" / "manifest.json"
    os.truncate(path, nbytes + 1)
    with pytest.raises(CheckpointError, match=r"it has more than 268,435,456 bytes"):
        read_checkpoint(two)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(two, file, make):
    (two / "step-00000040" / file).unlink()
    make(two / "step-00000040" / file)
    with pytest.raises(CheckpointError):
        read_checkpoint(two)


def test_an_endless_device_is_refused_at_once(two):
    path = two / "step-00000040" / "manifest.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_checkpoint(two)


def seal_again(folder, **changes):
    """Write the manifest in `folder` with other fields and a hash that fits, as a forger would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    manifest.pop("sha256")
    body = evenstep.checkpoint.files._spell_fields(manifest)
    path.write_bytes(evenstep.checkpoint.files._seal(body))


def test_a_newer_version_is_refused_with_the_release_that_reads_it(two):
    seal_again(two / "step-00000040", version=2, evenstep="9.8.7")
    with pytest.raises(CheckpointError, match=r"version 2, but .* version 1: .* evenstep 9\.8\.7"):
        read_checkpoint(two)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": {"$unknown": 1}},
        {"state": {"$tensor": {"name": "x", "dtype": "float32", "shape": [], "strides": []}}},
        {"files": {}},
        {"files": 1},
        {"files": {"tensors.safetensors": 1}},
    ],
    ids=json.dumps,
)
def test_a_forged_manifest_is_refused(two, changes):
    seal_again(two / "step-00000040", **changes)
    with pytest.raises(CheckpointError, match=r"step-00000040.*; use the earlier .*step-00000020"):
        read_checkpoint(two)


def test_a_folder_of_another_program_is_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds config\.json, model\.safetensors; give"):
        read_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_is_refused_with_its_contents(tmp_path):
    (tmp_path / "file").touch()
    assert list_checkpoints(tmp_path / "nothing") == list_checkpoints(tmp_path / "file") == []
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="it is a file"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds file"):
        latest_checkpoint(tmp_path)


# ---- failures while a checkpoint is written


def assert_not_saved(folder, match, tree=TREE, step=40):
    before = names(folder)
    with pytest.raises(SaveError, match=match) as caught:
        write_checkpoint(folder, tree, step=step)
    assert "\n" not in str(caught.value)
    assert "the checkpoints so far are untouched" in str(caught.value)
    assert names(folder) == before


BIG = {"weight": torch.zeros(500_000)}  # 2,000,000 bytes


@pytest.fixture
def mounted(tmp_path):
    """A small disk of its own, of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not mount or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk can't be mounted here: that needs the rights of root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint(mounted):
    write_checkpoint(mounted, TREE, step=20)
    match = r"step-00000040 .*No space left on device, \d+ bytes are free, about 2000000 bytes are"
    assert_not_saved(mounted, match, BIG)
    assert same(read_checkpoint(mounted), TREE)
    write_checkpoint(mounted, TREE, step=40)


def test_a_read_only_disk_leaves_the_earlier_checkpoint(mounted):
    write_checkpoint(mounted, TREE, step=20)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    assert_not_saved(mounted, "Read-only file system, .*; save to a folder that can be written")
    assert same(read_checkpoint(mounted), TREE)


def test_a_limit_on_the_size_of_files_leaves_the_earlier_checkpoint(tmp_path):
    write_checkpoint(tmp_path, TREE, step=20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert_not_saved(tmp_path, "File too large, about 2000000 bytes.*; raise the limit", BIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(read_checkpoint(tmp_path), TREE)


@pytest.fixture
def nobody():
    """A folder that is read-only for the current user, who is not root meanwhile."""
    folder = Path(tempfile.mkdtemp())
    write_checkpoint(folder, TREE, step=20)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_without_permission_leaves_the_earlier_checkpoint(nobody):
    assert_not_saved(nobody, "Permission denied, .*; save to a folder that you may write")
    assert same(read_checkpoint(nobody), TREE)
    with pytest.raises(SaveError, match=r"Permission denied"):
        write_checkpoint(nobody / "new", TREE, step=1)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path, nobody):
    user = os.geteuid()
    os.seteuid(os.getuid())
    tmp_path.chmod(0)
    os.seteuid(user)
    try:
        for read in (read_checkpoint, list_checkpoints, latest_checkpoint):
            with pytest.raises(CheckpointError, match=r"can't be read \(Permission denied\)"):
                read(tmp_path)
    finally:
        os.seteuid(os.getuid())
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("inside", [".", "deeper", "much/deeper"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path, inside):
    (tmp_path / "file").touch()
    match = f"{tmp_path / 'file'} is in the way, .*; give a folder, not a file"
    with pytest.raises(SaveError, match=match):
        write_checkpoint(tmp_path / "file" / inside, TREE, step=40)


def test_a_file_in_place_of_the_checkpoint_is_named(tmp_path):
    write_checkpoint(tmp_path, TREE, step=20)
    (tmp_path / "step-00000040").touch()
    assert_not_saved(tmp_path, "step-00000040 could not be written: .* is in the way")


def test_an_interrupt_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, TREE, step=20)

    def interrupt(tensors, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(evenstep.checkpoint.files, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, TREE, step=40)
    assert names(tmp_path) == ["step-00000020"]


def test_a_folder_that_cannot_be_removed_is_named_in_a_warning(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, TREE, step=20)

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"step-00000020.* could not be removed \(.*busy"):
        write_checkpoint(tmp_path, TREE, step=40, keep=1)
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000040"]


def test_folders_need_not_be_flushed_but_files_must_be(tmp_path, monkeypatch):
    really = os.fsync

    def refuse(kind):
        def fsync(descriptor):
            if kind(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "Invalid argument")
            really(descriptor)

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(stat.S_ISDIR))
    write_checkpoint(tmp_path, TREE, step=20)
    monkeypatch.setattr(os, "fsync", refuse(stat.S_ISREG))
    assert_not_saved(tmp_path, "Invalid argument")


# A process that is killed. Each `stop` forks a child that exits without cleaning up, just before
# its n-th operation on the disk (or with half of the tensors written).
STOPS = """
import os, sys
from pathlib import Path
import torch
import evenstep.checkpoint.files as checkpoint
from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import list_checkpoints, read_checkpoint, write_checkpoint

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
OLD, NEW = (encode({"w": torch.full((99,), float(n))}) for n in (1, 2))

def is_same(one, two):
    return torch.equal(one["w"], two.tensors["w"])

def stop(n, folder, step, keep):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [n]
    def tick(event="ours", args=()):
        if event in EVENTS or event == "ours":
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
    fsync, save_file = os.fsync, checkpoint.save_file
    def save_half(tensors, path):
        save_file(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        tick()
        save_file(tensors, path)
    checkpoint.save_file = save_half
    os.fsync = lambda descriptor: (tick(), fsync(descriptor), tick())
    sys.addaudithook(tick)
    try:
        write_checkpoint(folder, NEW, step=step, keep=keep)
    except BaseException as error:
        print(repr(error))
        os._exit(1)
    os._exit(0)

def run(root, step, keep):
    was_new = False
    for n in range(1000):
        folder = Path(root) / str(n)
        write_checkpoint(folder, OLD, step=20)
        stopped = stop(n, folder, step, keep)
        tree = read_checkpoint(folder)
        is_new = is_same(tree, NEW)
        assert is_new or is_same(tree, OLD), n
        assert is_new or not was_new, n
        for path in list_checkpoints(folder):
            read_checkpoint(path)
        write_checkpoint(folder, OLD, step=60, keep=3)
        left = sorted(path.name for path in folder.iterdir())
        assert left == [path.name for path in list_checkpoints(folder)], left
        assert not any(name.startswith(".") for name in left), left
        was_new = is_new
        if not stopped:
            assert is_new
            print(f"{n} stops")
            return
run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.parametrize(("step", "keep"), [(40, 1), (20, 3)], ids=["next", "replaced"])
def test_a_kill_at_any_moment_leaves_an_undamaged_newest_checkpoint(tmp_path, step, keep):
    command = [sys.executable, "-c", STOPS, str(tmp_path), str(step), str(keep)]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 15


@pytest.mark.parametrize("module", [evenstep.checkpoint.files, evenstep.checkpoint.codec])
def test_no_pickle_is_read_or_written(module):
    tree = ast.parse(Path(module.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for name in (alias.name, getattr(node, "module", None))
    }
    assert not used & {"pickle", "save", "load", "dill", "eval", "exec", "marshal", "shelve"}
