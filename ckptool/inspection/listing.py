"""The entries of a checkpoint: the rows of `ckptool list`, and their tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from ckptool._lazy import Result
from ckptool.core.addressing import NameIndex, select
from ckptool.core.model import Path, TensorRef
from ckptool.core.names import group_families
from ckptool.core.reading import Meter, hash_contents
from ckptool.core.tree import drop_ties, name_of, walk
from ckptool.core.values import (
    class_name_of,
    summarize,
    to_document,
    to_json_path,
    to_json_value,
    to_plain_value,
)
from ckptool.errors import AmbiguousName, NotFound, without_query
from ckptool.files.source import Progress
from ckptool.formats import Source, open_or_reuse
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import printable

JsonPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor. `stride` is in elements, `nbytes` is the size of the elements."""

    path: JsonPath
    name: str
    dtype: str
    shape: tuple[int | None, ...]
    stride: tuple[int, ...]
    device: str
    nbytes: int
    kind: str
    storage: str | None
    """An identifier that tied tensors share; None without a storage in the file."""
    requires_grad: bool
    sha256: str | None = None
    """Hash of the elements, row-major and little-endian; None if not requested or not defined."""
    numel: int = 0
    tied: bool = False
    """True if another key has the same elements."""
    digest: str | None = None
    """Digest of data other than elements (sparse, quantized, nested, a subclass's state), if
    requested: 16 hexadecimal digits of a `Fingerprints`."""

    def to_dict(self, *, hashed: bool = False) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`, with `sha256` if `hashed`."""
        return to_document(self, "numel", "tied", "digest", *(() if hashed else ("sha256",)))


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value, as in JSON."""

    path: JsonPath
    name: str
    type: str
    value: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`."""
        return to_document(self)


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object that is neither a tensor nor a plain value."""

    path: JsonPath
    name: str
    class_name: str
    summary: str = ""
    """A short description, if it is more than the class."""
    digest: str | None = None
    """Digest of its content without the listed tensors, if requested."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.list/1`."""
        return {"path": self.path, "name": self.name, "class": self.class_name}


@dataclass(frozen=True, slots=True, repr=False)
class Listing(Result):
    """The entries of a checkpoint in the order of the file; also a sequence of its tensor rows.

    `listing[0]` and `listing["state_dict/fc.weight"]` are rows of tensors. `file` and `format` are
    those of the `Checkpoint`, `values` the plain values, `objects` all other entries. `hashed` is
    True if the rows have their SHA-256.
    """

    file: str
    format: str
    tensors: tuple[TensorRow, ...]
    """The rows of the tensors, with a row for each key of a tied tensor."""
    values: tuple[ValueRow, ...]
    objects: tuple[ObjectRow, ...]
    hashed: bool = False
    quantizers: tuple[str, ...] = ()
    """The known quantizers of its weights."""
    unmatched: tuple[str, ...] = ()
    """A sentence on each name or glob that matches nothing, with the nearest names."""

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorRow]:
        """Yield the rows of the tensors."""
        return iter(self.tensors)

    def __contains__(self, key: object) -> bool:
        """Return True for the name or the row of a tensor."""
        return any(key in (row.name, row) for row in self.tensors)

    @overload
    def __getitem__(self, key: int | str) -> TensorRow: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[TensorRow, ...]: ...
    def __getitem__(self, key: int | str | slice) -> TensorRow | tuple[TensorRow, ...]:
        """Return a tensor by its position or its full path.

        Raises:
            NotFound: no tensor has that name (`AmbiguousName`: several have it).
        """
        if not isinstance(key, str):
            return self.tensors[key]
        rows = [row for row in self.tensors if row.name == key]
        if not rows:
            raise NotFound(f"no tensor is named {printable(key)!r}", file=self.file)
        if len(rows) > 1:
            raise AmbiguousName(f"several tensors are named {printable(key)!r}", file=self.file)
        return rows[0]

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
        include: Names and globs of the rows to list: a path, a key, the end of a path, a glob of
            whole keys, or one of whole paths with a `/`; wrapper prefixes are ignored.
        exclude: Names and globs of the rows to leave out.
        hash: Read every listed tensor and add the SHA-256 of its content.
        progress: Called with the bytes done and the total bytes.
        limits: Limits for nesting and for strides that repeat bytes.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened, or bytes cannot be read.
        AmbiguousName: a name matches several rows.
    """
    with open_or_reuse(source) as checkpoint:
        if hash:  # all bytes are read anyway
            checkpoint = checkpoint.with_late_values()
        index = NameIndex(walk(checkpoint.root, limits), checkpoint.path)
        selection = select(index, tuple(include), tuple(exclude), endings=True)
        tensors, values, objects = _group_entries(selection.pick_from(index))
        tensor_rows = list(make_tensor_rows(tensors))
        object_rows = [_make_object_row(path, leaf) for path, leaf in objects]
        if hash:
            total = sum(tensor.nbytes for _, tensor in drop_ties(tensors) if tensor.has_content)
            hashes = hash_contents(tensors, limits, Meter(progress, total).advance)
            digests = _compute_digests(tensors, objects, limits)  # first those of all tensors
            tensor_rows = [
                replace(row, sha256=sha256, digest=next(digests))
                for row, sha256 in zip(tensor_rows, hashes, strict=True)
            ]
            object_rows = [replace(row, digest=next(digests)) for row in object_rows]
        quantizers = (name for section in checkpoint.sections for name in section.quantizers)
        return Listing(
            file=without_query(checkpoint.path),
            format=checkpoint.format,
            tensors=tuple(tensor_rows),
            values=tuple(values),
            objects=tuple(object_rows),
            hashed=hash,
            unmatched=tuple(map(str, selection.unmatched)),
            quantizers=tuple(dict.fromkeys(quantizers)),
        )


def _group_entries(
    entries: Iterable[tuple[Path, Any]],
) -> tuple[list[tuple[Path, TensorRef]], list[ValueRow], list[tuple[Path, Any]]]:
    """Return the tensors, the rows of the plain values, and all other objects of some entries."""
    tensors: list[tuple[Path, TensorRef]] = []
    values: list[ValueRow] = []
    objects: list[tuple[Path, Any]] = []
    for path, leaf in entries:
        if isinstance(leaf, TensorRef):
            tensors.append((path, leaf))
        elif plain := to_plain_value(leaf):
            kind, value = plain
            values.append(ValueRow(to_json_path(path), name_of(path), kind, to_json_value(value)))
        else:
            objects.append((path, leaf))
    return tensors, values, objects


def _make_object_row(path: Path, leaf: Any) -> ObjectRow:
    """Return the row of an object, with a summary if it is more than the class."""
    name, text = class_name_of(leaf), summarize(leaf)
    summary = "" if text in (name, f"{name} object") else text
    return ObjectRow(to_json_path(path), name_of(path), name, summary)


def make_tensor_rows(leaves: Sequence[tuple[Path, TensorRef]]) -> Iterator[TensorRow]:
    """Yield the row of each tensor.

    A storage has the name of its key; `0#2` if it is the second one with the key `0`, in another
    file.
    """
    identities = [tensor.place for _, tensor in leaves]  # None for a tensor without stored bytes
    tensors_by_identity = Counter(identities)
    storage_names: dict[int, str] = {}
    storages_by_key = Counter[str]()
    for (path, tensor), identity in zip(leaves, identities, strict=True):
        storage = tensor.storage
        if storage is not None and id(storage) not in storage_names:
            storages_by_key[storage.key] += 1
            number = storages_by_key[storage.key]
            storage_names[id(storage)] = storage.key if number == 1 else f"{storage.key}#{number}"
        yield TensorRow(
            to_json_path(path),
            name_of(path),
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            tensor.device,
            tensor.nbytes,
            tensor.kind,
            storage_names.get(id(storage)),
            tensor.requires_grad,
            numel=tensor.numel,
            tied=identity is not None and tensors_by_identity[identity] > 1,
        )


def _compute_digests(
    leaves: Sequence[tuple[Path, TensorRef]], objects: Sequence[tuple[Path, Any]], limits: Limits
) -> Iterator[str | None]:
    """Yield a digest for each tensor, then for each object; None for plain tensors.

    A tensor has a digest if it has data other than elements, for example the scales of a quantizer.
    """
    from ckptool.inspection.equality import Fingerprints, is_made_of_parts

    hashed_ids = frozenset(id(tensor) for _, tensor in leaves if tensor.has_content)
    fingerprints = Fingerprints(limits, hashed_ids)
    for path, tensor in leaves:
        yield fingerprints.compute(path, tensor) if is_made_of_parts(tensor) else None
    for path, node in objects:
        yield fingerprints.compute(path, node)


MAX_PARTS = 100  # dots of a name that make levels; a hostile name has millions


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module or a tensor, folded from `count` equal ones. The totals are over all of them.

    `label` is the last component of the key, `{0..31}` for folded layers. `elements` and `nbytes`
    count tied tensors once for each key.
    """

    label: str
    tensors: int
    elements: int
    nbytes: int
    count: int = 1
    tensor: TensorRow | None = None
    """The tensor, one of `count` with the same dtype and shape."""
    children: tuple[TreeNode, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the node of `ckptool.tree/1`."""
        tensor = self.tensor
        return {
            "label": self.label,
            "count": self.count,
            "tensors": self.tensors,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "dtype": tensor.dtype if tensor else None,
            "shape": tensor.shape if tensor else None,
            "device": tensor.device if tensor else None,
            "children": [child.to_dict() for child in self.children],
        }


def build_tree(listing: Listing) -> TreeNode:
    """Return the tensors of a listing by module; the label of the root is the file's name.

    Numbered siblings are folded if their subtrees have the same keys, dtypes, devices and shapes.
    """
    rows = [(_split_path(row), row) for row in listing.tensors]
    root, _ = _fold_module(listing.file, depth=0, rows=rows, number_by_signature={})
    return root


def _split_path(row: TensorRow) -> tuple[str, ...]:
    """Return the components of a tensor's path, with its key split at dots."""
    *containers, key = (str(part) for part in row.path) if row.path else ("",)
    return (*containers, *key.split(".", MAX_PARTS))


def _fold_module(
    label: str,
    depth: int,
    rows: list[tuple[tuple[str, ...], TensorRow]],
    number_by_signature: dict[Any, int],
) -> tuple[TreeNode, int]:
    """Return the node of a module, and a number that equal subtrees share.

    `rows` are the tensors below the module with the components of their paths, of which `depth`
    belong to the module. It is a tensor itself if a path has no more. A signature has the header of
    that tensor, and the names and numbers of the children.
    """
    tensor = None
    rows_by_child: dict[str, list[tuple[tuple[str, ...], TensorRow]]] = {}
    for parts, row in rows:
        if len(parts) == depth:
            tensor = row
        else:
            rows_by_child.setdefault(parts[depth], []).append((parts, row))
    folded = [
        (name, *_fold_module(name, depth + 1, child_rows, number_by_signature))
        for name, child_rows in rows_by_child.items()
    ]
    header = (tensor.dtype, tensor.shape, tensor.device) if tensor else None
    signature = (header, tuple((name, number) for name, _, number in folded))
    number = number_by_signature.setdefault(signature, len(number_by_signature))
    children = tuple(_merge_siblings(folded))
    node = TreeNode(
        label,
        tensors=(tensor is not None) + sum(child.tensors for child in children),
        elements=(tensor.numel if tensor else 0) + sum(child.elements for child in children),
        nbytes=(tensor.nbytes if tensor else 0) + sum(child.nbytes for child in children),
        tensor=tensor,
        children=children,
    )
    return node, number


def _merge_siblings(folded: list[tuple[str, TreeNode, int]]) -> Iterator[TreeNode]:
    """Yield siblings, with equal numbered ones merged into the first of them.

    Each sibling is given as its name, node, and the number that equal subtrees share.
    """
    node_by_name = {name: node for name, node, _ in folded}
    # Only numbered siblings are merged: the signature of any other is its own name.
    signed_names = [(name, number if name.isdecimal() else name) for name, _, number in folded]
    for family in group_families(signed_names):
        members = [node_by_name[name] for name in family.names]
        if len(members) == 1:
            yield members[0]
            continue
        yield replace(
            members[0],
            label=family.label,
            tensors=sum(node.tensors for node in members),
            elements=sum(node.elements for node in members),
            nbytes=sum(node.nbytes for node in members),
            count=len(members),
        )
