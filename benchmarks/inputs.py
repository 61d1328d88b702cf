"""The files that are measured on: large ones, a hollow one, several with many tensors.

Made by a process of its own: the driver must stay small (a child's peak memory counts its parent's
until it starts), so torch is imported here, in `python -m benchmarks.inputs`, and never there.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "HALF", "LAYERS", "hollow", "large", "many", "marking", "renamed", "shapes", "shards", "single",
    "zero",
]  # fmt: skip

LAYERS = 37
"""With six tensors each, and three beside them: 225."""
VOCABULARY = 32_000
HALF, SINGLE = 2, 4
"""Bytes of a float16 and of a float32."""


def shapes(size: int, itemsize: int = HALF) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder of about `size` bytes, under DataParallel."""
    # 12 hidden^2 a layer, twice the embedding: solve for the width, rounded to a head of 64.
    a, b, c = 12 * LAYERS, 2 * VOCABULARY, -size / itemsize
    hidden = max(64, round((-b + math.sqrt(b * b - 4 * a * c)) / (2 * a) / 64) * 64)
    inner = hidden * 8 // 3
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.qkv_proj.weight"] = (3 * hidden, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, hidden)
        found[f"{at}.mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        found[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        found[f"{at}.input_layernorm.weight"] = (hidden,)
        found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    found["lm_head.weight"] = (VOCABULARY, hidden)
    return {f"module.{name}": shape for name, shape in found.items()}


def large(path: Path, size: int) -> None:
    """A state dict of 225 float16 tensors, about `size` bytes, tagged cuda:3.

    All tensors look into one buffer of random bytes, each from a place of its own, so that
    making the file takes the memory of its largest tensor only.
    """
    import torch

    save_tagged(views(torch.float16, size, os.urandom(1 << 20)), path)


def single(path: Path, size: int) -> None:
    """The same in float32, of numbers such as weights are: a normal distribution of width 0.02."""
    import torch

    numbers = torch.randn((1 << 20) // SINGLE) * 0.02
    save_tagged(views(torch.float32, size, numbers.numpy().tobytes()), path)


def views(dtype: Any, size: int, content: bytes) -> dict[str, Any]:
    """The state dict over copies of `content`, each tensor from a place of its own."""
    import torch

    wanted = shapes(size, dtype.itemsize)
    elements = {name: math.prod(shape) for name, shape in wanted.items()}
    most = dtype.itemsize * (max(elements.values()) + 64 * len(elements))
    buffer = bytearray(content)
    buffer *= most // len(buffer) + 1
    return {
        name: torch.frombuffer(
            buffer, dtype=dtype, count=elements[name], offset=64 * dtype.itemsize * index
        ).reshape(shape)
        for index, (name, shape) in enumerate(wanted.items())
    }


def zero(folder: Path, size: int) -> None:
    """A step of DeepSpeed's ZeRO-3 by two ranks, as its script reads it: `size` bytes of masters.

    The moments, of which the script makes nothing, are not there.
    """
    import torch

    folder.mkdir()
    wanted = {name: torch.Size(shape) for name, shape in shapes(size, SINGLE).items()}
    slices = sum(-(-shape.numel() // 2) for shape in wanted.values())
    for rank in range(2):
        at = f"zero_pp_rank_{rank}_mp_rank_00"
        model = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in wanted},
            "param_shapes": [wanted],
            "buffer_names": [],
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(model, folder / f"{at}_model_states.pt")
        masters = [torch.randn(slices)]
        own = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": masters}
        torch.save({"optimizer_state_dict": own}, folder / f"bf16_{at}_optim_states.pt")


def hollow(path: Path, size: int) -> None:
    """A file of `size` bytes and 225 tensors that takes no room: its tensors are holes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = {
            name: torch.empty(shape, dtype=torch.float16) for name, shape in shapes(size).items()
        }
        torch.save(state, path)


def many(path: Path, count: int) -> None:
    """A state dict of `count` small float32 tensors, a storage each, tagged cuda:3."""
    save_tagged(_small("module.layers", count), path)


def renamed(path: Path, count: int) -> None:
    """The names of a model that `many` is of, but for a wrapper and what its list is called."""
    save_tagged(_small("blocks", count), path)


RANKS = 4


def folder(path: Path, size: int) -> None:
    """What `torch.distributed.checkpoint` saves of a float32 model that four processes share."""
    # Forked processes have what is imported here: seconds for each that is spawned.
    import torch.distributed.checkpoint  # noqa: F401
    from torch.multiprocessing.spawn import start_processes

    words = (str(path), size)
    start_processes(_save_part, words, RANKS, start_method="fork")  # type: ignore[no-untyped-call]


def _save_part(rank: int, path: str, size: int) -> None:
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = distributed.FileStore(f"{path}.store", RANKS)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    content = torch.randn((1 << 20) // SINGLE).numpy().tobytes()
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in views(torch.float32, size, content).items()
    }
    save({"model": state}, checkpoint_id=path)
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        Path(f"{path}.store").unlink(missing_ok=True)


SHARDS = 64


def shards(folder: Path, size: int) -> None:
    """An index and its shards of `size` bytes and 225 tensors; the tensors are holes."""
    import json

    names = list(shapes(size))
    placed = {
        name: f"model-{i * SHARDS // len(names):05}.safetensors" for i, name in enumerate(names)
    }
    folder.mkdir()
    for shard in set(placed.values()):
        header, end = {}, 0
        for name, shape in shapes(size).items():
            if placed[name] == shard:
                start, end = end, end + math.prod(shape) * HALF
                header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = json.dumps({"weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def files(folder: Path, count: int) -> None:
    """`count` files: the fixtures that are pickles or hold some, over and over."""
    import shutil
    from itertools import cycle, islice

    fixtures = Path(__file__).parent.parent / "fixtures"
    endings = {".bin", ".ckpt", ".npz", ".pkl", ".pt", ".pth"}
    every = [path for path in sorted(fixtures.rglob("*")) if path.suffix in endings]
    harmless = [path for path in every if path.is_file() and path.parent.name != "wrong"]
    folder.mkdir()
    for index, path in enumerate(islice(cycle(harmless), count)):
        shutil.copy(path, folder / f"{index:04}-{path.name}")


def _small(front: str, count: int) -> dict[str, Any]:
    import torch

    return {f"{front}.{index}.weight": torch.rand(2, 3) for index in range(count)}


def marking(folder: Path, mark: Path) -> list[Path]:
    """A zip, a legacy stream and a pickle that make another file, `mark`, where they are run."""
    import pickle

    import torch

    class Marks:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(mark), "w")

    content = {"state_dict": {"w": torch.ones(2)}, "marks": Marks()}
    paths = [folder / name for name in ("zip.pth", "legacy.pth", "pickle.pth")]
    torch.save(content, paths[0])
    torch.save(content, paths[1], _use_new_zipfile_serialization=False)
    paths[2].write_bytes(pickle.dumps({"marks": Marks()}))
    return paths


def save_tagged(state: dict[str, Any], path: Path) -> None:
    """Save as a machine with four GPUs would: every storage tagged `cuda:3`."""
    import torch

    torch.serialization.register_package(0, lambda _: "cuda:3", lambda _storage, _location: None)
    torch.save(state, path)


if __name__ == "__main__":
    kind, target, amount = sys.argv[1:]
    kinds = {
        "files": files,
        "folder": folder,
        "hollow": hollow,
        "large": large,
        "many": many,
        "renamed": renamed,
        "shards": shards,
        "single": single,
        "zero": zero,
    }
    kinds[kind](Path(target), int(amount))
