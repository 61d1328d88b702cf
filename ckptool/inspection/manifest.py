"""Manifests: the SHA-256 of every tensor, stored in a file and compared with checkpoints.

A content hash does not depend on the format. A manifest of one file checks a copy in another
format: `{"schema": "ckptool.manifest/1", "files": [{"file", "tensors": [{"path", "name", "dtype",
"shape", "sha256"}]}]}`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.names import map_to_bare_names
from ckptool.core.reading import hash_contents
from ckptool.core.tree import name_of
from ckptool.core.values import format_shape, to_document, to_json_path
from ckptool.errors import CorruptFile, LimitExceeded, UsageError
from ckptool.files import FileSource
from ckptool.files.atomic import atomic_output
from ckptool.files.source import BytesDone
from ckptool.formats.base import Findings
from ckptool.formats.safetensors_header import parse_json
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import are, counted, listed

SCHEMA = "ckptool.manifest/1"


@dataclass(frozen=True, slots=True)
class HashedTensor:
    """A tensor in a manifest; `sha256` is None for kinds without plain content."""

    path: tuple[str | int, ...]
    name: str
    dtype: str
    shape: tuple[int | None, ...]
    sha256: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.manifest/1`."""
        return to_document(self)


Files = Mapping[str, Sequence[HashedTensor]]
"""The tensors of each file, by its path relative to the folder of the manifest."""


def manifest_name(file: str, manifest: str) -> str:
    """Return a file's name in a manifest: relative to the manifest's folder, with slashes."""
    folder = os.path.dirname(os.path.abspath(manifest))
    try:
        return os.path.relpath(file, folder).replace(os.sep, "/")
    except ValueError:  # another drive
        return os.path.abspath(file).replace(os.sep, "/")


def hashed_tensors(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, told: BytesDone | None = None
) -> tuple[HashedTensor, ...]:
    """Return every listed tensor with its content hash. Raises as `hash_contents`."""
    leaves = list(checkpoint.tensors())
    hashes = hash_contents(leaves, limits, told)
    return tuple(
        HashedTensor(to_json_path(path), name_of(path), tensor.dtype, tensor.shape, sha256)
        for (path, tensor), sha256 in zip(leaves, hashes, strict=True)
    )


def write_manifest(path: str, files: Files) -> None:
    """Write a manifest atomically, without replacing a file.

    Raises:
        WriteError: the file exists or cannot be written.
    """
    documents = [
        {"file": name, "tensors": [tensor.to_dict() for tensor in tensors]}
        for name, tensors in files.items()
    ]
    data = json.dumps({"schema": SCHEMA, "files": documents}, indent=1).encode() + b"\n"
    with atomic_output(path, len(data)) as output:
        output.write(data)


def read_manifest(path: str, limits: Limits = DEFAULT_LIMITS) -> Files | None:
    """Return the tensors of each file in a manifest; None if it does not exist.

    Raises:
        UsageError: the file is not a manifest.
        LimitExceeded: the file exceeds `limits`.
    """
    if not os.path.lexists(path):
        return None
    source = FileSource(path)
    try:
        if not source.read(0, min(source.size, 64)).lstrip().startswith(b"{"):
            raise _no_manifest(path)
        if source.size > limits.max_json_bytes:
            raise LimitExceeded(
                f"the manifest has {source.size:,} bytes; the limit is {limits.max_json_bytes:,}",
                file=path,
            )
        document = parse_json(source.read(0, source.size).decode("utf-8"), "the manifest")
    except (UnicodeDecodeError, CorruptFile) as error:
        raise _no_manifest(path) from error
    finally:
        source.close()
    match document:
        case {"schema": str(schema), "files": list(files)} if schema == SCHEMA:
            return dict(_file(entry, path) for entry in files)
    raise _no_manifest(path)


def _file(entry: Any, path: str) -> tuple[str, list[HashedTensor]]:
    match entry:
        case {"file": str(name), "tensors": list(tensors)}:
            return name, [_tensor(tensor, path) for tensor in tensors]
    raise _no_manifest(path)


def _tensor(entry: Any, path: str) -> HashedTensor:
    match entry:
        case {
            "path": list(keys), "name": str(name), "dtype": str(dtype), "shape": list(shape),
            "sha256": str() | None as sha256,
        } if (
            all(isinstance(key, (str, int)) for key in keys)
            and all(size is None or type(size) is int for size in shape)
        ):  # fmt: skip
            return HashedTensor(tuple(keys), name, dtype, tuple(shape), sha256)
    raise _no_manifest(path)


def _no_manifest(path: str) -> UsageError:
    return UsageError(
        "not a ckptool manifest, so it is not overwritten",
        file=path,
        hint="give --manifest a new file or an existing manifest",
    )


_Place = tuple[str | int, ...]
"""The path of a container."""
_Group = dict[str | int, HashedTensor]
"""The tensors of one container by their keys without wrapper prefixes."""
_MOST_COMPARED = 16


def compare_tensors(wanted: Sequence[HashedTensor], found: Sequence[HashedTensor]) -> Findings:
    """Return how the tensors differ: missing, extra, or a different dtype, shape or content.

    Paths are compared unchanged, else without section and wrapper prefixes
    (`state_dict/module.fc.weight` is `fc.weight`). If the layout of the file differs from the
    manifest's, missing containers are a note and not a problem.
    """
    by_path = {one.path: one for one in found}
    both = [(one, by_path[one.path]) for one in wanted if one.path in by_path]
    taken = {one.path for one, _ in both}
    ours, theirs = _groups(wanted, taken), _groups(found, taken)
    moved = False
    for place, other in _group_pairs(ours, theirs):
        moved = moved or place != other
        common = [name for name in ours[place] if name in theirs[other]]
        both.extend((ours[place].pop(name), theirs[other].pop(name)) for name in common)
    problems, notes = list[Finding](), list[str]()
    renamed = [(want.name, have.name) for want, have in both if want.name != have.name]
    if renamed:
        old, new = (listed([name]) for name in renamed[0])
        notes.append(
            f"{counted(len(renamed), 'tensor')} compared under other keys: "
            f"{old} in the manifest is {new} in this file"
        )
    for kind, side, groups, text, where in (
        ("missing", 0, ours, "in the manifest, but not in this file", "not in this file"),
        ("extra", 1, theirs, "in this file, but not in the manifest", "not in the manifest"),
    ):
        paired = {pair[side].path[:-1] for pair in both}
        elsewhere = Counter[str]()
        for place, group in groups.items():
            if moved and place not in paired:
                elsewhere[name_of(place[:1])] += len(group)
            else:
                problems += (Finding(kind, text, (one.name,)) for one in group.values())
        for name, count in (+elsewhere).items():
            notes.append(f"{counted(count, 'tensor')} of {listed([name])} {are(count)} {where}")
    for pair in both:
        problems += _differences(*pair)
    unhashed = sum(want.sha256 is None and have.sha256 is None for want, have in both)
    if unhashed:
        notes.append(
            f"{counted(unhashed, 'tensor')} without a hash because they are sparse or quantized: "
            "only dtype and shape were compared"
        )
    return Findings(tuple(problems), tuple(notes))


def _differences(want: HashedTensor, have: HashedTensor) -> Iterator[Finding]:
    if want.dtype != have.dtype:
        text = f"dtype is {have.dtype}, expected {want.dtype}"
        yield Finding("dtype", text, (have.name,))
    if want.shape != have.shape:
        text = f"shape is {format_shape(have.shape)}, expected {format_shape(want.shape)}"
        yield Finding("shape", text, (have.name,))
    elif want.dtype == have.dtype and want.sha256 != have.sha256:
        text = "content differs from the manifest, by SHA-256"
        yield Finding("content", text, (have.name,))


def _groups(tensors: Iterable[HashedTensor], taken: Container[_Place]) -> dict[_Place, _Group]:
    """Group tensors by container and bare key, if unique, except the paths in `taken`."""
    groups: dict[_Place, _Group] = {}
    for one in tensors:
        groups.setdefault(one.path[:-1], {})[one.path[-1] if one.path else ""] = one
    for place, group in groups.items():
        renamed: Mapping[Any, str] = map_to_bare_names(
            [own for own in group if isinstance(own, str)]
        )
        groups[place] = {
            renamed.get(own, own): one for own, one in group.items() if one.path not in taken
        }
    return groups


def _group_pairs(
    wanted: dict[_Place, _Group], found: dict[_Place, _Group]
) -> Iterator[tuple[_Place, _Place]]:
    """Yield containers with equal paths, then those with most common content, then most keys."""
    yield from ((place, place) for place in found if place in wanted)
    left = {place: group for place, group in wanted.items() if place not in found}
    other = {place: group for place, group in found.items() if place not in wanted}
    for content in (True, False):
        where: dict[Any, list[_Place]] = {}
        for want, group in left.items():
            for own, one in group.items():
                where.setdefault((own, content and one.sha256), []).append(want)
        votes = Counter(
            (want, have)
            for have, group in other.items()
            for own, one in group.items()
            for want in where.get((own, content and one.sha256), ())[:_MOST_COMPARED]
        )
        for (want, have), _ in votes.most_common():
            if want in left and have in other:
                del left[want], other[have]
                yield want, have
