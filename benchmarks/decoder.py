"""The model that the large files are of, for what fills a model."""

from __future__ import annotations

from typing import Any

from benchmarks.inputs import shapes

__all__ = ["decoder"]


def decoder(size: int, *, device: str = "cpu") -> Any:
    """A module of the names and shapes in the file of `size` bytes, float16, without wrapper.

    Every page of its memory is there already, as in a model that was initialized.
    """
    import torch

    root = torch.nn.Module()
    for name, shape in shapes(size).items():
        *path, leaf = name.split(".")[1:]
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        weight = torch.empty(shape, dtype=torch.float16, device=device)
        weight = weight if device == "meta" else weight.fill_(0.5)
        module.register_parameter(leaf, torch.nn.Parameter(weight))
    return root
