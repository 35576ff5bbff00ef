"""What each device of a pipeline holds: parameters, gradients, optimizer state, activations."""

import functools
import threading
from collections import defaultdict

import pytest
import torch
from torch import nn

import evenstep
from evenstep.stages import shard as shard_module
from evenstep.stages.carried import copied
from evenstep.stages.turns import TurnOrder
from layouts import own, shared
from reference import bits_of
from trainers import open_trainer

WIDTH = 24


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("devices", [shared, own])
def test_a_device_holds_its_share_of_parameters_gradients_and_optimizer_state(
    count, devices, monkeypatch
):
    """Every tensor is counted at the device whose turn it is when torch computes with it."""
    used = defaultdict(set)  # parameter -> the stages in which a module or AccumulateGrad had it

    def enter(shard, stage, name, given, enter=shard_module.StagedShard.enter):
        given = enter(shard, stage, name, given)
        used[name].add(shard.place.stage)
        return given

    monkeypatch.setattr(shard_module.StagedShard, "enter", enter)
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices(count), "divide": evenstep.Stages("balanced"), "check": "off"}
    reached = defaultdict(set)
    with open_trainer(model, nn.MSELoss(), optimizer=optimizer, **options) as trainer:
        executor = trainer._executor
        X = torch.randn(33, WIDTH)
        trainer.step(X, X)
        for lane in range(count):
            replica = executor._replica(lane)
            for number, parameter in enumerate(replica.parameters):
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_note, reached[number], executor, lane)
                )
        trainer.step(X, X)
        stages = executor.stages
    state = defaultdict(int)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        (stage,) = used[name.rpartition(".")[0]]
        assert reached[number] == {stage} == {stages.of_parameter[number]}
        moments = [one for one in optimizer.state[parameter].values() if one.ndim]
        state[stage] += bytes_of([parameter, parameter.grad, *moments])
    whole = sum(state.values())
    assert all(abs(own / (whole / count) - 1) < 0.05 for own in state.values())


def _note(stages, executor, lane, parameter):
    stages.add(executor._now[lane].place.stage)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_share_the_parameters_of_one_memory(replicas):
    model, X = chain(), torch.randn(33, WIDTH)
    options = {"devices": own(2 * replicas), "divide": evenstep.Stages("balanced:2")}
    with open_trainer(model, nn.MSELoss(), **options) as trainer:
        trainer.step(X, X)
        held = {
            parameter.data_ptr()
            for replica in trainer._replicas.all
            for parameter in replica.parameters
        }
        home = {parameter.data_ptr() for parameter in model.parameters()}
    assert len(held) == replicas * len(home)
    assert home <= held


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_stage_never_holds_more_shards_than_its_distance_from_the_end(count, monkeypatch):
    most, lock = defaultdict(int), threading.Lock()

    def begin(order, begin=TurnOrder.begin):
        begun = begin(order)
        with lock:
            for stage, holding in enumerate(order.holding):
                most[stage] = max(most[stage], len(holding))
        return begun

    monkeypatch.setattr(TurnOrder, "begin", begin)
    stages = {str(6 * stage // 4): stage for stage in range(count)}
    options = {"devices": count, "shards": 16, "divide": evenstep.Stages(stages)}
    X = torch.randn(64, WIDTH)
    with open_trainer(chain(), nn.MSELoss(), **options) as trainer:
        for _ in range(3):
            trainer.step(X, X)
    assert all(most[stage] <= count - stage for stage in range(count) if count > 1)


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "rows": lambda x: x[1:5],
    "columns": lambda x: x[:, 3:5],
    "every second": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(5, -1),
    "empty": lambda x: x[:0],
    "a number": lambda x: x[2, 3],
    "channels last": lambda x: x.view(1, 2, 3, 7).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("view", VIEWS)
def test_a_carried_tensor_is_laid_out_as_it_was(view, dtype):
    source = VIEWS[view](torch.arange(42).view(6, 7).to(dtype))
    copy = copied(source)
    assert bits_of(copy) == bits_of(source)
    assert copy.stride() == source.stride()
    assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    if source.numel():
        assert copy.data_ptr() % 64 == source.storage_offset() * source.itemsize % 64
    assert not copy._is_view()
