"""The entries of a file and a model, and the report of matching them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypedDict

from ckptool._lazy import Result
from ckptool.core.model import Shape, TensorRef
from ckptool.core.sections import Section, is_extra_state, list_wrappable_keys
from ckptool.dtypes import REAL_PARTS
from ckptool.remedies import Remedy


class Slot(NamedTuple):
    """One entry of a state dict or a model."""

    shape: Shape | None = None
    """None if unknown, or for an `_extra_state` or a lazy parameter; None fits every shape."""
    dtype: str | None = None
    """The torch name without `torch.`; None if unknown or not a tensor."""
    kind: str = "tensor"
    """`parameter`, `buffer`, `extra` (an `_extra_state`, or an entry that is not a tensor), or
    `tensor` if that is unknown."""
    tie: Hashable = None
    """Equal for keys that share one tensor; None if the tensor is not shared."""

    @property
    def elements(self) -> int:
        """The number of elements, or 1 if the shape is unknown."""
        return 1 if self.shape is None else prod(size or 0 for size in self.shape)


EXTRA = Slot(kind="extra")

Slots = dict[str, Slot]
"""Slots by key, in the order of the state dict."""


def fits(file_slot: Slot, model_slot: Slot) -> bool:
    """Return True if torch loads the file's entry into the model's entry.

    Torch copies a tensor of the same shape, and [1] into a scalar, as torch 0.3 saved scalars
    (`Module._load_from_state_dict`). Any value fits a model's entry without a known shape.
    """
    if model_slot.shape is None or file_slot.shape == model_slot.shape:
        return True
    if file_slot.shape is None:
        return file_slot.kind != "extra"  # a tensor of unknown shape may fit
    return not model_slot.shape and file_slot.shape == (1,)


def slots_of(section: Section) -> Slots:
    """Return the slots of a state dict or a pickled module in a file, in its order.

    An entry of a module that is not a tensor is `extra`, as is any `_extra_state`. Plain values
    that a training script added are left out. Parameters are known only if the file has
    `Parameter` objects, as in a pickled module. Keys with one place in the file are tied.
    """
    node, is_module = section.node, section.kind == "module"
    slots = dict.fromkeys(list_wrappable_keys(node), EXTRA)
    tensors = {
        key: node[key]
        for key in slots
        if isinstance(node[key], TensorRef) and not is_extra_state(key)
    }
    locations = {key: tensor.place or id(tensor) for key, tensor in tensors.items()}
    counts = Counter(locations.values())
    for key, tensor in tensors.items():
        kind = "parameter" if tensor.is_parameter else "buffer" if is_module else "tensor"
        tie = locations[key] if counts[locations[key]] > 1 else None
        slots[key] = Slot(tensor.shape, tensor.dtype, kind, tie)
    return slots


_INTEGERS = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""The smallest and the largest number of each dtype."""


@lru_cache(maxsize=256)
def is_exact_cast(wide: str, narrow: str) -> bool:
    """Return True if a cast from `narrow` to `wide` changes no value; False for unknown dtypes."""
    if wide == narrow:
        return True
    # Imported here: most files need no cast.
    from ckptool.tensors.casting import FLOATS, is_exact

    if wide in REAL_PARTS:
        return is_exact_cast(REAL_PARTS[wide], REAL_PARTS.get(narrow, narrow))
    if narrow in FLOATS:
        return wide in FLOATS and is_exact(narrow, wide)
    if narrow not in _INTEGERS:
        return False
    lowest, highest = _INTEGERS[narrow]
    if wide in _INTEGERS:
        return _INTEGERS[wide][0] <= lowest and highest <= _INTEGERS[wide][1]
    float_format = FLOATS.get(wide)
    if float_format is None or not float_format.signed:
        return False
    return highest.bit_length() <= float_format.digits and -lowest <= float_format.largest


def _to_json(value: Any) -> Any:
    """Return a value for JSON: a list for a tuple, a dict for a row or the report."""
    if isinstance(value, Remedy):
        return str(value)
    if isinstance(value, (tuple, list)):
        # Some rows have a `to_dict` of their own.
        return [item.to_dict() if isinstance(item, _Row) else _to_json(item) for item in value]
    if isinstance(value, (_Row, MatchReport)):
        return {item.name: _to_json(getattr(value, item.name)) for item in fields(value)}
    return value


@dataclass(frozen=True, slots=True)
class _Row:
    """A part of a report."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as in the document `ckptool.match/1`."""
        made: dict[str, Any] = _to_json(self)
        return made


@dataclass(frozen=True, slots=True)
class Renaming(_Row):
    """A rule that turns keys of the file into keys of the model.

    `kind` is `wrapper`, `prefix`, `known` (a rename in torch's history), `rule` (given by the
    user), or `proposed` (not applied). A key changed by several rules is listed in each of them.
    """

    kind: str
    text: str
    """A description: `module. removed`, `backbone. -> encoder.`, `gamma -> weight`."""
    names: tuple[tuple[str, str], ...]
    """Pairs of the key in the file and the key in the model."""
    rule: str = ""
    """The rule as `REGEX=>REPL` for `rename --rename`; empty if it needs several."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as in the document `ckptool.match/1`; `rule` is null if it is empty."""
        return {**_to_json(self), "rule": self.rule or None}


@dataclass(frozen=True, slots=True)
class Mismatch(_Row):
    """A tensor with another shape than in the model."""

    name: str
    """The key in the model."""
    own: str
    """The key in the file."""
    shape: Shape
    """The shape in the file."""
    wanted: Shape
    """The shape in the model."""


@dataclass(frozen=True, slots=True)
class Layout(_Row):
    """A tensor with axes in another, or an unknown, order in the file."""

    name: str
    own: str
    axes: tuple[int, ...] = ()
    """The axis in the file for each axis in the model; empty if unknown."""
    reason: str = ""
    """The reason why the order is unknown."""


@dataclass(frozen=True, slots=True)
class DtypeChange(_Row):
    """A tensor that is cast to another dtype on loading."""

    name: str
    own: str
    before: str
    after: str
    lossy: bool
    """True if values change: decided by the values if they are known, otherwise by the dtypes."""
    loss: str = ""
    """The loss, if the values are known: `3 of 64 overflow`."""


@dataclass(frozen=True, slots=True)
class Ambiguity(_Row):
    """Keys of the file that fit several keys of the model, or the reverse."""

    names: tuple[str, ...]
    candidates: tuple[str, ...]
    rules: tuple[str, ...] = ()
    """Rules `REGEX=>REPL`, each of which resolves the ambiguity."""


@dataclass(frozen=True, slots=True)
class Overlap(_Row):
    """Model tensors that share some of their memory. Reports no longer contain this."""

    names: tuple[str, ...]
    whole: str = ""
    """The one of `names` with the memory of all others; empty if there is none."""


@dataclass(frozen=True, slots=True)
class OptimizerReport(_Row):
    """The result of matching the state of an optimizer."""

    by: str
    """`names` or `position`."""
    matched: int
    """The number of parameters with loaded state."""
    parameters: int
    """The number of parameters of the optimizer."""
    problems: tuple[str, ...] = ()
    """The reasons why the state does not fit; empty if it fits."""
    cast: tuple[DtypeChange, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: Remedy | str = ""
    """The fix for the first of `problems`: arguments of `load_into`, or an instruction."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatchReport(Result):
    """The result of matching a state dict with a model."""

    file: str = ""
    """The path of the file; empty for a state dict in memory."""
    model: str = ""
    """The class of the model, or the path of the reference."""
    loaded: int = 0
    """The number of loaded elements of the model's parameters, ties once."""
    parameters: int = 0
    """The number of elements of the model's parameters, ties once; of all tensors if parameters
    are unknown, and of keys if there are no elements."""
    fitting: int = 0
    """The number of model keys that are loaded."""
    names: int = 0
    """The number of model keys, without the ones in `kept`."""
    missing_keys: list[str] = field(default_factory=list)
    """Model keys without a match in the file, as `load_state_dict` returns them."""
    unexpected_keys: list[str] = field(default_factory=list)
    """File keys without a match in the model."""
    mismatched: tuple[Mismatch, ...] = ()
    """Matching keys with different shapes."""
    renamed: tuple[Renaming, ...] = ()
    """The applied rules, in order."""
    layouts: tuple[Layout, ...] = ()
    """TensorFlow, Keras or Flax tensors that are transposed, and tensors for which neither the
    module type nor the user decides."""
    cast: tuple[DtypeChange, ...] = ()
    """Tensors that are cast to another dtype."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of model keys that are tied and loaded as one tensor."""
    untied: tuple[tuple[str, ...], ...] = ()
    """Groups of keys that are tied in the model but differ in the file."""
    overlapping: tuple[Overlap, ...] = ()
    """Always empty; kept for compatibility."""
    ambiguous: tuple[Ambiguity, ...] = ()
    """Ambiguous keys, which are also listed as missing and unexpected."""
    proposed: tuple[Renaming, ...] = ()
    """Rules that would match more keys; none of them was applied."""
    recipe: str = ""
    """The `convert` recipe that turns the keys of the file into those of the model:
    `experts-qwen`, `experts-qwen --reverse`. It was not applied."""
    moved: tuple[str, ...] = ()
    """Always empty; kept for compatibility."""
    respelled: tuple[str, ...] = ()
    """Always empty; kept for compatibility."""
    reformed: tuple[tuple[str, str], ...] = ()
    """Always empty; kept for compatibility."""
    left_out: tuple[tuple[str, str], ...] = ()
    """File keys that no model loads, such as an average's counter, each with the reason."""
    kept: tuple[tuple[str, str], ...] = ()
    """Model keys that keep their value, each with the reason: a BatchNorm counter that old files
    do not have."""
    optimizer: OptimizerReport | None = None
    """The result for the optimizer; None if no optimizer was given."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
    accepted: bool = field(default=False, compare=False)
    """True if `load_into` returned it: the differences were allowed. Not in the JSON document."""

    @property
    def coverage(self) -> float:
        """The share of the model's parameters that is loaded, from 0 to 1."""
        return self.loaded / self.parameters if self.parameters else 1.0

    @property
    def undecided(self) -> tuple[Layout, ...]:
        """The tensors with an unknown order of axes, which are not loaded."""
        return tuple(layout for layout in self.layouts if layout.reason)

    @property
    def fits(self) -> bool:
        """True if the whole model is loaded from the whole file without loss."""
        return not (
            self.missing_keys
            or self.unexpected_keys
            or self.mismatched
            or self.untied
            or self.undecided
            or any(cast.lossy for cast in self.cast)
            or (self.optimizer is not None and self.optimizer.problems)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.match/1`."""
        entries = _to_json(self)
        del entries["accepted"]  # `ckptool match` adds its own, with the reasons
        return {
            "schema": "ckptool.match/1",
            "file": self.file,
            "model": self.model,
            "fits": self.fits,
            "coverage": self.coverage,
            **entries,
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "kept": [{"name": name, "reason": reason} for name, reason in self.kept],
        }


def max_allowed_keys(n_keys: int) -> int:
    """Return the number of keys that a hint may allow: a tenth, or two for a layer."""
    return max(n_keys // 10, 2)


class Counts(TypedDict):
    """Fields of a `MatchReport`."""

    loaded: int
    parameters: int
    fitting: int
    names: int


def count_loaded(
    model_slots: Mapping[str, Slot], loaded: Collection[str], kept: Collection[str]
) -> Counts:
    """Count how much of a model is loaded: of its parameters, if they are known.

    `loaded` are the loaded keys, `kept` the keys that are not required. A tied tensor counts once,
    as loaded if one of its keys is. If parameters are unknown, all tensors count; in a model
    without elements, each key counts as one.
    """
    required = model_slots
    if kept:  # rarely
        required = {key: slot for key, slot in model_slots.items() if key not in kept}
    counted = required
    kinds = {slot.kind for slot in required.values()}
    if "parameter" in kinds and "tensor" not in kinds:  # all kinds are known
        counted = {key: slot for key, slot in required.items() if slot.kind == "parameter"}
    elif "extra" in kinds:
        counted = {key: slot for key, slot in required.items() if slot.kind != "extra"} or required
    untied_keys = [key for key, slot in counted.items() if slot.tie is None]
    if len(untied_keys) < len(counted):
        tied: dict[Hashable, str] = {}
        for key, slot in counted.items():
            if slot.tie is not None and (slot.tie not in tied or key in loaded):
                tied[slot.tie] = key
        untied_keys += tied.values()
    sizes = {key: counted[key].elements for key in untied_keys}
    if not any(sizes.values()):
        sizes = dict.fromkeys(counted, 1)
    return {
        "loaded": sum([size for key, size in sizes.items() if key in loaded]),
        "parameters": sum(sizes.values()),
        "fitting": sum([key in loaded for key in required]),
        "names": len(required),
    }


def list_casts(
    pairs: Mapping[str, str], file_slots: Mapping[str, Slot], model_slots: Mapping[str, Slot]
) -> tuple[DtypeChange, ...]:
    """Return the casts of the paired tensors in the order of the pairs, judged by dtype."""
    casts = []
    for key, file_key in pairs.items():
        before, after = file_slots[file_key].dtype, model_slots[key].dtype
        if before != after and before is not None and after is not None:
            is_lossy = not is_exact_cast(wide=after, narrow=before)
            casts.append(DtypeChange(key, file_key, before, after, is_lossy))
    return tuple(casts)
