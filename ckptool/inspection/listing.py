"""What a checkpoint holds, name by name: the rows of `ckptool list`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

from ckptool._lazy import Result
from ckptool.errors import AmbiguousName, LimitExceeded, NotFound, without_query
from ckptool.files.source import Progress
from ckptool.formats import Source, opened
from ckptool.inspection.values import class_of, is_value, json_path, json_value, summarise
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import Opaque, Path, Storage, TensorRef
from ckptool.tree import name_of, selected, walk
from ckptool.words import printable

__all__ = [
    "Listing",
    "ObjectRow",
    "RepeatedBytes",
    "StorageNames",
    "TensorRow",
    "ValueRow",
    "list_tensors",
    "tensor_row",
]

JsonPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor. `stride` counts elements, `nbytes` what the elements take."""

    path: JsonPath
    name: str
    dtype: str
    shape: tuple[int | None, ...]
    stride: tuple[int, ...]
    device: str
    nbytes: int
    kind: str
    storage: str | None
    """An identifier that ties share; None where there is no storage in the file."""
    requires_grad: bool
    sha256: str | None = None
    """Of the elements, row-major and little-endian; None where not asked or not defined."""
    numel: int = 0
    tied: bool = False
    """Whether another name has the very same elements."""
    digest: str | None = None
    """Of what is more than elements (sparse, quantised, nested, a subclass's state), where asked;
    16 hexadecimal digits of a `Fingerprints`."""

    def to_dict(self, *, hashed: bool = False) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`; `sha256` is there when `hashed`."""
        row = {
            "path": self.path,
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "stride": self.stride,
            "device": self.device,
            "nbytes": self.nbytes,
            "kind": self.kind,
            "storage": self.storage,
            "requires_grad": self.requires_grad,
        }
        return {**row, "sha256": self.sha256} if hashed else row


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value, as JSON holds it."""

    path: JsonPath
    name: str
    type: str
    value: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`."""
        return {"path": self.path, "name": self.name, "type": self.type, "value": self.value}


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object that is neither a tensor nor a plain value."""

    path: JsonPath
    name: str
    class_name: str
    summary: str = ""
    """What it is in a few words, where that is more than its class."""
    digest: str | None = None
    """Of all that it is made of, where asked; the tensors that are listed left out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`."""
        return {"path": self.path, "name": self.name, "class": self.class_name}


@dataclass(frozen=True, slots=True, repr=False)
class Listing(Result):
    """What a checkpoint holds, a row each, in the order of the file; itself a list of its tensors.

    `listing[0]` and `listing["state_dict/fc.weight"]` are rows of tensors. `file` and `format` are
    those of the `Checkpoint`, `values` the plain ones, `objects` all else; `hashed`: with SHA-256.
    """

    file: str
    format: str
    tensors: tuple[TensorRow, ...]
    """Each with its `name`: the address, which a `TensorRef` has not, as ties have several."""
    values: tuple[ValueRow, ...]
    objects: tuple[ObjectRow, ...]
    hashed: bool = False
    quantisers: tuple[str, ...] = ()
    """The known quantisers of its weights."""

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorRow]:
        """Yield the rows of the tensors."""
        return iter(self.tensors)

    def __contains__(self, key: object) -> bool:
        """Return True if there is a tensor of that name, or that row."""
        return any(key in (row.name, row) for row in self.tensors)

    @overload
    def __getitem__(self, key: int | str) -> TensorRow: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[TensorRow, ...]: ...
    def __getitem__(self, key: int | str | slice) -> TensorRow | tuple[TensorRow, ...]:
        """Return a tensor by its position or its whole name.

        Raises:
            NotFound: no tensor has that name (`AmbiguousName`: several have it).
        """
        if not isinstance(key, str):
            return self.tensors[key]
        found = [row for row in self.tensors if row.name == key]
        if not found:
            raise NotFound(f"no tensor is named {printable(key)!r}", file=self.file)
        if len(found) > 1:
            raise AmbiguousName(f"several tensors are named {printable(key)!r}", file=self.file)
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.list/1`."""
        return {
            "schema": "ckptool.list/1",
            "file": self.file,
            "format": self.format,
            "tensors": [row.to_dict(hashed=self.hashed) for row in self.tensors],
            "values": [row.to_dict() for row in self.values],
            "objects": [row.to_dict() for row in self.objects],
        }


class StorageNames:
    """An identifier for each storage: its key, made unique where several files use one key."""

    def __init__(self) -> None:
        """Start empty."""
        self._names: dict[int, str] = {}
        self._used: dict[str, int] = {}

    def __call__(self, storage: Storage | None) -> str | None:
        """Return the identifier of `storage`, always the same one."""
        if storage is None:
            return None
        name = self._names.get(id(storage))
        if name is None:
            count = self._used[storage.key] = self._used.get(storage.key, 0) + 1
            name = storage.key if count == 1 else f"{storage.key}#{count}"
            self._names[id(storage)] = name
        return name


def list_tensors(
    source: Source,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    hash: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Listing:
    """List the tensors, values and objects of a checkpoint.

    Args:
        source: A path, or an open checkpoint.
        include: Globs of the rows to list; with a `/` of whole names, others of the last key.
        exclude: Globs of the rows to leave out.
        hash: Read every listed tensor and add the SHA-256 of its content.
        progress: Called with the bytes done and the bytes in all.
        limits: Bounds for nesting and for strides that repeat bytes.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened, or bytes cannot be read.
    """
    globs, unless = tuple(include), tuple(exclude)
    leaves: list[tuple[Path, TensorRef]] = []
    values: list[ValueRow] = []
    objects: list[tuple[Path, Any]] = []
    with opened(source) as checkpoint:
        if hash:  # which reads it all
            checkpoint = checkpoint.settled()
        for path, leaf in walk(checkpoint.root, limits):
            if (globs or unless) and not selected(path, globs, unless):
                continue
            if isinstance(leaf, TensorRef):
                leaves.append((path, leaf))
            else:
                _sort_leaf(path, leaf, values, objects)
        hashes = _Hashes(leaves, limits, progress) if hash else None
        return Listing(
            file=without_query(checkpoint.path),
            format=checkpoint.format,
            tensors=tuple(_tensor_rows(leaves, hashes)),
            values=tuple(values),
            objects=tuple(_object_row(path, leaf, hashes) for path, leaf in objects),
            hashed=hash,
            quantisers=tuple(
                dict.fromkeys(q for part in checkpoint.sections for q in part.quantisers)
            ),
        )


def _sort_leaf(
    path: Path, leaf: Any, values: list[ValueRow], objects: list[tuple[Path, Any]]
) -> None:
    kind, value = type(leaf).__name__, leaf
    if isinstance(leaf, Opaque) and leaf.plain is not None:
        kind, value = leaf.plain
    elif not is_value(leaf):
        objects.append((path, leaf))
        return
    values.append(ValueRow(json_path(path), name_of(path), kind, json_value(value)))


def _object_row(path: Path, leaf: Any, hashes: _Hashes | None) -> ObjectRow:
    name, words = class_of(leaf), summarise(leaf)
    said = "" if words in (name, f"{name} object") else words
    digest = hashes.more_of(path, leaf) if hashes else None
    return ObjectRow(json_path(path), name_of(path), name, said, digest)


def _tensor_rows(
    leaves: list[tuple[Path, TensorRef]], hashes: _Hashes | None
) -> Iterator[TensorRow]:
    names = StorageNames()
    uses: dict[Any, int] = {}
    keys = [tensor.place for _, tensor in leaves]
    for key in keys:
        uses[key] = uses.get(key, 0) + 1
    for (path, tensor), key in zip(leaves, keys, strict=True):
        sha256 = hashes.of(path, key, tensor) if hashes else None
        tied = key is not None and uses[key] > 1
        row = tensor_row(path, tensor, names, sha256=sha256, tied=tied)
        yield replace(row, digest=hashes.more_of(path, tensor)) if hashes else row


def _file_of(tensor: TensorRef) -> str | None:
    data = tensor.storage.data if tensor.storage is not None else None
    return None if data is None else data.source.name


def tensor_row(
    path: Path,
    tensor: TensorRef,
    names: StorageNames,
    *,
    sha256: str | None = None,
    tied: bool = False,
) -> TensorRow:
    """Return the row of one tensor."""
    return TensorRow(
        json_path(path),
        name_of(path),
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.device,
        tensor.nbytes,
        tensor.kind,
        names(tensor.storage),
        tensor.requires_grad,
        sha256,
        tensor.numel,
        tied,
    )


class _Hashes:
    """SHA-256 of tensors, each tie read once."""

    def __init__(
        self, leaves: list[tuple[Path, TensorRef]], limits: Limits, progress: Progress | None
    ) -> None:
        self._known: dict[Any, str] = {}
        self._repeated = RepeatedBytes(limits)
        self._progress = progress
        # Modules that take milliseconds, and of which a list without hashes has no use.
        from ckptool.inspection.equality import Fingerprints, is_made_of_parts

        self._is_made_of_parts = is_made_of_parts
        self._place: Path = ()
        self._listed = {id(tensor) for _, tensor in leaves if tensor.has_content}
        self._fingerprints = Fingerprints(self._of_part)
        self._done = 0
        self._total = sum(tensor.nbytes for _, tensor in leaves if tensor.has_content)

    def of(self, path: Path, key: Any, tensor: TensorRef) -> str | None:
        if not tensor.has_content:
            return None
        digest = self._known.get(key)
        if digest is None:
            self._repeated.add(path, tensor)
            digest = self._known[key] = self._read(tensor)
        else:
            self._advance(tensor.nbytes)
        return digest

    def more_of(self, path: Path, node: Any) -> str | None:
        """Return a digest of an object, or of a tensor that is more than its elements."""
        if isinstance(node, TensorRef) and not self._is_made_of_parts(node):
            return None
        self._place = path
        return self._fingerprints.of(node)

    def _of_part(self, tensor: TensorRef) -> str:
        if id(tensor) in self._listed:  # it has a hash of its own
            return ""
        self._repeated.add(self._place, tensor)
        return self._read(tensor, told=False)

    def _read(self, tensor: TensorRef, told: bool = True) -> str:
        import hashlib  # OpenSSL: a list without hashes has no use for it

        digest = hashlib.sha256()
        for block in tensor.content():
            digest.update(block)
            self._advance(len(block) if told else 0)
        return digest.hexdigest()

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class RepeatedBytes:
    """Bytes read again and again because strides repeat them: a few of them can say exabytes."""

    def __init__(self, limits: Limits) -> None:
        """Start empty."""
        self._most = limits.max_repeated_bytes
        self._sum = 0

    def add(self, path: Path, tensor: TensorRef) -> None:
        """Count a tensor that is about to be read.

        Raises:
            LimitExceeded: too much of what was read so far is repetition.
        """
        stored = tensor.storage.nbytes if tensor.storage is not None else 0
        self._sum += max(0, tensor.nbytes - stored)
        if self._sum > self._most:
            raise LimitExceeded(
                f"{name_of(path)!r} spreads {stored:,} stored bytes over {tensor.nbytes:,}: "
                f"reading it would exceed the limit of {self._most:,} repeated bytes",
                file=_file_of(tensor),
            )
