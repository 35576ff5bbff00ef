"""Files that a command writes: completely, through links, and into streams."""

import os
import threading

import pytest

from evenstep.cli.files import OutputFile, target_of, write_text
from evenstep.errors import InputError


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


@pytest.mark.parametrize("name", ["/dev/null", "/", "nowhere/file"])
def test_what_can_never_be_a_file_is_refused_at_once(name):
    with pytest.raises(InputError, match=f"^got file {name}: expected a file in an"):
        OutputFile().convert(name, None, None)
