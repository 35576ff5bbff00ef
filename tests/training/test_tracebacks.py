"""The traceback of an error shows the user's lines, without evenstep's where they say nothing."""

import logging
import sys
import traceback

import pytest
import torch
from torch import nn

import evenstep
from dying import NoNotesError
from evenstep.training import trainer as trainer_module
from trainers import open_trainer
from zoo import make_batches

BATCH = make_batches((24,))[0]


class Broken(nn.Module):
    """Fails in a line that its author wants to see."""

    def __init__(self, error=None):
        super().__init__()
        self.layer, self.error = nn.Linear(36, 5), error

    def forward(self, x):
        if self.error is not None:
            raise self.error()
        return self.layer(x)  # its input needs to be flat


def modules_of(error):
    """Return the packages of the frames of a traceback, outermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    names = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in walked]
    if sys.version_info < (3, 11) and names.count("evenstep") == 1:
        names.remove("evenstep")  # where one of ours has hidden the others, it stays itself
    return names


@pytest.mark.parametrize("call", ["step", "backward", "evaluate", "predict", "float", "waitall"])
def test_an_error_in_the_model_shows_the_users_lines_and_those_of_torch(call):
    flights = 2 if call in ("float", "waitall") else 1
    calls = {
        "step": lambda: trainer.step(*BATCH),
        "backward": lambda: trainer.backward(*BATCH),
        "evaluate": lambda: trainer.evaluate([BATCH], {"right": evenstep.metrics.accuracy}),
        "predict": lambda: trainer.predict([BATCH[0]]),
        "float": lambda: float(trainer.step(*BATCH)),
        "waitall": lambda: (trainer.step(*BATCH), trainer.waitall()),
    }
    with (
        pytest.raises(RuntimeError, match="cannot be multiplied") as caught,
        open_trainer(Broken(), devices=1, max_in_flight=flights, check="off") as trainer,
    ):
        calls[call]()
    found = modules_of(caught.value)
    assert "evenstep" not in found
    assert found[0] == found[1] == __name__  # the test, and the lambda
    assert found.count(__name__) == 3  # and forward
    assert "torch" in found
    assert any("examples 0 to 2 of your batch" in note for note in caught.value.__notes__)


def test_an_error_that_evenstep_raises_on_purpose_points_at_the_users_line():
    model = nn.Linear(4, 4)
    with pytest.raises(evenstep.errors.InputError) as caught:
        evenstep.Trainer(model, torch.optim.SGD(model.parameters()), None, precision="fp8")
    assert modules_of(caught.value) == [__name__]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: evenstep.Trainer(nn.Linear(4, 4), None, device=1), "unexpected keyword argument"),
        (lambda: evenstep.verify(), "missing 2 required positional arguments"),
        (lambda: evenstep.data.digits(True, False), "takes from 0 to 1 positional arguments"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_python_s_error_alone(call, line):
    with pytest.raises(TypeError, match=line) as caught:
        call()
    assert modules_of(caught.value) == [__name__] * 2


def test_an_error_inside_a_call_that_looks_like_one_of_its_arguments_keeps_its_frames(monkeypatch):
    def fail(*_, **__):
        raise TypeError("a fault of ours")

    with open_trainer(nn.Linear(4, 4)) as trainer:
        monkeypatch.setattr(trainer._agreement, "compare", own(fail))
        with pytest.raises(TypeError, match="a fault of ours") as caught:
            trainer.evaluate([], {})
    assert modules_of(caught.value).count("evenstep") >= 2


def test_errors_outside_a_trainer_point_at_the_users_line(tmp_path):
    calls = [
        lambda: evenstep.verify(None, []),
        lambda: evenstep.export(nn.Linear(4, 4), torch.ones(2, 4), "it.pt"),
        lambda: evenstep.load_exported(tmp_path / "missing.pt2"),
        lambda: evenstep.find_devices(0),
        lambda: evenstep.shared(1),
        lambda: evenstep.data.Loader([], 0),
        lambda: evenstep.data.fashion_mnist(data_dir=tmp_path),
    ]
    for call in calls:
        with pytest.raises(evenstep.errors.EvenstepError) as caught:
            call()
        assert modules_of(caught.value) == [__name__] * 2


def test_if_evenstep_itself_fails_all_frames_stay(monkeypatch):
    def fail(*_, **__):
        raise AttributeError("a fault of ours")

    with open_trainer(nn.Sequential(nn.Flatten(), nn.Linear(36, 5))) as trainer:
        monkeypatch.setattr(trainer, "_step", own(fail))
        with pytest.raises(AttributeError, match="a fault of ours") as caught:
            trainer.step(*BATCH)
    assert modules_of(caught.value).count("evenstep") >= 2


def own(function):
    """Return a function as if it stood in evenstep's trainer."""
    return type(function)(function.__code__, {**vars(trainer_module)}, closure=function.__closure__)


def test_an_error_shortens_the_one_that_it_came_from_too(tmp_path):
    (tmp_path / "it.pt2").write_bytes(b"no archive")
    with pytest.raises(evenstep.errors.EvenstepError) as caught:
        evenstep.load_exported(tmp_path / "it.pt2")
    assert caught.value.__cause__ is not None
    assert "evenstep" not in modules_of(caught.value.__cause__)


def test_a_fault_of_evenstep_under_another_error_keeps_its_frames(monkeypatch):
    def fail(*_, **__):
        raise AttributeError("a fault of ours")

    with open_trainer(nn.Sequential(nn.Flatten(), nn.Linear(36, 5))) as trainer:
        monkeypatch.setattr(trainer, "_step", own(fail))

        def step():
            try:
                trainer.step(*BATCH)
            except AttributeError:
                evenstep.find_devices(0)

        with pytest.raises(evenstep.errors.InputError) as caught:
            step()
    assert modules_of(caught.value.__context__).count("evenstep") >= 2


def test_the_level_debug_shows_all_frames(caplog):
    with (
        caplog.at_level(logging.DEBUG, "evenstep"),
        pytest.raises(RuntimeError) as caught,
        open_trainer(Broken(), check="off") as trainer,
    ):
        trainer.step(*BATCH)
    assert modules_of(caught.value).count("evenstep") > 5


def test_an_error_that_refuses_to_be_changed_is_shortened_too():
    with (
        pytest.raises(NoNotesError) as caught,
        open_trainer(Broken(NoNotesError), check="off") as trainer,
    ):
        trainer.step(*BATCH)
    assert "evenstep" not in modules_of(caught.value)
