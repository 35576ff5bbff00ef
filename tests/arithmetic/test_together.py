"""Operations on tensors of several shards at once: the bits of each shard by itself."""

import functools

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import evenstep
from evenstep.arithmetic.together import (
    NotTogetherError,
    add_up,
    computing_together,
    of_shards,
    shards_of,
)
from evenstep.batch.rng import ShardRandomness
from evenstep.collectives import tree_sum
from evenstep.errors import ModelError
from op_db import copied, operations, results_of, samples

SHARDS = 3
PARTS = 16
SAMPLES = 4  # of each operation and dtype
LEFT_OUT = ("empty", "chalf", "to_sparse", "tensor_split")  # the last reads numbers by address
DTYPES = (torch.float32, torch.int64)


def bits(tensor):
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.ndim else tensor


def is_same(found, expected):
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if expected.is_floating_point() or expected.is_complex():  # NaN counts as NaN
        found, expected = (one.nan_to_num(nan=12.5) for one in (found, expected))
    return torch.equal(bits(found), bits(expected))


def are_same(found, expected):
    """Whether all tensors of all shards have the same bits."""
    pairs = zip(found, expected, strict=True)
    return all(is_same(*both) for own, its in pairs for both in zip(own, its, strict=True))


def of_one(given, shard):
    """Return arguments with the numbers of each tensor in a different order for each shard."""

    def moved(value):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        flat = value.detach().reshape(-1).roll(shard)
        return flat.reshape(value.shape).clone().requires_grad_(value.requires_grad)

    return pytree.tree_map(moved, given)


def together(function, each):
    """Return results and gradients of a call for all shards at once, for each shard."""

    def joined(*values):
        if not isinstance(values[0], torch.Tensor):
            return values[0]
        stacked = torch.stack([one.detach() for one in values])
        return of_shards(stacked, SHARDS).requires_grad_(values[0].requires_grad)

    given = pytree.tree_map(joined, *each)
    numbers = [ShardRandomness(lambda shard=shard: shard) for shard in range(SHARDS)]
    with computing_together(SHARDS, numbers):
        results = results_of(function, *given)
    wholes = [shards_of(one, SHARDS) for one in results]
    return [[one[shard] for one in wholes] for shard in range(SHARDS)]


def apart(function, each):
    results = []
    for shard, given in enumerate(each):
        with ShardRandomness(lambda shard=shard: shard):
            given = pytree.tree_map_only(torch.Tensor, copied, given)
            results.append(results_of(function, *given))
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part > 0)) for part in range(PARTS)]
)
def test_torchs_samples_have_the_bits_of_each_shard(part):
    compared, refused, wrong = 0, 0, []
    with evenstep.portable():
        for operation in operations(part, PARTS, LEFT_OUT):
            for dtype in set(DTYPES) & operation.dtypes:
                for sample in samples(operation, dtype, SAMPLES):
                    given = ((sample.input, *sample.args), sample.kwargs)
                    for function in filter(None, (operation.op, operation.inplace_variant)):
                        if function is operation.inplace_variant:
                            given = pytree.tree_map_only(torch.Tensor, torch.detach, given)
                        each = [of_one(given, shard) for shard in range(SHARDS)]
                        try:
                            expected = apart(function, each)
                        except Exception:  # no arguments for this operation
                            continue
                        try:
                            found = together(function, each)
                        except (NotTogetherError, ModelError):
                            refused += 1
                            continue
                        compared += 1
                        if not are_same(found, expected):
                            wrong.append((operation.name, dtype, str(sample)[:300]))
    assert not wrong
    assert compared > 5 * refused
    assert compared > 100


def test_the_samples_have_results_that_differ_between_shards():
    each = [of_one(((torch.arange(6.0),), {}), shard) for shard in range(SHARDS)]
    with evenstep.portable():
        found = apart(torch.exp, each)
    assert not torch.equal(found[0][0], found[1][0])


def masked(x):
    return x.masked_fill(torch.ones(4, 5).tril() == 0, -1.0).softmax(1)


def into_new(x):
    out = torch.zeros(4, 5)
    for row in range(4):
        out[row] = x[row] * 2
    return out.sum(0)


def in_place(x):
    y = x * 1
    y[:, 1:3] += 1
    y.mul_(torch.arange(5.0))
    return y.t_().clone()


def drawn(x):
    return functional.dropout(x, 0.5) + torch.rand(5) + torch.randn_like(x)


def mixed(x):
    half = torch.tensor(0.5, dtype=torch.float64)
    return (x * half).sum() * torch.tensor(3) + x.mean() * x.shape[0]


def promoted(x):
    return x.argmax() + torch.ones(5, dtype=torch.int32)


def joined(x):
    return torch.cat([x, torch.ones(4, 2), x[:, :1]], 1).chunk(2, 1)[1]


def of_constants(x):
    weight = torch.arange(15.0).view(5, 3)
    return torch.addmm(torch.ones(3), x, weight) + torch.ones(3, 4).mm(x).sum()


def attended(x):
    q = x.view(1, 2, 2, 5)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


CASES = (masked, into_new, in_place, drawn, mixed, promoted, joined, of_constants, attended)


def in_half_precision(x):
    weight = torch.ones(2, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    out = functional.conv1d(x.view(4, 1, 5).bfloat16(), weight)
    return torch.autograd.grad((out * out).sum(), weight)


def of_bytes(x):
    return functional.nll_loss(x.log_softmax(1), torch.tensor([0, 1, 2, 3], dtype=torch.uint8))


def test_labels_of_a_kind_that_has_no_kernel_are_refused_as_for_one_shard():
    with evenstep.portable(seed=0):
        each = [((torch.randn(4, 5),), {}) for _ in range(SHARDS)]
        for run_it in (apart, together):
            with pytest.raises(ModelError, match="nll_loss"):
                run_it(of_bytes, each)


CASES += (in_half_precision,)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_layers_do_has_the_bits_of_each_shard(case):
    with evenstep.portable(seed=0):
        each = [((torch.randn(4, 5).requires_grad_(),), {}) for _ in range(SHARDS)]
        expected, found = apart(case, each), together(case, each)
    assert are_same(found, expected)


KEPT = torch.zeros(4, 5)


def written_outside(x):
    return KEPT.add_(x)


def counted(x):
    KEPT.add_(1)
    return x


def as_number(x):
    return x * float(x.sum())


def of_data(x):
    return x[x > 0].sum()


@pytest.mark.parametrize(
    "case", [written_outside, counted, as_number, of_data], ids=lambda one: one.__name__
)
def test_what_needs_each_shard_by_itself_is_refused(case):
    with evenstep.portable(seed=0):
        each = [((torch.randn(4, 5),), {}) for _ in range(SHARDS)]
        with pytest.raises(NotTogetherError):
            together(case, each)


def test_a_number_that_all_shards_have_in_common_may_be_read():
    with evenstep.portable(seed=0):
        each = [((torch.randn(4, 5),), {}) for _ in range(SHARDS)]
        case = lambda x: x * float(torch.ones_like(x).sum())  # noqa: E731
        expected, found = apart(case, each), together(case, each)
    assert are_same(found, expected)


@pytest.mark.parametrize("shards", range(2, 10))
def test_gradients_are_added_in_the_canonical_tree(shards):
    terms = torch.randn(shards, 3, 1001) * torch.logspace(-6, 6, shards)[:, None, None]
    plain = torch.randn(7)
    expected = tree_sum([*terms], torch.add)
    of_plain = tree_sum([plain] * shards, torch.add)
    found = add_up([of_shards(terms.clone(), shards), None, plain.clone()], shards)
    assert found[1] is None
    assert is_same(found[0], expected)
    assert is_same(found[2], of_plain)
    assert found[0].untyped_storage().nbytes() == found[0].nbytes
    if shards > 3:
        assert not torch.equal(expected, functools.reduce(torch.add, terms))


def test_gradients_that_share_memory_are_added_up_once():
    one = of_shards(torch.ones(4, 3), 4)
    found = add_up([one, one.view(3), one[:2]], 4)
    assert [part.tolist() for part in found] == [[4.0] * 3, [4.0] * 3, [4.0] * 2]


def packed(x, lengths):
    one = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(one, batch_first=True)[0]


def test_lengths_of_packed_sequences_are_refused():
    # torch reads the sizes of packed batches by their address: those of the first shard
    lengths = torch.tensor([[6, 5, 5, 4], [6, 6, 4, 4]])
    each = [((torch.ones(4, 6, 3), one), {}) for one in (*lengths, lengths[0])]
    with evenstep.portable(), pytest.raises(NotTogetherError, match="packed"):
        together(packed, each)
