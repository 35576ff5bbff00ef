"""Loads Fashion-MNIST: 70,000 images of clothes in ten classes.

H. Xiao, K. Rasul, R. Vollgraf: "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms", arXiv 1708.07747. It is the data set of Dive into Deep Learning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from evenstep.data.download import download
from evenstep.data.idx import MOST_NBYTES, gunzip_idx, parse_idx
from evenstep.errors import DataError, hides_own_frames
from evenstep.files import read_file

TRAIN_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")

BASE_URLS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)

_TRAIN_SHA256 = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
)
_TEST_SHA256 = (
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)

IMAGE_SIZE = 28
CLASSES = 10


@hides_own_frames
def fashion_mnist(
    train: bool = True, data_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> TensorDataset:
    """Return the 60,000 training or the 10,000 test examples.

    Args:
        train: return the training examples; otherwise the test examples.
        data_dir: folder with the four original files, gzipped or not. None: they are downloaded
            once into the user's cache folder.
        progress: show a progress bar on stderr while downloading.

    Returns:
        Images, float32 (n, 1, 28, 28) in [0, 1], and labels, int64 (n,) in 0..9.

    Raises:
        DataError: a file is missing, can't be downloaded, is damaged or has values out of range.
    """
    if data_dir is None:
        return read_folder(download_files(train, progress=progress), train)
    return read_folder(Path(data_dir), train)


def download_files(
    train: bool,
    *,
    base_urls: Sequence[str] = BASE_URLS,
    cache: Path | None = None,
    retries: int = 2,
    progress: bool = True,
) -> Path:
    """Return the folder that holds the two files; download those that are missing.

    `cache` defaults to evenstep's own cache folder. Raises DataError as `download` does.
    """
    import pooch  # here, because it is slow to import and rarely needed

    folder = (cache or Path(pooch.os_cache("evenstep"))) / "fashion-mnist"
    names, checksums = (TRAIN_FILES, _TRAIN_SHA256) if train else (TEST_FILES, _TEST_SHA256)
    for name, sha256 in zip(names, checksums, strict=True):
        download(
            name,
            sha256=sha256,
            base_urls=base_urls,
            folder=folder,
            retries=retries,
            progress=progress,
        )
    return folder


def read_folder(folder: Path, train: bool) -> TensorDataset:
    """Read the training or the test examples from the files in `folder`, gzipped or not.

    Files in this format with a different number of examples are accepted. Raises DataError if a
    file is missing or damaged, or has values out of range.
    """
    images_name, labels_name = TRAIN_FILES if train else TEST_FILES
    images_path, images = _read(folder, images_name, dimensions=3)
    labels_path, labels = _read(folder, labels_name, dimensions=1)
    _check_images(images, images_path)
    _check_labels(labels, labels_path, len(images))
    return TensorDataset(_to_floats(images), torch.from_numpy(labels.astype(np.int64)))


def _read(folder: Path, name: str, dimensions: int) -> tuple[Path, npt.NDArray[np.uint8]]:
    """Return the path and the numbers of `name`, or of the same name without .gz."""
    for path in (folder / name, folder / name.removesuffix(".gz")):
        try:
            data = read_file(path, at_most=MOST_NBYTES + 4 + 4 * dimensions)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DataError(
                f"{path} can't be read ({error.strerror}): make it a readable file"
            ) from None
        if path.suffix == ".gz":
            data = gunzip_idx(data, str(path), dimensions)
        return path, parse_idx(data, str(path), dimensions)
    raise DataError(
        f"{name} is missing in {folder.absolute()}, with and without .gz: the folder needs the "
        f"four files {', '.join((*TRAIN_FILES, *TEST_FILES))}"
    )


def _check_images(images: npt.NDArray[np.uint8], path: Path) -> None:
    height, width = images.shape[1:]
    if (height, width) != (IMAGE_SIZE, IMAGE_SIZE):
        raise DataError(
            f"{path} has images of {height} x {width} pixels: "
            f"{IMAGE_SIZE} x {IMAGE_SIZE} are needed"
        )


def _check_labels(labels: npt.NDArray[np.uint8], path: Path, images: int) -> None:
    if len(labels) != images:
        raise DataError(
            f"{path} has {len(labels)} labels for {images} images: take both files from one set"
        )
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise DataError(
            f"{path} has label {labels[wrong[0]]} at example {wrong[0]}: "
            f"labels must be 0 to {CLASSES - 1}"
        )


def _to_floats(images: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Scale uint8 (n, h, w) to float32 (n, 1, h, w) in [0, 1], rounding each number once."""
    return torch.from_numpy(np.divide(images, np.float32(255), dtype=np.float32)).unsqueeze(1)
