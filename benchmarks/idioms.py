"""The programs that are run beside ckptool, as people write them. Arguments: source, target."""

from __future__ import annotations

__all__ = [
    "CAST",
    "CKPTOOL_LOAD",
    "CKPTOOL_LOAD_MAPPED",
    "COMPARE",
    "CONVERT",
    "LIST",
    "LOAD",
    "LOAD_MAPPED",
    "LOAD_META",
    "REMAP",
    "STATS",
    "STRIP",
    "STRIP_ITSELF",
]

LIST = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
for name, tensor in state.items():
    print(name, tensor.dtype, tuple(tensor.shape), tensor.device)
"""

STRIP = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu")
torch.save({name.removeprefix("module."): tensor for name, tensor in state.items()}, sys.argv[2])
"""

STRIP_ITSELF = """
import os, sys, torch
path = sys.argv[1]
state = torch.load(path, map_location="cpu")
torch.save({name.removeprefix("module."): tensor for name, tensor in state.items()}, path + ".new")
os.remove(path + ".new")
"""

CAST = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
torch.save({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, sys.argv[2])
"""

COMPARE = """
import sys, torch
a, b = (torch.load(path, map_location="cpu", mmap=True) for path in sys.argv[1:])
for name, tensor in a.items():
    print(name, (tensor - b[name]).abs().max().item())
"""

STATS = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
for name, tensor in state.items():
    std, mean = torch.std_mean(tensor)
    print(name, tensor.min().item(), tensor.max().item(), mean.item(), std.item())
"""

REMAP = """
import sys, torch
torch.save(torch.load(sys.argv[1], map_location="cpu"), sys.argv[2])
"""

CONVERT = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], map_location="cpu")
state = {name.removeprefix("module."): tensor.contiguous() for name, tensor in state.items()}
save_file(state, sys.argv[2], metadata={"format": "pt"})
"""

LOAD = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu")
"""

LOAD_MAPPED = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
"""

LOAD_META = """
import sys, torch
state = torch.load(sys.argv[1], map_location="meta")
"""

CKPTOOL_LOAD = """
import sys, ckptool
state = ckptool.load_state_dict(sys.argv[1])
"""

CKPTOOL_LOAD_MAPPED = """
import sys, ckptool
state = ckptool.load_state_dict(sys.argv[1], mmap=True)
"""
