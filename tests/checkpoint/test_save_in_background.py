"""Checkpoints that are written while training continues, and the errors of writing them."""

import contextlib
import threading

import pytest

import evenstep
from evenstep.checkpoint import async_writer
from evenstep.checkpoint.files import list_checkpoints
from evenstep.errors import CheckpointError, SaveError
from patience import wait
from resuming import LOSS, parts, run


class SlowDisk:
    """Delays the writing of a checkpoint until `free` is set."""

    def __init__(self, monkeypatch):
        self.asked, self.free = threading.Event(), threading.Event()
        self._write = async_writer.write_checkpoint
        monkeypatch.setattr(async_writer, "write_checkpoint", self)

    def __call__(self, *args, **options):
        self.asked.set()
        wait(self.free)
        return self._write(*args, **options)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch, max_in_flight):
    disk = SlowDisk(monkeypatch)
    names = ("batch_norm", "adam", "steps")
    model, optimizer, options = parts(*names)
    options["max_in_flight"] = max_in_flight
    with evenstep.Trainer(model, optimizer, LOSS, devices=2, **options) as trainer:
        run(trainer, 3)
        place = trainer.save(tmp_path, background=True)
        wait(disk.asked)
        run(trainer, 5)
        trainer.waitall()
        assert list_checkpoints(tmp_path) == []
        disk.free.set()
        trainer.wait_for_save()
        assert list_checkpoints(tmp_path) == [place]
    model, optimizer, options = parts(*names, seed=9)
    with evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=1, **options) as resumed:
        assert resumed.steps_done == 3
        run(resumed, 5)
    assert resumed.fingerprint() == trainer.fingerprint()


def test_closing_waits_for_the_disk(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        run(trainer, 2)
        trainer.save(tmp_path, background=True)
        wait(disk.asked)
        threading.Timer(0.2, disk.free.set).start()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert not [one for one in threading.enumerate() if one.name.startswith("evenstep")]


def trainer_with_a_file_in_the_way(folder):
    (folder / "file").write_text("in the way")
    model, optimizer, _ = parts("convolution")
    return evenstep.Trainer(model, optimizer, LOSS, devices=1)


@pytest.mark.parametrize(
    "use",
    [
        lambda trainer, folder: trainer.save(folder),
        lambda trainer, folder: trainer.save(folder, background=True),
        lambda trainer, folder: trainer.wait_for_save(),
        lambda trainer, folder: trainer.__exit__(None, None, None),
    ],
)
def test_an_error_of_the_writer_is_raised_by_the_next_call(tmp_path, use):
    trainer = trainer_with_a_file_in_the_way(tmp_path)
    with trainer:
        run(trainer, 1)
        trainer.save(tmp_path / "file", background=True)
        with pytest.raises(SaveError, match="in the way"):
            use(trainer, tmp_path / "good")
        if trainer._session.is_open:
            trainer.save(tmp_path / "good")


def test_a_step_raises_an_error_of_the_writer_and_is_not_taken(tmp_path):
    trainer = trainer_with_a_file_in_the_way(tmp_path)
    with trainer:
        run(trainer, 1)
        trainer.save(tmp_path / "file", background=True)
        with contextlib.suppress(SaveError):
            trainer._saver.writer.pending.result()
        with pytest.raises(SaveError, match="in the way"):
            run(trainer, 2)
        assert trainer.steps_done == 1
        run(trainer, 2)


def test_an_error_has_the_writers_error_as_a_note(tmp_path):
    def fail(trainer):
        with trainer:
            run(trainer, 1)
            trainer.save(tmp_path / "file", background=True)
            raise KeyError("of the user's")

    with pytest.raises(KeyError) as caught:
        fail(trainer_with_a_file_in_the_way(tmp_path))
    assert "in the way" in caught.value.__notes__[0]


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        run(trainer, 1)
        optimizer.state[next(model.parameters())]["a function"] = len
        with pytest.raises(CheckpointError, match="a function"):
            trainer.save(tmp_path, background=True)
