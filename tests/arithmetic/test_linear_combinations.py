"""Sums of scaled tensors against fractions, in every variant."""

import pytest
import torch

from evenstep.arithmetic.mode import PortableMode
from exact_floats import fma, odd_values, same

COUNT = 3000


@pytest.mark.parametrize("alpha", [0.3, -7.0, 1e-30])
def test_scaled_sum_is_rounded_once(variant, alpha):
    a, b = odd_values(COUNT, 0), odd_values(COUNT, 1)
    scale = float(torch.tensor(alpha))
    expected = torch.tensor([fma(scale, y, x) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    with PortableMode():
        result = torch.add(a, b, alpha=alpha)
        in_place = a.clone().add_(b, alpha=alpha)
        of_lists = a.clone()
        torch._foreach_add_([of_lists], [b], alpha=alpha)
        given = torch.add(a, b, alpha=alpha, out=torch.empty(0))
    assert same(given, expected)
    assert same(result, expected)
    assert same(in_place, expected)
    assert same(of_lists, expected)
