"""Bytes to torch tensors: `materialise` for one, `Materialiser` for a tree of them.

This room and `loading` are the only ones that import torch, inside the functions that need it.
"""

from ckptool.tensors.materialise import (
    Materialiser,
    is_one_part,
    materialise,
    only_a_part,
    require_torch,
    set_attributes,
    torch_dtype,
)

__all__ = [
    "Materialiser",
    "is_one_part",
    "materialise",
    "only_a_part",
    "require_torch",
    "set_attributes",
    "torch_dtype",
]
