"""A part of a checkpoint: one node of its tree, what globs choose, the weights of a model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.model import Opaque, Path, Storage, TensorRef
from ckptool.paths import name_of, resolve, selected
from ckptool.statedict import model_state_dict
from ckptool.transforms.compacting import without_unseen
from ckptool.transforms.nearest import similar
from ckptool.transforms.pruning import pruned
from ckptool.transforms.selection import beside, weights_alone
from ckptool.words import listed, printable

__all__ = ["extract"]

_WORTH_A_NOTE = 4096
"""Bytes of storages that no kept tensor uses."""


def extract(
    checkpoint: Checkpoint,
    *,
    key: Any = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    model_only: bool = False,
    trim: bool = True,
) -> Checkpoint:
    """A part of the checkpoint, and all else named among the changes, kind `left-out`.

    Args:
        checkpoint: Open.
        key: The address of a section, a container or a tensor, which becomes the root; a lone
            tensor a dict of one.
        include: Globs; the tensors that match one are kept (`paths.selected`), all by default.
        exclude: Globs; the tensors that match one go.
        model_only: The one state dict of a model (below `key`), and nothing beside it, nor values
            among its tensors; a pickled module becomes one.
        trim: Cut storages that lost a tensor down to what is still seen of them, sharing kept; for
            formats that have no storages there is no need.

    What is no tensor stays unless `model_only`; what cannot do without a tensor goes as a whole
    (`pruning.pruned`). Globs with a `/` are held against the names as they were. Nothing goes: the
    same checkpoint comes back.

    Raises:
        AmbiguousName: several answer to `key`; with `model_only`, several state dicts.
        NotFound: nothing answers to it, to a glob of `include`, or nothing is left.
        UsageError: `key` is empty or names a plain value; or a list or an object would lose some
            tensors.
    """
    globs = _Globs(include, exclude)
    part, where = _part(checkpoint, key, model_only)
    if globs:
        part = _chosen(checkpoint, part, where, globs)
    if all(change.kind == "warning" for change in part.changes[len(checkpoint.changes) :]):
        return part
    cut = without_unseen(checkpoint, part) if trim else part
    return cut.with_root(cut.root, *_totals(checkpoint, cut), *(_whole(cut) if trim else ()))


def _part(checkpoint: Checkpoint, key: Any, model_only: bool) -> tuple[Checkpoint, Path]:
    """What `key` and `model_only` choose, and the path that its root had."""
    if key == "":
        raise UsageError(
            "what has an empty name cannot be addressed",
            file=checkpoint.path or None,
            hint="without --key, the whole file is chosen",
        )
    if model_only:
        model = model_state_dict(checkpoint, key)
        return weights_alone(checkpoint, model), model.path
    if key is None:
        return checkpoint, ()
    path, node = _resolved(checkpoint, key)
    if node is checkpoint.root:
        return checkpoint, ()
    name = printable(name_of(path))
    left_out = list(beside(checkpoint.root, path, node))
    if isinstance(node, TensorRef):
        alone = {name_of(path[-1:]): node}
        change = Change("extract", f"the tensor {name} alone, in a dict", 1)
        return checkpoint.with_root(alone, change, *left_out), path[:-1]
    made = checkpoint.with_root(node, Change("extract", f"{name} becomes the root"), *left_out)
    return made, path


def _resolved(checkpoint: Checkpoint, key: Any) -> tuple[Path, Any]:
    try:
        return resolve(checkpoint, key, accept=_may_be_root)
    except AmbiguousName:
        raise
    except NotFound:
        path, _ = resolve(checkpoint, key)
        name, file = printable(name_of(path)), checkpoint.path
        raise UsageError(
            f"{name!r} is a value: no tensor, and nothing that holds any",
            file=file or None,
            hint=f"ckptool show {file} {name}" if file else None,
        ) from None


def _may_be_root(node: Any) -> bool:
    if isinstance(node, Opaque):
        return node.plain is None
    return isinstance(node, (dict, list, tuple, TensorRef))


class _Globs:
    """Which tensors are chosen, and which globs have matched none."""

    def __init__(self, include: Iterable[str], exclude: Iterable[str]) -> None:
        for given in (include, exclude):
            if isinstance(given, str):
                raise UsageError(f"a list of globs is wanted, not {given!r}", hint=f"[{given!r}]")
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._idle = dict.fromkeys((*self._include, *self._exclude))
        self._seen: list[Path] = []

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def choose(self, path: Path) -> bool:
        """Whether the tensor under that path is chosen."""
        self._seen.append(path)
        for glob in [glob for glob in self._idle if selected(path, (glob,))]:
            del self._idle[glob]
        return selected(path, self._include, self._exclude)

    def check(self, file: str) -> Iterator[Change]:
        """A warning for each glob of `exclude` that matched nothing.

        Raises:
            NotFound: one of `include` matched nothing.
        """
        for glob in self._idle:
            near = listed(self._near(glob))
            if glob in self._include:
                raise NotFound(
                    f"no tensor matches {printable(glob)!r}; there is {near}",
                    file=file or None,
                    hint=f"ckptool list {file}" if file else None,
                )
            yield Change("warning", f"no tensor matches {printable(glob)}; there is {near}")

    def _near(self, glob: str) -> list[str]:
        whole = "/" in glob
        names = list(dict.fromkeys(name_of(path if whole else path[-1:]) for path in self._seen))
        return similar(glob, names) or names


def _chosen(checkpoint: Checkpoint, part: Checkpoint, where: Path, globs: _Globs) -> Checkpoint:
    """The part without the tensors that the globs leave out."""
    rest = pruned(part.root, globs.choose, where=where, file=checkpoint.path)
    warnings = list(globs.check(checkpoint.path))
    if rest.root is None or not any(part.with_root(rest.root).tensors()):
        raise NotFound(
            "no tensor would be left",
            file=checkpoint.path or None,
            hint=_nothing_left(rest.left_out),
        )
    warnings.extend(
        Change("warning", f"{optimizer} still has the state of parameters that are left out")
        for optimizer in rest.stale
    )
    if rest.root is part.root and not warnings:
        return part
    return part.with_root(rest.root, *rest.left_out, *warnings)


def _nothing_left(left_out: Iterable[Change]) -> str:
    texts = [change.text for change in left_out]
    return f"this would go: {'; '.join(texts)}" if texts else "choose fewer with --exclude"


def _totals(before: Checkpoint, after: Checkpoint) -> Iterator[Change]:
    """How much is kept of how much."""
    every, kept = ([tensor for _, tensor in one.tensors()] for one in (before, after))
    text = f"{len(kept):,} of {len(every):,} tensors kept"
    yield Change("extract", f"{text}, {_bytes(kept):,} of {_bytes(every):,} bytes", len(kept))


def _whole(kept: Checkpoint) -> Iterator[Change]:
    """What a torch file holds beside what tensors see of their storages."""
    used, whole = _storages(tensor for _, tensor in kept.tensors())
    if whole - used >= max(used, _WORTH_A_NOTE):
        yield Change(
            "note",
            f"the tensors kept use {used:,} of the {whole:,} bytes of their storages, which a "
            "torch file holds whole: ckptool compact trims them",
        )


def _sizes(tensors: Iterable[TensorRef]) -> dict[Any, tuple[Storage | None, int]]:
    """Storage and bytes of each tensor, tied ones once."""
    return {
        (tensor.storage or tensor, tensor.offset, tensor.shape, tensor.stride): (
            tensor.storage,
            tensor.nbytes,
        )
        for tensor in tensors
    }


def _bytes(tensors: Iterable[TensorRef]) -> int:
    return sum(nbytes for _, nbytes in _sizes(tensors).values())


def _storages(tensors: Iterable[TensorRef]) -> tuple[int, int]:
    """The bytes that tensors use of their storages, and those of the storages."""
    used: dict[Storage, int] = {}
    for storage, nbytes in _sizes(tensors).values():
        if storage is not None and storage.data is not None:
            used[storage] = min(storage.nbytes, used.get(storage, 0) + nbytes)
    return sum(used.values()), sum(storage.nbytes for storage in used)
