"""A checkpoint: the tree, the file it stands for, and what has been done to it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.core.model import Path, TensorRef
from ckptool.files import Source

if TYPE_CHECKING:
    from collections import OrderedDict

    import torch

    from ckptool.core.addressing import TensorMap
    from ckptool.core.sections import Section
    from ckptool.transforms.name_rules import Rule
    from ckptool.transforms.step import Step
    from ckptool.writing import Receipt

MEMORY = "memory"
"""What stands for the format of a tree of live objects."""
TORCH_REFUSES = "torch refuses this file because"
"""How a note of a reader begins that says why `torch.load` does not open what ckptool does."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a transform did, for the user to read.

    `kind` is the transform's word (`strip`, `add`, `remap`, ...), `text` one sentence without a
    full stop, `count` how many tensors (or values) it concerns, `wanted` whether the user asked for
    what is left out (kind `left-out`): then it is no loss. `needed`: it has tensors without which
    what was asked for is not whole, and no file is written without them unless they are `wanted`
    out.
    """

    kind: str
    text: str
    count: int = 0
    wanted: bool = False
    needed: bool = False
    was: Any = None
    """What a configuration may state of it: the rows of a resized tensor, the type of cast ones,"""
    now: Any = None
    """and what it is to state now."""
    of_storages: bool = False
    """True if it says something only of a format that has storages."""


Gather = Callable[[Any], "list[Any]"]
"""What each of the processes gives that write a file together."""
Report = Callable[[Gather], Iterable[Change]]
"""What is known of a transform only when every byte has been computed: asked after a write."""


def alone(own: Any) -> list[Any]:
    """Return what the one process gives that has written all of it."""
    return [own]


@dataclass(frozen=True, slots=True)
class Details:
    """What a reader learned about the file beside its content."""

    size: int = 0
    """Bytes on disk, all files of the checkpoint together."""
    writer: str = ""
    """Who wrote it, as far as the layout tells: `torch 2.7 or newer`."""
    folder: str = ""
    """Of a zip: the folder in which all of its records stand, if its name is a plain one."""
    torch_version: str | None = None
    """The version, where the file states it."""
    byteorder: str = "little"
    """Of the elements in the file: `little` or `big`."""
    protocol: int | None = None
    """Pickle protocol of the object, where there is a pickle."""
    globals: tuple[str, ...] = ()
    """Every class and function that the pickle names, today's spelling, in order."""
    opcodes: tuple[str, ...] = ()
    """Pickle opcodes used that `weights_only=True` refuses whatever their effect."""
    tidy: bool = True
    """Whether the pickle numbers its memo in a row and leaves nothing on its stack, as all do."""
    framed: bool = True
    """Whether the frames of the file's pickles, if they have any, are where a pickler puts them."""
    storage_bytes: int = 0
    """Bytes of all storages and tensor records in the file, reachable or not."""
    dead_bytes: int = 0
    """Bytes that nothing in the file refers to."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user: compressed records, source text left behind, ..."""
    left_behind: tuple[str, ...] = ()
    """Sentences on what the file holds beside the tree, which no rewrite carries over."""
    unreferenced: tuple[str, ...] = ()
    """Sentences on records that nothing refers to: `dead_bytes` counts them, `compact` is meant to
    drop them."""
    header: Mapping[str, str] = field(default_factory=dict)
    """Free text of the file's header (safetensors' `__metadata__`) that the tree does not hold."""
    late: bool = False
    """Whether the tree holds values that are read when they are asked for (`Opaque.find`)."""


_NOW_STEPS = {
    "cast": "Cast(...)",
    "compact": "Compact()",
    "drop_objects": "Plain(plain=False, drop_objects=True)",
    "extract": "Take(...)",
    "to_plain": "Plain()",
}
"""Methods of before, each with the step in its place."""


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint(Result):
    """The content of a file, read from its header; tensors are read when they are used.

    Close the checkpoint, or use it as a context manager. Its methods return a new checkpoint over
    the same open file.
    """

    root: Any
    """The tree: dicts, lists and tuples, plain values, `TensorRef` and `Opaque`."""
    format: str
    """The name of the format: `torch-zip`, `torch-legacy`, `safetensors`, ..."""
    path: str
    """The path as it was given."""
    details: Details = field(default_factory=Details)
    """Facts about the file: sizes, writer, notes."""
    changes: tuple[Change, ...] = ()
    """The changes since the file was read, in order."""
    sources: tuple[Source, ...] = ()
    """The open files that the tensors read from."""
    reports: tuple[Report, ...] = ()
    """Called when it has been written: what only the computation tells."""
    original: Any = None
    """The tree as it was read."""

    @property
    def in_memory(self) -> bool:
        """Whether it is a tree of live objects that was read from no file."""
        return self.format == MEMORY

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the files that the tensors of this checkpoint, and of its copies, read from."""
        for source in self.sources:
            source.close()

    def __getitem__(self, key: Any) -> Any:
        """Return a tensor, value or container: by its path, its key, or the end of its path.

        `checkpoint["model/fc.weight"]` or `checkpoint["fc.weight"]`; wrapper prefixes are ignored.

        Raises:
            NotFound: there is nothing at `key` (`AmbiguousName`: there are several nodes).
        """
        from ckptool.core.addressing import resolve

        if isinstance(self.root, Mapping) and key in self.root:
            return self.root[key]
        return resolve(self, key)[1]

    def __iter__(self) -> Iterator[str]:
        """Yield the paths of the tensors."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)

    def __bool__(self) -> bool:
        """Return True: a checkpoint without tensors is one, too."""
        return True

    def __contains__(self, name: object) -> bool:
        """Return True if `name` means one tensor."""
        return name in self.tensors

    def keys(self) -> KeysView[str]:
        """Return the paths of the tensors."""
        return self.tensors.keys()

    def items(self) -> ItemsView[str, TensorRef]:
        """Return the tensors with their paths."""
        return self.tensors.items()

    def get(self, name: Any, default: Any = None) -> Any:
        """Return the tensor that `name` means, or `default`."""
        return self.tensors.get(name, default)

    def with_late_values(self) -> Checkpoint:
        """Return the checkpoint with all its values read, as far as they lie in other files.

        Raises:
            UnreadableFile: one cannot be read.
        """
        if not self.details.late:
            return self
        from ckptool.core.sections import with_numbers
        from ckptool.core.tree import with_late_values

        root = with_numbers(with_late_values(self.root))
        original = root if self.original is self.root else self.original
        details = replace(self.details, late=False)
        return replace(self, root=root, original=original, details=details)

    @cached_property
    def tensors(self) -> TensorMap:
        """The `TensorRef` of every tensor by its path, in the order of the file.

        A name may be a path that `ckptool list` prints, a key, or the end of a path, with or
        without wrapper prefixes. A call, `tensors()`, yields pairs of a path, as a tuple of keys,
        and a tensor.
        """
        from ckptool.core.addressing import TensorMap

        return TensorMap(self.leaves, self.path)

    @cached_property
    def leaves(self) -> tuple[tuple[Path, Any], ...]:
        """The path and the node of every tensor, value and object, in the order of the file."""
        from ckptool.core.tree import walk

        return tuple(walk(self.root))

    @cached_property
    def by_name(self) -> Mapping[str, TensorRef]:
        """The tensors by their names; the same as `tensors`."""
        return self.tensors

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of the checkpoint: state dicts, optimizers, schedulers, modules, values."""
        from ckptool.core.sections import sections

        return sections(self.root)

    @property
    def devices(self) -> dict[str, int]:
        """The number of tensors of each device tag, in order of first use."""
        return dict(Counter(tensor.device for _, tensor in self.tensors()))

    def state_dict(self, key: Any = None) -> OrderedDict[str, torch.Tensor]:
        """Return the tensors of the only or main state dict, ready for `load_state_dict`.

        Wrapper prefixes are removed. The tensors are on the CPU, or where `to` or `remap` put them.

        Args:
            key: The path of the state dict, if there are several.

        Raises:
            NotFound: there is no state dict (`AmbiguousName`: there are several, and no `key`).
        """
        from ckptool.loading.load import load_state_dict

        moved = any(change.kind == "remap" for change in self.changes)
        return load_state_dict(self, None if moved else "cpu", key=key)

    def to(self, device: Any) -> Checkpoint:
        """Return a checkpoint with all tensors on one device, such as `"cpu"`."""
        return self.remap(str(device))

    def with_root(self, root: Any, *changes: Change) -> Checkpoint:
        """Return a copy with another tree; `changes` say what is different."""
        return replace(self, root=root, changes=(*self.changes, *changes))

    def then(self, *steps: Step) -> Checkpoint:
        """Return the checkpoint after some steps, such as `ckptool.Strip()`, in this order.

        Raises:
            CheckpointError: a step cannot be done; the checkpoint is as it was.
        """
        from ckptool.transforms import changed

        return changed(self, steps)

    def strip_module(
        self,
        *,
        only: str | Sequence[str] | None = None,
        levels: int | None = None,
        at: str | None = None,
    ) -> Checkpoint:
        """Return a checkpoint without wrapper prefixes such as `module.` and `_orig_mod.`.

        Arguments and errors are those of `ckptool.strip_module`.
        """
        from ckptool.transforms import Strip

        return Strip(only, levels, at)(self)

    def add_module(
        self, *, wrapper: str = "module", at: str | None = None, key: Any = None
    ) -> Checkpoint:
        """Return a checkpoint whose keys start with `module.`, for a DataParallel model.

        Arguments and errors are those of `ckptool.add_module`.
        """
        from ckptool.transforms import Wrap

        return Wrap(wrapper, at, key)(self)

    def rename(
        self,
        rules: Iterable[str | Rule] = (),
        *,
        prefixes: Iterable[str] = (),
        key: Any = None,
    ) -> Checkpoint:
        """Return a checkpoint with keys renamed by rules such as `^backbone=>encoder`, in order.

        Arguments and errors are those of `ckptool.rename`.
        """
        from ckptool.transforms import Rename

        return Rename(rules, prefixes, key)(self)

    def remap(self, rules: str | Mapping[str, str]) -> Checkpoint:
        """Return a checkpoint on other devices: on one, or by rules such as `{"cuda:*": "cpu"}`.

        Raises:
            DeviceError: a word is not a device, or a tensor cannot be moved.
        """
        from ckptool.transforms import remapping

        return remapping(rules)(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Name the step that took the place of a method."""
            step = _NOW_STEPS.get(name)
            hint = f": it is checkpoint.then(ckptool.{step})" if step else ""
            raise AttributeError(f"Checkpoint has no attribute {name!r}{hint}", name=name, obj=self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        overwrite: bool = False,
        in_place: bool = False,
        rewrite: bool = False,
        strict: bool = False,
        dry_run: bool = False,
        max_shard_size: int | str | None = None,
        verify: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Receipt:
        """Write the checkpoint to `path`, as a whole or not at all.

        Args:
            path: The file to write.
            format: The format (`torch-zip`, `safetensors`, ...); default: by the extension.
            overwrite: Replace another file that exists.
            in_place: Allow `path` to be the source, which is edited if its format allows it.
            rewrite: With `in_place`, write a new file even if an edit would do.
            strict: Refuse to leave out anything that the user did not ask to leave out.
            dry_run: Plan only.
            max_shard_size: Split into files of at most this size: `"5GB"`, or bytes.
            verify: Read the result back and compare it. None: only if tensors are computed.
            progress: Called with the bytes done and the bytes in all.

        Raises:
            NotRepresentable: the format cannot hold a tensor (with `strict`: anything else).
            TargetExists: the target exists, or is the source.
            NoSpace: the disk is full.
            WriteDenied: the system refuses to write there.
            UnreadableFile: the source changed while it was read (`TruncatedFile`: got shorter).
            WriteError: the verification found a difference.
        """
        from ckptool.writing import save

        return save(
            self,
            path,
            format=format,
            overwrite=overwrite,
            in_place=in_place,
            rewrite=rewrite,
            strict=strict,
            dry_run=dry_run,
            max_shard_size=max_shard_size,
            verify=verify,
            progress=progress,
        )
