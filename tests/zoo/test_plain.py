"""Models of the zoo against plain torch: sameness of the layouts would not show a common fault."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import evenstep
from good_models import HUGGING_FACE, MODELS
from grouping import grouped
from layouts import own, shared
from reference import assert_same_bits, reference_step, shard_loss, whole_state

RECIPES = MODELS | HUGGING_FACE
SHARDS = (1, 3, 8)
LAYOUTS = {1: own(2), 3: 1, 8: shared(3)}
"""The devices for each number of shards: each of both once, as no layout changes the result."""
ROUNDING = 1e-4  # of a gradient in float32, relative to its norm

NOT_BY_SHARDS = {
    "synchronised batch norm": "batch_norm='sync' makes each shard depend on the others",
}
NOT_WHOLE = {
    "running statistic": "each shard is divided by its own running mean",
    "replaced buffer": "each shard subtracts its own running mean",
    "fixed random features": "the features are drawn anew in float64, so they are others",
    "distillation": "its teacher, outside of the model, computes in float32",
    "bfloat16 weights": "the weights have eight bits",
    "Mixtral": "its grouped product takes no float64",
    "Gemma 2": "its rows of padding are NaN in float64",
}


def cases(*, but=()):
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (number % 3 > 0 or name in HUGGING_FACE))
        for number, name in enumerate(RECIPES)
        if name not in but
    ]


def make_model(recipe):
    torch.manual_seed(0)
    return recipe.make_model()


def make_batches(recipe):
    """Return batches of many examples; and, where a shard may have one, of few and of one."""
    torch.manual_seed(1)
    few = () if depends_on_several(recipe) else (5, 1)
    return [recipe.make_batch(size) for size in (16, 19, *few)]


def depends_on_several(recipe):
    """Whether one example isn't enough: for batch statistics, or for standardised advantages."""
    return (
        has_batch_statistics(recipe)
        or "episodes" in recipe.make_batch.__code__.co_names
        or (recipe.make_batch.__name__ == "episodes")
    )


def has_batch_statistics(recipe):
    return any(isinstance(one, _BatchNorm) for one in make_model(recipe).modules())


def recorder(recipe):
    """Return a list, and a hook that appends the gradients by name before it calls the recipe's."""
    seen, own_hook = [], recipe.options.get("before_update", lambda model: None)

    def record(model):
        seen.append({
            name: None if one.grad is None else one.grad.clone()
            for name, one in model.named_parameters()
        })  # fmt: skip
        own_hook(model)

    return seen, record


def train(recipe, shards, devices, **choices):
    """Return the gradients of every step, the losses, and the state after them."""
    model, (gradients, record) = make_model(recipe), recorder(recipe)
    optimizer = recipe.make_optimizer(model.parameters())
    options = {
        **recipe.options,
        "shards": shards,
        "before_update": record,
        "check": "off",
        **choices,
    }
    with evenstep.Trainer(
        model,
        optimizer,
        recipe.loss,
        **grouped(objective=recipe.objective, devices=devices, **options),
    ) as trainer:
        losses = [float(trainer.step(*batch)) for batch in make_batches(recipe)]
    return gradients, losses, whole_state(model, optimizer)


def train_plainly(recipe, shards):
    """Do the same with torch alone."""
    model, (gradients, record) = make_model(recipe), recorder(recipe)
    optimizer = recipe.make_optimizer(model.parameters())
    settings = {
        "shards": shards,
        "before_update": record,
        "autocast": torch.bfloat16 if "precision" in recipe.options else None,
        **({"objective": recipe.objective} if recipe.objective else {"loss": recipe.loss}),
    }
    torch.set_num_threads(recipe.options.get("threads", 1))
    losses = [
        reference_step(model, optimizer, *batch, step=step, **settings)
        for step, batch in enumerate(make_batches(recipe))
    ]
    torch.set_num_threads(1)
    return gradients, losses, whole_state(model, optimizer)


def assert_plain(found, expected):
    for gradients, plain in zip(found[0], expected[0], strict=True):
        reached = {name: one for name, one in plain.items() if one is not None}
        assert {name for name, one in gradients.items() if one is not None} == reached.keys()
        assert_same_bits({name: gradients[name] for name in reached}, reached)
    assert found[1] == expected[1]
    assert_same_bits(found[2], expected[2])


@pytest.mark.parametrize("name", cases(but={*NOT_BY_SHARDS}))
@pytest.mark.thinned(2)
def test_gradients_losses_and_buffers_are_those_of_a_plain_loop_over_the_shards(name):
    for shards in SHARDS:
        expected = train_plainly(RECIPES[name], shards)
        assert_plain(train(RECIPES[name], shards, LAYOUTS[shards]), expected)


@pytest.mark.parametrize("name", NOT_BY_SHARDS)
def test_no_exception_is_left_that_a_plain_loop_could_compute(name):
    with pytest.raises(AssertionError):
        assert_plain(train(RECIPES[name], 8, 1), train_plainly(RECIPES[name], 8))


@pytest.mark.parametrize("name", cases(but=NOT_WHOLE))
@pytest.mark.thinned(2)
def test_the_mean_gradient_is_that_of_the_whole_batch_in_float64(name):
    recipe = RECIPES[name]
    if has_batch_statistics(recipe) or draws_numbers(recipe):
        return
    exact = whole_gradient(recipe, torch.float64)
    for shards in SHARDS:
        assert error_of(mean_gradient(recipe, shards), exact) < ROUNDING


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older versions compute some of these models otherwise"
)
@pytest.mark.parametrize("name", NOT_WHOLE)
def test_no_exception_is_left_that_agrees_with_the_whole_batch(name):
    recipe = RECIPES[name]
    assert not has_batch_statistics(recipe)
    assert not draws_numbers(recipe)
    try:
        error = error_of(mean_gradient(recipe, 8), whole_gradient(recipe, torch.float64))
    except RuntimeError:  # it can't be computed in float64
        return
    assert not error < ROUNDING


def mean_gradient(recipe, shards, **choices):
    """Return the first step's mean gradient as one vector."""
    (gradients, *_), _, _ = train(recipe, shards, 1, **choices)
    return torch.cat([one.to_dense().flatten() for one in gradients.values() if one is not None])


def error_of(found, exact):
    return float((found - exact).norm() / exact.norm())


def draws_numbers(recipe):
    """Whether the gradient depends on torch's random numbers."""
    first, second = (whole_gradient(recipe, seed=seed) for seed in (2, 3))
    return not torch.equal(first, second)


def whole_gradient(recipe, dtype=None, seed=2):
    """Return the gradient of the whole batch's mean loss, without shards, as one vector."""
    model, loss = make_model(recipe), copy.deepcopy(recipe.loss)
    batch = make_batches(recipe)[0]
    if dtype is not None:
        batch = pytree.tree_map(functools.partial(widened, dtype), batch)
        for module in (model, loss):
            if isinstance(module, nn.Module):
                module._apply(functools.partial(widened, dtype))
        if isinstance(loss, functools.partial):
            loss.keywords.update(pytree.tree_map(functools.partial(widened, dtype), loss.keywords))
    torch.manual_seed(seed)
    total, count = shard_loss(model, batch, None, objective=recipe.objective, loss=loss)
    (total / count).backward()
    return torch.cat([
        one.grad.to_dense().flatten() for one in model.parameters() if one.grad is not None
    ])  # fmt: skip


def widened(dtype, value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value
