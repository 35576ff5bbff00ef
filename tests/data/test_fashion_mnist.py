"""Fashion-MNIST: the known facts about the real files, and made-up files with one fault each."""

import gzip
import hashlib
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from evenstep.data import fashion_mnist
from evenstep.data.fashion_mnist import TEST_FILES, TRAIN_FILES, download_files, read_folder
from evenstep.errors import DataError

IMAGES, LABELS = TRAIN_FILES
REAL = Path(__file__).parents[3] / "shared" / "data" / "fashion-mnist"
needs_real_files = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the files of Fashion-MNIST in ../shared/data/fashion-mnist"
)
NO_SERVER = "http://127.0.0.1:9/"

# As torchvision publishes them (torchvision/datasets/mnist.py).
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def pixels(examples: int, height: int = 28, width: int = 28) -> np.ndarray:
    return (np.arange(examples * height * width) % 256).reshape(examples, height, width)


@pytest.fixture
def folder(tmp_path):
    """Twelve training examples with labels 0..9, 0, 1."""
    write(tmp_path, IMAGES, idx(pixels(12)))
    write(tmp_path, LABELS, idx(np.arange(12) % 10))
    return tmp_path


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(gzip.compress(content))


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        fashion_mnist(data_dir=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs_real_files
@pytest.mark.parametrize(("train", "each"), [(True, 6000), (False, 1000)])
def test_the_real_files_hold_as_many_of_each_class(train, each):
    images, labels = fashion_mnist(train, data_dir=REAL).tensors
    assert images.shape == (10 * each, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.dtype == torch.int64
    assert torch.bincount(labels).tolist() == [each] * 10
    assert labels[0] == 9  # both sets begin with an ankle boot


@needs_real_files
def test_the_real_files_are_the_published_ones():
    md5 = {name: hashlib.md5((REAL / name).read_bytes()).hexdigest() for name in MD5}
    assert md5 == MD5


@needs_real_files
@pytest.mark.parametrize(("train", "names"), [(True, TRAIN_FILES), (False, TEST_FILES)])
def test_the_real_files_pass_for_downloads(train, names, tmp_path):
    cache = tmp_path / "fashion-mnist"
    cache.mkdir()
    for name in names:
        (cache / name).symlink_to(REAL / name)
    assert download_files(train, base_urls=[NO_SERVER], cache=tmp_path) == cache


@needs_real_files
def test_without_a_folder_the_user_s_cache_is_read(tmp_path, monkeypatch):
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)
    cache = tmp_path / "evenstep" / "fashion-mnist"
    cache.mkdir(parents=True)
    for name in TEST_FILES:
        shutil.copy(REAL / name, cache)
    cached, given = fashion_mnist(train=False), fashion_mnist(train=False, data_dir=REAL)
    assert all(map(torch.equal, cached.tensors, given.tensors))


def test_pixels_are_divided_by_255_and_rounded_once(folder):
    images, labels = fashion_mnist(data_dir=folder).tensors
    exact = pixels(12).astype(np.float64) / 255
    assert np.array_equal(images.squeeze(1).numpy(), exact.astype(np.float32))
    assert labels.tolist() == [*range(10), 0, 1]


def test_a_path_may_be_a_string_and_files_may_be_unzipped(folder):
    zipped = fashion_mnist(data_dir=str(folder)).tensors
    for name in TRAIN_FILES:
        path = folder / name
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert all(map(torch.equal, zipped, fashion_mnist(data_dir=folder).tensors))


def test_a_missing_file_is_named_with_the_folder_and_all_four(folder):
    (folder / LABELS).unlink()
    message = refused(folder)
    assert message.startswith(f"{LABELS} is missing in {folder}")
    assert all(name in message for name in MD5)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert f"is missing in {tmp_path / 'nowhere'}" in refused(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_named(folder):
    assert f"is missing in {folder / IMAGES}" in refused(folder / IMAGES)


def test_a_folder_in_place_of_a_file_is_named(folder):
    (folder / IMAGES).unlink()
    (folder / IMAGES).mkdir()
    assert f"{folder / IMAGES} can't be read" in refused(folder)


def test_images_of_another_size_are_refused(folder):
    write(folder, IMAGES, idx(pixels(12, 32, 20)))
    assert "images of 32 x 20 pixels: 28 x 28 are needed" in refused(folder)


def test_labels_for_other_images_are_refused(folder):
    write(folder, LABELS, idx(np.zeros(11)))
    assert "11 labels for 12 images" in refused(folder)


def test_a_label_out_of_range_is_refused(folder):
    labels = np.zeros(12)
    labels[7] = 10
    write(folder, LABELS, idx(labels))
    assert "label 10 at example 7: labels must be 0 to 9" in refused(folder)


def test_swapped_files_are_refused(folder):
    shutil.copy(folder / LABELS, folder / IMAGES)
    assert f"{folder / IMAGES} has 1 dimensions, 3 are needed" in refused(folder)


@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (lambda data: data[:-4], "is truncated"),
        (lambda data: data[:-8] + b"\0" * 8, "is damaged"),
        (lambda data: gzip.decompress(data), "is not a gzip file"),
        (lambda data: b"", "is not a gzip file"),
        (lambda data: gzip.compress(b"<html>"), "is not an IDX file"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1]), "which promises 12"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, story):
    path = folder / LABELS
    path.write_bytes(damage(path.read_bytes()))
    message = refused(folder)
    assert message.startswith(f"{path} ")
    assert story in message


HEADER = struct.Struct(">BBBB3I")


def bomb(*promised: int) -> bytes:
    """Fifty million zeros behind a header, in as many thousand bytes."""
    return gzip.compress(HEADER.pack(0, 0, 8, 3, *promised) + bytes(50_000_000), compresslevel=1)


@pytest.mark.parametrize(
    ("name", "content", "story"),
    [
        (IMAGES, bomb(12, 28, 28), "unpacks to more than 9424 bytes"),
        (IMAGES, bomb(2**32 - 1, 28, 28), "promises 3367254359280 bytes; at most 1,073,741,824"),
        (IMAGES[:-3], HEADER.pack(0, 0, 8, 3, 2**32 - 1, 28, 28), "promises 3367254359280"),
        (IMAGES, gzip.compress(bytes(50_000_000), compresslevel=1), "is not an IDX file"),
    ],
    ids=["a bomb", "a bomb of terabytes", "a header of terabytes", "zeros"],
)
def test_what_would_unpack_to_too_much_is_refused_before_it_does(folder, name, content, story):
    (folder / IMAGES).unlink()
    (folder / name).write_bytes(content)
    tracemalloc.start()
    message = refused(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message.startswith(f"{folder / name} ")
    assert story in message
    assert peak < 5_000_000


def test_a_file_that_is_too_long_is_not_read(folder):
    (folder / IMAGES).unlink()
    (folder / IMAGES[:-3]).touch()
    os.truncate(folder / IMAGES[:-3], 1 << 40)
    assert "can't be read (it has more than 1,073,741,840 bytes)" in refused(folder)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(folder):
    (folder / IMAGES).unlink()
    os.mkfifo(folder / IMAGES)
    assert "can't be read (it is not a regular file)" in refused(folder)


def test_read_folder_reads_the_test_files_by_their_names(folder):
    for train_name, test_name in zip(TRAIN_FILES, TEST_FILES, strict=True):
        (folder / train_name).rename(folder / test_name)
    assert len(read_folder(folder, train=False)) == 12


def test_no_server_and_no_folder_end_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz .*data_dir"):
        download_files(True, base_urls=[NO_SERVER], cache=tmp_path, retries=0)
