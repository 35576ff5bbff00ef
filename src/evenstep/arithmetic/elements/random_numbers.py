"""Random numbers made of the generator's integers.

All are made of uniform numbers u = k · 2⁻²⁴ in [0, 1), which torch itself draws in the same way on
every processor. How many it draws depends on the number of elements only; element i of a tensor is
the i-th in row-major order, whatever the tensor's layout in memory. Normal and exponential numbers,
and those compared with a probability, differ from those of plain torch for the same seed, which in
part differ between processors.
"""

from __future__ import annotations

import decimal
import math

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import composed, kernel

aten = torch.ops.aten

_normals = Function("normals", "lpp")
_exponentials = Function("unary_exponential", "lpp")

_DIGITS = decimal.Context(prec=30)
_Generator = torch.Generator | None


def _uniform(count: int, generator: _Generator) -> torch.Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")


def _normal(count: int, generator: _Generator) -> torch.Tensor:
    """Return standard normal numbers by the method of Box and Muller.

    Of 2h uniform numbers, h = ⌈count / 2⌉: element i < h is √(−2 ln(1 − u[i])) cos(2π u[h + i]),
    and element h + i is the same with a sine.
    """
    half = (count + 1) // 2
    u = _uniform(2 * half, generator)
    _normals(half, u.data_ptr(), u.data_ptr())
    return u[:count]


def _exponential(count: int, generator: _Generator) -> torch.Tensor:
    """Return exponential numbers of rate 1: −ln(1 − u[i]), or 2⁻²⁵ where that is 0."""
    u = _uniform(count, generator)
    _exponentials(count, u.data_ptr(), u.data_ptr())
    return u


@kernel("normal_")
def normal_(
    target: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: _Generator = None
) -> torch.Tensor:
    """Fill a tensor with mean + std · z, both rounded, of standard normal z."""
    if not is_float32(target):
        return NotImplemented
    if not std >= 0:
        raise RuntimeError(f"normal_ expects std >= 0.0, but found std {std}")
    return target.copy_(_moved(_normal(target.numel(), generator), mean, std).view(target.shape))


def _moved(z: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    if std != 1:
        z.mul_(std)
    return z if mean == 0 else z.add_(mean)


@kernel("randn", "randn.generator")
def randn(
    size: list[int],
    *,
    generator: _Generator = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Return standard normal numbers."""
    if not _is_plain(dtype, layout, device):
        return NotImplemented
    return _normal(math.prod(size), generator).view(size)


def _is_plain(
    dtype: torch.dtype | None, layout: torch.layout | None, device: torch.device | None
) -> bool:
    return (
        (dtype or torch.get_default_dtype()) is torch.float32
        and layout in (None, torch.strided)
        and (device is None or device.type == "cpu")
    )


@kernel("randn_like", "randn_like.generator")
def randn_like(
    like: torch.Tensor, *, generator: _Generator = None, **options: object
) -> torch.Tensor:
    """Return standard normal numbers in a tensor like a given one."""
    target = aten.empty_like(like, **options)
    return normal_(target, generator=generator)


@kernel("normal.float_float")
def normal_of_numbers(
    mean: float, std: float, size: list[int], *, generator: _Generator = None, **options: object
) -> torch.Tensor:
    """Return mean + std · z, both rounded, of standard normal z."""
    z = randn(size, generator=generator, **options)  # type: ignore[arg-type]
    return z if z is NotImplemented else _moved(z, mean, std)


@kernel("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal(
    mean: torch.Tensor | float, std: torch.Tensor | float = 1.0, *, generator: _Generator = None
) -> torch.Tensor:
    """Return mean + std · z, both rounded, of standard normal z: one number for each element."""
    tensors = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    if not is_float32(*tensors):
        return NotImplemented
    if not (std.numel() == 0 or std.min() >= 0 if isinstance(std, torch.Tensor) else std >= 0):
        raise RuntimeError("normal expects all elements of std >= 0.0")
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    return _normal(math.prod(shape), generator).view(shape).mul(std).add(mean)


@kernel("uniform_")
def uniform_(
    target: torch.Tensor,
    from_: float = 0.0,
    to: float = 1.0,
    *,
    generator: _Generator = None,
    **named: float,
) -> torch.Tensor:
    """Fill a tensor with u · (to − from) + from, each operation rounded."""
    if not is_float32(target):
        return NotImplemented
    start = named.get("from", from_)
    if not start <= to:
        raise RuntimeError(f"uniform_ expects from <= to, but found from={start} > to={to}")
    u = _uniform(target.numel(), generator)
    if (start, to) != (0, 1):
        u.mul_(to - start).add_(start)
    return target.copy_(u.view(target.shape))


@kernel("bernoulli_.float", "bernoulli_.Tensor")
def bernoulli_(
    target: torch.Tensor, p: torch.Tensor | float = 0.5, *, generator: _Generator = None
) -> torch.Tensor:
    """Fill a tensor with 1 where u < p, else 0."""
    _check_probability(p)
    return target.copy_(_uniform(target.numel(), generator).view(target.shape) < p)


@kernel("bernoulli")
def bernoulli(p: torch.Tensor, *, generator: _Generator = None) -> torch.Tensor:
    """Return 1 where u < p, else 0."""
    return bernoulli_(torch.empty_like(p), p, generator=generator)


@kernel("bernoulli.p", "bernoulli.Tensor")
def bernoulli_like(
    like: torch.Tensor, p: torch.Tensor | float, *, generator: _Generator = None
) -> torch.Tensor:
    """Return 1 where u < p, else 0, in a tensor like a given one."""
    return bernoulli_(torch.empty_like(like), p, generator=generator)


def _check_probability(p: torch.Tensor | float) -> None:
    if isinstance(p, torch.Tensor):
        fine = p.numel() == 0 or bool(((p >= 0) & (p <= 1)).all())
    else:
        fine = 0 <= p <= 1
    if not fine:
        raise RuntimeError("bernoulli expects probabilities p between 0 and 1")


@kernel("native_dropout")
def native_dropout(
    values: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values · mask · 1 / (1 − p), and the mask: whether u < 1 − p."""
    if not train or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    mask = bernoulli_(torch.empty_like(values, dtype=torch.bool), 1 - p)
    return values.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


@kernel("native_dropout_backward")
def native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return grad · mask · scale."""
    return grad.mul(mask).mul_(scale)


@kernel("exponential_")
def exponential_(
    target: torch.Tensor, lambd: float = 1.0, *, generator: _Generator = None
) -> torch.Tensor:
    """Fill a tensor with −ln(1 − u) / lambd, never 0."""
    if not is_float32(target):
        return NotImplemented
    if not lambd > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    numbers = _exponential(target.numel(), generator)
    return target.copy_((numbers if lambd == 1 else numbers.div_(lambd)).view(target.shape))


@kernel("geometric_")
def geometric_(target: torch.Tensor, p: float, *, generator: _Generator = None) -> torch.Tensor:
    """Fill a tensor with ⌈e / −ln(1 − p)⌉ of exponential numbers e of rate 1."""
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    rate = -float(_DIGITS.ln(1 - decimal.Decimal(p)))
    numbers = _exponential(target.numel(), generator).div_(rate).ceil_()
    return target.copy_(numbers.view(target.shape))


@composed("log_normal_")
def log_normal_(
    target: torch.Tensor, mean: float = 1.0, std: float = 2.0, *, generator: _Generator = None
) -> torch.Tensor:
    """Fill a tensor with exp(mean + std · z) of standard normal z."""
    return target.normal_(mean, std, generator=generator).exp_()


@composed("multinomial")
def multinomial(
    weights: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: _Generator = None,
) -> torch.Tensor:
    """Draw categories with probabilities in proportion to weights, for each row.

    With replacement: the first whose cumulative sum exceeds u times the whole sum. Without: those
    of the largest weight / e, for exponential numbers e, the first of equal ones first.
    """
    possible = (weights > 0).sum(-1).min() if weights.numel() else torch.tensor(0)
    if not bool(((weights >= 0) & (weights < math.inf)).all()) or possible == 0:
        raise RuntimeError("multinomial expects finite weights >= 0 with a sum > 0 in each row")
    if not replacement:
        if num_samples > possible:
            raise RuntimeError("multinomial without replacement: fewer weights > 0 than samples")
        ranks = weights / torch.empty_like(weights).exponential_(generator=generator)
        return ranks.sort(dim=-1, descending=True, stable=True)[1][..., :num_samples].contiguous()
    sums = weights.cumsum(-1)
    u = torch.rand(*weights.shape[:-1], num_samples, generator=generator, dtype=weights.dtype)
    return torch.searchsorted(sums, u * sums[..., -1:], right=True)
