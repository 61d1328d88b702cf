"""The files that the README and the cookbook name, of their content."""

import gzip
import os
import shutil
import sys
from collections import OrderedDict
from pathlib import Path

from safetensors.torch import save_file

from tests.formats.distributed.megatron_files import whole, write_ranks
from tests.sources import PROJECT

FIXTURES = PROJECT / "fixtures"
CURRENT = FIXTURES / "torch-2.13.0"

COPIES = {
    "model.pth": CURRENT / "dp_full_cuda3.pth",
    "single.pth": CURRENT / "single.pth",
    "whole.pth": CURRENT / "whole_dp.pth",
    "scripted.pt": CURRENT / "scripted.pt",
    "with-args.pth": CURRENT / "misc.pth",
    "compiled.pth": FIXTURES / "ecosystem" / "dp_compiled.pth",
    "ema.pth": FIXTURES / "ecosystem" / "ema.pth",
    "epoch1.pth": CURRENT / "dp.pth",
    "jax.npz": FIXTURES / "numpy" / "jax.npz",
    "old.pth": FIXTURES / "torch-1.4.0" / "dp_full_cuda0.pth",
    "python2.pth": FIXTURES / "torch-1.0.1-python2" / "whole_dp.pth",
    "tower.pth": FIXTURES / "modules" / "whole_tower.pth",
    "lightning.ckpt": FIXTURES / "trainers" / "lightning.ckpt",
    "train.pth.tar": FIXTURES / "trainers" / "ddp.pth.tar",
    "ties.pth": FIXTURES / "tensors" / "ties.pth",
    "views.pth": FIXTURES / "tensors" / "views.pth",
    "tpu.pth": FIXTURES / "foreign" / "xla_1.12.pth",
    "rank0.pth": FIXTURES / "distributed" / "fsdp1_sharded_0_of_2.pth",
    "dtensor.pth": FIXTURES / "distributed" / "dtensor_0_of_2.pth",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": FIXTURES
    / "foreign"
    / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "s390x.pth": FIXTURES / "archives" / "big_endian.pth",
    "hub": FIXTURES / "shards" / "hub_safetensors",
    "deepspeed-run": FIXTURES / "zero" / "z3-bf16",
    "model.gguf": FIXTURES / "gguf" / "quantised.gguf",
    "llama-gptq": FIXTURES / "quantizers" / "gptq-v1",
    "nf4.pth": FIXTURES / "quantised" / "bnb4_state.pth",
    "flax_model.msgpack": FIXTURES / "flax" / "variables.msgpack",
    "model.keras": FIXTURES / "keras" / "model.keras",
    "images.keras": FIXTURES / "layouts" / "keras.keras",
    "images.msgpack": FIXTURES / "layouts" / "images.msgpack",
    "v4-8.pth": FIXTURES / "xla" / "xser-2.9.0.pth",
    "v4-8.pth.tensors": FIXTURES / "xla" / "xser-2.9.0.pth.tensors",
    "run-tf": FIXTURES / "tensorflow" / "run",
    "saved_model": FIXTURES / "tensorflow" / "saved_model",
    "tpu-ranks": FIXTURES / "xla" / "flat-2.9.0",
    "step-100": FIXTURES / "dcp" / "training-2.13.0",
    "actor": FIXTURES / "ranks" / "fsdp2-2.13.0",
    "model/sharded": FIXTURES / "dcp" / "hugging-2.13.0",
    "iter_0000007": FIXTURES / "processes" / "megatron",
    "checkpoint-9": FIXTURES / "processes" / "accelerate",
    "unzipped": FIXTURES / "archives" / "unzipped",
}
"""What each name stands for: a fixture, or a folder of them."""

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 83000000
"""
PAGE = "<!DOCTYPE html><html><head><title>Google Drive - Quota exceeded</title></head></html>"
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (3, 2))
        self.norm = nn.BatchNorm2d(4, eps=1e-3)
        self.square = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)
"""


class _Calls:
    def __reduce__(self):
        return open, ("you-have-been-run", "w")


def loads(path: Path):
    """What torch (or safetensors) reads from a file, without running anything."""
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def prepare(folder: Path) -> None:
    """Put all of them there; what else is in the folder goes."""
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, source in COPIES.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.oracle.json"))
        else:
            shutil.copyfile(source, folder / name)
    _train(folder)
    state = torch.load(COPIES["single.pth"])
    torch.save(state, folder / "protocol4.pth", pickle_protocol=4)
    torch.save({"state_dict": state, "note": _Calls()}, folder / "stranger.pth")
    torch.save(_adapter(), folder / "adapter.pth")
    torch.save(OrderedDict(state, **{"fc.bias": torch.full((10,), 1e6)}), folder / "large.pth")
    write_ranks(folder / "iter_0000100", whole())
    (folder / "net.py").write_text(NET)
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text("{}")
    (folder / "base" / "tokenizer.json").write_text("{}")
    (folder / "pointer.pth").write_text(POINTER)
    (folder / "pointer.safetensors").write_text(POINTER)
    short = (FIXTURES / "safetensors" / "ties.safetensors").read_bytes()[:-10]
    (folder / "cut.safetensors").write_bytes(short)
    (folder / "page.pth").write_text(PAGE)
    (folder / "empty.pth").write_bytes(b"")
    content = (folder / "model.pth").read_bytes()
    shutil.copy(FIXTURES / "lora/base.safetensors", folder)
    shutil.copytree(FIXTURES / "lora/plain", folder / "lora")
    torch.save({"embed_tokens.weight": torch.zeros(10, 4)}, folder / "vocabulary.pth")
    torch.save({"attn.qkv.weight": torch.zeros(12, 4)}, folder / "fused.pth")
    bias = [torch.zeros(8), torch.zeros(4)]
    encoder = {"weight": torch.zeros(8, 4), "bias": bias}
    torch.save({"encoder": encoder, "epoch": 3}, folder / "nested.pth")
    save_file({"fc1.weight": torch.zeros(8, 4)}, folder / "part1.safetensors")
    save_file({"fc2.weight": torch.zeros(4, 8)}, folder / "part2.safetensors")
    sizes = {"fc1.weight": 30_000, "fc1.bias": 10_000, "fc2.weight": 50_000, "fc2.bias": 10_000}
    torch.save({name: torch.zeros(size) for name, size in sizes.items()}, folder / "cut.pth")
    os.truncate(folder / "cut.pth", 200_000)
    (folder / "zipped.pth").write_bytes(gzip.compress(content, mtime=0))
    (folder / "flipped.pth").write_bytes(_flipped(content))


def _train(folder: Path) -> None:
    """Write the next epoch of `epoch1.pth`, and a run that keeps ten rows of a large tensor."""
    import torch

    torch.manual_seed(0)
    state = torch.load(folder / "epoch1.pth")
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.add_(0.01 * torch.randn(tensor.shape))
    torch.save(state, folder / "epoch2.pth")
    run = torch.load(CURRENT / "dp_full.pth")
    examples = torch.rand(1000, 3)[:10]
    torch.save({**run, "state_dict": state, "examples": examples}, folder / "run.pth")


def _adapter():
    """What peft saves of one layer."""
    import torch

    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    return {name.format("A"): torch.ones(4, 8), name.format("B"): torch.zeros(8, 4)}


def _flipped(content: bytes) -> bytes:
    """One bit of the first storage is another."""
    import zipfile
    from io import BytesIO

    with zipfile.ZipFile(BytesIO(content)) as archive:
        record = next(one for one in archive.infolist() if one.filename.endswith("data/0"))
    start = record.header_offset + 30
    name, extra = (int.from_bytes(content[start - n : start - n + 2], "little") for n in (4, 2))
    place = start + name + extra
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
