"""Torch's own samples of arguments for its operations: portable results are those of torch.

Whatever the dtypes, shapes and forms, a result has torch's dtype and shape and is near torch's, or
the operation is refused by name.
"""

import contextlib

import pytest
import torch
from torch.utils import _pytree as pytree

import evenstep
from evenstep.errors import ModelError
from op_db import copied, operations, results_of, samples

PARTS = 24
SAMPLES = 12  # of each operation and dtype
DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
RANDOM = ("rand", "normal", "bernoulli", "uniform", "dropout", "multinomial", "exponential")
RANDOM += ("geometric", "cauchy", "empty", "multi_head_attention", "scaled_dot_product")
TIES = ("topk", "sort", "argsort", "msort")  # equal numbers keep their order; in torch they may not
GROWS = "addbmm"  # in place, torch lets a target of one element grow


def outcome(function, sample, *, portable, in_place):
    """Return results and gradients of a call, or the type of the error that torch raised."""
    given = ((sample.input, *sample.args), sample.kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, copied, given)
    if in_place:
        args = (args[0].detach(), *args[1:])
    try:
        with evenstep.portable() if portable else contextlib.nullcontext():
            return results_of(function, args, kwargs)
    except ModelError:
        raise
    except Exception as error:  # torch's own, of a sample that it refuses
        return type(error)


def is_like(found, expected, dtype):
    if isinstance(expected, type) or isinstance(found, type):
        return isinstance(expected, type) == isinstance(found, type)
    if [(one.dtype, one.shape) for one in found] != [(one.dtype, one.shape) for one in expected]:
        return False
    return all(is_near(*pair, dtype) for pair in zip(found, expected, strict=True))


def is_near(found, expected, dtype):
    if expected.layout is not torch.strided or not expected.numel():
        return found.layout is expected.layout
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    limit = 2**-5 if dtype is torch.bfloat16 else 1e-4  # some roundings, of torch's too
    size = float(expected.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(found, expected, limit, limit * max(1.0, size), equal_nan=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_has_torchs_result_or_is_refused(part):
    wrong, compared = [], 0
    for operation in operations(part, PARTS, (*RANDOM, *TIES)):
        for dtype in set(DTYPES) & operation.dtypes:
            for sample in samples(operation, dtype, SAMPLES):
                for function in filter(None, (operation.op, operation.inplace_variant)):
                    in_place = function is operation.inplace_variant
                    if in_place and operation.name == GROWS:
                        continue
                    try:
                        found = outcome(function, sample, portable=True, in_place=in_place)
                    except ModelError:
                        continue
                    expected = outcome(function, sample, portable=False, in_place=in_place)
                    compared += 1
                    if not is_like(found, expected, dtype):
                        wrong.append((operation.name, dtype, in_place, str(sample)[:300]))
    assert not wrong
    assert compared > 100


OPERANDS = (
    *(torch.tensor([1.5, -2.0]), torch.tensor([2, -3]), torch.tensor([True, False])),
    *(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor(2.5), torch.tensor(3)),
    *(1.5, 2),  # not True: torch refuses it in some of these
)
OF_TWO = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "fmod", "remainder"),
    *("pow", "float_power", "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "xlogy"),
    *("logaddexp", "copysign", "eq", "lt", "ge", "ne", "logical_and", "bitwise_or", "dist"),
)
FORMS = {"": {}, " with alpha": {"alpha": 2}, " in place": {}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OF_TWO)
def test_two_operands_are_promoted_as_in_torch(name, form):
    def call(a, b):
        if form == " in place":
            return getattr(a.clone(), f"{name}_")(b)
        return getattr(torch, name)(a, b, **FORMS[form])

    for a in OPERANDS:
        for b in OPERANDS:
            try:
                expected = [call(a, b)]
            except NotImplementedError:  # hypot of integers, which has a kernel here
                continue
            except (RuntimeError, TypeError, AttributeError) as error:
                if "not implemented for" in str(error):  # as torch 2.6 says it
                    continue
                expected = type(error)
            try:
                with evenstep.portable():
                    found = [call(a, b)]
            except ModelError:
                continue
            except (RuntimeError, TypeError, AttributeError) as error:
                found = type(error)
            assert is_like(found, expected, torch.bfloat16), (a, b, found, expected)
