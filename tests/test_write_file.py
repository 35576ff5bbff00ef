"""Files that are written whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from evenstep.files import flush, write_file


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x00\xff", b"\x00\xff"),
        ("größer\n", "größer\n".encode()),
        (lambda file: file.write(b"by a function"), b"by a function"),
        ("", b""),
    ],
    ids=["bytes", "text", "function", "empty"],
)
@pytest.mark.parametrize("before", [None, b"something longer that was there before"])
def test_a_file_gets_its_content_and_nothing_else_is_left(tmp_path, content, expected, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    write_file(path, content)
    assert path.read_bytes() == expected
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["x" * 255, "\N{GRINNING FACE}" * 63], ids=["ascii", "wide"])
def test_the_longest_name_that_the_disk_allows_will_do(tmp_path, name):
    write_file(tmp_path / name, "text")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_that_open_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_file(tmp_path / "ours", "text")
        (tmp_path / "plain").write_text("text")
    finally:
        os.umask(before)
    ours, plain = ((tmp_path / name).stat().st_mode for name in ("ours", "plain"))
    assert ours == plain


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    write_file(path, "text")
    assert stat.S_IMODE(path.stat().st_mode) == mode


def write_and_fail(error):
    def write(file):
        file.write(b"half")
        raise error

    return write


ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
    ValueError("of the function's own"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_write_that_is_cut_short_changes_nothing(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(type(error)) as caught:
        write_file(path, write_and_fail(error))
    assert caught.value is error
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_disk_that_is_full_changes_nothing(tmp_path, monkeypatch):
    """The bytes are refused when they leave the buffer, as by a disk that has just become full."""
    path = tmp_path / "file"
    path.write_text("before")

    def fill(file):
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), file.fileno())
        file.write(b"x" * 100)

    with pytest.raises(OSError, match="No space left on device"):
        write_file(path, fill)
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def test_a_rename_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")

    def refuse(*arguments, **options):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "replace", refuse)  # which Python 3.10 does not look up in os
    with pytest.raises(OSError, match="busy"):
        write_file(path, "after")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def test_the_draft_is_on_the_disk_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")
    seen = []
    really = os.fsync

    def fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        seen.append((kind, os.fstat(descriptor).st_size if kind == "file" else path.read_text()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(path, "after!")
    assert seen == [("file", 6), ("folder", "after!")]


def test_a_link_is_refused_and_what_it_leads_to_is_untouched(tmp_path):
    (tmp_path / "secret").write_text("keep")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="it is a symbolic link"):
        write_file(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "secret").read_text() == "keep"
    assert names(tmp_path) == ["link", "secret"]


def test_a_link_in_place_of_the_draft_is_not_followed(tmp_path, monkeypatch):
    """Its name can't be predicted; here it is."""
    (tmp_path / "secret").write_text("keep")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    link = tmp_path / f".file.{'0' * 16}.draft"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", "text")
    assert (tmp_path / "secret").read_text() == "keep"
    assert names(tmp_path) == [link.name, "secret"]


def test_drafts_have_names_of_their_own(tmp_path):
    drafts = []

    def note(file):
        drafts.append(file.name)

    for _ in range(2):
        write_file(tmp_path / "file", note)
    assert len(set(drafts)) == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "there")
    with pytest.raises(OSError, match="it is not a regular file: give the path of a file") as error:
        write_file(tmp_path / "there", "text")
    assert error.value.filename == str(tmp_path / "there")
    assert names(tmp_path) == ["there"]
    assert not (tmp_path / "there").is_file()


def test_a_device_is_not_replaced():
    with pytest.raises(OSError, match="not a regular file"):
        write_file("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "folder" / "file", "text")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_folder_that_cannot_be_flushed_will_do_but_a_file_must_be(tmp_path, monkeypatch, code):
    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    flush(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)):
        flush(tmp_path / "file")


def test_a_folder_with_an_error_of_the_disk_is_not_taken_for_flushed(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        flush(tmp_path)
