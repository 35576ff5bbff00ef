"""Files that a command writes: completely, through links, and into streams."""

import os
import subprocess
import sys
import threading

import pytest

from evenstep.cli.terminal.files import OutputFile, target_of, write_text
from evenstep.errors import InputError
from marks import slow


def test_a_file_is_written_whole(tmp_path):
    write_text(str(tmp_path / "out.json"), "{}\n")
    assert (tmp_path / "out.json").read_text() == "{}\n"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    link = tmp_path / "newest.json"
    link.symlink_to("3.json")
    assert OutputFile().convert(str(link), None, None) == str(link)
    write_text(str(link), "{}\n")
    assert link.is_symlink()
    assert target_of(str(link)) == tmp_path.resolve() / "3.json"
    assert (tmp_path / "3.json").read_text() == "{}\n"


def test_a_pipe_gets_the_text(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert OutputFile(may_be_stream=True).convert(str(pipe), None, None) == str(pipe)
    write_text(str(pipe), "{}\n")
    reader.join()
    assert read == ["{}\n"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["/dev/null", "/", "nowhere/file", "circle", "astray"])
def test_what_can_never_be_a_file_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for link, target in (("circle", "back"), ("back", "circle"), ("astray", "nowhere/file")):
        (tmp_path / link).symlink_to(target)
    with pytest.raises(InputError, match=f"^got file {name}: expected a file in an"):
        OutputFile().convert(name, None, None)


SAY_AND_WRITE = """
import sys
from evenstep.cli.terminal.files import OutputFile, write_text
print("before")
name = OutputFile(may_be_stream=True).convert(sys.argv[1], None, None)
write_text(name, "{}\\n")
print("after")
"""


NAMES = ["/dev/stdout", *(slow(name) for name in ("/dev/fd/1", "/proc/self/fd/1"))]


@pytest.mark.parametrize("name", [*NAMES, slow("link")])
def test_stdout_by_its_name_is_written_where_it_stands_also_if_it_is_a_file(tmp_path, name):
    """A file must not be replaced, or overwritten from its beginning, under the shell's hands."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    out = tmp_path / "out"
    out.write_text("earlier\n")
    inode = out.stat().st_ino
    with out.open("a") as file:
        subprocess.run(
            [sys.executable, "-c", SAY_AND_WRITE, name], cwd=tmp_path, stdout=file, check=True
        )
    assert out.read_text() == "earlier\nbefore\n{}\nafter\n"
    assert out.stat().st_ino == inode


@pytest.mark.parametrize("name", NAMES)
def test_stdout_is_no_place_for_a_file_that_is_replaced(tmp_path, name):
    line = "from evenstep.cli.terminal.files import OutputFile; import sys\n"
    line += "OutputFile().convert(sys.argv[1], None, None)"
    with (tmp_path / "out").open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", line, name], stdout=file, stderr=subprocess.PIPE, text=True
        )
    assert f"InputError: got file {name}: expected a file in an existing folder" in done.stderr


def test_a_stream_is_never_made_a_file(tmp_path):
    """Not even where it was removed after the options were read."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    really = os.open

    def open_late(path, *arguments):
        pipe.unlink(missing_ok=True)
        return really(path, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_late)
        with pytest.raises(FileNotFoundError):
            write_text(str(pipe), "{}\n")
    assert os.listdir(tmp_path) == []


def test_a_link_of_another_user_is_not_followed(tmp_path, monkeypatch):
    """In a shared folder it may lead to any file that only you may write."""
    (tmp_path / "mine").write_text("keep")
    link = tmp_path / "out.json"
    link.symlink_to("mine")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    really = os.lstat

    def of_another_user(path, **options):
        status = [*really(path, **options)]
        status[4] = os.getuid() + 2
        return os.stat_result(status)

    monkeypatch.setattr(os, "lstat", of_another_user)
    for use in (target_of, lambda name: OutputFile().convert(name, None, None)):
        with pytest.raises(InputError) as caught:
            use(str(link))
        assert str(caught.value) == (
            f"{link} is a link that another user has made: give the path of the file itself"
        )
    assert (tmp_path / "mine").read_text() == "keep"
