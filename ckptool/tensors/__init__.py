"""Bytes to torch tensors: `materialize` for one, `Materializer` for a tree of them.

This room and `loading` are the only ones that import torch, inside the functions that need it.
"""

from ckptool.tensors.materialize import (
    Materializer as Materializer,
    is_one_part as is_one_part,
    materialize as materialize,
    only_part_error as only_part_error,
    set_attributes as set_attributes,
)
from ckptool.tensors.storages import (
    get_torch_dtype as get_torch_dtype,
    require_torch as require_torch,
)
