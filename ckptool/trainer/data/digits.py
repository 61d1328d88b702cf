"""Scikit-learn's images of handwritten digits, which come with it."""

from __future__ import annotations

import torch

from ckptool.errors import TrainingError
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import Rows, TrainData, split

__all__ = ["digits"]

_LARGEST = 16.0


def digits(config: TrainConfig) -> TrainData:
    """1797 images of 1 x 8 x 8 in [0, 1], four fifths of them, by the seed, to learn from.

    Targets are the digits; the loss is the cross entropy.

    Raises:
        TrainingError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise TrainingError(
            f"the data are scikit-learn's, which cannot be imported ({error})",
            hint="pip install 'ckptool[trainer]'",
        ) from error
    held = load_digits()
    dtype = getattr(torch, config.dtype)
    images = torch.as_tensor(held.images).unsqueeze(1).to(dtype) / _LARGEST
    labels = torch.as_tensor(held.target).long()
    learned, kept = (Rows(images[rows], labels[rows]) for rows in split(len(labels), config.seed))
    return TrainData(learned, kept, "cross_entropy", (1, 8, 8), 10, {"largest": _LARGEST})
