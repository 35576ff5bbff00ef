"""scikit-learn's handwritten digits: real data that needs no download.

They are the test part of E. Alpaydin, C. Kaynak: "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998: 1,797 images of 8x8 pixels with 17 shades.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from evenstep.errors import DataError

SMALL, LARGE = 8, 28
SHADES = 16
TEST_EVERY = 5


def digits(train: bool = True) -> TensorDataset:
    """Return the digits, enlarged to 28x28: 1,438 to train on, or the 359 others for the test.

    Every fifth example (the fourth from 0 on) belongs to the test.

    Returns:
        Images, float32 (n, 1, 28, 28) in [0, 1], and labels, int64 (n,) in 0..9. The numbers are
        the same bits on every machine.

    Raises:
        DataError: scikit-learn is not installed.
    """
    images, labels = _load()
    is_test = np.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    chosen = is_test != train
    return TensorDataset(
        torch.from_numpy(enlarge(images[chosen])).unsqueeze(1), torch.from_numpy(labels[chosen])
    )


def enlarge(images: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Interpolate shades 0..16, int64 (n, 8, 8), bilinearly to float32 (n, 28, 28) in [0, 1].

    It is `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`, computed in
    whole numbers and rounded once at the end, so that no thread or processor can move a bit.
    """
    weights = bilinear_weights()  # (28, 8), in 28ths
    sums = weights @ images @ weights.T
    # Both are whole numbers below 2^24, so exact as float32, and one division rounds once.
    enlarged: npt.NDArray[np.float32] = sums.astype(np.float32) / np.float32(SHADES * LARGE * LARGE)
    return enlarged


def bilinear_weights() -> npt.NDArray[np.int64]:
    """Return how many 28ths each small pixel gives to each large one, int64 (28, 8).

    The centre of large pixel i lies at (i + 1/2) * 8/28 - 1/2 = (16 i + 8 - 28) / 56
    = (4 i - 5) / 14 small pixels, and takes from its two neighbours what the distance leaves.
    Beyond the outermost centres it takes from the outermost pixel alone.
    """
    centres = np.clip((4 * np.arange(LARGE) - 5) * 2, 0, (SMALL - 1) * LARGE)  # in 28ths
    distances = np.abs(centres[:, None] - LARGE * np.arange(SMALL)[None, :])
    weights: npt.NDArray[np.int64] = np.clip(LARGE - distances, 0, None)
    return weights


def _load() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return shades, int64 (1797, 8, 8), and labels, int64 (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            'pip install "evenstep[demo]"'
        ) from None
    bunch = load_digits()
    return bunch.images.astype(np.int64), bunch.target.astype(np.int64)
