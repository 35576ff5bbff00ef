"""Optimizers that update each tensor by itself, and some that don't."""

import functools
import inspect

import torch

from optimizers import OPTIMIZERS as OF_TORCH
from optimizers import SETTINGS, matrices
from zoo import build


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                momentum = state.setdefault("momentum", torch.zeros_like(one))
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(group["lr"] * momentum.lerp(one.grad, 1 - first).sign())
                momentum.lerp_(one.grad, 1 - second)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al., "The Road Less Scheduled", 2024: its counts are in the groups."""

    def __init__(self, params, lr=0.1, beta=0.9, warmup=3):
        defaults = {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["weight_sum"] += rate**2
            share = rate**2 / group["weight_sum"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                z = self.state[one].setdefault("z", one.detach().clone())
                one.lerp_(z, share)
                one.sub_(one.grad, alpha=rate * (1 - group["beta"] * (1 - share)))
                z.sub_(one.grad, alpha=rate)
            group["k"] += 1


class NormOfAll(torch.optim.SGD):
    """It scales by the norm of all gradients, so tensors are coupled."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [one for group in self.param_groups for one in group["params"]]
        norm = torch.nn.utils.get_total_norm([one.grad for one in held if one.grad is not None])
        for one in held:
            if one.grad is not None:
                one.sub_(one.grad / norm, alpha=0.1)


class ByDistance(torch.optim.Optimizer):
    """Its rate follows the distance travelled, which is 0 in the first step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        held = [one for g in self.param_groups for one in g["params"] if one.grad is not None]
        far = sum(float((one - self.state[one].setdefault("0", one.clone())).sum()) for one in held)
        for one in held:
            one.sub_(one.grad, alpha=self.param_groups[0]["lr"] * (1 + abs(far)))


class DecaysAll(torch.optim.Optimizer):
    """It changes parameters without a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.mul_(0.99)
                if one.grad is not None:
                    one.sub_(one.grad, alpha=0.1)


class OneByOne(torch.optim.Optimizer):
    """It calls `update` with each parameter that has a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.update(one)


class Draws(OneByOne):
    """It adds noise from the generator that all tensors share (Langevin dynamics)."""

    def update(self, one):
        one.sub_(one.grad + torch.randn_like(one), alpha=0.1)


class KeepsElsewhere(OneByOne):
    """Its momentum is in an attribute of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.momentum = {}

    def update(self, one):
        momentum = self.momentum.setdefault(one, torch.zeros_like(one))
        one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=0.1)


class CountsGradients(OneByOne):
    """It decays its learning rate in groups with a gradient only."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if any(one.grad is not None for one in group["params"]):
                group["lr"] *= 0.9

    def update(self, one):
        one.sub_(one.grad, alpha=self.param_groups[0]["lr"])


COUPLED = [NormOfAll, ByDistance, Draws]


def _of_torch():
    for cls in OF_TORCH:
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            continue
        settings = SETTINGS.get(cls, {})
        yield cls.__name__, functools.partial(cls, **settings)
        if "foreach" in inspect.signature(cls).parameters:
            yield f"{cls.__name__}, foreach", functools.partial(cls, foreach=True, **settings)


OPTIMIZERS = {**dict(_of_torch()), "Lion": Lion, "ScheduleFree": ScheduleFree}


def model_of(name):
    return matrices() if name.startswith("Muon") else build("convolution")
