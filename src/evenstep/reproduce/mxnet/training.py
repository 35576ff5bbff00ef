"""LeNet from scratch and Gluon's ResNet-18, as the seeds train them, on one context or on two."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep import mxnet as mx
from evenstep.bench import fresh
from evenstep.mxnet import autograd, d2l, gluon, init, nd
from evenstep.mxnet.gluon.utils import split_and_load

Job = Mapping[str, Any]
Step = Callable[[Any, Any], None]

_SHAPES = ((20, 1, 3, 3), 20, (50, 20, 5, 5), 50, (800, 128), 128, (128, 10), 10)


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
        Xs, ys = split_and_load(X, contexts), split_and_load(y, contexts)
        with autograd.record():
            losses = [
                loss(_scores(part, own), label)
                for part, label, own in zip(Xs, ys, params, strict=True)
            ]
        for one in losses:
            one.backward()
        for number in range(len(made)):
            _all_reduce([own[number].grad for own in params])
        for own in params:
            d2l.sgd(own, lr, len(X))

    return step


def _scores(X: Any, params: Sequence[Any]) -> Any:
    h = nd.Convolution(X, params[0], params[1], kernel=(3, 3), num_filter=20)
    h = nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h = nd.Convolution(h, params[2], params[3], kernel=(5, 5), num_filter=50)
    h = nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))
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


def measure(job: Job) -> dict[str, Any]:
    """Return the examples per second of `steps` steps on images of noise, after one step."""
    torch.set_num_threads(1)
    contexts = [mx.gpu(i) for i in range(job["devices"])]
    examples = job["batch_size"] * (job["devices"] if job["grows"] else 1)
    X = nd.random.uniform(shape=(examples, 1, 28, 28))
    y = nd.random.randint(0, 10, shape=(examples,))
    step = {"lenet": lenet, "resnet18": resnet18}[job["measure"]](contexts, job["lr"])
    step(X, y)
    nd.waitall()
    began = time.perf_counter()
    for _ in range(job["steps"]):
        step(X, y)
        nd.waitall()
    seconds = time.perf_counter() - began
    return {"examples_per_s": job["steps"] * examples / seconds, "seconds": seconds}


if __name__ == "__main__":
    fresh.answer(measure)
