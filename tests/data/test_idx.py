"""The IDX parser gives back what was written, and one clear line for everything else."""

import gzip
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data.idx import gunzip, parse_idx
from evenstep.errors import DataError

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4)
LABELS = struct.pack(">BBBBI", 0, 0, 8, 1, 3) + bytes([7, 8, 9])


def idx(shape: list[int]) -> bytes:
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    return header + bytes(number % 251 for number in range(math.prod(shape)))


@given(SHAPES)
def test_the_numbers_lie_in_the_last_dimension_first(shape):
    array = parse_idx(idx(shape), "it", len(shape))
    numbers = np.arange(math.prod(shape)) % 251
    assert array.dtype == np.uint8
    assert np.array_equal(array, numbers.reshape(shape))


@given(shape=SHAPES, data=st.data())
def test_a_truncated_file_is_refused(shape, data):
    whole = idx(shape)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DataError, match=r"^labels-file ") as caught:
        parse_idx(whole[:cut], "labels-file", len(shape))
    assert "\n" not in str(caught.value)


def test_the_message_counts_what_is_missing():
    with pytest.raises(DataError, match=r"has 2 bytes after its header, which promises 3"):
        parse_idx(LABELS[:-1], "it", 1)


def test_too_many_bytes_are_refused():
    with pytest.raises(DataError, match=r"has 4 bytes after its header, which promises 3"):
        parse_idx(LABELS + b"\0", "it", 1)


def test_sizes_beyond_64_bits_are_refused():
    with pytest.raises(DataError, match=f"promises {(2**32 - 1) ** 3}"):
        parse_idx(struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "it", 3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_magic_number_is_refused(place):
    data = bytearray(LABELS)
    data[place] = 0x0D
    with pytest.raises(DataError, match=r"not an IDX file of unsigned bytes: .*0d.* 00 00 08"):
        parse_idx(bytes(data), "it", 1)


def test_swapped_files_are_noticed():
    with pytest.raises(DataError, match=r"has 1 dimensions, 3 are needed .*swapped"):
        parse_idx(LABELS, "it", 3)


@given(st.binary(max_size=300))
def test_gunzip_gives_back_what_gzip_took(data):
    assert gunzip(gzip.compress(data), "it", at_most=300) == data


@given(st.binary(max_size=300), st.integers(0, 300))
def test_what_unpacks_to_more_than_the_limit_is_refused(data, at_most):
    if len(data) <= at_most:
        assert gunzip(gzip.compress(data), "it", at_most=at_most) == data
    else:
        with pytest.raises(DataError, match=f"^it unpacks to more than {at_most} bytes"):
            gunzip(gzip.compress(data), "it", at_most=at_most)


def test_a_file_that_is_not_gzip_is_refused():
    with pytest.raises(DataError, match=r"it is not a gzip file: .*3c 68 instead of 1f 8b"):
        gunzip(b"<html>not found</html>", "it", at_most=300)


@given(st.data())
def test_a_truncated_gzip_file_is_refused(data):
    whole = gzip.compress(LABELS)
    cut = data.draw(st.integers(2, len(whole) - 1))
    with pytest.raises(DataError, match=f"it is truncated: its {cut} bytes"):
        gunzip(whole[:cut], "it", at_most=300)


@pytest.mark.parametrize("place", [-1, -5, -9])
def test_a_damaged_gzip_file_is_refused(place):
    """The last eight bytes are the length and the CRC-32; before them lies the data."""
    data = bytearray(gzip.compress(bytes(range(200)), compresslevel=0))
    data[place] ^= 0x55
    with pytest.raises(DataError, match="it is damaged"):
        gunzip(bytes(data), "it", at_most=300)


@given(place=st.integers(0, len(gzip.compress(LABELS)) - 1), flip=st.integers(1, 255))
def test_no_flipped_byte_passes_with_other_content(place, flip):
    data = bytearray(gzip.compress(LABELS))
    data[place] ^= flip
    try:
        content = gunzip(bytes(data), "it", at_most=300)
    except DataError:
        return
    assert content == LABELS
