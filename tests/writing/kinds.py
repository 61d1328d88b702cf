"""Every kind of write, each on its own files: what is there before, what is run, what is right.

The tensors are larger than what is gathered with its neighbors, so that the kernel copies them.
"""

import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from multiprocessing import get_context

from ckptool import transforms
from ckptool.errors import CheckpointWarning, FileMissing
from ckptool.files import recovery
from ckptool.files.editing import Edit
from ckptool.files.journal import write_journal
from ckptool.formats import load_format, open_checkpoint
from ckptool.writing import save
from tests.files.faults import Crash, crashes

SHARDED = "model.safetensors.index.json"
BIN = "model.bin.index.json"
MATERIALS: dict[str, bytes] = {}
"""The files that there are before, by name."""


def tensors(seed=0):
    """A state dict of two large tensors and two small ones."""
    import torch

    chance = torch.Generator().manual_seed(seed)
    return OrderedDict([
        ("module.conv.weight", torch.randn(120, 150, generator=chance)),
        ("module.fc.weight", torch.randn(100, 200, generator=chance)),
        ("module.fc.bias", torch.randn(100, generator=chance)),
        ("module.steps", torch.tensor(7)),
    ])  # fmt: skip


def materials():
    """What the library that a file is for makes of these tensors."""
    import torch
    from safetensors.torch import save as safetensors_bytes

    def torch_bytes(value, **options):
        buffer = BytesIO()
        torch.save(value, buffer, **options)
        return buffer.getvalue()

    whole = {"epoch": 7, "state_dict": tensors()}
    return {
        "zip": torch_bytes(whole),
        "legacy": torch_bytes(whole, _use_new_zipfile_serialization=False),
        "safetensors": safetensors_bytes(dict(tensors()), {"format": "pt"}),
        "flat": torch_bytes(tensors()),
        "other": torch_bytes(tensors(1)),
        "old": torch_bytes({"w": torch.arange(300.0)}),
    }


def provide(made):
    """Let the kinds have their files."""
    MATERIALS.update(made)


@contextmanager
def apart():
    """A process beside this one that calls functions; without torch, it forks in no time."""
    with ProcessPoolExecutor(
        1, get_context("spawn"), initializer=provide, initargs=(materials(),)
    ) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def write(source, target, *changes, **options):
    """What a verb does, in a folder."""

    def act(folder):
        with open_checkpoint(folder / source) as checkpoint:
            for change in changes:
                checkpoint = change(checkpoint)
            save(checkpoint, folder / target, **options)

    return act


def averaged(folder):
    with (
        open_checkpoint(folder / "model.pth") as first,
        open_checkpoint(folder / "other.pth") as second,
    ):
        save(transforms.average([first, second]), folder / "out.pth")


def recovered(folder):
    recovery.recover(folder / "model.pth")


def stripped(name):
    return name.removeprefix("module.")


def doubled(name):
    return f"module.{name}"


def renamed(name):
    return name.replace("conv", "stem")


def same(value):
    return value


def mean(one, other):
    return ((one.double() + other.double()) / 2).to(one.dtype)


def halved(tensor):
    import torch

    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


strip, add = transforms.Strip(), transforms.Wrap()
rename = transforms.Rename(["conv=>stem"])
remap = transforms.Remap(map={"*": "cuda:1"})
cast = transforms.Cast("bfloat16")


@dataclass(frozen=True)
class Kind:
    """A kind of write, and what it makes of the files in its folder."""

    acts: tuple[Callable, ...]
    """What is run, one after the other; the files between two of them are right too."""
    before: tuple[tuple[str, str], ...] = (("model.pth", "zip"),)
    """The files that are there, each with its material."""
    target: str = "out.pth"
    names: Callable = stripped
    """The new name of a tensor, by the old one."""
    values: Callable = same
    """The new tensor, by the old one."""
    edits: bool = False
    """Whether the file itself is changed where it lies: opening it leaves nothing beside it."""
    computed: bool = False
    """Whether torch computes the bytes."""
    first: Callable | None = None
    """What has been done with the files before."""
    links: tuple[tuple[str, str], ...] = field(default=())
    """Links that are there, each with what it leads to."""

    def lay(self, folder):
        """Put the files into the folder, and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, made_of in self.before:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(MATERIALS[made_of])
        for name, leads_to in self.links:
            (folder / name).symlink_to(leads_to)
        if self.first:
            self.first(folder)

    def run(self, folder):
        """All of it."""
        with quietly():
            for act in self.acts:
                act(folder)

    def open(self, folder):
        """Open the target, as a user does next."""
        with quietly():
            try:
                open_checkpoint(folder / self.target).close()
            except FileMissing:
                assert not os.path.exists(folder / self.target)

    def states(self, folder):
        """What may lie in the folder once the target has been opened: the old, ..., the new."""
        self.lay(folder)
        self.open(folder)
        found = [visible(folder)]
        for act in self.acts:
            with quietly():
                act(folder)
            assert not debris(folder)
            if visible(folder) not in found:
                found.append(visible(folder))
        return found

    def write_again(self, folder):
        """The next write to the same target."""
        changes = (transforms.extract_state_dict,) if self.target.endswith(".json") else ()
        sized = {"max_shard_size": 100_000} if changes else {}
        kept = folder.parent / "kept" / "model.pth"
        if not kept.exists():
            kept.parent.mkdir()
            kept.write_bytes(MATERIALS["old"])
        write(kept, self.target, *changes, overwrite=True, **sized)(folder)


@contextmanager
def quietly():
    """Whatever is said about an earlier write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        yield


def visible(folder):
    """The files below a folder with their bytes, links with what they lead to; none of ours."""
    return {
        path.relative_to(folder).as_posix(): (
            os.readlink(path) if path.is_symlink() else path.read_bytes()
        )
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or path.is_file()) and ".ckptool-" not in path.name
    }


def debris(folder):
    """Our own files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if ".ckptool-" in path.name)


def cut_short(folder):
    """Leave the file as a kill in the middle of stripping it in place does."""
    path = os.path.join(folder, "model.pth")
    with open_checkpoint(path) as checkpoint:
        patch = load_format(checkpoint.format).plan_edit(strip(checkpoint)).patch
    with open(path, "r+b") as file:
        write_journal(path, Edit.from_patch(file.fileno(), patch).to_journal())
        os.pwrite(file.fileno(), patch.data[: len(patch.data) // 2], patch.offset)


def shards(size, source="model.pth", target=SHARDED, *changes, **options):
    return write(
        source, target, transforms.extract_state_dict, *changes, max_shard_size=size, **options
    )


MODEL, LEGACY = (("model.pth", "zip"),), (("model.pth", "legacy"),)
FLAT = (("model.safetensors", "safetensors"),)
EDITED = {"before": MODEL, "target": "model.pth", "edits": True}
HEADER = {"before": FLAT, "target": "model.safetensors"}
OLD_TARGET = (*MODEL, ("out.pth", "old"))

COMPUTED = {"names": same, "values": halved, "computed": True}

KINDS = {
    # a new file, of each format
    "new-zip": Kind((write("model.pth", "out.pth", strip),)),
    "new-legacy": Kind((write("model.pth", "out.pth", strip, format="torch-legacy"),)),
    "new-safetensors": Kind(
        (write("model.pth", "out.safetensors", strip),), target="out.safetensors"
    ),
    "new-from-legacy": Kind((write("model.pth", "out.pth", strip),), before=LEGACY),
    "new-from-safetensors": Kind(
        (write("model.safetensors", "out.pth", strip, format="torch-zip"),), before=FLAT
    ),
    "new-folder": Kind(
        (write("model.pth", "new/folder/out.pth", strip),), target="new/folder/out.pth"
    ),
    # another file that it takes the place of
    "replaced-zip": Kind(
        (write("model.pth", "out.pth", strip, overwrite=True),), before=OLD_TARGET
    ),
    "replaced-legacy": Kind(
        (write("model.pth", "out.pth", strip, overwrite=True, format="torch-legacy"),),
        before=OLD_TARGET,
    ),
    "replaced-safetensors": Kind(
        (write("model.pth", "out.pth", strip, overwrite=True, format="safetensors"),),
        before=OLD_TARGET,
    ),
    "replaced-through-a-link": Kind(
        (write("model.pth", "link.pth", strip, overwrite=True),),
        before=(*MODEL, ("real/out.pth", "old")),
        target="link.pth",
        links=(("link.pth", "real/out.pth"),),
    ),
    "replaced-after-an-edit-cut-short": Kind(
        (write("other.pth", "model.pth", strip, overwrite=True),),
        before=(*MODEL, ("other.pth", "flat")),
        target="model.pth",
        first=cut_short,
    ),
    # the file itself, where it lies
    "edit-strip": Kind((write("model.pth", "model.pth", strip, in_place=True),), **EDITED),
    "edit-verified": Kind(
        (write("model.pth", "model.pth", strip, in_place=True, verify=True),), **EDITED
    ),
    "edit-header": Kind(
        (write("model.safetensors", "model.safetensors", strip, in_place=True),),
        edits=True,
        **HEADER,
    ),
    "edit-through-a-link": Kind(
        (write("link.pth", "link.pth", strip, in_place=True, overwrite=True),),
        before=(("real/model.pth", "zip"),),
        target="link.pth",
        links=(("link.pth", "real/model.pth"),),
        edits=True,
    ),
    "two-edits": Kind(
        (
            write("model.pth", "model.pth", strip, in_place=True),
            write("model.pth", "model.pth", rename, in_place=True),
        ),
        names=lambda name: renamed(stripped(name)),
        **EDITED,
    ),
    "two-headers": Kind(
        (
            write("model.safetensors", "model.safetensors", strip, in_place=True),
            write("model.safetensors", "model.safetensors", rename, in_place=True),
        ),
        names=lambda name: renamed(stripped(name)),
        edits=True,
        **HEADER,
    ),
    "recover": Kind((recovered,), names=same, **EDITED | {"first": cut_short}),
    # the file itself, written anew
    "rewrite-compact": Kind(
        (write("model.pth", "model.pth", transforms.Compact(), in_place=True, rewrite=True),),
        target="model.pth",
        first=write("model.pth", "model.pth", strip, in_place=True),
    ),
    "rewrite-legacy": Kind(
        (write("model.pth", "model.pth", strip, in_place=True),), before=LEGACY, target="model.pth"
    ),
    "rewrite-header": Kind(
        (write("model.safetensors", "model.safetensors", add, in_place=True),),
        names=doubled,
        **HEADER,
    ),
    # computed bytes
    "cast": Kind((write("model.pth", "out.pth", cast),), **COMPUTED),
    "cast-in-place": Kind(
        (write("model.pth", "model.pth", cast, in_place=True),),
        **COMPUTED | {"target": "model.pth"},
    ),
    "average": Kind(
        (averaged,),
        before=(("model.pth", "flat"), ("other.pth", "other")),
        **COMPUTED | {"values": mean},
    ),
    # several files
    "shards-new": Kind((shards(100_000, "model.pth", SHARDED, strip),), target=SHARDED),
    "shards-bin": Kind((shards(100_000, "model.pth", BIN, strip),), target=BIN),
    "shards-replaced": Kind(
        (shards(100_000, "model.pth", SHARDED, strip, overwrite=True),),
        target=SHARDED,
        first=shards(100_000),
    ),
    "shards-in-place": Kind(
        (shards(100_000, SHARDED, SHARDED, rename, in_place=True),),
        target=SHARDED,
        names=renamed,
        first=shards(100_000),
    ),
    "merged": Kind(
        (write(SHARDED, "out.safetensors", strip),),
        target="out.safetensors",
        first=shards(100_000),
    ),
    "merged-replaced": Kind(
        (write(SHARDED, "out.pth", strip, overwrite=True, format="torch-zip"),),
        before=OLD_TARGET,
        first=shards(100_000),
    ),
}


@dataclass(frozen=True)
class End:
    """What lay there after a crash."""

    crash: Crash
    state: int | None
    """Which of the right states, counted from the old one; None: it was none of them."""
    left: list[str]
    """What lay beside it after the next write, or after it was opened where that is enough."""


def ends(name, folder, losses):
    """Each crash of that kind, and the number of right states."""
    kind = KINDS[name]
    states, found = kind.states(folder), []
    for crash in crashes(partial(kind.run, folder), partial(kind.lay, folder), losses):
        kind.open(folder)
        there = visible(folder)
        if not kind.edits:
            kind.write_again(folder)
        state = states.index(there) if there in states else None
        found.append(End(crash, state, debris(folder)))
    return found, len(states)
