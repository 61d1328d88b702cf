"""Casts of tensors to another dtype."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

from ckptool.core.addressing import NameIndex, unmatched_error
from ckptool.core.checkpoint import Change, Checkpoint, Gather
from ckptool.core.model import (
    SPARSE_KINDS,
    Opaque,
    Path,
    Storage,
    StorageRef,
    TensorRef,
    copy_with_items,
    find_tensors,
    replace_elements,
)
from ckptool.core.modules import find_opaque_content, get_own_tensors, walk_modules
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.quantization_config import plain_header, quantization_config
from ckptool.core.quantizers import (
    MARKERS,
    OPTIMIZER_KEY,
    Quantized,
    find_incomplete,
    find_quantized,
    to_plain_key,
)
from ckptool.core.sections import MODEL_KINDS, describe_opaque_content
from ckptool.core.tree import is_within, name_of, rebuild, walk, walk_everything as every_node
from ckptool.dtypes import BY_NAME, BY_SAFETENSORS
from ckptool.errors import NotFound, NotRepresentable, UsageError
from ckptool.files.computed import ReadAhead
from ckptool.tensors.casting import FLOATS, Caster, Losses
from ckptool.tensors.dequantizing import PACKED, can_dequantize, dequantize
from ckptool.tensors.unpacking import UnknownLayout
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable, shell

if TYPE_CHECKING:
    import torch


class Originals:
    """Recognizes chosen tensors of a tree while it is rebuilt.

    `rebuild` passes on a copy of a tensor if its attributes or hooks are new.
    """

    def __init__(self, root: Any, chosen: Iterable[TensorRef]) -> None:
        """Remember the `chosen` tensors of the tree `root`."""
        self._chosen = {id(tensor): tensor for tensor in chosen}
        self._by_view: dict[Any, TensorRef] = {
            tensor.place or id(tensor): tensor for tensor in self._chosen.values()
        }
        self._known = {id(node) for node in every_node(root)}

    def find(self, node: Any) -> TensorRef | None:
        """Return the chosen tensor that a node is, or was copied from."""
        if not isinstance(node, TensorRef) or id(node) in self._known:
            return self._chosen.get(id(node))
        return self._by_view.get(node.place)


def replace_tensors(root: Any, replacements: Mapping[Path, TensorRef]) -> Any:
    """Return the tree with new tensors at some paths; keys tied to these keep the old tensor.

    Paths that lead through more than containers and attributes are skipped.
    """
    holders: dict[int, dict[Any, dict[Path, TensorRef]]] = {}
    for path, tensor in replacements.items():
        location = _find_holder(root, path)
        if location is not None:
            holder, depth = location
            key, inner_path = path[depth], path[depth + 1 :]
            holders.setdefault(id(holder), {}).setdefault(key, {})[inner_path] = tensor

    def replace_entries(old: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict with the new tensors, or the dict itself."""
        if id(old) not in holders:
            return old
        new = copy_with_items(old, old)
        for key, new_tensors in holders[id(old)].items():
            for inner_path, tensor in new_tensors.items():
                new[key] = _replace_inside(new[key], inner_path, tensor)
        return new

    return rebuild(root, None, replace_entries) if holders else root


def _find_holder(root: Any, path: Path) -> tuple[dict[Any, Any], int] | None:
    """Return the innermost dict on the path of a tensor, and its depth; None for another path.

    The path may lead through dicts, lists, tuples and attributes of objects.
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
    items = list(node)
    items[path[0]] = _replace_inside(items[path[0]], path[1:], tensor)
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
    others = {id(tensor) for path, tensor in checkpoint.tensors() if path not in spared}
    own: dict[int, TensorRef] = {}
    placed = {
        path: own.setdefault(id(tensor), replace(tensor))
        for path, tensor in checkpoint.tensors()
        if path in spared and id(tensor) in others
    }
    return replace(checkpoint, root=replace_tensors(checkpoint.root, placed))


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
        exceptions = (f"{glob}={dtype}" if dtype else glob for glob, dtype in parse_keep(self.keep))
        yield from replace(self, keep=()).words() if self.keep else super().words()
        for exception in exceptions:
            yield from ("--keep", exception)

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
        rules: dict[str, str | None] = {}
        for glob, dtype in parse_keep(self.keep):
            rules.setdefault(glob, dtype)
        spared_paths = set() if self.cast_optimizer else find_optimizer_paths(checkpoint)
        default = (
            None
            if self.dtype is None and self.dequantize is not None
            else parse_floating_dtype(self.dtype)
        )
        plan = _Plan(_separate_spared(checkpoint, spared_paths), default, rules)
        if self.dequantize is not None:
            plan.dequantize(parse_floating_dtype(self.dequantize))
        plan.choose_dtypes(spared_paths)
        if not self.raw:
            refuse_dependent_tensors(
                plan.checkpoint,
                {*plan.casts, *plan.uncastable},
                "add --raw to cast them as plain numbers",
            )
        changes = list(plan.list_changes())
        if not plan.casts and not plan.dequantized:
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


def refuse_dependent_tensors(
    checkpoint: Checkpoint, chosen: Collection[int], remedy: str = ""
) -> None:
    """Refuse to change tensors that only have a meaning together with others.

    `chosen` has the identities of the tensors to change.

    Raises:
        NotRepresentable: if one is quantized, is the companion of a quantized one, or has a meaning
            known only to the class of its module. `remedy` is the hint for all of these.
    """

    def raise_error(fact: str, *remedies: str) -> None:
        """Raise the error with all remedies as its hint."""
        hint = "; ".join(filter(None, (*remedies, remedy)))
        raise NotRepresentable(fact, file=checkpoint.path, hint=hint or None)

    def contains_chosen(node: Any) -> bool:
        """Return True if a node is or contains one of the tensors to change."""
        return any(id(_get_elements(tensor)) in chosen for tensor in find_tensors(node))

    for section in checkpoint.sections:
        for path, node in (
            find_opaque_content(section.holder).items() if section.kind == "module" else ()
        ):
            if contains_chosen(node):
                raise_error(f"cannot be cast: {describe_opaque_content(path, node)}")
    for state, name, quantized in _find_quantized_weights(checkpoint):
        if any(contains_chosen(state[key]) for key in (name, *quantized.companions)):
            file = f" {shell(checkpoint.path)}" if checkpoint.path else ""
            plain = f"dequantize them: ckptool cast --dequantize bfloat16{file}"
            cls = getattr(state[name], "class_name", "")
            config = quantization_config(checkpoint)
            companions = (
                listed(quantized.companions)
                if quantized.companions
                else f"its class, {printable(cls)}"
            )
            raise_error(
                f"{printable(name)!r} {quantized}: its values need {companions}",
                plain if can_dequantize(state, name, quantized, config) else "",
            )


def _find_quantized_weights(
    checkpoint: Checkpoint, *, alone: bool = False
) -> Iterator[tuple[dict[Any, Any], str, Quantized]]:
    """Yield the state dict, the key and the quantization of each quantized weight.

    Only models are judged by shapes, and a pickled module by its `state_dict()`. With `alone`, also
    yield torch's quantized tensors, which need no companions (in a layer, the scale of the
    activations is next to them).
    """
    models = {
        id(section.node): section for section in checkpoint.sections if section.kind in MODEL_KINDS
    }
    modules = (section.node for section in models.values() if section.kind == "module")
    for node in chain(every_node(checkpoint.root), modules):
        if isinstance(node, dict):
            for name, quantized in find_quantized(node, by_shape=id(node) in models).items():
                if next(find_tensors(node[name]), None) is not None:
                    yield node, name, quantized
            for name, value in node.items() if alone else ():
                if isinstance(value, TensorRef) and value.kind == "quantized":
                    stem = str(name).removesuffix("weight")
                    companions = tuple(f"{stem}{end}" for end in ("scale", "zero_point"))
                    has_companions = stem != name and all(key in node for key in companions)
                    yield (
                        node,
                        name,
                        Quantized(f"torch.{value.dtype}", companions if has_companions else ()),
                    )


def _get_elements(tensor: TensorRef) -> TensorRef:
    """Return the tensor itself, or the values of a sparse tensor, or the buffer of a nested one."""
    part = (tensor.parts or {}).get("buffer" if tensor.kind == "nested" else "values")
    return part if tensor.kind in (*SPARSE_KINDS, "nested") and part is not None else tensor


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
    """None: only dequantized weights change."""
    rules: dict[str, str | None]
    casts: dict[int, _PendingCast] = field(default_factory=dict)
    """The tensors to cast, by the identity of the tensor with the elements."""
    dequantized: dict[int, str] = field(default_factory=dict)
    """The new dtypes of dequantized storages, by identity."""
    schemes: dict[str, None] = field(default_factory=dict)
    """The schemes of dequantized weights."""
    dropped_keys: dict[str, None] = field(default_factory=dict)
    """The keys that dequantized weights no longer need."""
    uncastable: set[int] = field(default_factory=set)
    """The identities of tensors that cannot be cast."""
    unchanged: set[int] = field(default_factory=set)
    """The identities of tensors that already have the new dtype."""
    _matches_by_rule: Counter[str] = field(default_factory=Counter)
    _uncastable_names: list[str] = field(default_factory=list)
    _other_dtypes: Counter[str] = field(default_factory=Counter)
    _optimizer_count: int = 0
    _disputed_names: list[str] = field(default_factory=list)

    def dequantize(self, dtype: str) -> None:
        """Replace quantized weights and their companions with plain tensors of `dtype`.

        Raises:
            NotRepresentable: if a weight has an unsupported quantization.
            NotFound: if no weight is quantized.
        """
        replacements_by_state = self._dequantize_weights(dtype)
        for node in every_node(self.checkpoint.root):
            if isinstance(node, dict):
                self._refuse_incomplete(node, replacements_by_state.get(id(node), {}))
        if not replacements_by_state:
            has_float8 = any(
                tensor.dtype.startswith("float8_") for _, tensor in self.checkpoint.tensors()
            )
            raise NotFound(
                "the file has no quantized weights",
                file=self.checkpoint.path,
                hint=f"cast float8 weights without scales with --dtype {dtype}"
                if has_float8 and not self.checkpoint.changes
                else None,
            )

        def replace_entries(old: dict[Any, Any]) -> dict[Any, Any]:
            """Return a state dict with the plain tensors in place of the quantized ones."""
            replacements = replacements_by_state.get(id(old), {})
            if not replacements:
                return old
            entries = [replacements.get(key, {key: value}).items() for key, value in old.items()]
            counts = Counter(key for items in entries for key, _ in items)
            if duplicates := [key for key, count in counts.items() if count > 1]:
                raise NotRepresentable(
                    f"several entries would become {listed(duplicates)} when dequantized",
                    file=self.checkpoint.path,
                )
            return copy_with_items(old, chain.from_iterable(entries))

        root = rebuild(self.checkpoint.root, None, replace_entries)
        details = self.checkpoint.details
        details = replace(details, header=plain_header(details.header))
        self.checkpoint = replace(self.checkpoint, root=root, details=details)

    def _dequantize_weights(self, dtype: str) -> dict[int, dict[str, dict[str, TensorRef]]]:
        """Return the new entries of each quantized weight and companion.

        By the identity of the state dict, then by old key. A companion has no new entries.

        Raises:
            NotRepresentable: if a weight has an unsupported quantization.
        """
        done_by_parts: dict[tuple[int, ...], dict[str, TensorRef]] = {}
        replacements_by_state: dict[int, dict[str, dict[str, TensorRef]]] = {}
        nodes = {id(node) for node in every_node(self.checkpoint.root)}
        seen, config = set[int](), quantization_config(self.checkpoint)
        for state, name, quantized in _find_quantized_weights(self.checkpoint, alone=True):
            if id(state) not in nodes and id(state[name]) in seen:
                continue  # A pickled module's tensor that is done already.
            seen.add(id(state[name]))
            parts = (id(state[name]), *(id(state[key]) for key in quantized.companions))
            replacements = replacements_by_state.setdefault(id(state), {})
            try:
                if parts not in done_by_parts and id(state) not in nodes:
                    raise UnknownLayout
                plain_tensors = done_by_parts.get(parts) or dequantize(
                    state, name, quantized, config, self.checkpoint.path
                )
                key = to_plain_key(quantized.scheme, name)
                stem = key.removesuffix(PACKED) if isinstance(key, str) else key
                new_entries = {
                    f"{stem}{end}" if end else stem: tensor for end, tensor in plain_tensors.items()
                }
            except UnknownLayout as error:
                raise NotRepresentable(
                    f"{printable(str(name))!r} cannot be dequantized: it {quantized}, "
                    f"and {error.message}",
                    file=self.checkpoint.path,
                    hint=error.hint
                    if id(state) in nodes
                    else "add --model-only to convert the module to a state dict first",
                ) from None
            done_by_parts[parts] = plain_tensors
            self.dequantized[id(next(iter(plain_tensors.values())).storage)] = dtype
            self.schemes[quantized.scheme] = None
            markers = (key for key in state if str(key).rpartition(".")[2] in MARKERS)
            left_out = (*quantized.companions, *markers)
            self.dropped_keys.update(dict.fromkeys(left_out))
            replacements.update({name: new_entries} | {key: {} for key in left_out})
        return replacements_by_state

    def _refuse_incomplete(
        self, state: Mapping[Any, Any], replacements: Mapping[str, Mapping[str, TensorRef]]
    ) -> None:
        """Refuse a state dict with quantized weights that lack their companions.

        Such a weight has a key that only quantized weights have, or it looks like a dequantized
        one: the same float8 dtype, or the same last part of the key, dtype and kind. `replacements`
        has the new entries of each dequantized weight.

        Raises:
            NotRepresentable: if the result would still have quantized weights.
        """

        def refuse(name: object, fact: str) -> NoReturn:
            """Raise the error for a weight without its companions."""
            raise NotRepresentable(
                f"{printable(str(name))!r} is {fact}, but the tensors that it needs are missing",
                file=self.checkpoint.path,
                hint="get all shards of the model, or leave it out with --exclude",
            )

        def get_looks(name: Any, tensor: TensorRef) -> tuple[str, str, str]:
            """Return the last part of a key, and the dtype and kind of its tensor."""
            return str(name).rpartition(".")[2], tensor.dtype, tensor.kind

        for name in find_incomplete(state, replacements.keys()):
            refuse(name, "quantized, judging by its key")
        if not replacements:
            return
        # Codes may be stored as bfloat16, like the weights of ordinary layers.
        candidates = {
            name: tensor
            for name, tensor in state.items()
            if isinstance(tensor, TensorRef)
            and (tensor.dtype not in FLOATING or BY_NAME[tensor.dtype].itemsize == 1)
        }
        known = {
            get_looks(name, candidates[name]): name
            for name, plain_tensors in replacements.items()
            if plain_tensors and name in candidates
        }
        float8_names = {dtype: name for (_, dtype, _), name in known.items() if dtype in FLOATING}
        for name, tensor in candidates.items():
            if name not in replacements:
                similar = known.get(get_looks(name, tensor), float8_names.get(tensor.dtype))
                if similar is not None:
                    refuse(name, f"{tensor.dtype}, like the quantized {printable(similar)!r}")

    def choose_dtypes(self, spared_paths: set[Path]) -> None:
        """Choose the dtype of every tensor of the checkpoint, except at `spared_paths`."""
        tensors = [*self.checkpoint.tensors(), *_iterate_unsaved_buffers(self.checkpoint)]
        rule_by_position = self._match_rules(tensors)
        for position, (path, tensor) in enumerate(tensors):
            if tensor.dtype not in FLOATING or tensor.kind == "quantized":
                self._other_dtypes[tensor.dtype] += 1
            elif path in spared_paths:
                self._optimizer_count += 1
            else:
                self._choose_dtype(path, tensor, rule_by_position.get(position))
        for identity in self.unchanged & self.casts.keys():
            self._disputed_names.extend(self.casts.pop(identity).names)

    def _match_rules(self, tensors: list[tuple[Path, TensorRef]]) -> dict[int, str]:
        """Return the first rule that matches each tensor, by position in `tensors`.

        Raises:
            NotFound: if a rule matches no tensor.
            AmbiguousName: if a name matches several tensors.
        """
        index, rule_by_position = NameIndex(tensors, self.checkpoint.path), dict[int, str]()
        for rule in self.rules:
            matches = index.select(rule, endings=False)
            if not matches:
                raise unmatched_error(index.describe_unmatched(rule), self.checkpoint.path)
            for position in matches:
                rule_by_position.setdefault(position, rule)
        return rule_by_position

    def _choose_dtype(self, path: Path, tensor: TensorRef, rule: str | None) -> None:
        """Choose the dtype of a tensor, or note the reason why it cannot be cast.

        `rule` is the first exception that matches it.
        """
        dtype, name, elements = self.dtype or tensor.dtype, name_of(path), _get_elements(tensor)
        plain_dtype = self.dequantized.get(id(tensor.storage))
        if rule is not None:
            dtype = self.rules[rule] or plain_dtype or tensor.dtype
            self._matches_by_rule[rule] += 1
        elif plain_dtype is not None:
            dtype = plain_dtype
        obstacle = _find_obstacle(elements, dtype)
        if dtype == tensor.dtype:
            self.unchanged.add(id(elements))
        elif obstacle is not None or elements.storage is None:
            self.uncastable.add(id(elements))
            self._uncastable_names.append(f"{name} ({obstacle})")
        else:
            cast = self.casts.setdefault(
                id(elements), _PendingCast(elements, elements.storage, dtype)
            )
            cast.names.append(name)
            if cast.dtype != dtype:
                self._disputed_names.append(name)

    def list_changes(self) -> Iterator[Change]:
        """Yield a change for each group of tensors that is cast, or skipped, with the reason."""
        if self.dequantized:
            count = len(self.dequantized)
            text = f"dequantized {counted(count, 'tensor')} ({listed(self.schemes)})"
            left_out = f"; left out: {listed(self.dropped_keys)}" if self.dropped_keys else ""
            [plain_dtype] = {*self.dequantized.values()}
            yield Change("dequantize", text + left_out, count, now=plain_dtype)
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
            elif dtype is None:
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
        kinds: dict[int, set[tuple[str, str]]] = {}
        names: dict[int, list[str]] = {}
        for cast in self.casts.values():
            kinds.setdefault(id(cast.storage), set()).add(cast.pair)
            names.setdefault(id(cast.storage), []).extend(cast.names)
        for node in every_node(self.checkpoint.root):
            if isinstance(node, (TensorRef, StorageRef)) and id(node) not in self.casts:
                kinds.get(id(node.storage), set()).add(("", ""))
        separated = [
            name for storage, pairs in kinds.items() if len(pairs) > 1 for name in names[storage]
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
        for cast in casts:
            self._groups.setdefault((id(cast.storage), *cast.pair), []).append(cast)
        self._storages = {
            key: self._casters[first.pair].cast(
                first.storage, [(cast.names[0], cast.tensor) for cast in (first, *others)]
            )
            for key, (first, *others) in self._groups.items()
        }

    def replace_leaf(self, node: Any) -> Any:
        """Return a tensor with its new dtype, or any other node unchanged."""
        if not isinstance(node, TensorRef):
            return node
        elements = _get_elements(node)
        if elements is not node:  # The values of a sparse tensor were cast before.
            return node if elements.dtype == node.dtype else replace(node, dtype=elements.dtype)
        original = self._originals.find(node)
        if original is None:
            return node
        dtype = self._plan.casts[id(original)].dtype
        storage = self._storages[id(node.storage), node.dtype, dtype]
        return replace_elements(node, dtype=dtype, storage=storage)

    def report_losses(self, gather: Gather) -> Iterator[Change]:
        """Yield the totals for each pair of dtypes, then the tensors with losses, largest first."""
        for caster in self._casters.values():
            for losses in gather(dict(caster.losses)):
                caster.losses.update(losses)
        for pair, caster in self._casters.items():
            count = sum(
                len(cast.names)
                for casts in self._groups.values()
                if casts[0].pair == pair
                and any(member.names[0] in caster.losses for member in casts)
                for cast in casts
            )
            if count:
                yield _summarize_losses(pair, count, caster.losses.values())
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
            for count, name, dtype, losses in sorted(rows, key=lambda item: (-item[0], item[1])):
                share = f"{count:,} of {counted(losses.elements, 'value')}"
                text = f"{ties.get(name) or printable(name)}: {share} {verb} in {dtype}"
                if kind == "overflow":
                    text += f" (the largest magnitude is {losses.largest:.5g})"
                yield Change(kind, text, count)


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
