import collections
import enum
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenstep.checkpoint.codec import decode, encode
from evenstep.errors import CheckpointError

NATIVE = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
NATIVE += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FOREIGN = [torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
FOREIGN += [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = NATIVE + FOREIGN


def bits(tensor):
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copy.reshape(-1).view(torch.uint8).tolist()


def same(got, wanted):
    """Equal in type, order and every bit; tensors also in dtype, shape and strides."""
    if isinstance(wanted, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), bits(t)) for t in (got, wanted)]
        return type(got) is torch.Tensor and facts[0] == facts[1]
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return same([list(pair) for pair in got.items()], [list(pair) for pair in wanted.items()])
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, complex):
        return same([got.real, got.imag], [wanted.real, wanted.imag])
    if isinstance(wanted, float):
        return struct.pack("d", got) == struct.pack("d", wanted)
    return bool(got == wanted)


def there_and_back(tree):
    plain, tensors = encode(tree)
    text = json.dumps(plain, allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


def random_tensor(dtype, *shape):
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize))
    return values.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    torch.manual_seed(draw(st.integers(0, 9)))
    return random_tensor(draw(st.sampled_from(DTYPES)), *shape).permute(order)


TEXT = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(
    ["$tensor", "$dict", "$tuple", "$int", "$", "a/b", "__metadata__", "name", ""]
)
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers()
KEYS = st.recursive(NUMBERS | TEXT, lambda keys: st.lists(keys, max_size=2).map(tuple))
TREES = st.recursive(
    NUMBERS | TEXT | tensors(),
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.lists(trees, max_size=3).map(tuple)
        | st.dictionaries(TEXT, trees, max_size=3)
        | st.dictionaries(KEYS, trees, max_size=3)
        | st.dictionaries(KEYS, trees, max_size=3).map(collections.Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
@example({"$tensor": {"name": "a", "dtype": "float32", "shape": [], "strides": []}})
@example({"$dict": [["a", 1]], "b": {"$tuple": []}})
@example({"\ud83d\ude00": "\ud83d\ude00", "\U0001f600": "\U0001f600"})
@example([-0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 0.1, 1e22])
@example([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, True, 1, 1.0])
@example({1: "int", "1": "str", (1, (None, 0.5)): "tuple", None: "none", b"".hex(): "empty"})
def test_decode_returns_exactly_what_encode_was_given(tree):
    assert same(there_and_back(tree), tree)


def test_every_payload_of_a_nan_survives():
    nan = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))[0]
    assert struct.pack(">d", there_and_back([nan])[0]).hex() == "fff8000000abcdef"


def test_kinds_of_containers_that_come_back_as_plain_ones():
    tree = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, b=[1], a=[2]),
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    wanted = {
        "ordered": {"b": 1, "a": 2},
        "default": {"b": [1], "a": [2]},
        "size": (2, 3),
        "parameter": torch.ones(2),
    }
    assert same(there_and_back(tree), wanted)


@pytest.mark.parametrize(
    ("scalar", "wanted"),
    [
        (np.float64(0.1), 0.1),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.complex64(1 + 2j), 1 + 2j),
    ],
)
def test_numpy_numbers_become_the_python_numbers_that_equal_them(scalar, wanted):
    assert same(there_and_back({"a": scalar, scalar: None}), {"a": wanted, wanted: None})


@pytest.mark.parametrize("number", [np.float32(0.1), np.float16(-0.0), np.float32("inf")])
def test_short_floats_of_numpy_stay_what_they_are(number):
    """An optimizer that divides by its rate rounds to their precision."""
    assert same(there_and_back({"a": number, number: None}), {"a": number, number.item(): None})
    assert type(there_and_back([number])[0] / 3.0) is type(number)


def test_a_number_of_numpy_is_not_any_type():
    with pytest.raises(CheckpointError, match="did not encode"):
        decode({"$numpy": ["float64", 1.0]}, {}.__getitem__)


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (len, "builtin_function_or_method"),
        (object(), "object"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (np.zeros(2), "numpy.ndarray"),
        (np.str_("a"), "numpy.str_"),
        (np.timedelta64(3, "ns"), "numpy.timedelta64"),
        (np.datetime64(3, "ns"), "numpy.datetime64"),
        (np.longdouble(1), f"numpy.{np.longdouble.__name__}"),
        (torch.float32, "torch.dtype"),
        (torch.device("cpu"), "torch.device"),
    ],
)
def test_other_kinds_are_refused_with_their_path_and_type(value, name):
    with pytest.raises(CheckpointError) as caught:
        encode({"optimizer": [0, {"a": value}]})
    assert "state['optimizer'][1]['a'] is of type" in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("key", [b"bytes", frozenset(), torch.ones(()), (1, (torch.ones(()),))])
def test_other_keys_are_refused_with_their_path_and_type(key):
    with pytest.raises(CheckpointError, match=r"state\['a'\].* has a key of type "):
        encode({"a": {key: 1}})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "without data"),
    ],
)
def test_tensors_without_dense_data_are_refused(make, kind):
    with pytest.raises(CheckpointError, match=rf"state\['a'\] is a .*{kind}.*dense tensor"):
        encode({"a": make()})


@pytest.mark.parametrize("container", [list, tuple, dict])
def test_a_tree_that_is_too_deep_is_refused(container):
    deep = 1
    for _ in range(2000):
        deep = {"a": deep} if container is dict else container([deep])
    with pytest.raises(CheckpointError, match="more than 100 levels"):
        encode(deep)


def test_a_tree_that_contains_itself_is_refused_but_100_levels_are_not():
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop)
    deep = 0
    for _ in range(100):
        deep = (deep,)
    assert there_and_back(deep) == deep


LAYOUTS = {
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last, one channel": torch.empty_strided((2, 1, 4, 5), (20, 1, 5, 1)).normal_(),
    "transposed": torch.randn(3, 4).t(),
    "offset view": torch.randn(100)[7:19].view(3, 4),
    "a lone element, any stride": torch.randn(9)[::9],
    "a lone complex element, any stride": torch.randn(9, dtype=torch.complex128)[::9],
    "conjugate": torch.randn(3, 4, dtype=torch.complex128).t().conj(),
    "empty, any stride": torch.empty_strided((2, 0, 3), (1, 9, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_tensors_keep_their_order_in_memory(name):
    assert same(there_and_back([LAYOUTS[name]]), [LAYOUTS[name].resolve_conj()])


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(3, 4), torch.arange(12)[::2], torch.arange(12).view(3, 4)[:, 1:]],
)
def test_other_tensors_come_back_contiguous(tensor):
    assert same(there_and_back(tensor), tensor.contiguous())


def test_a_negated_view_is_stored_by_its_values():
    tensor = torch.randn(3, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    assert torch.equal(there_and_back(tensor), tensor)


def test_tensors_that_share_memory_come_back_with_their_own():
    whole = torch.arange(6.0)
    tree = {"a": whole, "b": whole, "c": whole[2:], "d": whole.view(torch.complex64)}
    _, stored = encode(tree)
    assert len({tensor.untyped_storage().data_ptr() for tensor in stored.values()}) == 4
    back = there_and_back(tree)
    assert same(back, tree)
    back["a"].zero_()
    assert torch.equal(back["b"], whole)


def test_encoding_does_not_copy_a_contiguous_tensor():
    tensor = torch.nn.Parameter(torch.ones(3))
    _, stored = encode({"model": {"weight": tensor}})
    assert stored["model/weight"].data_ptr() == tensor.data_ptr()
    assert not stored["model/weight"].requires_grad


def test_tensors_come_back_in_fresh_aligned_memory():
    plain, stored = encode([torch.ones(3), torch.ones(3, dtype=torch.complex128)])
    for tensor in decode(plain, stored.__getitem__):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.data_ptr() not in [other.data_ptr() for other in stored.values()]


def test_names_of_tensors_are_readable_and_never_clash():
    one, two = torch.ones(1), torch.full((1,), 2.0)
    tree = {"a": {"b": one, 0: one, "0": two}, "a/b": two, "__metadata__": one, "": two}
    plain, stored = encode(tree)
    assert len(stored) == 6
    assert "a/b" in stored
    assert "__metadata__" not in stored
    assert same(decode(plain, stored.__getitem__), tree)
    long = {"x" * 300 + str(number): torch.full((1,), number) for number in range(20)}
    assert same(there_and_back(long), long)


ENTRY = {"name": "a", "dtype": "float32", "shape": [2, 3], "strides": [3, 1]}


@pytest.mark.parametrize(
    "plain",
    [
        {"$unknown": 1},
        {"$tuple": [], "$dict": []},
        {"$tuple": [], "a": 1},
        {"$tuple": 1},
        {"$dict": [1]},
        {"$dict": [[[1], 2]]},
        {"$int": 5},
        {"$int": "0xg"},
        {"$float": "00"},
        {"$complex": [1.0]},
        {"$str": "zz"},
        {"$tensor": 1},
        {"$tensor": ENTRY | {"name": "b"}},
        {"$tensor": ENTRY | {"dtype": "load"}},
        {"$tensor": ENTRY | {"dtype": "float1024"}},
        {"$tensor": ENTRY | {"dtype": "float64"}},
        {"$tensor": ENTRY | {"dtype": "complex64"}},
        {"$tensor": ENTRY | {"shape": [3, 2]}},
        {"$tensor": ENTRY | {"shape": [2, "3"]}},
        {"$tensor": ENTRY | {"shape": [-2, -3]}},
        {"$tensor": ENTRY | {"strides": [1]}},
        {"$tensor": ENTRY | {"strides": [0, 0]}},
        {"$tensor": ENTRY | {"strides": [10**12, 1]}},
        {"$tensor": {"name": "a"}},
    ],
    ids=json.dumps,
)
def test_what_encode_never_writes_is_refused(plain):
    with pytest.raises(CheckpointError, match="a state that evenstep did not encode"):
        decode([plain], {"a": torch.zeros(2, 3)}.__getitem__)


def test_a_plain_value_that_is_too_deep_is_refused():
    plain = []
    for _ in range(10_000):
        plain = [plain]
    with pytest.raises(CheckpointError, match="a state that evenstep did not encode"):
        decode(plain, {}.__getitem__)
