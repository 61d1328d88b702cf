"""What the words of `data` and `model` may be; torch is not needed to tell."""

from __future__ import annotations

import re

from ckptool.factories import FACTORY

__all__ = ["csv_path", "data_fault", "hidden_widths", "loss_fault", "model_fault"]

_DATA = ("random", "friedman", "digits")
_MLP = re.compile(r"mlp(?::([1-9]\d{0,8}(?:,[1-9]\d{0,8})*))?", re.ASCII)
_USUAL = [16, 32]


def csv_path(data: str) -> str | None:
    """The file of `csv:PATH`; None: it is another word."""
    return data[4:] if data.startswith("csv:") else None


def data_fault(data: str) -> str | None:
    """What is wrong with a word for data; whether a file is there is seen when it is read."""
    if data in _DATA or csv_path(data) or (data[:4] != "csv:" and FACTORY.fullmatch(data)):
        return None
    return f"is none of {', '.join(_DATA)}, csv:PATH, module:factory"


def loss_fault(loss: str) -> str | None:
    """What is wrong with a word for a loss; whether torch has it is seen later."""
    if loss.isidentifier() or FACTORY.fullmatch(loss):
        return None
    return "is neither a name in torch.nn.functional nor module:function"


def hidden_widths(model: str) -> list[int] | None:
    """How wide the hidden layers of `mlp:16,32` are; None: it is another word."""
    found = _MLP.fullmatch(model)
    if found is None:
        return None
    return [int(width) for width in found[1].split(",")] if found[1] else _USUAL


def model_fault(model: str) -> str | None:
    """What is wrong with a word for a model."""
    if model in ("linear", "cnn") or hidden_widths(model) or FACTORY.fullmatch(model):
        return None
    if model.startswith("mlp:"):
        return "has widths that are no whole numbers from 1 on, as in mlp:16,32"
    return "is none of linear, mlp:16,32, cnn, module:factory"
