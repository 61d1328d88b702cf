"""Models by name: `linear`, `mlp:16,32`, `cnn`, `module:factory`."""

from __future__ import annotations

from ckptool.trainer.models.named import model_of

__all__ = ["model_of"]
