"""A checkpoint is written whole or not at all: full disks, missing permissions, kills."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from test_codec import same

import evenstep.checkpoint.codec
import evenstep.checkpoint.files
from checkpoints import TREE, names, write_checkpoint
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints, read_checkpoint
from evenstep.errors import CheckpointError, SaveError
from warm import run


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


@pytest.mark.parametrize(
    ("step", "keep"),
    [pytest.param(40, 1, id="next", marks=pytest.mark.slow), pytest.param(20, 3, id="replaced")],
)
def test_a_kill_at_any_moment_leaves_an_undamaged_newest_checkpoint(tmp_path, step, keep):
    done = run("-c", STOPS, tmp_path, step, keep)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 15
