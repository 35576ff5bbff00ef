"""Loads handwritten digits: real data that comes with evenstep.

They are the test set of E. Alpaydin, C. Kaynak: "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998 (https://doi.org/10.24432/C50P49), under CC BY 4.0: 1,797 images
of 8x8 pixels with 17 shades. `digits.safetensors` has them unchanged, in their order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from torch.utils.data import TensorDataset

SMALL, LARGE = 8, 28
SHADES = 16
TEST_EVERY = 5


def digits(train: bool = True) -> TensorDataset:
    """Return the digits, enlarged to 28x28 pixels: 1,438 training or 359 test examples.

    Examples 4, 9, 14, ... are the test examples.

    Returns:
        Images, float32 (n, 1, 28, 28) in [0, 1], and labels, int64 (n,) in 0..9; bit-identical on
        every machine.
    """
    images, labels = _load()
    is_test = np.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    chosen = is_test != train
    return TensorDataset(
        torch.from_numpy(enlarge(images[chosen])).unsqueeze(1), torch.from_numpy(labels[chosen])
    )


def enlarge(images: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Interpolate shades 0..16, int64 (n, 8, 8), bilinearly to float32 (n, 28, 28) in [0, 1].

    Equals `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`, but computes in
    integers and rounds once at the end, so that the result does not depend on the machine.
    """
    weights = bilinear_weights()  # (28, 8), in 28ths
    sums = weights @ images @ weights.T
    # Both are integers below 2^24, hence exact as float32, and the division rounds once.
    enlarged: npt.NDArray[np.float32] = sums.astype(np.float32) / np.float32(SHADES * LARGE * LARGE)
    return enlarged


def bilinear_weights() -> npt.NDArray[np.int64]:
    """Return the weight of each small pixel in each large one, in 28ths, int64 (28, 8).

    The centre of large pixel i lies at (i + 1/2) * 8/28 - 1/2 = (16 i + 8 - 28) / 56
    = (4 i - 5) / 14 small pixels. The weights of its two neighbours are 1 minus the distance.
    Beyond the outermost centres, the outermost pixel has all the weight.
    """
    centres = np.clip((4 * np.arange(LARGE) - 5) * 2, 0, (SMALL - 1) * LARGE)  # in 28ths
    distances = np.abs(centres[:, None] - LARGE * np.arange(SMALL)[None, :])
    weights: npt.NDArray[np.int64] = np.clip(LARGE - distances, 0, None)
    return weights


def _load() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return shades, int64 (1797, 8, 8), and labels, int64 (1797,)."""
    stored = load_file(Path(__file__).with_name("digits.safetensors"))
    return stored["images"].astype(np.int64), stored["labels"].astype(np.int64)
