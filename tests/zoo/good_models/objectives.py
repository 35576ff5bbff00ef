"""Objectives of other kinds: ranking, regression, reinforcement learning, several tasks at once."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from good_models.recipe import ADAM, SGD, Recipe, mlp, numbers, summed, trainable, vectors

CROSS_ENTROPY = nn.CrossEntropyLoss()
WIDTH, CLASSES = 6, 5


def classifier():
    return mlp(WIDTH, 12, CLASSES)


def three_views(n):
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def triplet(model, anchor, positive, negative):
    return summed(F.triplet_margin_loss(
        model(anchor), model(positive), model(negative), reduction="none"))  # fmt: skip


def pairs(n):
    return (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), torch.randint(2, (n,)).float()


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(),
                                     nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))  # fmt: skip
        self.predictor = mlp(4, 2, 4)

    def forward(self, x):
        code = self.encoder(x)
        return self.predictor(code), code.detach()


def simsiam(model, first, second):
    """Two views of each example, without negatives (Chen and He, 2020, algorithm 1)."""
    (guess, code), (other_guess, other_code) = model(first), model(second)
    return summed(-F.cosine_similarity(guess, other_code) - F.cosine_similarity(other_guess, code))


TEACHER = mlp(WIDTH, 16, CLASSES)


def distillation(model, X, y):
    """Soft targets of a larger network at temperature 2 (Hinton et al., 2015)."""
    with torch.no_grad():
        soft = (TEACHER(X) / 2).softmax(1)
    logits = model(X)
    losses = F.cross_entropy(logits, y, reduction="none")
    return summed(losses + 4 * F.cross_entropy(logits / 2, soft, reduction="none"))


class QNetwork(nn.Module):
    """A network of action values, and its frozen target."""

    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(4, 8, 3), mlp(4, 8, 3)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)


def q_learning(model, states, actions, rewards, after, done):
    """Double DQN (van Hasselt et al., 2015)."""
    chosen = model.online(states).gather(1, actions[:, None])[:, 0]
    with torch.no_grad():
        best = model.online(after).argmax(1, keepdim=True)
        wanted = rewards + 0.9 * (1 - done) * model.target(after).gather(1, best)[:, 0]
    return summed(F.smooth_l1_loss(chosen, wanted, reduction="none"))


def transitions(n):
    done = (torch.rand(n) < 0.2).float()
    return torch.randn(n, 4), torch.randint(3, (n,)), torch.randn(n), torch.randn(n, 4), done


def standardised(n):
    advantages = torch.randn(n)
    return (advantages - advantages.mean()) / advantages.std()


def policy_gradient(model, states, actions, advantages):
    """REINFORCE with a baseline: the advantages sum to zero."""
    policy = torch.distributions.Categorical(logits=model(states))
    return summed(-policy.log_prob(actions) * advantages)


def episodes(n):
    return torch.randn(n, 4), torch.randint(3, (n,)), standardised(n)


def zero_head(*widths):
    """Return an `mlp` whose outputs are all equal at first."""
    model = mlp(*widths)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


def answers_in_groups(n):
    """Advantages that sum to zero in every group of two answers (GRPO, 2024)."""
    rewards = torch.randn(n + n % 2).view(-1, 2)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()[:n]
    return torch.randn(n, 4), torch.randint(3, (n,)), advantages


class TwoTasks(nn.Module):
    """A shared body, with a weight for each task (Kendall et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.body = mlp(WIDTH, 8)
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, CLASSES), "place": nn.Linear(8, 2)})
        self.log_variances = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(())) for name in self.heads}
        )

    def forward(self, x):
        features = self.body(x).relu()
        return {name: head(features) for name, head in self.heads.items()}


def two_tasks(model, batch):
    outputs, wanted = model(batch["input"]), batch["wanted"]
    losses = {
        "kind": F.cross_entropy(outputs["kind"], wanted["kind"], reduction="none"),
        "place": F.mse_loss(outputs["place"], wanted["place"], reduction="none").sum(1),
    }
    return summed(sum(
        (-model.log_variances[name]).exp() * loss + model.log_variances[name]
        for name, loss in losses.items()
    ))  # fmt: skip


def labelled_places(n):
    wanted = {"kind": torch.randint(CLASSES, (n,)), "place": torch.randn(n, 2)}
    return ({"input": torch.randn(n, WIDTH), "wanted": wanted},)


class WithAuxiliaryHead(nn.Module):
    """Returns the scores of a second head too, but in training only (GoogLeNet, 2014)."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.second = mlp(WIDTH, 8), mlp(8, CLASSES), mlp(8, CLASSES)

    def forward(self, x):
        features = self.body(x).relu()
        scores = self.head(features)
        return (scores, self.second(features)) if self.training else scores


def auxiliary(model, X, y):
    scores, second = model(X)
    losses = [F.cross_entropy(one, y, reduction="sum") for one in (scores, second)]
    return losses[0] + 0.3 * losses[1], len(y)


class LossesInTraining(nn.Module):
    """Returns its losses in training, and answers in evaluation, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.net = mlp(WIDTH, 8, CLASSES)

    def forward(self, x, targets=None):
        scores = self.net(x)
        if not self.training:
            return [{"label": int(label)} for label in scores.argmax(1)]
        return {"kind": F.cross_entropy(scores, targets["kind"], reduction="sum")}


def losses_in_training(model, X, targets):
    return sum(model(X, targets).values()), len(X)


def targets_by_name(n):
    X, y = vectors()(n)
    return X, {"kind": y}


def labelled_only(model, X, y):
    """A shard without labels counts nothing, and reaches no parameter."""
    known = y != -100
    if not known.any():
        return X.new_zeros(()), 0
    return F.cross_entropy(model(X[known]), y[known], reduction="sum"), known.sum()


def labels_at_the_end(n):
    X, y = vectors()(n)
    return X, torch.where(torch.arange(n) < n // 2, -100, y)


def scaled_in_place(model, pixels, y):
    pixels.div_(255).sub_(0.5)
    return F.cross_entropy(model(pixels), y, reduction="sum"), len(y)


def pixels(n):
    return torch.rand(n, WIDTH) * 255, torch.randint(CLASSES, (n,))


def taken_apart(model, batch):
    y = batch.pop("y")
    return F.cross_entropy(model(**batch), y, reduction="sum"), len(y)


def by_name(n):
    X, y = vectors()(n)
    return ({"input": X, "y": y},)


def mixup(model, X, y, other_X, other_y):
    """Each example is mixed with the one that the batch gives it (Zhang et al., 2017)."""
    share = torch.distributions.Beta(0.4, 0.4).sample((len(X),))
    logits = model(X * share[:, None] + other_X * (1 - share[:, None]))
    losses = (F.cross_entropy(logits, wanted, reduction="none") for wanted in (y, other_y))
    return summed(next(losses) * share + next(losses) * (1 - share))


def consistency(model, X, y):
    """Two noisy views of an example shall be classified alike (R-Drop, 2021)."""
    first, second = (model(X + 0.1 * torch.randn_like(X)).log_softmax(1) for _ in range(2))
    between = F.kl_div(first, second, reduction="none", log_target=True).sum(1)
    return summed(F.nll_loss(first, y, reduction="none") + between)


def with_decay(model, X, y):
    """An L2 penalty in the objective: once for each example of the mean."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(X), y, reduction="sum") + 1e-3 * penalty * len(X), len(X)


def adversarial(model, X, y):
    """Examples moved along the sign of their gradient (Goodfellow et al., 2014)."""
    moved = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y, reduction="sum"), moved)
    return F.cross_entropy(model(X + 0.1 * slope.sign()), y, reduction="sum"), len(X)


def heat_equation(model, points):
    """The residual of u_t = u_xx, by derivatives of the network (Raissi et al., 2017)."""
    points.requires_grad_()
    (first,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return summed((first[:, 1] - second[:, 0]) ** 2)


def few_shots(model, X, y, new_X, new_y):
    """One inner step for each task, and the loss after it (MAML, 2017)."""
    parameters = dict(model.named_parameters())

    def loss(parameters, X, y):
        return F.mse_loss(functional_call(model, parameters, (X,)), y)

    def adapted(X, y, new_X, new_y):
        slopes = grad(loss)(parameters, X, y)
        moved = {name: value - 0.1 * slopes[name] for name, value in parameters.items()}
        return loss(moved, new_X, new_y)

    return summed(vmap(adapted)(X, y, new_X, new_y))


def tasks(n):
    return torch.randn(n, 4, 1), torch.randn(n, 4, 1), torch.randn(n, 3, 1), torch.randn(n, 3, 1)


def quantiles(model, X, y):
    levels = torch.tensor([0.1, 0.5, 0.9])
    errors = y - model(X)
    return summed(torch.maximum(levels * errors, (levels - 1) * errors).sum(1))


def soft_labels(n):
    return torch.randn(n, WIDTH), torch.randn(n, CLASSES).softmax(1)


def some_unlabelled(n):
    X, y = vectors()(n)
    return X, y.masked_fill(torch.rand(n) < 0.2, -100)


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1])

OBJECTIVES = {
    "triplets": Recipe(lambda: mlp(WIDTH, 8, 3), three_views, objective=triplet),
    "simsiam": Recipe(SimSiam, lambda n: three_views(n)[:2], objective=simsiam),
    "distillation": Recipe(classifier, vectors(), objective=distillation),
    "q-learning": Recipe(
        QNetwork, transitions, objective=q_learning, make_optimizer=trainable(ADAM)),
    "policy gradient": Recipe(
        lambda: mlp(4, 8, 3), episodes, objective=policy_gradient, make_optimizer=ADAM),
    "advantages in groups": Recipe(
        lambda: zero_head(4, 8, 3), answers_in_groups, objective=policy_gradient,
        make_optimizer=ADAM),
    "two tasks": Recipe(TwoTasks, labelled_places, objective=two_tasks, make_optimizer=ADAM),
    "mixup of given pairs": Recipe(
        classifier, lambda n: (*vectors()(n), *vectors()(n)), objective=mixup),
    "auxiliary head in training": Recipe(
        WithAuxiliaryHead, vectors(), objective=auxiliary, unjudged="too many values to unpack"),
    "losses in training": Recipe(
        LossesInTraining, targets_by_name, objective=losses_in_training,
        unjudged="no attribute 'values'"),
    "shards without labels": Recipe(classifier, labels_at_the_end, objective=labelled_only),
    "examples scaled in place": Recipe(classifier, pixels, objective=scaled_in_place),
    "batch taken apart": Recipe(
        lambda: nn.Linear(WIDTH, CLASSES), by_name, objective=taken_apart),
    "consistency": Recipe(classifier, vectors(), objective=consistency),
    "penalty in the objective": Recipe(classifier, vectors(), objective=with_decay),
    "adversarial examples": Recipe(classifier, vectors(), objective=adversarial),
    "physics-informed": Recipe(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        lambda n: (torch.rand(n, 2),), objective=heat_equation, make_optimizer=ADAM),
    "inner steps": Recipe(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), tasks,
        objective=few_shots, make_optimizer=ADAM),
    "quantiles": Recipe(lambda: mlp(WIDTH, 12, 3), numbers(), objective=quantiles),
    "margins": Recipe(classifier, vectors(), nn.MultiMarginLoss()),
    "divergence": Recipe(
        lambda: nn.Sequential(classifier(), nn.LogSoftmax(1)), soft_labels,
        nn.KLDivLoss(reduction="batchmean")),
    "soft labels": Recipe(classifier, soft_labels, CROSS_ENTROPY),
    "label smoothing": Recipe(classifier, vectors(), nn.CrossEntropyLoss(label_smoothing=0.2)),
    "class weights, ignored labels": Recipe(
        classifier, some_unlabelled, nn.CrossEntropyLoss(CLASS_WEIGHTS), make_optimizer=SGD),
    "functional class weights": Recipe(
        classifier, some_unlabelled,
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS, label_smoothing=0.1)),
    "negative log-likelihood": Recipe(
        lambda: nn.Sequential(classifier(), nn.LogSoftmax(1)), vectors(),
        nn.NLLLoss(CLASS_WEIGHTS)),
}  # fmt: skip
