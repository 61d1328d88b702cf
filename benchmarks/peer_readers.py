"""How each tool is asked for the tensors of a file; run by `peers.py` in its own environment.

    python peer_readers.py TOOL SECONDS < list of files

prints a JSON object for each file: `tensors` (sizes and SHA-256 of the row-major little-endian
bytes) or `error`, and whether torch has been imported. Each file is read in a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Given = Iterator[tuple[Sequence[int | None], str | None]]
"""Sizes and hash of each tensor; None where numbers are not asked for."""
Reader = Callable[[str], Given]


def sha256(tensor: Any) -> str:
    """Of a torch tensor."""
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def flat(node: Any) -> Given:
    """The tensors in dicts, lists and modules, each once a name."""
    import torch

    if isinstance(node, torch.Tensor):
        yield list(node.shape), sha256(node)
    elif isinstance(node, torch.nn.Module):
        yield from flat(dict(node.state_dict()))
    elif isinstance(node, dict):
        for value in node.values():
            yield from flat(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from flat(value)


def of_safetensors(path: str | Path) -> Given:
    """The tensors of a file that a converter wrote."""
    from safetensors.torch import load_file

    return flat(load_file(path))


def by_ckptool(path: str) -> Given:
    """From the header and the bytes, without torch."""
    import ckptool

    with ckptool.open(path) as checkpoint:
        for _, tensor in checkpoint.tensors():
            digest = hashlib.sha256()
            for block in tensor.content():
                digest.update(block)
            yield list(tensor.shape), digest.hexdigest()


def by_torch(path: str) -> Given:
    """As most programs load a file."""
    import torch

    return flat(torch.load(path, map_location="cpu", weights_only=True))


def by_checkpoint_tools(path: str) -> Given:
    """`checkpoint-tools convert`, and what it wrote."""
    from checkpoint_tools.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        main(["convert", "--full", "--name", out, path], standalone_mode=False)
        (written,) = os.listdir(folder)
        yield from of_safetensors(os.path.join(folder, written))


def by_sft(path: str) -> Given:
    """`sft convert`, and what it wrote."""
    from sft.ops.convert import convert_to_safetensors

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.safetensors"
        convert_to_safetensors(src=Path(path), dst=out, dtype=None)
        yield from of_safetensors(out)


def by_ckptkit(path: str) -> Given:
    """`ckptkit info`: sizes alone."""
    from ckptkit import inspect

    for tensor in inspect(path).tensors:
        yield list(tensor.shape), None


def by_pt_loader(path: str) -> Given:
    """`PtCheckpoint.state_dict`: arrays of numpy."""
    import numpy
    from pt_loader import PtCheckpoint

    for array in PtCheckpoint.load(path).state_dict(backend="numpy").values():
        data = numpy.ascontiguousarray(array).tobytes()
        yield list(array.shape), hashlib.sha256(data).hexdigest()


def by_mergekit(path: str) -> Given:
    """`TensorLoader.get`, as its merges read a model."""
    from mergekit.io.loader import TensorLoader

    loader = TensorLoader.get(path, use_lazy_unpickle=True, device="cpu")
    for name in loader.keys():  # noqa: SIM118 (no mapping)
        tensor = loader.get_tensor(name)
        yield list(tensor.shape), sha256(tensor)


READERS: dict[str, Reader] = {
    "ckptool": by_ckptool,
    "torch.load(weights_only=True)": by_torch,
    "checkpoint-tools convert": by_checkpoint_tools,
    "ckptkit info": by_ckptkit,
    "mergekit, its lazy loader": by_mergekit,
    "pt-safe-loader": by_pt_loader,
    "sft convert": by_sft,
}


def answer(read: Reader, path: str, patience: int) -> dict[str, Any]:
    """What one fork says of one file."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            told: dict[str, Any] = {"tensors": list(read(path))}
        except BaseException as error:  # whatever a tool raises, SystemExit too
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
        told["torch"] = "torch" in sys.modules
        with os.fdopen(sender, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        if select.select([pipe], [], [], patience)[0]:
            text = pipe.read()
        else:
            os.kill(child, signal.SIGKILL)
            text = ""
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": "no answer", "signal": status or signal.SIGKILL}
    answered: dict[str, Any] = json.loads(text)
    return answered


def main() -> None:
    """Each file of standard input, in order."""
    read, patience = READERS[sys.argv[1]], int(sys.argv[2])
    paths = sys.stdin.read().splitlines()
    with contextlib.suppress(Exception):
        list(read(paths[0]))  # what a tool imports takes seconds: once, before the forks
    for path in paths:
        print(json.dumps(answer(read, path, patience)), flush=True)


if __name__ == "__main__":
    main()
