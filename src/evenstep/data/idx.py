"""Parses the IDX file format of MNIST.

The format (Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits",
http://yann.lecun.com/exdb/mnist/, "File formats"): two zero bytes, a byte for the type of the
numbers (0x08: unsigned bytes), a byte for the number of dimensions, each dimension's size as a
big-endian 32-bit integer, then the numbers in row-major order.

`name` is the name of the data in error messages.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from evenstep.errors import DataError

UNSIGNED_BYTE = 0x08
MOST_NBYTES = 1 << 30  # of the numbers in a file


def gunzip_idx(data: bytes, name: str, dimensions: int) -> bytes:
    """Decompress an IDX file, as far as its header promises.

    Raises DataError as `gunzip` and `parse_idx` do.
    """
    header_nbytes = 4 + 4 * dimensions
    promised = math.prod(_parse_header(_unpack(data, name, header_nbytes), name, dimensions))
    return gunzip(data, name, at_most=header_nbytes + promised)


def gunzip(data: bytes, name: str, *, at_most: int) -> bytes:
    """Decompress `data`, to `at_most` bytes, and verify its checksum.

    Raises DataError if `data` is not in gzip format, is truncated or damaged, or unpacks to more.
    """
    content = _unpack(data, name, at_most + 1)
    if len(content) > at_most:
        raise DataError(f"{name} unpacks to more than {at_most} bytes: download it again")
    return content


def _unpack(data: bytes, name: str, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of what `data` unpacks to, or all if there are fewer."""
    if data[:2] != b"\x1f\x8b":
        raise DataError(
            f"{name} is not a gzip file: it begins with {_hex(data[:2])} instead of 1f 8b; "
            f"download it again"
        )
    try:
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(nbytes)
    except EOFError:
        raise DataError(
            f"{name} is truncated: its {len(data)} bytes end within the compressed data; "
            f"download it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name} is damaged ({error}): download it again") from None


def parse_idx(data: bytes, name: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array in `data`, a read-only view with `dimensions` dimensions.

    Raises DataError if the magic number, the number of dimensions or the length of the data is
    wrong.
    """
    shape = _parse_header(data, name, dimensions)
    body = memoryview(data)[4 + 4 * dimensions :]
    promised = math.prod(shape)
    if len(body) != promised:
        raise DataError(
            f"{name} has {len(body)} bytes after its header, which promises {promised} "
            f"({' x '.join(map(str, shape))}): download it again"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _parse_header(data: bytes, name: str, dimensions: int) -> tuple[int, ...]:
    magic = data[:4]
    if len(magic) < 4 or magic[:3] != bytes([0, 0, UNSIGNED_BYTE]):
        raise DataError(
            f"{name} is not an IDX file of unsigned bytes: it begins with {_hex(magic)} instead "
            f"of 00 00 08 and the number of dimensions; is it a different file?"
        )
    if magic[3] != dimensions:
        raise DataError(
            f"{name} has {magic[3]} dimensions, {dimensions} are needed "
            f"(images have 3, labels 1): are two files swapped?"
        )
    if len(data) < 4 + 4 * dimensions:
        raise DataError(
            f"{name} ends within its header, after {len(data)} of {4 + 4 * dimensions} bytes: "
            f"download it again"
        )
    shape = struct.unpack_from(f">{dimensions}I", data, offset=4)
    if math.prod(shape) > MOST_NBYTES:
        raise DataError(
            f"{name} has a header that promises {math.prod(shape)} bytes; at most "
            f"{MOST_NBYTES:,} are read: download it again"
        )
    return shape


def _hex(data: bytes) -> str:
    return data.hex(" ") or "nothing"
