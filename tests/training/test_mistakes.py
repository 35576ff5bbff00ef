"""The mistakes of a first hour, each with what the line that answers it must say."""

import copy
import io
import itertools
import logging
import pickle
import re
import sys
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


def loop_again(trainer):
    batches = trainer.epoch(LOADER)  # as what accelerator.prepare(loader) returns
    for _ in range(2):
        for X, y in batches:
            trainer.step(X, y)


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
    "fit": "write the loop, `for X, y in trainer.epoch(loader): trainer.step(X, y)`",
    "train": "write the loop, `for X, y in trainer.epoch(loader): ... model.train()",
    "eval": "trainer.evaluate and trainer.predict set the model's mode themselves",
    "zero_grad": "leave it out, as each trainer.step begins with new gradients",
    "parameters": "use model.parameters()",
    "state_dict": "write trainer.save(folder) and evenstep.Trainer.load( ... model.state_dict()",
    "load_state_dict": "write evenstep.Trainer.load( ... model.load_state_dict(",
    "to": "choose devices by evenstep.Trainer(..., devices=",
    "test": "write trainer.evaluate(batches, metrics)",
    "shards": "use trainer.experiment.shards",
    "prepare": "leave it out: model, optimizer and loader stay as they are",
    "clip_grad_norm_": "write experiment=evenstep.Experiment(clip_norm=",
    "accumulate": "give trainer.step the whole batch, which is computed in shards",
}
KEYWORDS = {
    "num_shards": "write shards=",
    "num_devices": "write devices=",
    "world_size": "write devices=",
    "callback": "write callbacks=",
    "lr": "the optimizer has it",
    "epochs": "write the loop, `for epoch in range(epochs)`",
    "batch_size": "the loader has it: write trainer.epoch(loader)",
    "train_loader": "the loader has it: write trainer.epoch(loader)",
    "max_grad_norm": "write experiment=evenstep.Experiment(clip_norm=...)",
    "scaler": 'write precision="bf16", which needs no scaler',
    "fp16": 'write precision="bf16"',
    "mixed_precision": "write precision=",
    "gradient_accumulation_steps": "give trainer.step the whole batch",
    "find_unused_parameters": "leave it out",
    "strategy": "write layout=evenstep.Layout(...)",
}
"""What other libraries call arguments, and what the note on Python's error says."""
PICKLED = "can't be pickled or copied: write trainer.save(folder), and evenstep.Trainer.load("
LOOP = "gives batches: write `for X, y in trainer.epoch(loader): trainer.step(X, y)`"
OPTIMIZER = "give an optimizer object, such as torch.optim.SGD(model.parameters(), lr=0.1)"
METRICS = 'give a dict, such as {"accuracy": evenstep.metrics.accuracy}'
NO_GRADIENT = "no parameter of the model has got a gradient in step 0, since "
DETACHED = f"{NO_GRADIENT}the loss does not depend on them ... detach() ... the step was not taken"
MAKER = "as make_trainer: give a function that takes devices and returns a new trainer"
PAIR = "return the pair (total, count) over the examples that the metric is given"
LISTED = "values of type {} in a batch of {} examples: ... give a tensor ... evenstep.shared("
LOADER_OF = "as a loader, so each of {} would be a batch: give an iterable of batches"

# What a plain loop does, and other libraries: raised by evenstep's last frame, at the user's line.
LEFT_OVERS = [
    (inside(step_twice),
     "SGD.step() was called while a trainer is open ... remove loss.backward() and optimizer.step()"
     " from the loop (a scheduler's step() stays) ... trainer.backward("),
    (inside(lambda trainer: trainer.step(X, y).backward()),
     "the loss has no backward: ... remove loss.backward() and optimizer.step() from the loop"),
    *((inside(lambda trainer, name=name: getattr(trainer, name)()), f"has no {name}: {advice}")
      for name, advice in HABITS.items()),
    (inside(lambda trainer: trainer.load("folder")),
     "Trainer.load makes a new trainer ... trainer = evenstep.Trainer.load(folder, model, "),
    (inside(lambda trainer: torch.amp.GradScaler("cpu").scale(trainer.step(X, y))),
     'GradScaler has no use here: ... precision="bf16" needs no scaler'),
    (inside(lambda trainer: trainer(X)), "can't be called: use trainer.predict([X]) ... model(X)"),
    (inside(lambda trainer: torch.save(trainer, io.BytesIO())), PICKLED),
    (lambda: pickle.dumps(trainer_of()), PICKLED),
    (lambda: copy.deepcopy(trainer_of()), PICKLED),
]  # fmt: skip

MISTAKES = [
    (inside(lambda trainer: (trainer.step(X, y) / 4).backward()),
     "remove loss.backward() and optimizer.step() ... instead of accumulating ... the whole batch"),
    # ---- what a trainer is made of
    (made(loss=nn.CrossEntropyLoss), "the class CrossEntropyLoss as loss ... CrossEntropyLoss()"),
    (made(loss="cross_entropy"), "got loss='cross_entropy': give a function or a module"),
    (made(loss=nn.CrossEntropyLoss(reduction="sum")),
     "reduction='sum', but loss= needs a mean: ... objective=lambda model, X, y: (total, count)"),
    (lambda: evenstep.Trainer(nn.Linear, sgd(net()), nn.CrossEntropyLoss()),
     "got the class Linear as model: give an object of it, such as Linear("),
    (lambda: evenstep.Trainer(3, sgd(net()), None), "got model=3: give a torch.nn.Module"),
    (made(optimizer=3), "got optimizer=3: give an optimizer object"),
    (made(optimizer="sgd"), f"got optimizer='sgd': {OPTIMIZER}"),
    (made(optimizer=torch.optim.SGD), f"got the class SGD as optimizer: {OPTIMIZER}"),
    (made(optimizer=[sgd(net())]), f"got optimizer=[SGD ( ... : {OPTIMIZER}"),
    (made(optimizer=a_scheduler()), "got a scheduler, StepLR, as optimizer ... , scheduler=...)"),
    (made(scheduler=a_scheduler()),
     "the scheduler, StepLR, belongs to a different optimizer, SGD, so ... StepLR(optimizer,"),
    (made(scheduler=torch.optim.lr_scheduler.ChainedScheduler([a_scheduler()])),
     "the scheduler, ChainedScheduler, belongs to a different optimizer, SGD, so it would not"),
    (made(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(net()))),
     "the scheduler, ReduceLROnPlateau, belongs to a different optimizer, SGD, so it would not"),
    (made(scheduler=sgd(net())), "got an optimizer, SGD, as scheduler: give a scheduler ... leave"),
    (swapped, "a loss, CrossEntropyLoss, as optimizer: ... evenstep.Trainer(model, optimizer, l"),
    (of_another_model, "4 of 4 parameters that are not the model's: ... model.parameters(), after"),
    (made(devices="gpu"), "got device 'gpu': write cpu:0, cpu:1, ..., cuda:0 ... or auto"),
    (made(devices="mps"), "got mps:0: evenstep does not support Apple's MPS; use CPU devices"),
    (made(devices=0), "got 0 devices: at least 1 is needed"),
    (made(devices=[0, 1]), "got a device of type int: give a name such as cpu:1 or cuda:0"),
    (made(precision="fp16"), "got precision='fp16': choose one of fp32, bf16"),
    (made(nn.DataParallel(net())), "the model is a DataParallel: give ... model.module, because"),
    # ---- `with`
    (lambda: trainer_of().step(X, y), "is not open: use it as `with evenstep.T ... .open()`"),
    (use_closed, "the trainer was closed ... indent the call into ... `with trainer:`"),
    (share_an_optimizer, "another trainer with this optimizer is open: close that one first"),
    (open_twice, "the trainer is open already: remove the second `with` or `open`"),
    # ---- batches
    (step(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y))),
     f"batch[0] is a DataLoader, which {LOOP}"),
    (step(batch for batch in LOADER), f"batch[0] is a generator, which {LOOP}"),
    (step(X.numpy(), y.numpy()), "batch[0] is a numpy array: ... torch.from_numpy(array)"),
    (step((X, y)), "got one argument, a tuple of 2 parts: write trainer.step(*batch)"),
    (step(X), "(output, target), got a batch of 1 part: give trainer.step(X, y) ... objective="),
    (step(X, y[:9]), "batch[0] has 16, batch[1] has 9; ... whole as evenstep.shared(tensor)"),
    (step(IMAGES, y), "batch[0] is torch.uint8, but ... torch.float32: give X.float() / 255"),
    (step(X.double(), y), "batch[0] is torch.float64, but ... torch.float32: give X.float()"),
    (step(X[:, 0], y), "(16, 6, 6), without a dimension for channels: ... give X.unsqueeze(1)"),
    (step(X.permute(0, 2, 3, 1), y),
     "(16, 6, 6, 1), with the channels last: ... give X.permute(0, 3, 1, 2)"),
    (step(X.tolist(), y), f"batch[0] is a list of 16 {LISTED.format('list', 16)}"),
    (inside(lambda trainer: trainer.step(F.cross_entropy(trainer.model(X), y))),
     "batch[0] is a loss: give the batch, trainer.step(X, y)"),
    (inside(lambda trainer: trainer.step(trainer.model(X), y)),
     "batch[0] was computed by the trainer's own model: give the model's input, trainer.step(X,"),
    (step(y, X), "batch[0] is torch.int64 and batch[1] is torch.float32: the model's input comes"),
    # ---- labels
    (step(X, y.float()), "the labels are torch.float32: ... numbers of classes, so give y.long()"),
    (step(X, y.int()), "the labels are torch.int32: ... numbers of classes, so give y.long()"),
    (step(X, y[:, None]), "the labels are of shape (examples, 1): ... give y.squeeze(1)"),
    (step(X, F.one_hot(y, 5)), "one-hot labels are torch.int64: give y.argmax(1), or y.float()"),
    (step(X, F.one_hot(y, 7).float()), "the labels have 7 columns, but the model gives 5 classes"),
    (step(X, y + 1), "a label is 5, but the model gives 5 classes, 0 to 4: number the labels"),
    (step(X, torch.where(y == 0, -100, y - 1 - (y == 1).long())),
     "a label is -1, but the model gives 5 classes, 0 to 4: number the labels from 0"),
    # ---- what would train nothing, or something else
    (one_step(model=frozen()),
     f"{NO_GRADIENT}none requires a gradient: call requires_grad_() ... the step was not taken"),
    (one_step(loss=lambda output, y: output.detach().mean()), DETACHED),
    (with_objective(torch.no_grad()(lambda model, X, y: F.cross_entropy(model(X), y))), DETACHED),
    (one_step(y.float(), model=one_column(), loss=nn.MSELoss()),
     "shape (examples,), but the model gives (examples, 1), so MSELoss ... give y.unsqueeze(-1)"),
    (one_step(y[:, None], model=nn.Sequential(one_column(), nn.Flatten(0)), loss=F.l1_loss),
     "shape (examples, 1), but the model gives (examples,), so F.l1_loss ... give y.squeeze(-1)"),
    (one_step((y > 2).float(), model=one_column(), loss=nn.BCEWithLogitsLoss()),
     "shape (examples,), but the model gives (examples, 1): give y.unsqueeze(-1)"),
    (one_step((y[:, None] > 2).long(), model=one_column(), loss=nn.BCEWithLogitsLoss()),
     "the labels are torch.int64: BCEWithLogitsLoss takes floats, so give y.float()"),
    # ---- functions that take other arguments
    (one_step(loss=lambda y, output: F.cross_entropy(output, y)),
     "called as loss(output, target), and works with (target, output) only: give lambda output,"),
    *((lambda name=name: evenstep.Trainer(net(), None, **{name: 1}), f"got {name}=: {advice}")
      for name, advice in KEYWORDS.items()),
    (lambda: evenstep.Experiment(num_shards=2), "did you mean evenstep.Experiment(shards=...)?"),
    (lambda: evenstep.Experiment(peer_timeout=2), "did you mean evenstep.Faults(peer_timeout_s=."),
    (lambda: evenstep.Layout(wings=2), "Layout has no argument 'wings': it has divide, "),
    (one_step(model=TwoOutputs()),
     "returned a tuple, but CrossEntropyLoss takes a tensor: ... objective= ... model(X)[0], y)"),
    (one_step(loss=lambda model, X, y: F.cross_entropy(model(X), y)),
     "called the loss as loss(output, *targets), with 1 target ... objective=...): <lambda>()"),
    (with_objective(lambda model, batch: None),
     "called the objective as objective(model, *batch), with 2 parts of a batch: <lambda>()"),
    (evaluate({"accuracy": evenstep.metrics.accuracy}, [X]),
     'called the metric "accuracy" as metric(output, *targets), with 0 targets: accuracy()'),
    (lambda: evenstep.Trainer(net(), None, device="cpu"), "got device=: write devices="),
    (lambda: evenstep.Trainer(net(), None, clip_norm=1.0),
     "got clip_norm=: write experiment=Experiment(clip_norm=...)"),
    (lambda: evenstep.Trainer(net(), None, lost_after=3.0),
     "got lost_after=: write faults=Faults(lost_after_s=...)"),
    # ---- loaders
    (inside(loop_again),
     "can be looped over once, and that loop has ended: call trainer.epoch(loader) anew in each"),
    (trained(X), f"got a tensor {LOADER_OF.format('its rows')}"),
    (trained((X, y)), f"got a tuple of 2 tensors {LOADER_OF.format('them')}"),
    (trained(NAMED), "got the strings 'image', 'label', 'name' ... trainer.step(**batch)"),
    (inside(lambda trainer: trainer.step(**next(iter(NAMED)))),
     f"batch[0]['name'] is a list of 4 {LISTED.format('str', 4)}"),
    (lambda: evenstep.data.Loader((X, y), 8),
     "got a tuple of 2 tensors as a data set ... give torch.utils.data.TensorDataset(X, y)"),
    # ---- evenstep.verify
    (lambda: evenstep.verify(trainer_of(), LOADER), f"got a Trainer {MAKER}"),
    (verified(net()), f"got a Sequential {MAKER}"),
    (verified(lambda devices: trainer_of(devices=devices), devices=2),
     "got devices=2: give a list of the sets of devices to compare, such as [1, 2]"),
    (verified(lambda: trainer_of()), "called make_trainer(devices): <lambda>() takes 0"),
    (verified(lambda devices: None), "make_trainer returned None: it must return an evenstep.T"),
    (verified(lambda devices: trainer_of(devices=1)),
     "a trainer on cpu:0 instead of cpu:0, cpu:1: give ... devices=devices"),
    (verified(of_one_model()), "a trainer of the same model again ... inside make_trainer"),
    # ---- evaluation
    (evaluate({"accuracy": a_mean}), f'metric "accuracy" returned a tensor of shape (): {PAIR}'),
    (evaluate({"right": lambda output, y: (output.argmax(1) == y).float()}, [(X[:4], y[:4])]),
     f'the metric "right" returned a tensor of shape (2,): {PAIR}'),
    (evaluate({"right": lambda output, y: (output.argmax(1) == y, len(y))}, [(X[:4], y[:4])]),
     f'the metric "right" returned (a tensor of shape (2,), 2): {PAIR}'),
    (evaluate({"both": lambda output, y: {"right": (output.argmax(1) == y).sum()}}),
     f'the metric "both" returned {{\'right\': tensor( ... {PAIR}'),
    (evaluate({"one": lambda output, y: ("half", len(y))}, [(X[:4], y[:4])]),
     f'the metric "one" returned (\'half\', 2): {PAIR}'),
    (evaluate([a_mean]), f"got a list as metrics: {METRICS}"),
    (evaluate(a_mean), f"got a function as metrics: {METRICS}"),
    (evaluate({"accuracy": "accuracy"}), "\"accuracy\" is 'accuracy': give a function, metric("),
    (evaluate({"accuracy": evenstep.metrics.accuracy}, (X, y)),
     "got a tuple of 2 tensors as batches ... give a list of batches, such as [(X, y)]"),
    (inside(lambda trainer: trainer.predict((X, y))),
     "got a tuple of 2 tensors as batches ... give a list of batches, such as [(X, y)]"),
    (inside(lambda trainer: trainer.predict(None)), "got None as batches: give an iterable of b"),
    (inside(lambda trainer: trainer.predict(X)),
     "got a tensor as batches, so each of its rows would be a batch: ... such as [X]"),
]  # fmt: skip


def answers(error):
    """Return the first line of evenstep's own error; of torch's and Python's, the notes too."""
    lines = [str(error).splitlines()[0]]
    return lines if isinstance(error, EvenstepError) else lines + getattr(error, "__notes__", [])


@pytest.mark.parametrize(("make", "answer"), LEFT_OVERS + MISTAKES)
def test_a_mistake_is_answered_in_one_line(make, answer):
    """In the table, " ... " stands for any text."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the line tells
        make()
    pattern = ".*".join(map(re.escape, answer.split(" ... ")))
    assert any(re.search(pattern, line) for line in answers(caught.value)), answers(caught.value)
    if (make, answer) not in LEFT_OVERS:
        stays = sys.version_info < (3, 11)  # where one of ours has hidden the others, it stays
        assert packages_of(caught.value).count("evenstep") <= stays


def packages_of(error):
    """Return the packages of the frames that a traceback shows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_globals["__name__"].partition(".")[0] for frame in frames]


def test_more_devices_than_cores_are_answered_by_a_note(monkeypatch):
    monkeypatch.setattr("evenstep.devices.discovery.usable_cores", lambda: 2)
    assert trainer_of(devices=3, shards=3).notes == [
        "3 threads of CPU devices share 2 cores: the result is the same, but no faster than with 2"
    ]


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("one", [X.flatten(1), (X.flatten(1), y)], ids=["X", "(X, y)"])
def test_one_batch_instead_of_a_list_is_refused_before_anything_is_computed(call, one):
    """A linear layer would take each row, or each tensor, for a batch."""
    computed = []
    model = nn.Linear(36, 5)
    model.register_forward_pre_hook(lambda *_: computed.append(1))
    metrics = {"zero": lambda output, *_: (torch.zeros(()), len(output))}
    with trainer_of(model) as trainer:
        with pytest.raises(InputError, match=r"as batches, so each of .* would be a batch") as seen:
            trainer.predict(one) if call == "predict" else trainer.evaluate(one, metrics)
        assert "evenstep" not in packages_of(seen.value) or sys.version_info < (3, 11)
        assert seen.value.__cause__ is None
        assert not computed


def test_some_batches_of_an_epoch_may_be_taken_at_a_time():
    with trainer_of() as trainer:
        batches, taken = trainer.epoch([(X, y)] * 5), []
        while some := [*itertools.islice(batches, 2)]:
            taken += some
    assert len(taken) == 5


def test_a_split_tensor_is_a_tuple_of_batches():
    model, batches = nn.Linear(36, 5), X.flatten(1).split(2)
    with trainer_of(model) as trainer:
        found = trainer.predict(batches)
        assert torch.equal(found, trainer.predict([*batches]))
    torch.testing.assert_close(found, model(X.flatten(1)).detach())


# ---- a model in evaluation mode


def messages_of_two_steps(model, caplog):
    with trainer_of(model) as trainer:
        trainer.step(X, y)
        trainer.step(X, y)
    return caplog.messages


def test_a_model_that_is_trained_in_evaluation_mode_is_named_once(caplog):
    model = nn.Sequential(net(), nn.Dropout(), nn.BatchNorm1d(5), nn.Dropout()).eval()
    (message,) = messages_of_two_steps(model, caplog)
    assert "evaluation mode, which changes what Dropout and BatchNorm1d compute: call m" in message


def test_nothing_is_said_where_the_mode_makes_no_difference(caplog):
    assert not messages_of_two_steps(net().eval(), caplog)
    frozen_norm = nn.Sequential(net(), nn.BatchNorm1d(5).eval())
    assert not messages_of_two_steps(frozen_norm, caplog)


# ---- errors inside a shard


@pytest.mark.parametrize(
    ("examples", "shards", "side_by_side", "those"),
    [
        (16, 2, False, "examples 0 to 7"),
        (16, 2, True, "examples 0 to 7"),
        (16, 1, False, "examples 0 to 15"),
        (2, 2, False, "example 0"),
    ],
)
def test_a_note_says_which_examples_a_shard_has(examples, shards, side_by_side, those):
    def fail(output, y):
        raise ZeroDivisionError("by the user") if 0 in y else RuntimeError("not this one")

    y = torch.arange(examples)
    with (
        pytest.raises(ZeroDivisionError, match="by the user") as caught,
        trainer_of(loss=fail, shards=shards, side_by_side=side_by_side) as trainer,
    ):
        trainer.step(X[:examples], y)
    where = f"in shard 0 ({those} of your batch) of step 0 on cpu:0"
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


def test_a_name_with_advice_is_no_attribute():
    trainer = trainer_of()
    for name in HABITS:
        assert not hasattr(evenstep.Trainer, name)
        assert not hasattr(trainer, name)
        assert name not in dir(trainer)
    assert "step" in dir(trainer)
    assert not hasattr(StepLoss, "backward")
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nothing'"):
        trainer.nothing  # noqa: B018


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
