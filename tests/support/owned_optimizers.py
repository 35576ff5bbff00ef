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


class Lamb(torch.optim.Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning", 2020; it may clip, as NVIDIA's.

    Args:
        params: as of every optimizer.
        max_grad_norm: the largest norm of all gradients together; None to leave them as they are.
    """

    def __init__(self, params, max_grad_norm=None, lr=1e-2, betas=(0.9, 0.999), eps=1e-6):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        most = self.defaults["max_grad_norm"]
        held = [one for group in self.param_groups for one in group["params"]]
        held = [one for one in held if one.grad is not None]
        norm = torch.nn.utils.get_total_norm([one.grad for one in held])
        scale = 1.0 if most is None or norm <= most else most / norm
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.update(one, one.grad * scale, group)

    def update(self, one, grad, group):
        first, second = group["betas"]
        state = self.state[one]
        mean = state.setdefault("mean", torch.zeros_like(one)).lerp_(grad, 1 - first)
        square = state.setdefault("square", torch.zeros_like(one)).lerp_(grad**2, 1 - second)
        update = mean / (square.sqrt() + group["eps"]) + 0.01 * one
        trust = one.norm() / update.norm()
        one.sub_(update, alpha=group["lr"] * (float(trust) if 0 < trust < 10 else 1.0))


class ClampedTrust(OneByOne):
    """Its rate follows the norm of all weights over that of all gradients, between 0.1 and 10."""

    def step(self, closure=None):
        held = [one for group in self.param_groups for one in group["params"]]
        held = [one for one in held if one.grad is not None]
        norms = [torch.nn.utils.get_total_norm(tensors) for tensors in
                 (held, [one.grad for one in held])]  # fmt: skip
        self.rate = float((norms[0] / norms[1]).clamp(0.1, 10)) if held else 0.0
        super().step()

    def update(self, one):
        one.sub_(one.grad, alpha=self.rate)


class AverageOfMatrices(OneByOne):
    """It subtracts the mean of all matrices' gradients, and leaves vectors alone."""

    def step(self, closure=None):
        held = [one for group in self.param_groups for one in group["params"] if one.ndim > 1]
        means = [one.grad.mean() for one in held if one.grad is not None]
        self.mean = float(sum(means)) / len(means) if means else 0.0
        super().step()

    def update(self, one):
        one.sub_(one.grad - (self.mean if one.ndim > 1 else 0.0), alpha=0.1)


class OwnList(torch.optim.Optimizer):
    """It updates the parameters that an attribute of its own leads to, not those of its groups."""

    def __init__(self, params, hold=list):
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.mine = hold(params)

    @torch.no_grad()
    def step(self, closure=None):
        is_list = isinstance(self.mine, torch.nn.ParameterList) or not callable(self.mine)
        for one in self.mine if is_list else self.mine():
            one = one[-1] if isinstance(one, tuple) else one
            if one.grad is not None:
                one.sub_(one.grad, alpha=self.param_groups[0]["lr"])


class Holder:
    """An object with parameters."""

    def __init__(self, params):
        self.params = params

    def __call__(self):
        return self.params

    def get(self):
        return self.params


OWN_LISTS = {
    "list": list,
    "pairs": lambda params: [(str(number), one) for number, one in enumerate(params)],
    "dict": lambda params: dict.fromkeys(params, 1),
    "closure": lambda params: lambda: params,
    "default": lambda params: lambda found=params: found,
    "partial": lambda params: functools.partial(list, params),
    "method": lambda params: Holder(params).get,
    "object": Holder,
    "module": lambda params: torch.nn.ParameterList(params),
}

COUPLED = [NormOfAll, ByDistance, Draws, ClampedTrust, AverageOfMatrices] + [
    functools.partial(Lamb, max_grad_norm=most) for most in (1e-7, 0.01, 1.0, 100.0)
]


def _of_torch():
    for cls in OF_TORCH:
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            continue
        settings = SETTINGS.get(cls, {})
        yield cls.__name__, functools.partial(cls, **settings)
        if "foreach" in inspect.signature(cls).parameters:
            yield f"{cls.__name__}, foreach", functools.partial(cls, foreach=True, **settings)


OPTIMIZERS = {**dict(_of_torch()), "Lion": Lion, "Lamb": Lamb, "ScheduleFree": ScheduleFree}


def model_of(name):
    return matrices() if name.startswith("Muon") else build("convolution")
