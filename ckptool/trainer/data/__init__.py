"""Data to train on: a pair of datasets, what a model for them looks like, and the loss."""

from __future__ import annotations

from ckptool.trainer.data.datasets import TrainData, data_of

__all__ = ["TrainData", "data_of"]
