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
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.names import map_to_bare_names
from ckptool.core.reading import hash_contents
from ckptool.core.tree import name_of
from ckptool.core.values import format_shape, to_document, to_json_path
from ckptool.errors import CorruptFile, LimitExceeded, UsageError
from ckptool.files import FileSource
from ckptool.files.atomic import open_atomic_output
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


def hash_tensors(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, on_progress: BytesDone | None = None
) -> tuple[HashedTensor, ...]:
    """Return every listed tensor with its content hash. Raises as `hash_contents`."""
    leaves = list(checkpoint.tensors())
    hashes = hash_contents(leaves, limits, on_progress)
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
    with open_atomic_output(path, len(data)) as output:
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
        # First, so that a large checkpoint given by mistake is not reported as too long.
        if not source.read(0, min(source.size, 64)).lstrip().startswith(b"{"):
            raise _not_manifest_error(path)
        if source.size > limits.max_json_bytes:
            raise LimitExceeded(
                f"the manifest has {source.size:,} bytes; the limit is {limits.max_json_bytes:,}",
                file=path,
            )
        document = parse_json(source.read(0, source.size).decode("utf-8"), "the manifest")
    except (UnicodeDecodeError, CorruptFile) as error:
        raise _not_manifest_error(path) from error
    finally:
        source.close()
    match document:
        case {"schema": str(schema), "files": list(files)} if schema == SCHEMA:
            return dict(_parse_file(entry, path) for entry in files)
    raise _not_manifest_error(path)


def _parse_file(entry: Any, path: str) -> tuple[str, list[HashedTensor]]:
    """Return the name and the tensors of a file in a manifest."""
    match entry:
        case {"file": str(name), "tensors": list(tensors)}:
            return name, [_parse_tensor(tensor, path) for tensor in tensors]
    raise _not_manifest_error(path)


def _parse_tensor(entry: Any, path: str) -> HashedTensor:
    """Return a tensor of a manifest; raises UsageError unless it has all keys."""
    match entry:
        case {
            "path": list(keys), "name": str(name), "dtype": str(dtype), "shape": list(shape),
            "sha256": str() | None as sha256,
        } if (
            all(isinstance(key, (str, int)) for key in keys)
            and all(size is None or type(size) is int for size in shape)
        ):  # fmt: skip
            return HashedTensor(tuple(keys), name, dtype, tuple(shape), sha256)
    raise _not_manifest_error(path)


def _not_manifest_error(path: str) -> UsageError:
    """Return the error about a file that is not a manifest."""
    return UsageError(
        "not a ckptool manifest, so it is not overwritten",
        file=path,
        hint="give --manifest a new file or an existing manifest",
    )


_Place = tuple[str | int, ...]
"""The path of a container."""
_Group = dict[str | int, HashedTensor]
"""The tensors of one container by their keys without wrapper prefixes."""
_MAX_CANDIDATES = 16
"""The most containers for which one tensor votes, which bounds the time."""


def compare_tensors(
    expected_tensors: Sequence[HashedTensor], actual_tensors: Sequence[HashedTensor]
) -> Findings:
    """Return how the tensors differ: missing, extra, or a different dtype, shape or content.

    Paths are compared unchanged, else without section and wrapper prefixes
    (`state_dict/module.fc.weight` is `fc.weight`). If the layout of the file differs from the
    manifest's, missing containers are a note and not a problem.
    """
    pairing = _pair_tensors(expected_tensors, actual_tensors)
    notes = []
    renamed = [pair for pair in pairing.pairs if pair.expected.name != pair.actual.name]
    if renamed:
        old, new = (listed([tensor.name]) for tensor in renamed[0])
        notes.append(
            f"{counted(len(renamed), 'tensor')} compared under other keys: "
            f"{old} in the manifest is {new} in this file"
        )
    unpaired = _report_unpaired(pairing)
    notes += unpaired.notes
    problems = [*unpaired.problems]
    for expected, actual in pairing.pairs:
        problems += _compare_tensor(expected, actual)
    unhashed = sum(not (pair.expected.sha256 or pair.actual.sha256) for pair in pairing.pairs)
    if unhashed:
        notes.append(
            f"{counted(unhashed, 'tensor')} without a hash because they are sparse or quantized: "
            "only dtype and shape were compared"
        )
    return Findings(tuple(problems), tuple(notes))


class _Pair(NamedTuple):
    """A tensor in the manifest and in the file."""

    expected: HashedTensor
    actual: HashedTensor


class _Pairing(NamedTuple):
    """The tensors of a manifest and of a file: those in both, and those in only one."""

    pairs: list[_Pair]
    missing: dict[_Place, _Group]
    """The tensors that only the manifest has, by container."""
    extra: dict[_Place, _Group]
    """The tensors that only the file has, by container."""
    has_other_layout: bool
    """True if containers with different paths were paired."""


def _pair_tensors(
    expected_tensors: Sequence[HashedTensor], actual_tensors: Sequence[HashedTensor]
) -> _Pairing:
    """Pair tensors with equal paths, then those with the same key in paired containers."""
    actual_by_path = {tensor.path: tensor for tensor in actual_tensors}
    pairs = [
        _Pair(tensor, actual_by_path[tensor.path])
        for tensor in expected_tensors
        if tensor.path in actual_by_path
    ]
    paired_paths = {pair.expected.path for pair in pairs}
    missing = _group_by_container(expected_tensors, paired_paths)
    extra = _group_by_container(actual_tensors, paired_paths)
    has_other_layout = False
    for container, partner in _pair_containers(missing, extra):
        has_other_layout = has_other_layout or container != partner
        common_keys = [key for key in missing[container] if key in extra[partner]]
        pairs += [
            _Pair(missing[container].pop(key), extra[partner].pop(key)) for key in common_keys
        ]
    return _Pairing(pairs, missing, extra, has_other_layout)


def _report_unpaired(pairing: _Pairing) -> Findings:
    """Return a problem for each tensor that is missing or extra.

    If the layout of the file differs, all tensors of a container without any pair are one note:
    the manifest may be of a file with an optimizer, and the file has only the weights.
    """
    problems, notes = list[Finding](), list[str]()
    expected_containers = {pair.expected.path[:-1] for pair in pairing.pairs}
    actual_containers = {pair.actual.path[:-1] for pair in pairing.pairs}
    for kind, groups, paired_containers, where, absent in (
        ("missing", pairing.missing, expected_containers, "in the manifest", "not in this file"),
        ("extra", pairing.extra, actual_containers, "in this file", "not in the manifest"),
    ):
        count_by_section = Counter[str]()
        for container, group in groups.items():
            if pairing.has_other_layout and group and container not in paired_containers:
                count_by_section[name_of(container[:1])] += len(group)
            else:
                text = f"{where}, but {absent}"
                problems += [Finding(kind, text, (tensor.name,)) for tensor in group.values()]
        for section, count in count_by_section.items():
            tensors = f"{counted(count, 'tensor')} of {listed([section])}"
            notes.append(f"{tensors} {are(count)} {absent}")
    return Findings(tuple(problems), tuple(notes))


def _compare_tensor(expected: HashedTensor, actual: HashedTensor) -> Iterator[Finding]:
    """Yield differences of one tensor: in dtype, shape, or content."""
    if expected.dtype != actual.dtype:
        text = f"dtype is {actual.dtype}, expected {expected.dtype}"
        yield Finding("dtype", text, (actual.name,))
    if expected.shape != actual.shape:
        text = f"shape is {format_shape(actual.shape)}, expected {format_shape(expected.shape)}"
        yield Finding("shape", text, (actual.name,))
    elif expected.dtype == actual.dtype and expected.sha256 != actual.sha256:
        text = "content differs from the manifest, by SHA-256"
        yield Finding("content", text, (actual.name,))


def _group_by_container(
    tensors: Iterable[HashedTensor], skipped: Container[_Place]
) -> dict[_Place, _Group]:
    """Group tensors by container and by key without wrapper prefixes.

    The keys of a container stay unchanged if two of them would become the same. Tensors with paths
    in `skipped` are left out.
    """
    groups: dict[_Place, _Group] = {}
    for tensor in tensors:
        key = tensor.path[-1] if tensor.path else ""  # the root itself may be a tensor
        groups.setdefault(tensor.path[:-1], {})[key] = tensor
    for container, group in groups.items():
        bare_names: Mapping[Any, str] = map_to_bare_names(
            [key for key in group if isinstance(key, str)]
        )
        groups[container] = {
            bare_names.get(key, key): tensor
            for key, tensor in group.items()
            if tensor.path not in skipped
        }
    return groups


def _pair_containers(
    expected_groups: dict[_Place, _Group], actual_groups: dict[_Place, _Group]
) -> Iterator[tuple[_Place, _Place]]:
    """Yield pairs of containers with equal paths, then those with most tensors in common.

    A tensor votes for each pair of containers that have it, under the same key: first with the
    same content, then, for containers without a partner, with any content.
    """
    yield from (
        (container, container) for container in actual_groups if container in expected_groups
    )
    unpaired_expected = {
        container: group
        for container, group in expected_groups.items()
        if container not in actual_groups
    }
    unpaired_actual = {
        container: group
        for container, group in actual_groups.items()
        if container not in expected_groups
    }
    for by_content in (True, False):
        candidates: dict[Any, list[_Place]] = {}  # expected containers by key and content
        for expected, group in unpaired_expected.items():
            for key, tensor in group.items():
                content = tensor.sha256 if by_content else None
                candidates.setdefault((key, content), []).append(expected)
        votes = Counter[tuple[_Place, _Place]]()
        for actual, group in unpaired_actual.items():
            for key, tensor in group.items():
                content = tensor.sha256 if by_content else None
                containers = candidates.get((key, content), [])[:_MAX_CANDIDATES]
                votes.update((expected, actual) for expected in containers)
        for (expected, actual), _ in votes.most_common():
            if expected in unpaired_expected and actual in unpaired_actual:
                del unpaired_expected[expected], unpaired_actual[actual]
                yield expected, actual
