"""Casts of tensors to another dtype."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ckptool.core.addressing import NameIndex, unmatched_error
from ckptool.core.checkpoint import Change, Checkpoint, Gather
from ckptool.core.model import (
    Opaque,
    Path,
    Storage,
    StorageRef,
    TensorRef,
    copy_with_items,
    replace_elements,
)
from ckptool.core.modules import get_own_tensors, walk_modules
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.quantizers import OPTIMIZER_KEY
from ckptool.core.tree import is_within, name_of, rebuild, walk, walk_everything as every_node
from ckptool.dtypes import BY_SAFETENSORS
from ckptool.errors import UsageError
from ckptool.files.computed import ReadAhead
from ckptool.tensors.casting import FLOATS, Caster, Losses
from ckptool.transforms.dequantizing import (
    Dequantized,
    dequantize_weights,
    get_elements,
    refuse_dependent_tensors,
)
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    import torch


class Originals:
    """Recognizes chosen tensors of a tree while it is rebuilt.

    If `rebuild` has replaced the attributes or hooks of a tensor, it passes on a copy of it.
    """

    def __init__(self, root: Any, chosen: Iterable[TensorRef]) -> None:
        """Remember the `chosen` tensors of the tree `root`, to find them in its copies."""
        self._chosen = {id(tensor): tensor for tensor in chosen}
        self._by_view: dict[Any, TensorRef] = {
            tensor.place or id(tensor): tensor for tensor in self._chosen.values()
        }
        """The chosen tensors by the bytes that they view, which a copy shares, or else by `id`."""
        self._ids_in_root = {id(node) for node in every_node(root)}
        """All nodes of `root`; any other node is a copy."""

    def find(self, node: Any) -> TensorRef | None:
        """Return the chosen tensor that a node is, or was copied from."""
        if not isinstance(node, TensorRef) or id(node) in self._ids_in_root:
            return self._chosen.get(id(node))
        return self._by_view.get(node.place)


def replace_tensors(root: Any, replacements: Mapping[Path, TensorRef]) -> Any:
    """Return the tree with new tensors at some paths; keys tied to these keep the old tensor.

    Paths that lead through more than containers and attributes are skipped.
    """
    # For each dict, by id: its keys, the paths inside of lists there, and the new tensors.
    edits_by_dict: dict[int, list[tuple[Any, Path, TensorRef]]] = {}
    for path, tensor in replacements.items():
        location = _find_innermost_dict(root, path)
        if location is not None:
            innermost, depth = location
            key, inner_path = path[depth], path[depth + 1 :]
            edits_by_dict.setdefault(id(innermost), []).append((key, inner_path, tensor))

    def replace_entries(old: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict with the new tensors, or the dict itself."""
        if id(old) not in edits_by_dict:
            return old
        new = copy_with_items(old, old)
        for key, inner_path, tensor in edits_by_dict[id(old)]:
            new[key] = _replace_inside(new[key], inner_path, tensor)
        return new

    return rebuild(root, mapping=replace_entries) if edits_by_dict else root


def _find_innermost_dict(root: Any, path: Path) -> tuple[dict[Any, Any], int] | None:
    """Return the innermost dict on the path of a tensor, and the position of its key in the path.

    The path may lead through dicts, lists, tuples and attributes of objects; None for another path.
    """
    node, innermost = root, None
    for depth, key in enumerate(path):
        node = node.attributes if isinstance(node, Opaque) else node
        if isinstance(node, dict) and key in node:
            innermost = node, depth
        elif not (isinstance(node, (list, tuple)) and isinstance(key, int) and key < len(node)):
            return None
        node = node[key]
    return innermost if isinstance(node, TensorRef) else None


def _replace_inside(node: Any, path: Path, tensor: TensorRef) -> Any:
    """Return nested lists or tuples with `tensor` at the path inside; `tensor` if it is empty."""
    if not path:
        return tensor
    index, *inner_path = path
    items = list(node)
    items[index] = _replace_inside(items[index], tuple(inner_path), tensor)
    return items if isinstance(node, list) else type(node)(items)


def find_optimizer_paths(checkpoint: Checkpoint) -> set[Path]:
    """Return the paths of tensors in optimizers and schedulers: sections, objects, or by key."""
    paths = {
        path
        for section in checkpoint.sections
        if section.kind in ("optimizer", "scheduler")
        for path, _ in section.tensors()
    }
    pickled_paths: list[Path] = []

    def note_pickled(path: Path, node: Any) -> bool:
        """Note the path of a pickled optimizer; enter every container."""
        if isinstance(node, Opaque) and node.class_name.startswith("torch.optim."):
            pickled_paths.append(path)
        return True

    for path, leaf in walk(checkpoint.root, enter=note_pickled):
        if isinstance(leaf, TensorRef) and (
            any(isinstance(key, str) and OPTIMIZER_KEY.fullmatch(key) for key in path[:-1])
            or any(is_within(path, holder) for holder in pickled_paths)
        ):
            paths.add(path)
    return paths


def _iterate_unsaved_buffers(checkpoint: Checkpoint) -> Iterator[tuple[Path, TensorRef]]:
    """Yield the non-persistent buffers of pickled modules, which `Module.to` casts too."""
    for section in checkpoint.sections:
        is_module = section.kind == "module"
        for prefix, module in walk_modules(section.holder) if is_module else ():
            saved = get_own_tensors(module)
            for name, buffer in module.attributes.get("_buffers", {}).items():
                if isinstance(buffer, TensorRef) and name not in saved:
                    yield (*section.path, f"{prefix}{name}"), buffer


def _separate_spared(checkpoint: Checkpoint, spared: set[Path]) -> Checkpoint:
    """Return the checkpoint with own tensor objects at the paths `spared`, which are not cast.

    Without this, a tensor that is also at another path would be cast with it.
    """
    cast_ids = {id(tensor) for path, tensor in checkpoint.tensors() if path not in spared}
    copy_by_id: dict[int, TensorRef] = {}
    copy_by_path = {
        path: copy_by_id.setdefault(id(tensor), replace(tensor))
        for path, tensor in checkpoint.tensors()
        if path in spared and id(tensor) in cast_ids
    }
    return replace(checkpoint, root=replace_tensors(checkpoint.root, copy_by_path))


FLOATING = tuple(FLOATS)
"""The dtypes that can be cast from and to."""

_ALIASES = {"double": "float64", "float": "float32", "single": "float32", "half": "float16"}
Keep: TypeAlias = (
    "Mapping[str, str | torch.dtype | None] | Iterable[str | tuple[str, str | torch.dtype | None]]"
)
"""Exceptions from a cast: globs with dtypes, or with None for the tensor's own dtype."""


def parse_floating_dtype(word: Any) -> str:
    """Return the dtype for a word such as `bf16`, `half`, `torch.float8_e5m2` or `F8_E4M3`.

    Raises:
        UsageError: if tensors cannot be cast to it.
    """
    name = str(word).strip().removeprefix("torch.")
    code = BY_SAFETENSORS.get(name.upper())
    name = code.name if code else name.lower()
    name = _ALIASES.get(name, re.sub(r"^fp(?=\d)", "float", name))
    if name not in FLOATING:
        raise UsageError(
            f"{printable(str(word))!r} is not a floating-point dtype to cast to",
            hint=f"choose one of {', '.join(FLOATING)}",
        )
    return name


@dataclass(frozen=True)
class Cast(Step):
    """Cast floating-point tensors to another dtype, like `.to(dtype)`.

    Each storage is cast as a whole, so ties, views and strides stay. The bytes are cast when they
    are written. Integer, boolean, complex and quantized tensors keep their dtype (quantized ones
    unless `raw`). So does the state of optimizers and schedulers, unless `cast_optimizer`. With
    `dequantize`, the scales are left out.
    """

    on_files: ClassVar[str] = "use tensor.to(dtype) for tensors in memory"

    dtype: str | torch.dtype | None = None
    """The dtype to cast to. None, with `dequantize`: other tensors keep their dtype."""
    keep: Keep = ()
    """Exceptions: globs, or globs with dtypes (`{"*.norm.*": "float32"}`). The first match wins."""
    cast_optimizer: bool = False
    """Cast the state of optimizers too."""
    allow_overflow: bool = False
    """Allow values that overflow the dtype, and cast them as torch does."""
    dequantize: str | torch.dtype | None = None
    """Convert quantized weights to plain tensors of this dtype."""
    raw: bool = False
    """Cast quantized tensors as if they were plain numbers."""

    def __post_init__(self) -> None:
        """Check the dtypes.

        Raises:
            UsageError: if no dtype is given, or one is not a floating dtype (also in `keep`).
        """
        if self.dtype is None and self.dequantize is None:
            raise UsageError(
                "cast needs --dtype or --dequantize", hint="for example --dtype bfloat16"
            )
        for word in (self.dtype, self.dequantize):
            if word is not None:
                parse_floating_dtype(word)
        object.__setattr__(self, "keep", parse_keep(self.keep))

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        if not self.keep:
            yield from super().words()
            return
        yield from replace(self, keep=()).words()  # all other options
        for glob, dtype in parse_keep(self.keep):
            yield from ("--keep", f"{glob}={dtype}" if dtype else glob)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with other dtypes.

        When the file is written, `Checkpoint.reports` count the values that overflowed or were
        rounded. Without `allow_overflow`, an overflow raises `NotRepresentable`.

        Raises:
            NotRepresentable: if quantized tensors would be cast without their scales, or cannot be
                dequantized.
            NotFound: if `dequantize` is given and no weight is quantized.
        """
        refuse_placeholders(checkpoint)
        dtype_by_glob: dict[str, str | None] = {}
        for glob, dtype in parse_keep(self.keep):
            dtype_by_glob.setdefault(glob, dtype)
        spared_paths = set() if self.cast_optimizer else find_optimizer_paths(checkpoint)
        only_dequantizes = self.dtype is None and self.dequantize is not None
        default_dtype = None if only_dequantizes else parse_floating_dtype(self.dtype)
        plan = _Plan(_separate_spared(checkpoint, spared_paths), default_dtype, dtype_by_glob)
        if self.dequantize is not None:
            plan.plain_dtype = parse_floating_dtype(self.dequantize)
            plan.dequantized = dequantize_weights(plan.checkpoint, plan.plain_dtype)
            plan.checkpoint = plan.dequantized.checkpoint
        plan.choose_dtypes(spared_paths)
        if not self.raw:
            refuse_dependent_tensors(
                plan.checkpoint,
                {*plan.casts, *plan.uncastable},
                "add --raw to cast them as plain numbers",
            )
        changes = list(plan.list_changes())
        if not plan.casts and not plan.dequantized:
            # Only warnings, if tensors have the dtype already: nothing was to be done.
            notable = [
                change for change in changes if change.kind == "warning" or not plan.unchanged
            ]
            return checkpoint.with_root(checkpoint.root, *notable) if notable else checkpoint
        work = _Work(plan, allow_overflow=self.allow_overflow)
        root = rebuild(plan.checkpoint.root, work.replace_leaf)
        result = replace(checkpoint, details=plan.checkpoint.details)
        result = result.with_root(root, *changes, *plan.warn_of_separated())
        return replace(result, reports=(*result.reports, work.report_losses))


def parse_keep(keep: Any) -> tuple[tuple[str, str | None], ...]:
    """Return the exceptions from a cast: globs, each with a dtype, or None for the tensor's own.

    Args:
        keep: A mapping of keys and globs (`core.addressing`) to dtypes or None, or an iterable of
            these pairs or of patterns.

    Raises:
        UsageError: if it is neither, or tensors cannot be cast to a dtype.
    """
    items = keep.items() if isinstance(keep, Mapping) else keep
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise UsageError(f"keep takes a list of globs, or globs with dtypes, not {keep!r}")
    rules: list[tuple[str, str | None]] = []
    for item in items:
        match item:
            case (str() as glob) | (str() as glob, None):
                rules.append((glob, None))
            case (str() as glob, dtype):
                rules.append((glob, parse_floating_dtype(dtype)))
            case _:
                raise UsageError(
                    f"keep takes globs, or pairs of a glob and a dtype, not {item!r}",
                    hint='keep={"*.norm.*": "float32", "*.bias": None}',
                )
    return tuple(rules)


def _find_obstacle(tensor: TensorRef, dtype: str) -> str | None:
    """Return the reason why a floating tensor cannot be cast to `dtype`, or None."""
    if tensor.kind == "numpy":
        return "a numpy array"
    if tensor.has_content:
        if tensor.flags and dtype.startswith("float8"):
            return "lazily negated, which torch does not support for 8-bit dtypes"
        return None
    return "part of a distributed tensor" if tensor.is_spread else f"a {tensor.kind} tensor"


@dataclass(frozen=True)
class _PendingCast:
    """A tensor to cast, with its new dtype and all of its keys."""

    tensor: TensorRef
    storage: Storage
    dtype: str
    names: list[str] = field(default_factory=list)

    @property
    def pair(self) -> tuple[str, str]:
        """The old and the new dtype."""
        return self.tensor.dtype, self.dtype


@dataclass
class _Plan:
    """The new dtype of each tensor, and the changes for the receipt."""

    checkpoint: Checkpoint
    dtype: str | None
    """The new dtype of all tensors without a rule. None: only dequantized weights change."""
    rules: dict[str, str | None]
    """The exceptions: the dtype by glob, or None to keep the dtype."""
    casts: dict[int, _PendingCast] = field(default_factory=dict)
    """The tensors to cast, by the identity of the tensor with the elements."""
    dequantized: Dequantized | None = None
    """The dequantized weights, which get `plain_dtype`."""
    plain_dtype: str = ""
    uncastable: set[int] = field(default_factory=set)
    """The identities of tensors that cannot be cast."""
    unchanged: set[int] = field(default_factory=set)
    """The identities of tensors that already have the new dtype."""
    _matches_by_rule: Counter[str] = field(default_factory=Counter)
    _uncastable_names: list[str] = field(default_factory=list)
    _other_dtypes: Counter[str] = field(default_factory=Counter)
    _optimizer_count: int = 0
    _disputed_names: list[str] = field(default_factory=list)

    def choose_dtypes(self, spared_paths: set[Path]) -> None:
        """Choose the dtype of every tensor of the checkpoint, except at `spared_paths`."""
        tensors = [*self.checkpoint.tensors(), *_iterate_unsaved_buffers(self.checkpoint)]
        glob_by_position = self._match_rules(tensors)
        for position, (path, tensor) in enumerate(tensors):
            if tensor.dtype not in FLOATING or tensor.kind == "quantized":
                self._other_dtypes[tensor.dtype] += 1
            elif path in spared_paths:
                self._optimizer_count += 1
            else:
                self._choose_dtype(path, tensor, glob_by_position.get(position))
        # A tensor with two keys, of which one keeps its dtype and the other does not.
        for identity in self.unchanged & self.casts.keys():
            self._disputed_names.extend(self.casts.pop(identity).names)

    def _match_rules(self, tensors: list[tuple[Path, TensorRef]]) -> dict[int, str]:
        """Return the glob of the first rule that matches each tensor, by position in `tensors`.

        A tensor without a match is left out.

        Raises:
            NotFound: if a rule matches no tensor.
            AmbiguousName: if a name matches several tensors.
        """
        index, glob_by_position = NameIndex(tensors, self.checkpoint.path), dict[int, str]()
        for glob in self.rules:
            positions = index.select(glob, endings=False)
            if not positions:
                raise unmatched_error(index.describe_unmatched(glob), self.checkpoint.path)
            for position in positions:
                glob_by_position.setdefault(position, glob)
        return glob_by_position

    def _choose_dtype(self, path: Path, tensor: TensorRef, glob: str | None) -> None:
        """Choose the dtype of a tensor, or note the reason why it cannot be cast.

        `glob` is that of the first rule that matches it; a rule without a dtype keeps the one that
        it has, or for a quantized weight `plain_dtype`, to which it was dequantized.
        """
        name, elements = name_of(path), get_elements(tensor)
        dequantized_storages = self.dequantized.storages if self.dequantized else ()
        is_dequantized = id(tensor.storage) in dequantized_storages
        if glob is not None:
            kept_dtype = self.plain_dtype if is_dequantized else tensor.dtype
            dtype = self.rules[glob] or kept_dtype
            self._matches_by_rule[glob] += 1
        elif is_dequantized:
            dtype = self.plain_dtype
        else:
            dtype = self.dtype or tensor.dtype
        obstacle = _find_obstacle(elements, dtype)
        if dtype == tensor.dtype:
            self.unchanged.add(id(elements))
        elif obstacle is not None or elements.storage is None:  # no storage is always an obstacle
            self.uncastable.add(id(elements))
            self._uncastable_names.append(f"{name} ({obstacle})")
        else:
            cast = self.casts.setdefault(
                id(elements), _PendingCast(elements, elements.storage, dtype)
            )
            cast.names.append(name)
            if cast.dtype != dtype:  # another key of the tied tensor has another dtype
                self._disputed_names.append(name)

    def list_changes(self) -> Iterator[Change]:
        """Yield a change for each group of tensors that is cast, or skipped, with the reason."""
        if plain := self.dequantized:
            count = len(plain.storages)
            text = f"dequantized {counted(count, 'tensor')} ({listed(plain.schemes)})"
            left_out = f"; left out: {listed(plain.dropped_keys)}" if plain.dropped_keys else ""
            yield Change("dequantize", text + left_out, count, now=self.plain_dtype)
        pairs = Counter(cast.pair for cast in self.casts.values() for _ in cast.names)
        for (old, new), count in pairs.items():
            text = f"cast {counted(count, 'tensor')} from {old} to {new}"
            # A dtype from `keep` is not the dtype of the whole model.
            now = new if new == self.dtype else None
            yield Change("cast", text, count, was=old, now=now)
        for glob, dtype in self.rules.items():
            count = self._matches_by_rule[glob]
            if not count:
                text = f"no floating-point tensor matches {printable(glob)!r}"
                yield Change("warning", text)
            elif dtype is None:  # with a dtype, its casts are counted above
                yield Change(
                    "keep",
                    f"kept {counted(count, 'tensor')} that match {printable(glob)!r}",
                    count,
                )
        if self._other_dtypes:
            count = sum(self._other_dtypes.values())
            are = "is" if count == 1 else "are"
            dtypes = listed(self._other_dtypes)
            text = f"skipped {counted(count, 'tensor')} that {are} not floating point ({dtypes})"
            yield Change("keep", text, count)
        if self._optimizer_count:
            tensors = counted(self._optimizer_count, "tensor")
            text = f"skipped {tensors} of optimizers (--cast-optimizer casts them)"
            yield Change("keep", text, self._optimizer_count)
        if self._uncastable_names:
            text = f"unchanged: {listed(self._uncastable_names)}"
            yield Change("warning", text, len(self._uncastable_names))
        if self._disputed_names:
            text = f"tied keys must have one dtype: {listed(self._disputed_names)}"
            yield Change("warning", text, len(self._disputed_names))

    def warn_of_separated(self) -> Iterator[Change]:
        """Warn of tensors that no longer share memory because their dtypes differ now."""
        pairs_by_storage: dict[int, set[tuple[str, str]]] = {}  # of old and new dtype
        names_by_storage: dict[int, list[str]] = {}
        for cast in self.casts.values():
            pairs_by_storage.setdefault(id(cast.storage), set()).add(cast.pair)
            names_by_storage.setdefault(id(cast.storage), []).extend(cast.names)
        not_cast = "", ""
        for node in every_node(self.checkpoint.root):
            is_uncast = isinstance(node, (TensorRef, StorageRef)) and id(node) not in self.casts
            if is_uncast and id(node.storage) in pairs_by_storage:
                pairs_by_storage[id(node.storage)].add(not_cast)
        separated = [
            name
            for storage, pairs in pairs_by_storage.items()
            if len(pairs) > 1
            for name in names_by_storage[storage]
        ]
        if separated:
            text = f"no longer shares memory with other tensors: {listed(separated)}"
            yield Change("warning", text, len(separated))


class _Work:
    """The new storages, and the values that overflowed or were rounded."""

    def __init__(self, plan: _Plan, *, allow_overflow: bool) -> None:
        """Prepare one caster for each pair of dtypes, and one new storage for each cast storage."""
        read_ahead, file, casts = ReadAhead(), plan.checkpoint.path, plan.casts.values()
        self._plan = plan
        self._originals = Originals(plan.checkpoint.root, (cast.tensor for cast in casts))
        self._casters = {
            pair: Caster(*pair, allow_overflow=allow_overflow, file=file, ahead=read_ahead)
            for pair in dict.fromkeys(cast.pair for cast in casts)
        }
        self._groups: dict[tuple[int, str, str], list[_PendingCast]] = {}
        """The casts by the identity of their storage, the old and the new dtype."""
        for cast in casts:
            self._groups.setdefault((id(cast.storage), *cast.pair), []).append(cast)
        self._storages = {}
        for key, group in self._groups.items():
            caster, storage = self._casters[group[0].pair], group[0].storage  # of all in the group
            # Tied names have one cast: the first name is for messages.
            self._storages[key] = caster.cast(
                storage, [(cast.names[0], cast.tensor) for cast in group]
            )

    def replace_leaf(self, node: Any) -> Any:
        """Return a tensor with its new dtype, or any other node unchanged."""
        if not isinstance(node, TensorRef):
            return node
        elements = get_elements(node)
        if elements is not node:  # a sparse tensor, whose values this function got before
            return node if elements.dtype == node.dtype else replace(node, dtype=elements.dtype)
        original = self._originals.find(node)
        if original is None:
            return node
        dtype = self._plan.casts[id(original)].dtype
        storage = self._storages[id(node.storage), node.dtype, dtype]
        return replace_elements(node, dtype=dtype, storage=storage)

    def report_losses(self, gather: Gather) -> Iterator[Change]:
        """Yield the totals for each pair of dtypes, then the tensors with losses, largest first.

        `gather` collects the losses of all processes that write the file.
        """
        for caster in self._casters.values():
            for losses in gather(dict(caster.losses)):
                caster.losses.update(losses)
        for pair, caster in self._casters.items():
            n_computed = self._count_computed_tensors(pair)
            if n_computed:
                yield _summarize_losses(pair, n_computed, caster.losses.values())
        ties = {
            cast.names[0]: f"{printable(cast.names[0])} (and {listed(cast.names[1:])})"
            for cast in self._plan.casts.values()
            if len(cast.names) > 1
        }
        for kind, verb in _LOSSES.items():
            rows = [
                (getattr(losses, kind), name, dtype, losses)
                for (_, dtype), caster in self._casters.items()
                for name, losses in caster.losses.items()
                if getattr(losses, kind)
            ]
            rows.sort(key=lambda row: (-row[0], row[1]))  # by count, then by name
            for count, name, dtype, losses in rows:
                share = f"{count:,} of {counted(losses.elements, 'value')}"
                text = f"{ties.get(name) or printable(name)}: {share} {verb} in {dtype}"
                if kind == "overflow":
                    text += f" (the largest magnitude is {losses.largest:.5g})"
                yield Change(kind, text, count)

    def _count_computed_tensors(self, pair: tuple[str, str]) -> int:
        """Return the number of tensors of a pair of dtypes whose storages were cast and written."""
        counted_names = self._casters[pair].losses
        groups = (casts for casts in self._groups.values() if casts[0].pair == pair)
        # A storage has been cast if the losses of one of its tensors were counted.
        computed = (
            casts for casts in groups if any(one.names[0] in counted_names for one in casts)
        )
        return sum(len(cast.names) for casts in computed for cast in casts)


_LOSSES = {
    "overflow": "overflowed",
    "underflow": "underflowed to zero",
    "precision": "lost precision",
}


def _summarize_losses(pair: tuple[str, str], tensors: int, losses: Iterable[Losses]) -> Change:
    """Return the change for all tensors cast from one dtype to another, with their losses."""
    all_losses = list(losses)
    count = sum(tensor_losses.elements for tensor_losses in all_losses)
    facts = []
    for kind, verb in _LOSSES.items():
        n_lost = sum(getattr(tensor_losses, kind) for tensor_losses in all_losses)
        if n_lost:
            share = (
                _format_share(n_lost, count) if kind == "precision" else counted(n_lost, "value")
            )
            facts.append(f"{share} {verb}")
    subject = f"{counted(tensors, 'tensor')}, {' -> '.join(pair)}"
    return Change("cast", f"{subject}: {', '.join(facts) or 'nothing was lost'}", count)


def _format_share(part: int, whole: int) -> str:
    """Return a share of the values as a percentage, or as a count below 1%."""
    percent = 100 * part / whole
    if percent < 1:
        return counted(part, "value")
    shown = f"{percent:.0f}" if percent <= 99 or part == whole else "more than 99"
    return f"{shown}% of the values"
