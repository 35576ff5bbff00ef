"""Errors of user code: a table of the places where it is called, and of six kinds of errors."""

import dataclasses
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import evenstep
from evenstep.engine import InlineLanes
from grouping import grouped
from layouts import own

LAYOUTS = {
    "one": {"devices": 1},
    "two": {"devices": 2},
    "own": {"devices": own(2)},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "in flight, own": {"devices": own(2), "max_in_flight": 2},
    "stages": {"devices": 2, "divide": evenstep.Stages({"first": 0, "last": 1})},
    "side by side": {"devices": 2, "side_by_side": True},
    "owners": {"devices": 2, "divide": evenstep.Owners()},
    "inline": {"devices": 2, "lanes": InlineLanes},
    "sync": {"devices": 2, "batch_norm": "sync"},
}
X, Y = torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 4
EXAMPLES = [*zip(X, Y, strict=True)]


# ---- the errors


class OrdinaryError(LookupError):
    pass


class AwkwardError(Exception):
    """Needs arguments, and can't be copied, pickled, changed or printed in full."""

    def __init__(self, text, *, code):
        super().__init__(text)
        object.__setattr__(self, "code", code)

    def __setattr__(self, name, value):
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol):
        raise TypeError("not to be pickled")

    def __repr__(self):
        raise RuntimeError("no repr")


KINDS = {
    "an exception": lambda: OrdinaryError("enough"),
    "Ctrl-C": lambda: KeyboardInterrupt("enough"),
    "exit": lambda: SystemExit("enough"),
    "StopIteration": lambda: StopIteration("enough"),
    "GeneratorExit": lambda: GeneratorExit("enough"),
    "an awkward one": lambda: AwkwardError("enough", code=3),
}


class Bang:
    """Raises a new error of one kind while it is due, in any copy: once, or at each call."""

    def __init__(self, kind, *, once=False):
        self.kind, self.once = kind, once
        self.is_due = False
        self.raised = []
        self.lock = threading.Lock()

    def __call__(self, *_):
        with self.lock:
            if not self.is_due:
                return
            self.is_due = not self.once
            error = KINDS[self.kind]()
            self.raised.append(error)
        raise error

    def __deepcopy__(self, memo):
        return self

    def passing(self, x):
        """Return the argument, if it doesn't fail."""
        self()
        return x


# ---- where user code is called


@dataclasses.dataclass(frozen=True)
class Place:
    """A place where the trainer calls user code.

    Attributes:
        given: returns what `trainer_of` takes, for a bang.
        call: what is called when the error is due; then again, undisturbed.
        leaves: "nothing", a "whole" step, or "half" of one.
        layouts: those that it is tried on.
    """

    given: Callable[[Bang], Mapping[str, Any]]
    call: Callable[..., Any]
    leaves: str = "nothing"
    layouts: tuple[str, ...] = tuple(LAYOUTS)


class Model(nn.Module):
    def __init__(self, inside):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.inside = inside

    def forward(self, x):
        return self.last(self.inside(self.norm(self.first(x))))


def trainer_of(
    layout,
    *,
    resumed_from=None,
    loss=None,
    inside=None,
    make=None,
    prepare=None,
    schedule=None,
    **options,
):
    """Return a trainer, with what a place needs."""
    model = Model(inside or (lambda x: x))
    make = make or (lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    optimizer = make(model.parameters())
    if prepare is not None:
        prepare(model, optimizer)
    if schedule is not None:
        options["scheduler"] = Scheduler(optimizer, schedule)
    options = {"shards": 4, **LAYOUTS[layout], **options}
    if "objective" not in options:
        options["loss"] = loss or nn.CrossEntropyLoss()
    if resumed_from is None:
        return evenstep.Trainer(model, optimizer, **grouped(**options))
    return evenstep.Trainer.load(resumed_from, model, optimizer, **grouped(**options))


def step(trainer, bang, folder):
    trainer.step(X, Y)
    trainer.waitall()


def two_steps(trainer, bang, folder):
    for _ in range(2):
        trainer.step(X, Y)
    trainer.waitall()


def backward(trainer, bang, folder):
    trainer.backward(X, Y)
    trainer.optimizer.step()


def backward_with_objective(trainer, bang, folder):
    trainer.backward(X, Y, objective=objective(bang))
    trainer.optimizer.step()


def accuracy(output, y):
    return (output.argmax(1) == y).sum(), len(y)


def evaluate(trainer, bang, folder):
    return trainer.evaluate([(X, Y)], {"right": lambda *given: bang.passing(accuracy(*given))})


def evaluate_with(trainer, bang, folder, **options):
    return trainer.evaluate([(X, Y)], {"right": accuracy}, **options)


def predict(trainer, bang, folder):
    return trainer.predict([X], lambda model, x: bang.passing(model(x)))


def evaluate_batches(trainer, bang, folder):
    def batches():
        yield X, Y
        bang()
        yield X, Y

    return trainer.evaluate(batches(), {"right": accuracy})


def predict_batches(trainer, bang, folder):
    return trainer.predict(Failing([X, X], bang))


def evaluate_another_model(trainer, bang, folder):
    class Average(Model):
        def named_parameters(self, *given, **options):
            bang()
            return super().named_parameters(*given, **options)

    return evaluate_with(trainer, bang, folder, model=Average(None))


def evaluate_an_object(where):
    return lambda trainer, bang, folder: trainer.evaluate(
        [(X, Y)], {"right": metric_object(bang, where)}
    )


def metric_object(bang, where):
    from torchmetrics import MeanMetric

    class Right(MeanMetric):
        def update(self, output, y):
            if where == "update":
                bang()
            super().update((output.argmax(1) == y).float())

        def compute(self):
            if where == "compute":
                bang()
            return super().compute()

    return Right()


def save(trainer, bang, folder):
    trainer.save(folder)


def save_in_background(trainer, bang, folder):
    trainer.save(folder, background=True)
    trainer.wait_for_save()


class Failing:
    """A list of batches whose iterator may fail before the second one, and go on then."""

    def __init__(self, batches, bang):
        self.batches, self.bang = batches, bang

    def __iter__(self):
        return FailingIterator(self)

    def __len__(self):
        return len(self.batches)


class FailingIterator:
    def __init__(self, of):
        self.rest, self.place, self.bang = iter(of.batches), 0, of.bang

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == 1:
            self.bang()
        self.place += 1
        return next(self.rest)


class Data:
    """A map-style data set, a sampler, or a `collate_fn`, which may fail."""

    def __init__(self, bang=lambda *_: None):
        self.bang = bang

    def __len__(self):
        return len(EXAMPLES)

    def __getitem__(self, index):
        if index == 9:
            self.bang()
        return EXAMPLES[index]

    def __iter__(self):
        for index in range(16):
            if index == 9:
                self.bang()
            yield index

    def collate(self, examples):
        if any(torch.equal(x, X[9]) for x, _ in examples):
            self.bang()
        return torch.utils.data.default_collate(examples)


class Stream(IterableDataset):
    def __init__(self, bang):
        self.bang = bang

    def __iter__(self):
        for index, example in enumerate(EXAMPLES):
            if index == 9:
                self.bang()
            yield example


LOADERS = {
    "a list": lambda bang: [(X, Y), (X, Y)],
    "a data set": lambda bang: DataLoader(Data(bang), batch_size=8),
    "a sampler": lambda bang: DataLoader(Data(), batch_size=8, sampler=Data(bang)),
    "collate_fn": lambda bang: DataLoader(Data(), batch_size=8, collate_fn=Data(bang).collate),
    "a stream": lambda bang: DataLoader(Stream(bang), batch_size=8),
    "an iterator of batches": lambda bang: Failing([(X, Y), (X, Y)], bang),
    "evenstep's Loader": lambda bang: evenstep.data.Loader(Data(bang), batch_size=8),
    "its collate_fn": lambda bang: evenstep.data.Loader(
        Data(), batch_size=8, collate_fn=Data(bang).collate
    ),
    "its sampler": lambda bang: evenstep.data.Loader(Data(), batch_size=8, sampler=Data(bang)),
}


def epoch_of(name):
    """Return what trains on the rest of an epoch, of one loader for each bang."""

    def epoch(trainer, bang, folder):
        if not hasattr(bang, "loader"):
            bang.loader = LOADERS[name](bang)
        for batch in trainer.epoch(bang.loader):
            trainer.step(*batch)
            trainer.waitall()

    return epoch


class Batch(Mapping):
    """A batch of a class of the user's own."""

    def __init__(self, bang):
        self.bang = bang

    def __iter__(self):
        self.bang()
        return iter(("x", "y"))

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return {"x": X, "y": Y}[key]


def step_on_a_mapping(trainer, bang, folder):
    trainer.step(Batch(bang))
    trainer.waitall()


class State:
    def __init__(self, bang, where):
        self.bang, self.where = bang, where

    def state_dict(self):
        if self.where == "state_dict":
            self.bang()
        return {"a": torch.ones(2)}

    def load_state_dict(self, state):
        if self.where == "load_state_dict":
            self.bang()


class Callback(evenstep.callbacks.Callback):
    def __init__(self, bang, where):
        setattr(self, where, bang)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bang, where):
        ctx.bang, ctx.where = bang, where
        if where == "forward":
            bang()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.where == "backward":
            ctx.bang()
        return gradient, None, None


class ByHand(torch.optim.Optimizer):
    def __init__(self, parameters, bang):
        super().__init__(parameters, {"lr": 0.1})
        self.bang = bang

    @torch.no_grad()
    def step(self, closure=None):
        for number, one in enumerate(self.param_groups[0]["params"]):
            if number == 3:
                self.bang()
            one.sub_(0.1 * one.grad)

    def __deepcopy__(self, memo):
        raise AssertionError("nobody copies it")


def objective(bang):
    def total(model, X, y):
        bang()
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    return total


def of_mapping(model, batch):
    return objective(lambda: None)(model, batch["x"], batch["y"])


def hooked(bang):
    """A hook on an activation's gradient."""

    def inside(x):
        if x.requires_grad:
            x.register_hook(bang)
        return x

    return {"inside": inside}


def recomputed(bang):
    def inside(x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: (torch.is_grad_enabled() and bang(), x * 1)[1], x, use_reentrant=False
        )

    return {"inside": inside}


def saved_tensors(bang):
    def inside(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, bang.passing):
            return x * x

    return {"inside": inside}


def inside_function(where):
    return lambda bang: {"inside": lambda x: Passes.apply(x, bang, where)}


def on_the_model(path):
    """Register a hook by calling an attribute of the model."""
    return lambda bang: {"prepare": lambda model, _: operator.attrgetter(path)(model)(bang)}


def on_the_optimizer(name):
    return lambda bang: {"prepare": lambda _, optimizer: getattr(optimizer, name)(bang)}


def extra_state(bang):
    class Counting(nn.Identity):
        def get_extra_state(self):
            bang()
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    return {"prepare": lambda model, optimizer: model.add_module("counting", Counting())}


class Scheduler(torch.optim.lr_scheduler.ConstantLR):
    def __init__(self, optimizer, bang):
        self.bang = bang
        super().__init__(optimizer)

    def state_dict(self):
        self.bang()
        return {"last_epoch": self.last_epoch}


def step_observed(trainer, bang, folder):
    trainer.on_shard = bang
    step(trainer, bang, folder)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


def nothing_given(bang):
    return {}


NOT_OWNERS = tuple(name for name in LAYOUTS if name != "owners")
"""There, hooks on the optimizer and backward are refused."""

IN_FLIGHT = ("in flight", "in flight, own")
WITH_HOOKS = tuple(name for name in NOT_OWNERS if name not in IN_FLIGHT)  # of the optimizer


def in_forward(bang):
    return {"inside": lambda x: bang.passing(x)}  # a bound method would be watched for changes


def in_update(name):
    return lambda bang: {name: bang}


def in_callback(name):
    return lambda bang: {"callbacks": [Callback(bang, name)]}


def by_hand(bang):
    return {"make": lambda parameters: ByHand(parameters, bang)}


def with_lbfgs(given):
    return lambda bang: {**given(bang), "make": lbfgs}


def in_state(bang):
    return {"state": {"a": State(bang, "state_dict")}}


def in_loss(bang):
    return {"loss": lambda *given: bang.passing(nn.functional.cross_entropy(*given))}


PLACES = {
    "forward": Place(in_forward, step),
    "the loss": Place(in_loss, step),
    "the objective": Place(lambda bang: {"objective": objective(bang)}, step),
    "a hook before a module": Place(on_the_model("last.register_forward_pre_hook"), step),
    "a hook behind a module": Place(on_the_model("first.register_forward_hook"), step),
    "a hook on a module's gradient": Place(on_the_model("last.register_full_backward_hook"), step),
    "a hook on an activation's gradient": Place(hooked, step),
    "a hook on a parameter": Place(on_the_model("last.weight.register_hook"), step),
    "a Function's forward": Place(inside_function("forward"), step),
    "a Function's backward": Place(inside_function("backward"), step),
    "a recomputed function": Place(recomputed, step),
    "a hook on saved tensors": Place(saved_tensors, step),
    "a batch's own class": Place(lambda bang: {"objective": of_mapping}, step_on_a_mapping),
    "before_update": Place(in_update("before_update"), step),
    "a hook before the optimizer": Place(
        on_the_optimizer("register_step_pre_hook"), step, layouts=WITH_HOOKS
    ),
    "the optimizer": Place(by_hand, step, "half", NOT_OWNERS),
    "a hook behind the optimizer": Place(
        on_the_optimizer("register_step_post_hook"), step, "whole", WITH_HOOKS
    ),
    "after_update": Place(in_update("after_update"), step, "whole"),
    "forward, and a step behind it": Place(in_forward, two_steps, layouts=IN_FLIGHT),
    "before_update, and a step behind it": Place(
        in_update("before_update"), two_steps, layouts=IN_FLIGHT
    ),
    "the optimizer, and a step behind it": Place(by_hand, two_steps, "half", IN_FLIGHT),
    "on_step": Place(in_callback("on_step"), step, "whole"),
    "on_save": Place(in_callback("on_save"), save),
    "on_epoch": Place(in_callback("on_epoch"), epoch_of("a list"), "epoch"),
    "forward, in backward": Place(in_forward, backward, layouts=NOT_OWNERS),
    "the objective of backward": Place(nothing_given, backward_with_objective, layouts=NOT_OWNERS),
    "a metric": Place(nothing_given, evaluate),
    "forward, in evaluate": Place(in_forward, evaluate_with),
    "a metric object's update": Place(nothing_given, evaluate_an_object("update")),
    "a metric object's compute": Place(nothing_given, evaluate_an_object("compute")),
    "evaluate's batches": Place(nothing_given, evaluate_batches),
    "evaluate's model": Place(nothing_given, evaluate_another_model),
    "predict's forward": Place(nothing_given, predict),
    "predict's batches": Place(nothing_given, predict_batches),
    "a state's state_dict": Place(in_state, save),
    "the same in the background": Place(in_state, save_in_background),
    "a module's extra state": Place(extra_state, save),
    "a scheduler's state_dict": Place(in_update("schedule"), save),
    "a step that is observed": Place(nothing_given, step_observed),
    "forward, with LBFGS": Place(with_lbfgs(in_forward), step, layouts=NOT_OWNERS),
    "after_update, with LBFGS": Place(
        with_lbfgs(in_update("after_update")), step, "whole", NOT_OWNERS
    ),
    "a hook on the optimizer's state": Place(
        on_the_optimizer("register_state_dict_post_hook"), save, layouts=NOT_OWNERS
    ),
    **{name: Place(nothing_given, epoch_of(name)) for name in LOADERS if name != "a list"},
}
