"""A checkpoint: the tree, its file, and the changes made so far."""

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
"""The format name of a tree of live objects."""
TORCH_REFUSES = "torch refuses this file because"
"""The start of a reader's note on why `torch.load` cannot open a file that ckptool can."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a transform made, for the user to read.

    `kind` is the word of the transform (`strip`, `add`, `remap`, ...), `text` a sentence without a
    full stop, and `count` the number of tensors or values. For kind `left-out`, `wanted` is True if
    the user asked to leave this out, which makes it no loss, and `needed` is True if the result is
    incomplete without it: no file is then written unless it is also `wanted`.
    """

    kind: str
    text: str
    count: int = 0
    wanted: bool = False
    needed: bool = False
    was: Any = None
    """The old fact that a configuration may state: rows of a resized tensor, dtype of cast ones."""
    now: Any = None
    """The new fact, for the configuration to state."""
    of_storages: bool = False
    """True if it applies only to formats with storages."""


Gather = Callable[[Any], "list[Any]"]
"""Gathers one object from each of the processes that write a file together."""
Report = Callable[[Gather], Iterable[Change]]
"""Returns the changes that are known only when every byte was computed, after a write."""


def gather_alone(value: Any) -> list[Any]:
    """Return the value of the only process, which has written the whole file."""
    return [value]


@dataclass(frozen=True, slots=True)
class Details:
    """Facts about a file other than its content."""

    size: int = 0
    """Bytes on disk, for all files of the checkpoint together."""
    writer: str = ""
    """The program that wrote it, judging by the layout, for example `torch 2.7 or newer`."""
    folder: str = ""
    """The folder inside a zip that contains all records, if its name is a plain one."""
    torch_version: str | None = None
    """The torch version, if the file states it."""
    byteorder: str = "little"
    """The byte order of the elements: `little` or `big`."""
    protocol: int | None = None
    """The pickle protocol, if the file has a pickle."""
    globals: tuple[str, ...] = ()
    """Every class and function that the pickle refers to, in order, in current spelling."""
    opcodes: tuple[str, ...] = ()
    """The pickle opcodes in use that `weights_only=True` always rejects."""
    tidy: bool = True
    """True if the memo is numbered consecutively and the stack ends empty, as picklers do."""
    framed: bool = True
    """True if all frames of the pickles are where a pickler puts them."""
    storage_bytes: int = 0
    """Bytes of all storages and tensor records in the file, used or not."""
    dead_bytes: int = 0
    """Bytes that nothing in the file refers to."""
    notes: tuple[str, ...] = ()
    """Notes for the user: compressed records, source text in the file, ..."""
    left_behind: tuple[str, ...] = ()
    """Notes on content outside the tree, which a rewrite does not keep."""
    unreferenced: tuple[str, ...] = ()
    """Notes on records that nothing refers to. `dead_bytes` counts them, and `compact` drops
    them."""
    header: Mapping[str, str] = field(default_factory=dict)
    """Text entries of the header that are not in the tree (`__metadata__` of safetensors)."""
    late: bool = False
    """True if the tree has values that are read on demand (`Opaque.find`)."""


_NOW_STEPS = {
    "cast": "Cast(...)",
    "compact": "Compact()",
    "drop_objects": "Plain(plain=False, drop_objects=True)",
    "extract": "Take(...)",
    "to_plain": "Plain()",
}
"""Removed methods, each with the step that replaces it."""


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint(Result):
    """The content of a file, read from its header. Tensors are read on first use.

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
    """Functions called after a write, for facts that only the computation shows."""
    original: Any = None
    """The tree as it was read."""

    @property
    def in_memory(self) -> bool:
        """True if the tree has live objects and was not read from a file."""
        return self.format == MEMORY

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the files that this checkpoint and its copies read tensors from."""
        for source in self.sources:
            source.close()

    def __getitem__(self, key: Any) -> Any:
        """Return the tensor, value or container with this path, key, or end of a path.

        For example `checkpoint["model/fc.weight"]` or `checkpoint["fc.weight"]`. Wrapper prefixes
        are ignored.

        Raises:
            NotFound: if no entry matches `key` (`AmbiguousName`: if several do).
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
        """Return True, even for a checkpoint without tensors."""
        return True

    def __contains__(self, name: object) -> bool:
        """Return True if `name` matches exactly one tensor."""
        return name in self.tensors

    def keys(self) -> KeysView[str]:
        """Return the paths of the tensors."""
        return self.tensors.keys()

    def items(self) -> ItemsView[str, TensorRef]:
        """Return the tensors with their paths."""
        return self.tensors.items()

    def get(self, name: Any, default: Any = None) -> Any:
        """Return the tensor that `name` matches, or `default`."""
        return self.tensors.get(name, default)

    def with_late_values(self) -> Checkpoint:
        """Return the checkpoint with the values that are in other files read.

        Raises:
            UnreadableFile: if one of these files cannot be read.
        """
        if not self.details.late:
            return self
        from ckptool.core.sections import restore_integer_keys
        from ckptool.core.tree import with_late_values

        root = restore_integer_keys(with_late_values(self.root))
        # Reading the values is not a change of the tree.
        original = root if self.original is self.root else self.original
        details = replace(self.details, late=False)
        return replace(self, root=root, original=original, details=details)

    @cached_property
    def tensors(self) -> TensorMap:
        """The `TensorRef` of every tensor by its path, in the order of the file.

        Index it with a path as printed by `ckptool list`, a key, or the end of a path, with or
        without wrapper prefixes. Calling it, `tensors()`, yields pairs of a path (a tuple of keys)
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
        """The same as `tensors`."""
        return self.tensors

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections: state dicts, optimizers, schedulers, modules, values."""
        from ckptool.core.sections import find_sections

        return find_sections(self.root)

    @property
    def devices(self) -> dict[str, int]:
        """The number of tensors per device tag, in order of first use."""
        return dict(Counter(tensor.device for _, tensor in self.tensors()))

    def state_dict(self, key: Any = None) -> OrderedDict[str, torch.Tensor]:
        """Return the tensors of the only state dict, or the model's, ready for `load_state_dict`.

        Wrapper prefixes are removed. The tensors are on the CPU, or where `to` or `remap` put them.

        Args:
            key: The path of the state dict, if there are several.

        Raises:
            NotFound: if there is no state dict (`AmbiguousName`: if there are several, no `key`).
        """
        from ckptool.loading.load import load_state_dict

        moved = any(change.kind == "remap" for change in self.changes)  # `to` is a remap, too
        map_location = None if moved else "cpu"  # None: as the checkpoint states
        return load_state_dict(self, map_location, key=key)

    def to(self, device: Any) -> Checkpoint:
        """Return a checkpoint with all tensors on one device, for example `"cpu"`."""
        return self.remap(str(device))

    def with_root(self, root: Any, *changes: Change) -> Checkpoint:
        """Return a copy with another tree; `changes` describe the difference."""
        return replace(self, root=root, changes=(*self.changes, *changes))

    def then(self, *steps: Step) -> Checkpoint:
        """Apply steps in order, such as `ckptool.Strip()`, and return the new checkpoint.

        Raises:
            CheckpointError: if a step fails; the checkpoint is unchanged.
        """
        from ckptool.transforms import run_steps

        return run_steps(self, steps)

    def strip_module(
        self,
        *,
        only: str | Sequence[str] | None = None,
        levels: int | None = None,
        at: str | None = None,
    ) -> Checkpoint:
        """Return a checkpoint without wrapper prefixes such as `module.` and `_orig_mod.`.

        Arguments and errors are the same as for `ckptool.strip_module`.
        """
        from ckptool.transforms import Strip

        return Strip(only, levels, at)(self)

    def add_module(
        self, *, wrapper: str = "module", at: str | None = None, key: Any = None
    ) -> Checkpoint:
        """Return a checkpoint whose keys start with `module.`, for a DataParallel model.

        Arguments and errors are the same as for `ckptool.add_module`.
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
        """Return a checkpoint with keys renamed by rules such as `^backbone=>encoder`.

        Arguments and errors are the same as for `ckptool.rename`.
        """
        from ckptool.transforms import Rename

        return Rename(rules, prefixes, key)(self)

    def remap(self, rules: str | Mapping[str, str]) -> Checkpoint:
        """Return a checkpoint with tensors on other devices, for example `{"cuda:*": "cpu"}`.

        Raises:
            DeviceError: if a rule has an invalid device, or a tensor cannot be moved.
        """
        from ckptool.transforms import make_remap

        return make_remap(rules)(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the step which replaced a removed method."""
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
        """Write the checkpoint to `path`, completely or not at all.

        Args:
            path: The file to write.
            format: The format (`torch-zip`, `safetensors`, ...). Default: by the extension.
            overwrite: Replace an existing file other than the source.
            in_place: Allow `path` to be the source, and edit it if its format allows that.
            rewrite: With `in_place`, write a new file even if an edit is possible.
            strict: Raise an error rather than leave out anything that was not asked for.
            dry_run: Return the receipt without writing anything.
            max_shard_size: Split into files of at most this size: `"5GB"`, or a number of bytes.
            verify: Read the result back and compare it. None: only if tensors are computed.
            progress: Called with the bytes done so far and the total bytes.

        Raises:
            NotRepresentable: if the format cannot store a tensor (with `strict`: or anything else).
            TargetExists: if the target exists, or is the source.
            NoSpace: if the disk is full.
            WriteDenied: if the system denies writing there.
            UnreadableFile: if the source changed during the read (`TruncatedFile`: if it shrank).
            WriteError: if the verification found a difference.
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
