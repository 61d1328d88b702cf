"""Bytes to torch tensors: `materialise` for one, `Materialiser` for a tree of them.

This room and `loading` are the only ones that import torch, inside the functions that need it.
"""

from ckptool.tensors.materialise import (
    Materialiser as Materialiser,
    is_one_part as is_one_part,
    materialise as materialise,
    only_a_part as only_a_part,
    require_torch as require_torch,
    set_attributes as set_attributes,
    torch_dtype as torch_dtype,
)
