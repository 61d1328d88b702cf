"""What is killed: commands on files of 20 MB, and what lies there before."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from ckptool.formats import open_checkpoint

TENSORS, ELEMENTS = 1000, 5000
INDEX = "out.safetensors.index.json"
SHARDS = tuple(f"out-{n:05}-of-00004.safetensors" for n in range(1, 5))
SIZE = 5_200_000
"""Bytes of tensors in a shard."""


@dataclass(frozen=True)
class Work:
    """A command, and the files that it works on."""

    arguments: tuple[str, ...]
    target: str
    """What is opened afterwards."""
    before: tuple[tuple[str, str], ...] = (("model.pth", "model.pth"),)
    """The files that are there, each with the source that it is a copy of."""
    cut_short: bool = False
    """Whether an edit of the target has been cut short before."""


OLD_SHARDS = tuple((name, name) for name in (*SHARDS, INDEX))

WORKS = {
    "in place, torch zip": Work(("strip-module", "--in-place", "model.pth"), "model.pth"),
    "in place, safetensors": Work(
        ("strip-module", "--in-place", "model.safetensors"),
        "model.safetensors",
        (("model.safetensors", "model.safetensors"),),
    ),
    "in place, rewritten": Work(
        ("strip-module", "--in-place", "legacy.pth"), "legacy.pth", (("legacy.pth", "legacy.pth"),)
    ),
    "new file": Work(("strip-module", "model.pth", "-o", "out.pth"), "out.pth"),
    "replaced file": Work(
        ("strip-module", "model.pth", "-o", "out.pth", "--force"),
        "out.pth",
        (("model.pth", "model.pth"), ("out.pth", "old.pth")),
    ),
    "new shards": Work(("convert", "model.pth", INDEX, "--max-shard-size", str(SIZE)), INDEX),
    "replaced shards": Work(
        ("convert", "model.pth", INDEX, "--max-shard-size", str(SIZE), "--force"),
        INDEX,
        (("model.pth", "model.pth"), *OLD_SHARDS),
    ),
    "merged shards": Work(("convert", INDEX, "out.safetensors"), "out.safetensors", OLD_SHARDS),
    "cast": Work(("cast", "model.pth", "--dtype", "bfloat16", "-o", "out.pth"), "out.pth"),
    "average": Work(
        ("average", "model.pth", "legacy.pth", "-o", "out.pth"),
        "out.pth",
        (("model.pth", "model.pth"), ("legacy.pth", "legacy.pth")),
    ),
    "recover": Work(("recover", "model.pth"), "model.pth", cut_short=True),
}

MIXED = "two at once"
"""Commands on one file, two of which run at a time."""
MIXTURE = (
    ("strip-module", "--in-place", "model.pth"),
    ("add-module", "--in-place", "model.pth"),
    ("compact", "--in-place", "model.pth"),
    ("list", "--hash", "--json", "model.pth"),
)


def make_sources(folder):
    """The files that the works begin with: 1,000 tensors, in four formats."""
    chance = torch.Generator().manual_seed(0)
    state = OrderedDict(
        (f"module.layer{n}.weight", torch.randn(ELEMENTS, generator=chance)) for n in range(TENSORS)
    )
    torch.save({"epoch": 7, "state_dict": state}, folder / "model.pth")
    torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(dict(state), folder / "model.safetensors", {"format": "pt"})
    torch.save({"w": torch.randn(4_000_000, generator=chance)}, folder / "old.pth")
    with open_checkpoint(folder / "model.pth") as checkpoint:
        checkpoint.save(folder / INDEX, max_shard_size=SIZE)
