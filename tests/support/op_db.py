"""Torch's own samples of arguments for its operations."""

import contextlib
import itertools
import warnings
from unittest import mock

import torch
from torch.utils import _pytree as pytree


def operations(part, parts, left_out):
    """Return one part of the operations whose names have none of some words."""
    # the list forbids to set torch's flags, for ever and in all tests: not here
    with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [one for one in op_db if not any(word in one.name for word in left_out)][part::parts]


def samples(operation, dtype, most):
    needs_gradient = dtype is torch.float32 and operation.supports_autograd
    with contextlib.suppress(Exception):  # some need what isn't installed
        found = operation.sample_inputs("cpu", dtype, requires_grad=needs_gradient)
        yield from [*itertools.islice(found, most)]


def tensors(tree):
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


def copied(value):
    return value.detach().clone().requires_grad_(value.requires_grad)


def results_of(function, args, kwargs):
    """Return results and gradients of a call."""
    results = tensors(function(*args, **kwargs))
    outputs = [one for one in results if one.requires_grad and one.is_floating_point()]
    inputs = [one for one in tensors((args, kwargs)) if one.requires_grad]
    gradients = ()
    if outputs and inputs:
        ones = [torch.ones_like(one) for one in outputs]
        gradients = torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
    return [one.detach() for one in (*results, *gradients) if one is not None]
