"""The mistakes of a first hour, each with the first line that answers it."""

import copy
import io
import logging
import pickle
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.data import Cursor
from evenstep.errors import EvenstepError, InputError
from evenstep.steps.step import StepLoss
from grouping import grouped

torch.manual_seed(0)
X, y = torch.randn(16, 1, 6, 6), torch.arange(16) % 5
IMAGES = (X * 10).to(torch.uint8)
LOADER = [(X[:8], y[:8]), (X[8:], y[8:])]


def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trainer_of(model=None, optimizer=None, loss=None, **options):
    model = net() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    loss = nn.CrossEntropyLoss() if loss is None else loss
    options = {"devices": 1, "shards": 2, "tune_malloc": False, **options}
    return evenstep.Trainer(model, optimizer, loss, **grouped(**options))


def inside(use):
    """Return a call of `use` with an open trainer."""

    def call():
        with trainer_of() as trainer:
            use(trainer)

    return call


def step(*batch):
    return inside(lambda trainer: trainer.step(*batch))


def evaluate(metrics, batches=LOADER):
    return inside(lambda trainer: trainer.evaluate(batches, metrics))


def made(*arguments, **options):
    return lambda: trainer_of(*arguments, **options)


def step_twice(trainer):
    trainer.step(X, y)
    trainer.optimizer.step()


def use_closed():
    with trainer_of() as trainer:
        trainer.step(X, y)
    trainer.step(X, y)


def share_an_optimizer():
    first = trainer_of()
    with first, evenstep.Trainer(first.model, first.optimizer, nn.CrossEntropyLoss()):
        pass


def open_twice():
    with trainer_of() as trainer, trainer:
        pass


def a_scheduler():
    return torch.optim.lr_scheduler.StepLR(sgd(net()), 1)


def of_another_model():
    return trainer_of(net(), sgd(net()))


def a_mean(output, y):
    return (output.argmax(1) == y).float().mean()


def frozen():
    return net().requires_grad_(False)


def one_column():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 1))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 5)

    def forward(self, X):
        return self.layer(X.flatten(1)), X


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"image": X[i], "label": y[i], "name": f"image {i}"}


NAMED = torch.utils.data.DataLoader(Named(), batch_size=4)


def trained(loader):
    def use(trainer):
        for batch in trainer.epoch(loader):
            trainer.step(*batch)

    return inside(use)


def one_step(labels=y, **options):
    def call():
        with trainer_of(**options) as trainer:
            trainer.step(X, labels)

    return call


def with_objective(objective):
    def call():
        model = net()
        with evenstep.Trainer(model, sgd(model), objective=objective, devices=1) as trainer:
            trainer.step(X, y)

    return call


def verified(make_trainer, devices=(1, 2)):
    return lambda: evenstep.verify(make_trainer, LOADER, devices=devices, steps=1)


def of_one_model():
    model = net()
    return lambda devices: trainer_of(model, devices=devices)


def swapped():
    model = net()
    evenstep.Trainer(model, nn.CrossEntropyLoss(), sgd(model))


HABITS = {
    "fit": "Trainer has no fit: write the loop, `for X, y in trainer.epoch(loader): "
    "trainer.step(X, y)`",
    "train": "Trainer has no train: write the loop, `for X, y in trainer.epoch(loader): "
    "trainer.step(X, y)`; for the model's mode, model.train()",
    "eval": "Trainer has no eval: trainer.evaluate and trainer.predict set the model's mode "
    "themselves",
    "zero_grad": "Trainer has no zero_grad: leave it out, as each trainer.step begins with new "
    "gradients",
    "parameters": "Trainer has no parameters: use model.parameters()",
    "state_dict": "Trainer has no state_dict: write trainer.save(folder) and "
    "evenstep.Trainer.load(folder, model, optimizer, loss); for the model alone, "
    "model.state_dict()",
    "load_state_dict": "Trainer has no load_state_dict: write evenstep.Trainer.load(folder, model, "
    "optimizer, loss); for the model alone, model.load_state_dict(...)",
    "to": "Trainer has no to: choose devices by evenstep.Trainer(..., devices=...)",
    "test": "Trainer has no test: write trainer.evaluate(batches, metrics)",
}
PICKLED = (
    "a trainer can't be pickled or copied: write trainer.save(folder), and "
    "evenstep.Trainer.load(folder, model, optimizer, loss) to resume; for the model alone, "
    "torch.save(model.state_dict(), file)"
)
LOOP = "write `for X, y in trainer.epoch(loader): trainer.step(X, y)`"
OPTIMIZER = "give an optimizer object, such as torch.optim.SGD(model.parameters(), lr=0.1)"
METRICS = 'give a dict, such as {"accuracy": evenstep.metrics.accuracy}'
NO_GRADIENT = "no parameter of the model has got a gradient in step 0, since "
DETACHED = (
    f"{NO_GRADIENT}the loss does not depend on them (look for detach(), item() or "
    f"torch.no_grad()); the step was not taken"
)
MAKER = (
    "give a function that takes devices and returns a new trainer, such as the one in the help of "
    "evenstep.verify"
)
PAIR = (
    "return the pair (total, count) over the examples that the metric is given, such as "
    "((output.argmax(1) == y).sum(), len(y)), from which the mean over all batches follows"
)

MISTAKES = {
    # ---- what a plain loop does, and other libraries
    "a left-over optimizer.step()": (
        inside(step_twice),
        "SGD.step() was called while a trainer is open, but Trainer.step has updated the "
        "parameters already: remove loss.backward() and optimizer.step() from the loop (a "
        "scheduler's step() stays), or call trainer.backward(...) instead of trainer.step(...)",
    ),
    "a left-over loss.backward()": (
        inside(lambda trainer: trainer.step(X, y).backward()),
        "the loss has no backward: trainer.step has computed the gradients and updated the model "
        "already, so remove loss.backward() and optimizer.step() from the loop",
    ),
    "a left-over (loss / 4).backward()": (
        inside(lambda trainer: (trainer.step(X, y) / 4).backward()),
        "trainer.step has computed the gradients and updated the model already, so remove "
        "loss.backward() and optimizer.step() from the loop (instead of accumulating gradients, "
        "give trainer.step the whole batch)",
    ),
    **{
        f"trainer.{name}": (inside(lambda trainer, name=name: getattr(trainer, name)()), line)
        for name, line in HABITS.items()
    },
    "trainer(X)": (
        inside(lambda trainer: trainer(X)),
        "a trainer can't be called: use trainer.predict([X]), which computes on all devices, or "
        "model(X)",
    ),
    "torch.save(trainer)": (inside(lambda trainer: torch.save(trainer, io.BytesIO())), PICKLED),
    "pickle.dumps(trainer)": (lambda: pickle.dumps(trainer_of()), PICKLED),
    "copy.deepcopy(trainer)": (lambda: copy.deepcopy(trainer_of()), PICKLED),
    # ---- what a trainer is made of
    "a loss class": (
        made(loss=nn.CrossEntropyLoss),
        "got the class CrossEntropyLoss as loss: give an object of it, such as CrossEntropyLoss()",
    ),
    "the name of a loss": (
        made(loss="cross_entropy"),
        "got loss='cross_entropy': give a function or a module, such as nn.CrossEntropyLoss()",
    ),
    "a summed loss": (
        made(loss=nn.CrossEntropyLoss(reduction="sum")),
        "got a loss with reduction='sum', but loss= needs a mean: leave reduction out, or write "
        "objective=lambda model, X, y: (total, count) with the sum over the shard as total and "
        "what to divide by (such as len(y)) as count",
    ),
    "a model class": (
        lambda: evenstep.Trainer(nn.Linear, sgd(net()), nn.CrossEntropyLoss()),
        "got the class Linear as model: give an object of it, such as Linear(...)",
    ),
    "the name of an optimizer": (made(optimizer="sgd"), f"got optimizer='sgd': {OPTIMIZER}"),
    "an optimizer class": (
        made(optimizer=torch.optim.SGD),
        f"got the class SGD as optimizer: {OPTIMIZER}",
    ),
    "a scheduler as optimizer": (
        made(optimizer=a_scheduler()),
        "got a scheduler, StepLR, as optimizer: give the optimizer that it was made for, and the "
        "scheduler as evenstep.Trainer(..., scheduler=...)",
    ),
    "an optimizer as scheduler": (
        made(scheduler=sgd(net())),
        "got an optimizer, SGD, as scheduler: give a scheduler that was made for it, or leave "
        "scheduler out",
    ),
    "optimizer and loss swapped": (
        swapped,
        "got a loss, CrossEntropyLoss, as optimizer: the order is evenstep.Trainer(model, "
        "optimizer, loss)",
    ),
    "the optimizer of another model": (
        of_another_model,
        "the optimizer holds 4 of 4 parameters that are not the model's: make it from "
        "model.parameters(), after the last change to the model",
    ),
    "an unknown device": (
        made(devices="gpu"),
        "got device 'gpu': write cpu:0, cpu:1, ..., cuda:0, cuda:1, ..., a number of devices, or "
        "auto",
    ),
    "no device": (made(devices=0), "got 0 devices: at least 1 is needed"),
    "the numbers of devices": (
        made(devices=[0, 1]),
        "got a device of type int: give a name such as cpu:1 or cuda:0, a torch.device, or an "
        "evenstep.Device",
    ),
    "half precision": (
        made(precision="fp16"),
        "got precision='fp16': choose one of fp32, bf16",
    ),
    # ---- `with`
    "no with": (
        lambda: trainer_of().step(X, y),
        "the trainer is not open: use it as `with evenstep.Trainer(...) as trainer:`, or as "
        "`trainer = evenstep.Trainer(...).open()`",
    ),
    "a closed trainer": (
        use_closed,
        "the trainer was closed, at the end of its `with` or by `close`: indent the call into the "
        "`with`, or open the trainer again by `with trainer:`",
    ),
    "two trainers of one optimizer": (
        share_an_optimizer,
        "another trainer with this optimizer is open: close that one first (end its `with`, or "
        "call its `close`), or give each trainer an optimizer of its own",
    ),
    "with, twice": (open_twice, "the trainer is open already: remove the second `with` or `open`"),
    # ---- batches
    "a DataLoader as a batch": (
        step(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y))),
        f"batch[0] is a DataLoader, which gives batches: {LOOP}",
    ),
    "a generator as a batch": (
        step(batch for batch in LOADER),
        f"batch[0] is a generator, which gives batches: {LOOP}",
    ),
    "numpy": (
        step(X.numpy(), y.numpy()),
        "batch[0] is a numpy array: give a tensor, torch.from_numpy(array)",
    ),
    "a batch in one piece": (
        step((X, y)),
        "got one argument, a tuple of 2 parts: write trainer.step(*batch)",
    ),
    "no labels": (
        step(X),
        "cross entropy and NLL take (output, target), got a batch of 1 part: give "
        "trainer.step(X, y), or use objective=... for other batches",
    ),
    "too few labels": (
        step(X, y[:9]),
        "the tensors of a batch need the same number of examples (first dimension), but batch[0] "
        "has 16, batch[1] has 9; give one that every shard needs whole as evenstep.shared(tensor)",
    ),
    "images in bytes": (
        step(IMAGES, y),
        "batch[0] is torch.uint8, but the model's parameters are torch.float32: give "
        "X.float() / 255",
    ),
    "doubles": (
        step(X.double(), y),
        "batch[0] is torch.float64, but the model's parameters are torch.float32: give X.float()",
    ),
    "images without channels": (
        step(X[:, 0], y),
        "batch[0] is of shape (16, 6, 6), without a dimension for channels: a Conv2d takes "
        "(examples, channels, height, width), so give X.unsqueeze(1)",
    ),
    "images with channels last": (
        step(X.permute(0, 2, 3, 1), y),
        "batch[0] is of shape (16, 6, 6, 1), with the channels last: a Conv2d takes (examples, "
        "channels, height, width), so give X.permute(0, 3, 1, 2)",
    ),
    # ---- labels
    "labels as float": (
        step(X, y.float()),
        "the labels are torch.float32: cross entropy takes numbers of classes, so give y.long()",
    ),
    "labels as int32": (
        step(X, y.int()),
        "the labels are torch.int32: cross entropy takes numbers of classes, so give y.long()",
    ),
    "labels in a column": (
        step(X, y[:, None]),
        "the labels are of shape (examples, 1): cross entropy takes one number for each example, "
        "so give y.squeeze(1)",
    ),
    "one-hot labels": (
        step(X, F.one_hot(y, 5)),
        "the one-hot labels are torch.int64: give y.argmax(1), or y.float()",
    ),
    "one-hot labels of another width": (
        step(X, F.one_hot(y, 7).float()),
        "the labels have 7 columns, but the model gives 5 classes: use one number of classes",
    ),
    "labels from 1": (
        step(X, y + 1),
        "a label is 5, but the model gives 5 classes, 0 to 4: number the labels from 0, or give "
        "the model a larger last layer",
    ),
    "labels that are masked by -1": (
        step(X, torch.where(y == 0, -100, y - 1 - (y == 1).long())),
        "a label is -1, but the model gives 5 classes, 0 to 4: number the labels from 0, or give "
        "the model a larger last layer",
    ),
    # ---- what would train nothing, or something else
    "a frozen model": (
        one_step(model=frozen()),
        f"{NO_GRADIENT}none requires a gradient: call requires_grad_() on those that are to be "
        f"trained; the step was not taken",
    ),
    "a detached loss": (one_step(loss=lambda output, y: output.detach().mean()), DETACHED),
    "an objective under no_grad": (
        with_objective(torch.no_grad()(lambda model, X, y: F.cross_entropy(model(X), y))),
        DETACHED,
    ),
    "labels that broadcast": (
        one_step(y.float(), model=one_column(), loss=nn.MSELoss()),
        "the labels are of shape (examples,), but the model gives (examples, 1), so MSELoss would "
        "compare every example with all others: give y.unsqueeze(-1)",
    ),
    "outputs that broadcast": (
        one_step(y[:, None], model=nn.Sequential(one_column(), nn.Flatten(0)), loss=F.l1_loss),
        "the labels are of shape (examples, 1), but the model gives (examples,), so F.l1_loss "
        "would compare every example with all others: give y.squeeze(-1)",
    ),
    "binary labels of another shape": (
        one_step((y > 2).float(), model=one_column(), loss=nn.BCEWithLogitsLoss()),
        "the labels are of shape (examples,), but the model gives (examples, 1): give "
        "y.unsqueeze(-1)",
    ),
    "binary labels as numbers of classes": (
        one_step((y[:, None] > 2).long(), model=one_column(), loss=nn.BCEWithLogitsLoss()),
        "the labels are torch.int64: BCEWithLogitsLoss takes floats, so give y.float()",
    ),
    "DataParallel": (
        made(nn.DataParallel(net())),
        "the model is a DataParallel: give the module inside it, model.module, because the trainer "
        "itself divides each batch among the devices",
    ),
    # ---- functions that take other arguments
    "a model with two outputs": (
        one_step(model=TwoOutputs()),
        "the model returned a tuple, but CrossEntropyLoss takes a tensor: give objective=lambda "
        "model, X, y: loss(model(X)[0], y) instead of loss=..., or let forward return the tensor "
        "alone",
    ),
    "an objective as loss": (
        one_step(loss=lambda model, X, y: F.cross_entropy(model(X), y)),
        "called the loss as loss(output, *targets), with 1 target (what takes (model, *batch) is "
        "given as objective=...): <lambda>() missing 1 required positional argument: 'y'",
    ),
    "an objective that takes the batch in one piece": (
        with_objective(lambda model, batch: None),
        "called the objective as objective(model, *batch), with 2 parts of a batch: <lambda>() "
        "takes 2 positional arguments but 3 were given",
    ),
    "a metric without targets": (
        evaluate({"accuracy": evenstep.metrics.accuracy}, [X]),
        'called the metric "accuracy" as metric(output, *targets), with 0 targets: accuracy() '
        "missing 1 required positional argument: 'target'",
    ),
    "a misspelt argument": (
        lambda: evenstep.Trainer(net(), None, device="cpu"),
        "got device=: write devices=",
    ),
    "an argument that another one groups": (
        lambda: evenstep.Trainer(net(), None, clip_norm=1.0),
        "got clip_norm=: write experiment=Experiment(clip_norm=...)",
    ),
    "a misspelt argument that another one groups": (
        lambda: evenstep.Trainer(net(), None, lost_after=3.0),
        "got lost_after=: write faults=Faults(lost_after_s=...)",
    ),
    "a list of optimizers": (
        made(optimizer=[sgd(net())]),
        "got optimizer=[SGD ( Parameter Group 0 dampening:... nesterov: False weight_decay: 0 )]: "
        f"{OPTIMIZER}",
    ),
    # ---- loaders
    "a tensor as a loader": (
        trained(X),
        "got a tensor as a loader, so each of its rows would be a batch: give an iterable of "
        "batches, such as torch.utils.data.DataLoader(...) or a list, [(X, y)]",
    ),
    "one batch as a loader": (
        trained((X, y)),
        "got a tuple of 2 tensors as a loader, so each of them would be a batch: give an iterable "
        "of batches, such as torch.utils.data.DataLoader(...) or a list, [(X, y)]",
    ),
    "the names in a batch": (
        trained(NAMED),
        "got the strings 'image', 'label', 'name' and no tensor: if they are the names in a batch "
        "that is a dict, write trainer.step(**batch)",
    ),
    "strings in a batch": (
        inside(lambda trainer: trainer.step(**next(iter(NAMED)))),
        "batch[0]['name'] is a list of 4 values of type str in a batch of 4 examples: if there is "
        "one for each example, give a tensor, of which every shard gets its own rows; if every "
        "shard needs all of them, give evenstep.shared(torch.tensor(...)), or leave them out",
    ),
    "images as lists": (
        step(X.tolist(), y),
        "batch[0] is a list of 16 values of type list in a batch of 16 examples: if there is "
        "one for each example, give a tensor, of which every shard gets its own rows; if every "
        "shard needs all of them, give evenstep.shared(torch.tensor(...)), or leave them out",
    ),
    "a loss as a batch": (
        inside(lambda trainer: trainer.step(F.cross_entropy(trainer.model(X), y))),
        "batch[0] is a loss: give the batch, trainer.step(X, y), which computes the loss and its "
        "gradients on all devices",
    ),
    "tensors as a data set": (
        lambda: evenstep.data.Loader((X, y), 8),
        "got a tuple of 2 tensors as a data set, so each of them would be an example: give "
        "torch.utils.data.TensorDataset(X, y)",
    ),
    # ---- evenstep.verify
    "verify: a trainer": (
        lambda: evenstep.verify(trainer_of(), LOADER),
        f"got a Trainer as make_trainer: {MAKER}",
    ),
    "verify: a model": (verified(net()), f"got a Sequential as make_trainer: {MAKER}"),
    "verify: a number of devices": (
        verified(lambda devices: trainer_of(devices=devices), devices=2),
        "got devices=2: give a list of the sets of devices to compare, such as [1, 2]",
    ),
    "verify: a function without argument": (
        verified(lambda: trainer_of()),
        "called make_trainer(devices): <lambda>() takes 0 positional arguments but 1 was given",
    ),
    "verify: a function that returns nothing": (
        verified(lambda devices: None),
        "make_trainer returned None: it must return an evenstep.Trainer",
    ),
    "verify: always the same devices": (
        verified(lambda devices: trainer_of(devices=1)),
        "make_trainer returned a trainer on cpu:0 instead of cpu:0, cpu:1: give the trainer what "
        "make_trainer is given, devices=devices",
    ),
    "verify: always the same model": (
        verified(of_one_model()),
        "make_trainer returned a trainer of the same model again, which is trained by now: make "
        "model, optimizer and trainer inside make_trainer",
    ),
    # ---- evaluation
    "a metric that returns a mean": (
        evaluate({"accuracy": a_mean}),
        f'the metric "accuracy" returned a tensor of shape (): {PAIR}',
    ),
    "a metric that returns a row for each example": (
        evaluate({"right": lambda output, y: (output.argmax(1) == y).float()}, [(X[:4], y[:4])]),
        f'the metric "right" returned a tensor of shape (2,): {PAIR}',
    ),
    "a list of metrics": (evaluate([a_mean]), f"got a list as metrics: {METRICS}"),
    "a metric alone": (evaluate(a_mean), f"got a function as metrics: {METRICS}"),
    "the name of a metric": (
        evaluate({"accuracy": "accuracy"}),
        "the metric \"accuracy\" is 'accuracy': give a function, metric(output, *targets) -> "
        "(total, count)",
    ),
    "one batch to evaluate": (
        evaluate({"accuracy": evenstep.metrics.accuracy}, (X, y)),
        "got a tuple of 2 tensors as batches, so each of them would be a batch: give a list of "
        "batches, such as [(X, y)]",
    ),
    "nothing to predict": (
        inside(lambda trainer: trainer.predict(None)),
        "got None as batches: give an iterable of batches, such as a DataLoader or a list, "
        "[(X, y)]",
    ),
    "one tensor to predict": (
        inside(lambda trainer: trainer.predict(X)),
        "got a tensor as batches, so each of its rows would be a batch: give a list of batches, "
        "such as [X]",
    ),
}


RAISED_AT_THE_LINE = {  # one frame of evenstep's, the last, which raises
    *("a left-over optimizer.step()", "a left-over loss.backward()"),
    *(f"trainer.{name}" for name in HABITS),
    *("trainer(X)", "torch.save(trainer)", "pickle.dumps(trainer)", "copy.deepcopy(trainer)"),
}


def answers(error):
    """Return the first line of evenstep's own error; of torch's and Python's, the notes too."""
    lines = [str(error).splitlines()[0]]
    return lines if isinstance(error, EvenstepError) else lines + getattr(error, "__notes__", [])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line(name):
    make, line = MISTAKES[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the line tells
        make()
    assert line in answers(caught.value)
    if name not in RAISED_AT_THE_LINE:
        assert "evenstep" not in packages_of(caught.value)


def packages_of(error):
    """Return the packages whose frames a traceback shows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return {frame.f_globals["__name__"].partition(".")[0] for frame in frames}


def test_there_are_many():
    assert len(MISTAKES) >= 25


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    with trainer_of() as trainer:
        trainer.save(tmp_path)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    with pytest.raises(EvenstepError) as caught:
        evenstep.Trainer.load(tmp_path, model, sgd(model), nn.CrossEntropyLoss())
    assert answers(caught.value) == [
        "can't resume with parameter 1.weight float32 (5, 36) instead of none, parameter 1.bias "
        "float32 (5,) instead of none, parameter 0.weight none instead of float32 (2, 1, 3, 3) and "
        "3 more: the checkpoint is of another model: build the model that was trained, or train "
        "from the start in a new folder"
    ]


def test_more_devices_than_cores_are_answered_by_a_note(monkeypatch):
    monkeypatch.setattr("evenstep.devices.discovery.usable_cores", lambda: 2)
    assert trainer_of(devices=3, shards=3).notes == [
        "3 threads of CPU devices share 2 cores: the result is the same, but no faster than with 2"
    ]


# ---- a model in evaluation mode


def messages_of_two_steps(model, caplog):
    with trainer_of(model) as trainer:
        trainer.step(X, y)
        trainer.step(X, y)
    return caplog.messages


def test_a_model_that_is_trained_in_evaluation_mode_is_named_once(caplog):
    model = nn.Sequential(net(), nn.Dropout(), nn.BatchNorm1d(5), nn.Dropout()).eval()
    assert messages_of_two_steps(model, caplog) == [
        "the model is in evaluation mode, which changes what Dropout and BatchNorm1d compute: call "
        "model.train() before the first step"
    ]


def test_nothing_is_said_where_the_mode_makes_no_difference(caplog):
    assert not messages_of_two_steps(net().eval(), caplog)
    frozen_norm = nn.Sequential(net(), nn.BatchNorm1d(5).eval())
    assert not messages_of_two_steps(frozen_norm, caplog)


# ---- errors inside a shard


@pytest.mark.parametrize(
    ("examples", "shards", "side_by_side", "where"),
    [
        (16, 2, False, "in shard 0 (examples 0 to 7 of your batch) of step 0 on cpu:0"),
        (16, 2, True, "in shard 0 (examples 0 to 7 of your batch) of step 0 on cpu:0"),
        (16, 1, False, "in shard 0 (examples 0 to 15 of your batch) of step 0 on cpu:0"),
        (2, 2, False, "in shard 0 (example 0 of your batch) of step 0 on cpu:0"),
    ],
)
def test_a_note_says_which_examples_a_shard_has(examples, shards, side_by_side, where):
    def fail(output, y):
        raise ZeroDivisionError("by the user") if 0 in y else RuntimeError("not this one")

    y = torch.arange(examples)
    with (
        pytest.raises(ZeroDivisionError, match="by the user") as caught,
        trainer_of(loss=fail, shards=shards, side_by_side=side_by_side) as trainer,
    ):
        trainer.step(X[:examples], y)
    assert caught.value.__notes__[0] == where


def test_a_note_names_the_micro_batch_of_ones_own_shards():
    def fail(output, y):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, trainer_of(loss=fail) as trainer:
        trainer.step(evenstep.Shards([(X[:4], y[:4]), (X[4:], y[4:])]))
    assert caught.value.__notes__[0] == "in shard 0 (your micro-batch 0) of step 0 on cpu:0"


@pytest.mark.parametrize("batch", [(X, y), (IMAGES, y), (X[:, 0], y), ([X, y],)], ids=range(4))
def test_an_error_of_the_users_own_gets_no_advice(batch):
    def fail(model, *batch):
        raise RuntimeError("by the user")

    model = net()
    options = {"devices": 1, "shards": 2, "objective": fail}
    with (
        pytest.raises(RuntimeError, match="by the user") as caught,
        evenstep.Trainer(model, sgd(model), **grouped(**options)) as trainer,
    ):
        trainer.step(*batch)
    assert caught.value.__notes__ == [
        "in shard 0 (examples 0 to 7 of your batch) of step 0 on cpu:0"
    ]


# ---- names that a trainer does not have


@pytest.mark.parametrize("name", HABITS)
def test_a_name_with_advice_is_no_attribute(name):
    trainer = trainer_of()
    assert not hasattr(evenstep.Trainer, name)
    assert not hasattr(trainer, name)
    assert name not in dir(trainer)
    assert "step" in dir(trainer)


def test_the_loss_has_no_attribute_with_advice():
    assert not hasattr(StepLoss, "backward")


def test_another_missing_name_is_answered_by_python():
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nothing'"):
        trainer_of().nothing  # noqa: B018


def test_an_attribute_error_inside_a_property_is_not_hidden(monkeypatch):
    trainer = trainer_of()
    monkeypatch.delattr(trainer._self_check, "report")
    with pytest.raises(AttributeError, match="'SelfCheck' object has no attribute 'report'"):
        trainer.contract  # noqa: B018


@pytest.mark.parametrize("name", ["model", "optimizer", "experiment", "devices"])
def test_what_a_trainer_was_made_from_cant_be_replaced(name):
    with trainer_of() as trainer:
        before = getattr(trainer, name)
        with pytest.raises(InputError, match=rf"trainer\.{name} can't be replaced.*new trainer"):
            setattr(trainer, name, None)
        assert getattr(trainer, name) is before


# ---- `break` out of an epoch

LEFT = (
    "the loop over trainer.epoch was left after 1 batch of epoch 0, so the next one yields the "
    "rest of that epoch: to count whole epochs, write `while trainer.cursor.epoch < epochs`"
)


def take_one(trainer, loader=LOADER):
    for batch in trainer.epoch(loader):
        trainer.step(*batch)
        break


def test_a_break_out_of_an_epoch_is_said_once(caplog):
    with trainer_of() as trainer:
        take_one(trainer)
        assert not caplog.messages
        assert len([*trainer.epoch(LOADER)]) == 1
        assert caplog.messages == [LEFT]
        assert trainer.cursor == Cursor(1, 0)
        take_one(trainer)
        take_one(trainer)
        assert caplog.messages == [LEFT]


def test_nothing_is_said_of_whole_epochs_and_after_a_resume(caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    with trainer_of() as trainer:
        for _ in range(2):
            for batch in trainer.epoch(LOADER):
                trainer.step(*batch)
        take_one(trainer)
        trainer.save(tmp_path)
    model = net()
    resumed = evenstep.Trainer.load(tmp_path, model, sgd(model), nn.CrossEntropyLoss(), devices=1)
    with resumed:
        assert len([*resumed.epoch(LOADER)]) == 1
    assert not caplog.messages
