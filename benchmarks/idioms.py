"""The programs that are run beside ckptool, as people write them. Arguments: source, target.

Those that fill a model take the size of the file instead of a target, and print how long that took.
"""

from __future__ import annotations

__all__ = [
    "CAST",
    "CKPTOOL_FILL",
    "CKPTOOL_FILL_META",
    "CKPTOOL_LOAD",
    "CKPTOOL_LOAD_MAPPED",
    "CKPTOOL_MATCH",
    "COMPARE",
    "CONSUME",
    "CONVERT",
    "DCP_LIST",
    "DCP_TO_TORCH",
    "FILL",
    "FILL_META",
    "LIST",
    "LOAD",
    "LOAD_MAPPED",
    "LOAD_META",
    "MATCH",
    "MERGEKIT",
    "PT_EXPORT",
    "PT_LOAD",
    "REMAP",
    "STATS",
    "STRIP",
    "STRIP_ITSELF",
]

LIST = """
import sys, torch
state = torch.load(sys.argv[1], map_location="meta")
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

DCP_LIST = """
import sys
from torch.distributed.checkpoint import FileSystemReader
for name, one in FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata.items():
    print(name, getattr(one, "size", None))
"""

DCP_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
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

FILL = """
import sys, time, torch
from benchmarks.decoder import decoder
model = decoder(int(sys.argv[2]))
start = time.perf_counter()
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
model.load_state_dict(state)
print(time.perf_counter() - start)
"""

CKPTOOL_FILL = """
import sys, time, torch, ckptool
from benchmarks.decoder import decoder
model = decoder(int(sys.argv[2]))
start = time.perf_counter()
ckptool.load_into(model, sys.argv[1])
print(time.perf_counter() - start)
"""

FILL_META = """
import sys, time, torch
from benchmarks.decoder import decoder
model = decoder(int(sys.argv[2]), device="meta")
start = time.perf_counter()
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
model.load_state_dict(state, assign=True)
print(time.perf_counter() - start)
"""

CKPTOOL_FILL_META = """
import sys, time, torch, ckptool
from benchmarks.decoder import decoder
model = decoder(int(sys.argv[2]), device="meta")
start = time.perf_counter()
ckptool.load_into(model, sys.argv[1])
print(time.perf_counter() - start)
"""

CKPTOOL_MATCH = """
import sys, time, torch, ckptool
count, weight = int(sys.argv[1]), torch.zeros(2, 3)
file = {f"module.backbone.layers.{index}.weight": weight.clone() for index in range(count)}
model = {f"layers.{index}.weight": (2, 3) for index in range(count)}
start = time.perf_counter()
_, report = ckptool.match(file, model)
print(time.perf_counter() - start)
assert report.coverage == 1.0
"""

MATCH = """
import sys, torch
file, model = (torch.load(path, map_location="cpu", mmap=True) for path in sys.argv[1:])
file = {
    name.replace("module.", "").replace("layers.", "blocks."): tensor
    for name, tensor in file.items()
}
print(sorted(set(model) - set(file)), sorted(set(file) - set(model)))
print([name for name in set(file) & set(model) if file[name].shape != model[name].shape])
"""

CONSUME = """
import sys, time, torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
count, weight = int(sys.argv[1]), torch.zeros(2, 3)
file = {f"module.backbone.layers.{index}.weight": weight.clone() for index in range(count)}
start = time.perf_counter()
consume_prefix_in_state_dict_if_present(file, "module.")
consume_prefix_in_state_dict_if_present(file, "backbone.")
print(time.perf_counter() - start)
"""

PT_EXPORT = """
import sys
from pt_loader import PtCheckpoint
PtCheckpoint.load(sys.argv[1]).export(sys.argv[2])
"""

PT_LOAD = """
import sys
from pt_loader import PtCheckpoint
state = PtCheckpoint.load(sys.argv[1]).state_dict(backend="numpy", copy=False)
"""

MERGEKIT = """
import sys
from mergekit.io.loader import TensorLoader
loader = TensorLoader.get(sys.argv[1], use_lazy_unpickle=True, device="cpu")
state = {name: loader.get_tensor(name) for name in loader.keys()}
"""

FICKLING = """
import sys, zipfile
from pathlib import Path
from fickling.analysis import check_safety
from fickling.fickle import StackedPickle
for path in Path(sys.argv[1]).iterdir():
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                pickles = StackedPickle.load(archive.read(name))
        else:
            pickles = StackedPickle.load(path.read_bytes())
        severities = [check_safety(pickled).severity for pickled in pickles]
    except Exception:
        pass  # a kind that it does not read
"""
