"""Checkpoints in shards as Hugging Face's loaders and writers have them."""

import json

import torch
from safetensors.torch import load_file, save_file

from ckptool.files.atomic import open_atomic_output


def write_set(folder, shards, *, index="model.safetensors.index.json", **changes):
    """Shards by file name, as their own libraries write them, and an index; `changes` are to it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        (save_file if file.endswith(".safetensors") else torch.save)(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    size = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    document = {"metadata": {"total_size": size}, "weight_map": weight_map, **changes}
    (folder / index).write_text(json.dumps(document, indent=2) + "\n")
    return folder / index


def write_plan(plan, path=None):
    """Put the files of a plan on the disk, one by one; `path` is that of a single one."""
    for file in plan.files:
        with open_atomic_output(file.path or path, file.size, overwrite=True) as output:
            file.write(output)


def loaded(index):
    """What a loader of Hugging Face's gets: every shard, by the library of its own, in one dict."""
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for file in dict.fromkeys(weight_map.values()):
        path = index.parent / file
        if file.endswith(".safetensors"):
            part = load_file(path)
        else:
            part = torch.load(path, weights_only=True)
        assert not part.keys() & found.keys()
        found.update(part)
    assert found.keys() == weight_map.keys()
    return found
