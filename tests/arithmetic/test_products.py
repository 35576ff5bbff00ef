"""Products against chains of exact fused multiply-adds, in every variant; gradients by float64."""

import random

import pytest
import torch

from chains import LAYOUTS, chain, float32, laid_out, some_places
from evenstep.arithmetic.mode import PortableMode
from evenstep.errors import ModelError
from exact_floats import fma, odd_values, same

SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 48, 64, 65]
DEPTHS = [0, 1, 2, 3, 4, 5, 8, 9, 16, 31, 64]


def values(shape, seed, *, are_odd=True):
    count = int(torch.tensor(shape).prod())
    if are_odd:
        return odd_values(count, seed).reshape(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_is_chain(result, a, b, finish=lambda place, total: total, count=12, seed=0):
    """Compare some elements of a product with their chains over k, finished."""
    for place in some_places(result.shape, count, seed) if result.numel() else []:
        *batch, i, j = place
        left, right = a[(*batch, i)].tolist(), b[(*batch, slice(None), j)].tolist()
        expected = finish(place, chain(zip(left, right, strict=True)))
        assert same(result[place], torch.tensor(expected)), place


@pytest.mark.parametrize("seed", range(12))
def test_product_is_one_chain_for_each_element(variant, seed):
    pick = random.Random(seed)
    for case in range(8):
        m, n, k = pick.choice(SIZES), pick.choice(SIZES), pick.choice(DEPTHS)
        are_odd = case % 2 == 0
        a = values((m, k), 2 * case, are_odd=are_odd)
        b = values((k, n), 2 * case + 1, are_odd=are_odd)
        first, second = (laid_out(x, pick.choice(LAYOUTS)) for x in (a, b))
        with PortableMode():
            result = first @ second
        assert result.is_contiguous()
        assert_is_chain(result, a, b, seed=case)


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(3, 257, 5), (193, 20, 33), (5, 30, 1025), (200, 300, 70), (14, 1030, 35), (1, 600, 300)],
)
def test_blocks_continue_chains(variant, m, k, n):
    if variant == "plain" and m * k * n > 10**6:
        m = 20
    a, b = values((m, k), 1, are_odd=False), values((k, n), 2, are_odd=False)
    with PortableMode():
        result, transposed = a @ b, (b.t() @ laid_out(a, "transposed").t()).t()
    assert_is_chain(result, a, b, count=6)
    assert same(transposed, result)


def test_product_has_the_bits_of_its_parts(variant):
    """Rows, columns and matrices of a batch don't depend on what is computed beside them."""
    pick = random.Random(5)
    for case in range(150):
        m, n, k = pick.choice(SIZES), pick.choice(SIZES), pick.choice(DEPTHS[1:])
        a, b = values((3, m, k), case), values((3, k, n), case + 1000)
        a, b = laid_out(a, pick.choice(LAYOUTS)), laid_out(b, pick.choice(LAYOUTS))
        i, j = pick.randrange(m), pick.randrange(n)
        with PortableMode():
            batch = torch.bmm(a, b)
            alone = a[1] @ b[1]
            row, column = a[1, i : i + 1] @ b[1], a[1] @ b[1][:, j : j + 1]
            of_vector, of_vectors = torch.mv(a[1], b[1, :, j]), torch.dot(a[1, i], b[1, :, j])
        assert same(batch[1], alone)
        assert same(alone[i : i + 1], row)
        assert same(alone[:, j : j + 1], column)
        assert same(alone[:, j], of_vector)
        assert same(alone[i, j], of_vectors)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0, 0.3), (0.7, -1.3), (1, 2)])
def test_addend_is_added_last(variant, beta, alpha):
    a, b, addend = values((2, 13, 9), 1), values((2, 9, 35), 2), values((13, 1), 3)
    scale, factor = float32(beta), float32(alpha)

    def finish(place, total):
        scaled = fma(factor, total, -0.0)
        return fma(scale, float(addend[place[-2], 0]), scaled) if beta else scaled

    with PortableMode():
        single = torch.addmm(addend, a[0], b[0], beta=beta, alpha=alpha)
        batch = torch.baddbmm(addend, a, b, beta=beta, alpha=alpha)
        vector = torch.addmv(addend[:, 0], a[0], b[0, :, 4], beta=beta, alpha=alpha)
        summed = torch.addbmm(addend, a, b, beta=beta, alpha=alpha)
        outer = torch.addr(addend, a[0, :, 0], b[0, 0], beta=beta, alpha=alpha)
        written = torch.empty(13, 35)
        torch.addmm(addend, a[0], b[0], beta=beta, alpha=alpha, out=written)
    assert_is_chain(single, a[0], b[0], finish, count=60)
    assert_is_chain(batch, a, b, finish, count=60)
    assert_is_chain(summed, torch.cat((*a,), 1), torch.cat((*b,), 0), finish, count=60)
    assert_is_chain(outer, a[0, :, :1], b[0, :1], finish, count=60)
    assert same(vector, single[:, 4])
    assert same(written, single)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_nothing_to_multiply(variant, shape):
    m, k, n = shape
    a, b, bias = torch.ones(m, k), torch.ones(k, n), torch.full((n,), -0.0)
    with PortableMode():
        assert same(a @ b, torch.zeros(m, n))
        assert same(torch.addmm(bias, a, b, beta=2), torch.zeros(m, n))
        assert same(torch.bmm(a[None], b[None]), torch.zeros(1, m, n))
        none = torch.addbmm(torch.ones(m, n), a[None][:0], b[None][:0], beta=3)
    assert same(none, torch.full((m, n), 3.0))


def test_expanded_operands_and_batches_of_many(variant):
    a, b = values((1, 1, 7), 1).expand(96, 20, 7), values((7, 1), 2).expand(7, 18)
    with PortableMode():
        result = torch.bmm(a, b.expand(96, 7, 18))
        broadcast = torch.matmul(a, b)
    assert_is_chain(result, a, b.expand(96, 7, 18))
    assert same(result, broadcast)


def test_shapes_that_do_not_fit_raise_torchs_error():
    a, b = torch.ones(2, 3), torch.ones(4, 5)
    calls = [
        lambda: a @ b,
        lambda: torch.addmm(torch.ones(4), a, a.t()),
        lambda: torch.bmm(a[None], b[None]),
        lambda: torch.mv(a, torch.ones(2)),
        lambda: torch.dot(torch.ones(2), torch.ones(3)),
        lambda: torch.addmv(torch.ones(3), a, torch.ones(3)),
        lambda: torch.addbmm(torch.ones(7), a[None], a.t()[None]),
    ]
    for call in calls:
        with PortableMode(), pytest.raises(RuntimeError, match=r"size|shape|expand"):
            call()


def test_other_numbers_are_refused_and_integers_are_torchs_own():
    whole = torch.arange(6).reshape(2, 3)
    with PortableMode():
        assert torch.equal(whole @ whole.t(), torch.tensor([[5, 14], [14, 50]]))
        with pytest.raises(ModelError, match="mm of float64"):
            whole.double() @ whole.double().t()


@pytest.mark.parametrize("seed", range(6))
def test_gradients_are_those_of_float64_but_for_rounding(variant, seed):
    m, k, n = [random.Random(seed).choice(SIZES) for _ in range(3)]
    a, b, bias = (values(s, seed + i, are_odd=False) for i, s in enumerate([(m, k), (n, k), (n,)]))
    weights = values((m, n), seed + 9, are_odd=False)

    def gradients(convert):
        inputs = [convert(x).requires_grad_() for x in (a, b, bias)]
        result = torch.addmm(inputs[2], inputs[0], inputs[1].t())
        return torch.autograd.grad(result, inputs[:2], convert(weights))

    with PortableMode():
        found = gradients(torch.Tensor.clone)
    exact = gradients(torch.Tensor.double)
    # A chain of n operations is off by at most n 2⁻²⁴ times the sum of the products' sizes (first
    # order; Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).
    sizes = (weights.abs() @ b.abs(), weights.abs().t() @ a.abs())
    for one, wanted, size, depth in zip(found, exact, sizes, (n, m), strict=True):
        assert ((one - wanted).abs() <= 1.01 * depth * 2**-24 * size.double()).all()
