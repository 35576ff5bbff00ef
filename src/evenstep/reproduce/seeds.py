"""The book's MXNet programs on `evenstep.mxnet`, each measured in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep import mxnet as mx
from evenstep.mxnet import autograd, d2l, gluon, init, nd
from evenstep.mxnet.gluon import nn
from evenstep.mxnet.gluon.utils import split_and_load
from evenstep.reproduce.measures import (
    FEATURES,
    HIDDEN,
    Call,
    Job,
    growth,
    queued,
    repeat,
    together,
    waiting,
)

Step = Callable[[Any, Any], None]

_SHAPES = ((20, 1, 3, 3), 20, (50, 20, 5, 5), 50, (800, 128), 128, (128, 10), 10)
_CONTEXTS = {None: mx.cpu(), "cpu:0": mx.cpu(), "cpu:1": mx.gpu(0)}


class OnMXNet:
    """Runs operations in MXNet's words: each is queued."""

    waitall = staticmethod(nd.waitall)

    def call(self, operation: str, size: int, device: str | None = None) -> Call:
        """Return what queues it; "sum" is a product whose elements are added."""
        x = nd.random.uniform(shape=(size, size), ctx=_CONTEXTS[device])
        calls: dict[str, Call] = {
            "add": lambda: x + 1,
            "mm": lambda: nd.dot(x, x),
            "sum": lambda: nd.dot(x, x).sum(),
        }
        return calls[operation]

    def many(self, call: Call, count: int, *, waits: bool) -> None:
        """Queue it so often."""
        repeat(call, count, waits=waits)
        self.waitall()


def calls(job: Job) -> dict[str, Any]:
    """Return the shortest mean microseconds of a call of a small network, hybridized or not."""
    net, x = nn.HybridSequential(), nd.random.normal(shape=(1, FEATURES))
    net.add(nn.Dense(256, activation="relu"), nn.Dense(128, activation="relu"), nn.Dense(2))
    net.initialize()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(job["rounds"]):
        for active, times in found.items():
            net.hybridize(active)
            net(x).wait_to_read()
            began = time.perf_counter()
            for _ in range(job["calls"]):
                net(x)
            nd.waitall()
            times.append(1e6 * (time.perf_counter() - began) / job["calls"])
    return {"eager_us": min(found[False]), "hybrid_us": min(found[True])}


def memory(job: Job) -> dict[str, Any]:
    """Return the growth of the process, with and without reading each loss by `asscalar`."""
    net, loss, count = nn.Sequential(), gluon.loss.L2Loss(), job["examples"]
    net.add(*(nn.Dense(width, activation="relu") for width in HIDDEN), nn.Dense(1))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.005})

    def train() -> None:
        X, y = nd.random.normal(shape=(count, FEATURES)), nd.ones((count,))
        with autograd.record():
            found = loss(y, net(X))
        if job["bound"] == "asscalar":
            found.mean().asscalar()
        found.backward()
        trainer.step(count)

    return growth(train, nd.waitall, job["batches"])


def lenet(contexts: Sequence[mx.Context], lr: float) -> Step:
    """Return a step of the book's LeNet from scratch."""
    made = [
        nd.zeros(shape) if isinstance(shape, int) else nd.random.normal(scale=0.01, shape=shape)
        for shape in _SHAPES
    ]
    params = [[one.copyto(context) for one in made] for context in contexts]
    for one in (one for own in params for one in own):
        one.attach_grad()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(X: Any, y: Any) -> None:
        parts = split_and_load(X, contexts), split_and_load(y, contexts), params
        with autograd.record():
            losses = [loss(_scores(X, own), y) for X, y, own in zip(*parts, strict=True)]
        for one in losses:
            one.backward()
        for number in range(len(made)):
            _all_reduce([own[number].grad for own in params])
        for own in params:
            d2l.sgd(own, lr, len(X))

    return step


def _scores(X: Any, params: Sequence[Any]) -> Any:
    pool = {"pool_type": "avg", "kernel": (2, 2), "stride": (2, 2)}
    h = nd.Convolution(X, params[0], params[1], kernel=(3, 3), num_filter=20)
    h = nd.Pooling(nd.relu(h), **pool)
    h = nd.Convolution(h, params[2], params[3], kernel=(5, 5), num_filter=50)
    h = nd.Pooling(nd.relu(h), **pool)
    h = nd.relu(nd.dot(nd.flatten(h), params[4]) + params[5])
    return nd.dot(h, params[6]) + params[7]


def _all_reduce(data: Sequence[Any]) -> None:
    for one in data[1:]:
        data[0][:] += one.copyto(data[0].context)
    for one in data[1:]:
        data[0].copyto(one)


def resnet18(contexts: Sequence[mx.Context], lr: float) -> Step:
    """Return a step of Gluon's ResNet-18 with `gluon.Trainer`."""
    net = d2l.resnet18(10)
    net.initialize(init=init.Normal(sigma=0.01), ctx=list(contexts))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(X: Any, y: Any) -> None:
        Xs, ys = split_and_load(X, contexts), split_and_load(y, contexts)
        with autograd.record():
            losses = [loss(net(part), label) for part, label in zip(Xs, ys, strict=True)]
        for one in losses:
            one.backward()
        trainer.step(len(X))

    return step


def speed(make: Callable[[Sequence[mx.Context], float], Step], job: Job) -> dict[str, Any]:
    """Return the examples per second of `steps` steps on images of noise, after one step."""
    examples = job["batch_size"] * (job["devices"] if job["grows"] else 1)
    X = nd.random.uniform(shape=(examples, 1, 28, 28))
    y = nd.random.randint(0, 10, shape=(examples,))
    step = make([mx.gpu(i) for i in range(job["devices"])], job["lr"])
    step(X, y)
    nd.waitall()
    began = time.perf_counter()
    for _ in range(job["steps"]):
        step(X, y)
        nd.waitall()
    seconds = time.perf_counter() - began
    return {"examples_per_s": job["steps"] * examples / seconds, "seconds": seconds}


_MEASURES: Mapping[str, Callable[[Job], dict[str, Any]]] = {
    "queued": lambda job: queued(OnMXNet(), job, "sum"),
    "waiting": lambda job: waiting(OnMXNet(), job),
    "together": lambda job: together(OnMXNet(), job),
    "calls": calls,
    "memory": memory,
    "lenet": lambda job: speed(lenet, job),
    "resnet18": lambda job: speed(resnet18, job),
}


def measure(job: Job) -> dict[str, Any]:
    """Measure what the job names."""
    torch.set_num_threads(1)
    return _MEASURES[job["measure"]](job)
