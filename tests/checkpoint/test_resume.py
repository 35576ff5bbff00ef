"""Runs stopped anywhere and resumed on other devices end with the bits of uninterrupted ones."""

import contextlib
import copy
import json
import threading

import numpy as np
import pytest
import torch
from torch import nn

import evenstep
from evenstep.checkpoint import async_writer
from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import list_checkpoints, read_checkpoint, write_checkpoint
from evenstep.checkpoint.fingerprint import named_state
from evenstep.data import Loader
from evenstep.errors import CheckpointError, InputError, SaveError
from layouts import own
from patience import wait
from reference import assert_same_bits, whole_state
from zoo import build, make_batches, options_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 6]),
}
LOSS = nn.CrossEntropyLoss()
X, Y = make_batches((53,))[0]
LOADER = Loader(torch.utils.data.TensorDataset(X, Y), 18, seed=3)  # 3 batches an epoch, the last 17


def parts(name="batch_norm", optimizer="sgd", scheduler="none", seed=0):
    model = build(name, seed)
    made = OPTIMIZERS[optimizer](model.parameters())
    made_scheduler = SCHEDULERS[scheduler](made)
    options = {} if made_scheduler is None else {"scheduler": made_scheduler}
    return model, made, {**options_of(model), **options}


def run(trainer, steps):
    """Train until `steps` steps since the start of the training are done."""
    while trainer.steps_done < steps:
        for batch in trainer.epoch(LOADER):
            loss = trainer.step(*batch)
            if isinstance(trainer.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                trainer.scheduler.step(float(loss))
            elif trainer.scheduler:
                trainer.scheduler.step()
            if trainer.steps_done == steps:
                return


def uninterrupted(steps, *names):
    model, optimizer, options = parts(*names)
    with evenstep.Trainer(model, optimizer, LOSS, devices=1, **options) as trainer:
        run(trainer, steps)
    return trainer


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("devices", [1, 2, 3, own(2)], ids=str)
def test_resuming_on_other_devices_mid_epoch(tmp_path, stop, devices):
    model, optimizer, _ = parts()
    with evenstep.Trainer(model, optimizer, LOSS, devices=2) as trainer:
        run(trainer, stop)
        trainer.save(tmp_path)
    model, optimizer, _ = parts(seed=9)
    with evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=devices) as resumed:
        assert resumed.steps_done == stop
        run(resumed, 8)
    whole = uninterrupted(8)
    assert resumed.fingerprint() == whole.fingerprint()
    assert_same_bits(whole_state(model, optimizer), whole_state(whole.model, whole.optimizer))


@pytest.mark.parametrize(
    "names",
    [
        *[("convolution", optimizer, "none") for optimizer in OPTIMIZERS],
        *[("convolution", "sgd", scheduler) for scheduler in SCHEDULERS],
        *[
            (name, "adam", "none")
            for name in ("recurrent", "tied", "unused", "branching", "mixed_dtypes", "noisy")
        ],
    ],
    ids="-".join,
)
def test_everything_that_training_continues_from_is_saved(tmp_path, names):
    model, optimizer, options = parts(*names)
    with evenstep.Trainer(model, optimizer, LOSS, devices=3, **options) as trainer:
        run(trainer, 4)
        trainer.save(tmp_path)
    model, optimizer, options = parts(*names, seed=9)
    resumed = evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=2, **options)
    with resumed:
        run(resumed, 7)
    whole = uninterrupted(7, *names)
    assert resumed.fingerprint() == whole.fingerprint()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in whole.optimizer.param_groups]


@pytest.fixture
def saved(tmp_path):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1, shards=4, seed=6) as trainer:
        run(trainer, 2)
        trainer.save(tmp_path)
    return tmp_path


def test_shards_and_seed_come_from_the_checkpoint(saved):
    model, optimizer, _ = parts("convolution")
    trainer = evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=2)
    assert (trainer.experiment.shards, trainer.experiment.seed) == (4, 6)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"shards": 8}, "shards 8 instead of 4"),
        ({"seed": 0}, "seed 0 instead of 6"),
        ({"precision": "bf16"}, "precision bf16 instead of fp32"),
        ({"memory_format": "contiguous"}, "memory_format contiguous instead of channels_last"),
        ({"threads": 2}, "threads 2 instead of 1"),
    ],
)
def test_another_experiment_is_refused(saved, option, line):
    model, optimizer, _ = parts("convolution")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=line):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1, **option)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_another_model_is_refused_by_naming_tensors(saved):
    model, optimizer, _ = parts("dropout")
    with pytest.raises(
        CheckpointError,
        match=r"another model: parameter 1\.weight is not in it.*its parameter 0\.weight is not in "
        r"the model",
    ):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


def test_another_shape_is_refused_by_naming_both(saved):
    model, _, _ = parts("convolution")
    model[4] = nn.Linear(20, 7)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(
        CheckpointError,
        match=r"4\.weight is float32 \(5, 20\) in it, float32 \(7, 20\) in the model",
    ):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


def test_another_optimizer_is_refused(saved):
    model, _, _ = parts("convolution")
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match="another optimizer"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


def test_another_kind_of_optimizer_is_refused(saved):
    model, optimizer, _ = parts("convolution", "adam")
    with pytest.raises(CheckpointError, match="optimizer"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


ADAMS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}


def saved_with(optimizer, folder, **options):
    model = build("convolution")
    made = optimizer(model.parameters())
    with evenstep.Trainer(model, made, LOSS, devices=1, **options) as trainer:
        run(trainer, 2)
        trainer.save(folder)
    return trainer


def refused_by(folder, optimizer):
    """Return what is said to another optimizer; model and optimizer must stay as they are."""
    model = build("convolution", seed=9)
    made = optimizer(model.parameters())
    before = dict(named_state(model, made))
    before = {name: value.clone() for name, value in before.items()}
    settings = copy.deepcopy(made.state_dict()["param_groups"])
    with pytest.raises(CheckpointError) as caught:
        evenstep.Trainer.load(folder, model, made, LOSS, devices=1)
    assert_same_bits(dict(named_state(model, made)), before)
    assert made.state_dict()["param_groups"] == settings
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved_adams(tmp_path_factory):
    """A checkpoint of each, with the same settings."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ADAMS}
    for name, kind in ADAMS.items():
        saved_with(lambda p, kind=kind: kind(p, lr=0.01), folders[name])
    return folders


@pytest.mark.parametrize("saved", ADAMS)
@pytest.mark.parametrize("given", ADAMS)
def test_the_state_of_another_optimizer_is_refused_by_naming_both(saved_adams, saved, given):
    if given == saved:
        model = build("convolution", seed=9)
        made = ADAMS[given](model.parameters(), lr=0.01)
        with evenstep.Trainer.load(saved_adams[saved], model, made, LOSS, devices=1) as trainer:
            run(trainer, 3)
        return
    line = refused_by(saved_adams[saved], lambda p: ADAMS[given](p, lr=0.01))
    names = [f"torch.optim.{name.lower()}.{name}" for name in (saved, given)]
    assert line == (
        f"the checkpoint is of another optimizer: it was saved with {names[0]}, and Trainer.load "
        f"got {names[1]}: give it the optimizer that was trained with"
    )


def test_other_settings_of_an_optimizer_are_refused_by_naming_both(tmp_path):
    """They had no effect: a checkpoint's settings replaced them, and nobody was told."""
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), tmp_path)
    line = refused_by(tmp_path, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True))
    assert line == (
        "the checkpoint is of torch.optim.sgd.SGD with lr=0.1, nesterov=False, and Trainer.load "
        "got one with lr=0.05, nesterov=True, which would have no effect: give the settings of the "
        "checkpoint, and change optimizer.param_groups afterwards"
    )


def test_a_setting_that_only_one_version_of_torch_knows_is_no_difference(tmp_path):
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)

    def other_version(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.defaults["newer"] = True
        del optimizer.defaults["differentiable"]
        return optimizer

    model = build("convolution")
    evenstep.Trainer.load(tmp_path, model, other_version(model.parameters()), LOSS, devices=1)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (0.1, np.float64(0.1)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.tensor(0.1), 0.1),
        (1, 1.0),
    ],
    ids=["numpy", "tensors", "a tensor", "an integer"],
)
def test_settings_that_are_equal_or_may_change_in_place_are_no_difference(tmp_path, saved, given):
    """Schedulers write to a rate that is a tensor, and so to the default that it came from."""
    saved_with(lambda p: torch.optim.SGD(p, lr=saved), tmp_path)
    model = build("convolution")
    optimizer = torch.optim.SGD(model.parameters(), lr=given)
    evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=1)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(float(saved))


class Rule(torch.optim.SGD):
    """Has a default that no checkpoint can hold."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        self.defaults["rule"] = len


def test_a_default_that_no_checkpoint_can_hold_is_not_compared(tmp_path):
    saved_with(lambda p: Rule(p, lr=0.1), tmp_path)
    assert "of test_resume.Rule with lr=0.1, and" in refused_by(tmp_path, lambda p: Rule(p, lr=0.2))
    model = build("convolution")
    evenstep.Trainer.load(tmp_path, model, Rule(model.parameters(), lr=0.1), LOSS, devices=1)


def test_a_class_may_be_in_a_script_now_and_in_a_module_later(tmp_path, monkeypatch):
    monkeypatch.setattr(Rule, "__module__", "__main__")
    saved_with(lambda p: Rule(p, lr=0.1), tmp_path)
    monkeypatch.undo()
    model = build("convolution")
    evenstep.Trainer.load(tmp_path, model, Rule(model.parameters(), lr=0.1), LOSS, devices=1)


def test_a_class_of_the_same_name_as_one_of_torch_is_another_one(tmp_path):
    class SGD(torch.optim.SGD):
        pass

    SGD.__qualname__ = "SGD"
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)
    line = refused_by(tmp_path, lambda p: SGD(p, lr=0.1))
    assert "saved with torch.optim.sgd.SGD, and Trainer.load got test_resume.SGD" in line


class Outer(torch.optim.SGD):
    def __init__(self, parameters, kind=torch.optim.Adam):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.1)
        self.inner = kind(parameters, lr=0.01)


def test_an_optimizer_inside_another_one_is_compared_too(tmp_path):
    saved_with(Outer, tmp_path)
    line = refused_by(tmp_path, lambda p: Outer(p, torch.optim.RAdam))
    assert "saved with torch.optim.adam.Adam, and Trainer.load got torch.optim.radam.RAdam" in line


def rewritten(folder, change):
    """Change the encoded state of a checkpoint, and seal it again."""
    (path,) = list_checkpoints(folder)
    tree = read_checkpoint(path)
    change(tree)
    write_checkpoint(folder, encode(tree), step=int(path.name[5:]))


def test_a_checkpoint_without_the_class_loads_as_before(tmp_path):
    trainer = saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)
    rewritten(tmp_path, lambda tree: tree.pop("optimizers"))
    model = build("convolution", seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loaded = evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=1)
    assert loaded.fingerprint() == trainer.fingerprint()
    assert loaded.fingerprint(version=2) == trainer.fingerprint(version=2)


@pytest.mark.parametrize("version", [0, 3, "1"])
def test_a_fingerprint_has_version_1_or_2(version):
    model, optimizer, _ = parts("convolution")
    trainer = evenstep.Trainer(model, optimizer, LOSS, devices=1)
    assert trainer.fingerprint() == trainer.fingerprint(version=1)
    assert trainer.fingerprint() != trainer.fingerprint(version=2)
    with pytest.raises(InputError, match=f"got version={version!r}: there are versions 1 and 2"):
        trainer.fingerprint(version=version)


# ---- the extra state of modules


class Warm(nn.Module):
    """A layer whose factor follows a number that the user raises; torch saves it as extra state."""

    def __init__(self, steps=0, history=()):
        super().__init__()
        self.steps = steps
        self.history = torch.tensor([*history])

    def forward(self, x):
        return x * (1 - 0.5 ** (self.steps + 1))

    def get_extra_state(self):
        return {"steps": self.steps, "history": self.history}

    def set_extra_state(self, state):
        self.steps, self.history = state["steps"], state["history"]


def warming(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), Warm(), nn.Linear(8, 5))
    model(X[:2])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def warm_up(trainer, model, until):
    while trainer.steps_done < until:
        trainer.step(X[:16], Y[:16])
        trainer.waitall()
        model[2].steps += 1
        model[2].history = torch.cat([model[2].history, torch.tensor([0.5])])


@pytest.mark.parametrize("devices", [1, own(2)], ids=str)
@pytest.mark.parametrize("aside", [False, True])
def test_the_extra_state_of_modules_is_saved_and_restored(tmp_path, devices, aside):
    model, optimizer = warming()
    with evenstep.Trainer(model, optimizer, LOSS, devices=devices) as trainer:
        warm_up(trainer, model, 2)
        trainer.save(tmp_path, aside=aside)
        warm_up(trainer, model, 4)
    again, optimizer = warming(seed=9)
    with evenstep.Trainer.load(tmp_path, again, optimizer, LOSS, devices=devices) as resumed:
        assert again[2].steps == 2
        assert again[2].history.tolist() == [0.5, 0.5]
        warm_up(resumed, again, 4)
    assert resumed.fingerprint(version=2) == trainer.fingerprint(version=2)
    assert_same_bits(whole_state(again, optimizer), whole_state(model, trainer.optimizer))


def refused_extra(folder, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        evenstep.Trainer.load(folder, model, optimizer, LOSS, devices=1)
    return str(caught.value)


@pytest.fixture
def warmed(tmp_path):
    model, optimizer = warming()
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        warm_up(trainer, model, 2)
        trainer.save(tmp_path)
    return tmp_path


def test_a_model_without_the_extra_state_is_another_one(warmed):
    model, _ = warming()
    model[2] = nn.Identity()
    assert "another model: its extra state of 2 is not in the model" in refused_extra(warmed, model)


def test_a_model_with_more_extra_state_is_another_one(warmed):
    model, _ = warming()
    model[0] = nn.Sequential(nn.Flatten(), Warm())
    assert "another model: extra state of 0.1 is not in it" in refused_extra(warmed, model)


class Forgets(Warm):
    def set_extra_state(self, state):
        pass


class Fails(Warm):
    def set_extra_state(self, state):
        raise KeyError("steps of another version")


class Reports(Warm):
    set_extra_state = nn.Module.set_extra_state


@pytest.mark.parametrize("kind", [Forgets, Fails, Reports])
def test_extra_state_that_is_not_taken_back_is_noticed(warmed, kind):
    model, _ = warming()
    model[2] = kind()
    line = refused_extra(warmed, model)
    assert "layer 2" in line
    assert kind.__name__ in line
    assert "set_extra_state" in line


def test_extra_state_that_is_only_a_report_need_not_be_taken_back(warmed):
    model, _ = warming()
    model[2] = Reports(2, (0.5, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evenstep.Trainer.load(warmed, model, optimizer, LOSS, devices=1)


def test_extra_state_that_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    model, optimizer = warming()
    model[2].history = len
    trainer = evenstep.Trainer(model, optimizer, LOSS, devices=1)
    with pytest.raises(
        CheckpointError, match=r"\['model'\]\['extra'\]\['2'\]\['history'\] is of ty"
    ):
        trainer.save(tmp_path)


def test_a_checkpoint_without_extra_state_leaves_it_as_it_is(warmed):
    """As it did when no checkpoint had any."""
    rewritten(warmed, lambda tree: tree["model"].pop("extra"))
    model, optimizer = warming()
    model[2].steps = 7
    evenstep.Trainer.load(warmed, model, optimizer, LOSS, devices=1)
    assert model[2].steps == 7


def test_a_scheduler_that_was_not_saved_is_refused(saved):
    model, optimizer, options = parts("convolution", "sgd", "steps")
    with pytest.raises(CheckpointError, match="without a learning-rate scheduler"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1, **options)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    write_checkpoint(tmp_path, encode({"weights": torch.zeros(3)}), step=1)
    model, optimizer, _ = parts("convolution")
    with pytest.raises(CheckpointError, match="not of a trainer"):
        evenstep.Trainer.load(tmp_path, model, optimizer, LOSS)


def test_a_state_that_is_not_restored_is_noticed(saved, monkeypatch):
    """Training must not continue silently from another state than was saved."""
    model, optimizer, _ = parts("convolution")
    monkeypatch.setattr("evenstep.checkpoint.training_state.restore_optimizer", lambda *_: None)
    with pytest.raises(CheckpointError, match="fingerprint"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


def test_a_save_that_fails_leaves_the_last_checkpoint(saved):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=2) as trainer:
        (saved / "file").write_text("in the way")
        with pytest.raises(SaveError):
            trainer.save(saved / "file")
    again, optimizer, _ = parts("convolution")
    assert evenstep.Trainer.load(saved, again, optimizer, LOSS).fingerprint() == (
        trainer.fingerprint()
    )


def test_the_manifest_is_json_that_a_person_can_read(saved):
    manifests = list(saved.glob("step-*/manifest.json"))
    assert len(manifests) == 1
    manifest = json.loads(manifests[0].read_text())
    assert manifest["step"] == 2
    assert manifest["state"]["experiment"]["shards"] == 4


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
        place = trainer.save(tmp_path, aside=True)
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
        trainer.save(tmp_path, aside=True)
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
        lambda trainer, folder: trainer.save(folder, aside=True),
        lambda trainer, folder: trainer.wait_for_save(),
        lambda trainer, folder: trainer.__exit__(None, None, None),
    ],
)
def test_an_error_of_the_writer_is_raised_by_the_next_call(tmp_path, use):
    trainer = trainer_with_a_file_in_the_way(tmp_path)
    with trainer:
        run(trainer, 1)
        trainer.save(tmp_path / "file", aside=True)
        with pytest.raises(SaveError, match="in the way"):
            use(trainer, tmp_path / "good")
        if trainer._is_open:
            trainer.save(tmp_path / "good")


def test_a_step_raises_an_error_of_the_writer_and_is_not_taken(tmp_path):
    trainer = trainer_with_a_file_in_the_way(tmp_path)
    with trainer:
        run(trainer, 1)
        trainer.save(tmp_path / "file", aside=True)
        with contextlib.suppress(SaveError):
            trainer._saves.pending.result()
        with pytest.raises(SaveError, match="in the way"):
            run(trainer, 2)
        assert trainer.steps_done == 1
        run(trainer, 2)


def test_an_error_has_the_writers_error_as_a_note(tmp_path):
    def fail(trainer):
        with trainer:
            run(trainer, 1)
            trainer.save(tmp_path / "file", aside=True)
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
            trainer.save(tmp_path, aside=True)


def test_the_first_save_says_what_of_a_loader_of_ones_own_is_not_in_it(tmp_path, caplog):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        for _ in range(2):
            trainer.step(X[:16], Y[:16])
            trainer.save(tmp_path)
    (line,) = [record.message for record in caplog.records if "does not hold" in record.message]
    assert "trainer.epoch(loader)" in line
    assert "numpy.random" in line


def test_a_training_by_epochs_is_saved_whole(tmp_path, caplog):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        run(trainer, 2)
        trainer.save(tmp_path)
    assert "does not hold" not in caplog.text
