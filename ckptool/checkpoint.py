"""A checkpoint: the tree, the file it stands for, and what has been done to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptool.files import FileSource
from ckptool.model import Path, TensorRef

if TYPE_CHECKING:
    from ckptool.statedict import Section
    from ckptool.writing import Receipt

__all__ = ["TORCH_REFUSES", "Change", "Checkpoint", "Details", "Report"]

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


Report = Callable[[], Iterable[Change]]
"""What is known of a transform only when every byte has been computed: asked after a write."""


@dataclass(frozen=True, slots=True)
class Details:
    """What a reader learned about the file beside its content."""

    size: int = 0
    """Bytes on disk, all files of the checkpoint together."""
    writer: str = ""
    """Who wrote it, as far as the layout tells: `torch 2.7 or newer`."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a file holds, over its header alone. A transform returns a new one, same storages.

    Close it, or use it as a context manager: its tensors read from the open file.
    """

    root: Any
    """The tree: dicts, lists and tuples, plain values, `TensorRef` and `Opaque`."""
    format: str
    """As `convert` takes it: `torch-zip`, `torch-legacy`, `safetensors`, ..."""
    path: str
    """As it was given."""
    details: Details = field(default_factory=Details)
    """What the file is beside its content: sizes, writer, notes."""
    changes: tuple[Change, ...] = ()
    """What transforms did since it was read, in order."""
    sources: tuple[FileSource, ...] = ()
    """The open files that the tensors read from."""
    reports: tuple[Report, ...] = ()
    """Called when it has been written: what only the computation tells."""
    original: Any = None
    """The tree as it was read."""

    def __enter__(self) -> Checkpoint:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file behind every tensor of this checkpoint and of those made from it."""
        for source in self.sources:
            source.close()

    def __getitem__(self, key: Any) -> Any:
        """The node under a key of the root, else under an address (`paths.resolve`).

        Raises:
            NotFound: nothing, or several things (`AmbiguousName`), answer to it.
        """
        from ckptool.paths import resolve

        if isinstance(self.root, Mapping) and key in self.root:
            return self.root[key]
        return resolve(self, key)[1]

    def __iter__(self) -> Iterator[Any]:
        """The keys of the root."""
        return iter(self.root if isinstance(self.root, Mapping) else ())

    def tensors(self) -> Iterator[tuple[Path, TensorRef]]:
        """Every listed tensor with its path, in the order of the file."""
        from ckptool.paths import walk

        return ((path, leaf) for path, leaf in walk(self.root) if isinstance(leaf, TensorRef))

    @property
    def sections(self) -> tuple[Section, ...]:
        """The named parts: state dicts, optimizers, schedulers, modules, and the values beside."""
        from ckptool.statedict import sections

        return sections(self.root)

    @property
    def devices(self) -> dict[str, int]:
        """How many tensors each device tag has, in order of first use."""
        counts: dict[str, int] = {}
        for _, tensor in self.tensors():
            counts[tensor.device] = counts.get(tensor.device, 0) + 1
        return counts

    def with_root(self, root: Any, *changes: Change) -> Checkpoint:
        """The same file with another tree, and what made the difference."""
        return replace(self, root=root, changes=(*self.changes, *changes))

    def strip_module(self, **options: Any) -> Checkpoint:
        """Wrapper components taken off every name; options as `transforms.strip_module`."""
        from ckptool.transforms import strip_module

        return strip_module(self, **options)

    def add_module(self, **options: Any) -> Checkpoint:
        """`module.` put before every name; options as `transforms.add_module`."""
        from ckptool.transforms import add_module

        return add_module(self, **options)

    def rename(self, rules: Iterable[Any] = (), **options: Any) -> Checkpoint:
        """Every name rewritten by `rules`; rules and options as `transforms.rename`."""
        from ckptool.transforms import rename

        return rename(self, rules, **options)

    def extract(self, **options: Any) -> Checkpoint:
        """A part of it; options as `transforms.extract`."""
        from ckptool.transforms import extract

        return extract(self, **options)

    def remap(self, rules: Mapping[str, str]) -> Checkpoint:
        """Every device tag rewritten by `rules` (`transforms.remap`)."""
        from ckptool.transforms import remap

        return remap(self, rules)

    def compact(self) -> Checkpoint:
        """Storages cut down to what tensors see of them (`transforms.compact`)."""
        from ckptool.transforms import compact

        return compact(self)

    def to_plain(self, *, drop: bool = False) -> Checkpoint:
        """Objects turned into plain data (`transforms.to_plain`)."""
        from ckptool.transforms import to_plain

        return to_plain(self, drop=drop)

    def drop_objects(self) -> Checkpoint:
        """Objects left out (`transforms.drop_objects`)."""
        from ckptool.transforms import drop_objects

        return drop_objects(self)

    def cast(self, dtype: Any = None, **options: Any) -> Checkpoint:
        """Floating tensors in another element type; options as `transforms.cast`."""
        from ckptool.transforms import cast

        return cast(self, dtype, **options)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Receipt:
        """Write it to `path`; options as `writing.save`."""
        from ckptool.writing import save

        return save(self, path, **options)
