"""Programs like public ones, with at most five lines changed, train the same on any devices."""

import dataclasses
import functools
import json
import re
import runpy
import sys

import pytest

from launched import launched
from strangers import FOLDER, diff_of, even_source, run

MOST_LINES = 5


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A program of `examples/strangers`.

    Args:
        few: arguments for a short training that prints its progress often.
        alike: further arguments with which nothing in a step is random, so that the losses of the
            program as it stands are those of evenstep to rounding; None if there are none.
        stop: the line of progress at which it is stopped, to be resumed: in the middle of an epoch,
            or at the end of one where the loop draws the data itself.
        needs: a library.
    """

    few: str
    alike: str | None = ""
    stop: int = 11
    needs: str = "torch"


STRANGERS = {
    "dcgan": Stranger("--niter 2", None),
    "mnist": Stranger("--epochs 2 --log-interval 1", "--dropout 0"),
    "nanogpt": Stranger("--max_iters 9", "--dropout 0", stop=5),
    "run_glue": None,  # see test_a_program_with_the_trainer_of_transformers_...
    "run_glue_no_trainer": Stranger("--num_train_epochs 2", "--dropout 0", needs="transformers"),
    "siamese_network": Stranger("--epochs 2 --log-interval 1"),
    "time_sequence_prediction": Stranger("", stop=2),
    "train_unconditional": Stranger("", stop=8, needs="diffusers"),
    "vae": Stranger("--epochs 2 --log-interval 1", None),
    "vision_transformer": Stranger("--epochs 2", "--dropout 0"),
    "word_language_model_lstm": Stranger("--epochs 2", "--dropout 0", stop=7),
    "word_language_model_transformer": Stranger("--epochs 2", "--dropout 0", stop=7),
}
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/plain.py"))
OWN_LOOPS = [name for name in NAMES if STRANGERS[name]]
ALIKE = [name for name in OWN_LOOPS if STRANGERS[name].alike is not None]
READ_ME = (FOLDER / "README.md").read_text(encoding="utf-8")
ORIGIN = re.compile(r"^The original: (https://github\.com/\S+)$", re.MULTILINE)
ROW = re.compile(r"^\| \[(\w+)\]\(\w+\) \| \[[^]]+\]\((\S+)\) \| (\d+) \| (\d+) \|", re.MULTILINE)


def changes(name):
    """Return how many lines a diff adds (a changed line counts as one), and how many it removes."""
    return tuple(sum(line.startswith(sign) for line in diff_of(name)) for sign in "+-")


def program(name, folder):
    """Write the program that a diff makes; return its file."""
    pytest.importorskip(STRANGERS[name].needs if STRANGERS[name] else "transformers")
    source = folder / "even.py"
    source.write_text(even_source(name))
    return source


def losses(lines):
    return [float(re.match(r"[\d.]+", told)[0]) for _, _, told in lines]


def test_every_program_is_tried():
    assert sorted(STRANGERS) == NAMES
    assert len(NAMES) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_are_added_or_changed(name):
    added, removed = changes(name)
    assert 0 < added <= MOST_LINES
    assert all(len(line) <= 101 for line in diff_of(name))
    compile(even_source(name), name, "exec")
    (address,) = ORIGIN.findall(even_source(name))
    listed = {row[0]: row[1:] for row in ROW.findall(READ_ME)}
    assert listed[name] == (address, str(added), str(removed))


def test_one_program_trains_the_same_on_two_devices(tmp_path):
    source = program("mnist", tmp_path)
    one = run(source, ["--epochs", "1", "--log-interval", "4"])
    assert len(one) == 4
    assert run(source, ["--epochs", "1", "--log-interval", "4"], devices=2) == one


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_program_has_one_fingerprint_on_any_devices_before_and_after_a_resume(name, tmp_path):
    source, arguments = program(name, tmp_path), STRANGERS[name].few.split()
    one, stop = run(source, arguments), STRANGERS[name].stop
    assert stop < len(one)
    assert len({fingerprint for _, fingerprint, _ in one}) == len(one)  # it learns on every line
    for devices in (2, 3):
        assert run(source, arguments, devices=devices) == one
    begun = run(source, arguments, devices=2, save=(stop, tmp_path / "checkpoints"))
    assert begun == one[:stop]
    last, resume = one[-1][0], tmp_path / "checkpoints"
    assert run(source, arguments, devices=3, resume=resume, until=last) == one[stop:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_program_has_one_fingerprint_in_two_processes_before_and_after_a_resume(name, tmp_path):
    source, arguments = program(name, tmp_path), STRANGERS[name].few.split()
    one = [[*line] for line in run(source, arguments, devices=2)]
    finished = launched(2, "stranger.py", tmp_path, source, STRANGERS[name].stop, *arguments)
    assert finished.returncode == 0, finished.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [one, one]


@pytest.mark.slow
def test_a_program_ends_in_two_processes_as_it_stands(tmp_path):
    finished = launched(2, program("mnist", tmp_path), "--epochs", "1", "--log-interval", "1")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert finished.stdout.count("train epoch 1") == 2 * 13
    assert finished.stdout.count("test loss") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALIKE)
def test_a_program_trains_what_it_trained_before(name, tmp_path):
    """With one shard (batch normalization is of a shard), and batches in the loader's own order."""
    source = program(name, tmp_path)
    arguments = [*STRANGERS[name].few.split(), *STRANGERS[name].alike.split()]
    plain = run(FOLDER / name / "plain.py", arguments)
    even = run(source, arguments, shards=1)
    assert losses(even) == pytest.approx(losses(plain), rel=1e-4)
    assert len(even) > 3


def fine_tuned(source, out, monkeypatch, devices, *arguments):
    """Run a program with the trainer of transformers; return what it has logged and saved."""
    from evenstep.integrations import transformers as integration

    even_trainer = functools.partial(integration.EvenTrainer, devices=devices)
    arguments = ["--output_dir", str(out), *arguments]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [str(source), *arguments])
        patched.setattr(integration, "EvenTrainer", even_trainer)
        runpy.run_path(str(source), run_name="__main__")
    history = json.loads((out / "checkpoint-20" / "trainer_state.json").read_text())["log_history"]
    log = [(one["loss"], one["grad_norm"]) for one in history if "loss" in one]
    assert len(log) == 20
    return log, (out / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the libraries' own
def test_a_program_with_the_trainer_of_transformers_trains_the_same(tmp_path, monkeypatch):
    source = program("run_glue", tmp_path)
    one, *others = (
        fine_tuned(source, tmp_path / f"{devices}", monkeypatch, devices) for devices in (1, 2, 3)
    )
    assert others == [one, one]
    stopped = ["--resume_from_checkpoint", str(tmp_path / "2" / "checkpoint-7")]
    assert fine_tuned(source, tmp_path / "resumed", monkeypatch, 3, *stopped) == one
    alike = ["--dropout", "0"]
    plain = FOLDER / "run_glue" / "plain.py"
    log, _ = fine_tuned(plain, tmp_path / "plain", monkeypatch, 1, *alike)
    found, _ = fine_tuned(source, tmp_path / "alike", monkeypatch, 2, *alike)
    for got, wanted in zip(found, log, strict=True):
        assert got == pytest.approx(wanted, rel=1e-3)
