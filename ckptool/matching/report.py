"""The entries of both sides, and the report: which names fit, by which rules, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypedDict

from ckptool._lazy import Result
from ckptool.core.model import Shape, TensorRef
from ckptool.core.sections import Section, is_extra_state, wrapped_names
from ckptool.dtypes import REAL_PARTS
from ckptool.remedies import Remedy


class Slot(NamedTuple):
    """One entry of a state dict, or of what a model has."""

    shape: Shape | None = None
    """None: not known, or nothing that has one (an `_extra_state`, a lazy parameter); fits any."""
    dtype: str | None = None
    """Torch's name without `torch.`; None: not known, or no tensor."""
    kind: str = "tensor"
    """`parameter`, `buffer`, `extra` (an `_extra_state`, or an entry that is not a tensor), or
    `tensor`: not known which."""
    tie: Hashable = None
    """Equal for names that are one tensor; None: it is alone."""

    @property
    def elements(self) -> int:
        """How many numbers it has, 1 where its shape is not known."""
        return 1 if self.shape is None else prod(size or 0 for size in self.shape)


EXTRA = Slot(kind="extra")

Slots = dict[str, Slot]
"""By name, in the order of the state dict."""


def fits(found: Slot, wanted: Slot) -> bool:
    """Return whether torch puts what is found where the other is wanted.

    Into a tensor it copies one of its shape, and [1] into a scalar, as torch 0.3 saved those
    (`Module._load_from_state_dict`). A value that is not a tensor goes where no tensor is wanted,
    or where nothing is known.
    """
    if wanted.shape is None or found.shape == wanted.shape:
        return True
    if found.shape is None:
        return found.kind != "extra"
    return not wanted.shape and found.shape == (1,)


def slots_of(section: Section) -> Slots:
    """Return what a file's state dict, or pickled module, has, in its order.

    What is under the name of a module and no tensor is `extra`, as is any `_extra_state`; plain
    values that a training script put beside the tensors are left out. Which tensor is a parameter
    is known where the file keeps `Parameter`s, as a pickled module does.
    """
    node, is_module = section.node, section.kind == "module"
    slots = dict.fromkeys(wrapped_names(node), EXTRA)
    tensors = {
        name: node[name]
        for name in slots
        if isinstance(node[name], TensorRef) and not is_extra_state(name)
    }
    places = {name: tensor.place or id(tensor) for name, tensor in tensors.items()}
    counts = Counter(places.values())
    for name, tensor in tensors.items():
        kind = "parameter" if tensor.is_parameter else "buffer" if is_module else "tensor"
        tie = places[name] if counts[places[name]] > 1 else None
        slots[name] = Slot(tensor.shape, tensor.dtype, kind, tie)
    return slots


_INTEGERS = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""The smallest and the largest number."""


@lru_cache(maxsize=256)
def holds(wide: str, narrow: str) -> bool:
    """Return whether a cast from `narrow` to `wide` changes no number; False for unknown types."""
    if wide == narrow:
        return True
    # Imported here: of most files no type changes.
    from ckptool.tensors.casting import FLOATS, is_exact

    if wide in REAL_PARTS:
        return holds(REAL_PARTS[wide], REAL_PARTS.get(narrow, narrow))
    if narrow in FLOATS:
        return wide in FLOATS and is_exact(narrow, wide)
    if narrow not in _INTEGERS:
        return False
    least, most = _INTEGERS[narrow]
    if wide in _INTEGERS:
        return _INTEGERS[wide][0] <= least and most <= _INTEGERS[wide][1]
    kind = FLOATS.get(wide)
    if kind is None or not kind.signed:
        return False
    return most.bit_length() <= kind.digits and -least <= kind.largest


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a list for a tuple, and a dict for a row."""
    if isinstance(value, Remedy):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [one.to_dict() if isinstance(one, _Row) else _plain(one) for one in value]
    if isinstance(value, (_Row, MatchReport)):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value


@dataclass(frozen=True, slots=True)
class _Row:
    """A part of a report."""

    def to_dict(self) -> dict[str, Any]:
        """Return the object as `ckptool.match/1` has it."""
        made: dict[str, Any] = _plain(self)
        return made


@dataclass(frozen=True, slots=True)
class Renaming(_Row):
    """A rule by which names of the file become names of the model.

    `kind` is `wrapper`, `prefix`, `known` (a rename of torch's own history), `rule` (the user's),
    or `proposed` (not applied). A name that several rules change is listed by each of them.
    """

    kind: str
    text: str
    """For people: `module. removed`, `backbone. -> encoder.`, `gamma -> weight`."""
    names: tuple[tuple[str, str], ...]
    """Name in the file and name in the model."""
    rule: str = ""
    """The same as `REGEX=>REPL` for `rename --rename`; empty where no single one does it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `ckptool.match/1` has it; `rule` is null if no single one does it."""
        return {**_plain(self), "rule": self.rule or None}


@dataclass(frozen=True, slots=True)
class Mismatch(_Row):
    """A tensor of another shape than the model's."""

    name: str
    own: str
    """Its name in the file."""
    shape: Shape
    """In the file."""
    wanted: Shape
    """In the model."""


@dataclass(frozen=True, slots=True)
class Layout(_Row):
    """A tensor whose axes are in another order in the file, or in one that nothing decides."""

    name: str
    own: str
    axes: tuple[int, ...] = ()
    """For each axis of the model's tensor, that of the file's; empty: not decided."""
    reason: str = ""
    """Why nothing decides it."""


@dataclass(frozen=True, slots=True)
class DtypeChange(_Row):
    """A tensor whose elements change type on the way into the model."""

    name: str
    own: str
    before: str
    after: str
    lossy: bool
    """Whether numbers change: by the values where they are known, else by what the types hold."""
    loss: str = ""
    """What is lost, in words, where values are known: `3 of 64 overflow`."""


@dataclass(frozen=True, slots=True)
class Ambiguity(_Row):
    """Names of the file that fit several of the model's, or the reverse: not guessed between."""

    names: tuple[str, ...]
    candidates: tuple[str, ...]
    rules: tuple[str, ...] = ()
    """`REGEX=>REPL`s, any one of which decides it."""


@dataclass(frozen=True, slots=True)
class Overlap(_Row):
    """Tensors of the model that share some of their memory. No report has one any more."""

    names: tuple[str, ...]
    whole: str = ""
    """The one of `names` whose memory holds that of all the others; empty: none does."""


@dataclass(frozen=True, slots=True)
class OptimizerReport(_Row):
    """How the state of an optimizer was matched, or why it was not."""

    by: str
    """`names` or `position`."""
    matched: int
    """Parameters whose state is loaded."""
    parameters: int
    """Parameters that the optimizer has."""
    problems: tuple[str, ...] = ()
    """What does not fit, a sentence each; none: it does."""
    cast: tuple[DtypeChange, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: Remedy | str = ""
    """What helps against the first of `problems`: arguments of `load_into`, or what to do."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatchReport(Result):
    """Whether a state dict fits a model, and how it is made to."""

    file: str = ""
    """What the state dict is from; empty: memory."""
    model: str = ""
    """What it is for: a class, or the reference's path."""
    loaded: int = 0
    """Elements of the model's parameters that are loaded, ties once."""
    parameters: int = 0
    """Elements of the model's parameters, ties once; of all tensors where they cannot be told, and
    names where there are no elements."""
    fitting: int = 0
    """Names of the model that are loaded."""
    names: int = 0
    """Names that the model has, those that are `kept` left out."""
    missing_keys: list[str] = field(default_factory=list)
    """Names of the model that nothing of the file fits, as `load_state_dict` returns them."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Names of the file that fit nothing of the model's."""
    mismatched: tuple[Mismatch, ...] = ()
    """Names of both sides, of different shapes."""
    renamed: tuple[Renaming, ...] = ()
    """The rules by which names came to fit, in the order in which they apply."""
    layouts: tuple[Layout, ...] = ()
    """Tensors of TensorFlow, Keras or Flax that are transposed, and those of which neither the
    module's type nor the user says whether."""
    cast: tuple[DtypeChange, ...] = ()
    """Tensors that change type on the way."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of the model that are one tensor, which is loaded."""
    untied: tuple[tuple[str, ...], ...] = ()
    """Names that are one tensor in the model, and not equal in the file."""
    overlapping: tuple[Overlap, ...] = ()
    """Always empty; kept for programs that read it: torch loads such tensors, in its order."""
    ambiguous: tuple[Ambiguity, ...] = ()
    """Their names are among the missing and the unexpected too."""
    proposed: tuple[Renaming, ...] = ()
    """Rules that would match more names, for the user to decide: none of them was applied."""
    recipe: str = ""
    """The recipe of `convert` that leads from the keys of the file to those of the model:
    `experts-qwen`, `experts-qwen --reverse`. It was not applied."""
    moved: tuple[str, ...] = ()
    """Empty; kept for those who read it."""
    respelled: tuple[str, ...] = ()
    """Empty; kept for those who read it."""
    reformed: tuple[tuple[str, str], ...] = ()
    """Empty; kept for those who read it."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Names of the file that no model takes, each with the reason: an average's counter."""
    kept: tuple[tuple[str, str], ...] = ()
    """Names of the model that keep what they have, each with the reason: a counter of BatchNorm
    that old files have not."""
    optimizer: OptimizerReport | None = None
    """How its state was matched; None where none was asked for."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user."""

    @property
    def coverage(self) -> float:
        """The share of the model's parameters that is loaded, 0 to 1."""
        return self.loaded / self.parameters if self.parameters else 1.0

    @property
    def undecided(self) -> tuple[Layout, ...]:
        """The tensors whose axes nothing decides; none is loaded."""
        return tuple(one for one in self.layouts if one.reason)

    @property
    def fits(self) -> bool:
        """Whether all of the model is loaded from all of the file, and nothing lost on the way."""
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
        return {
            "schema": "ckptool.match/1",
            "file": self.file,
            "model": self.model,
            "fits": self.fits,
            "coverage": self.coverage,
            **_plain(self),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "kept": [{"name": name, "reason": reason} for name, reason in self.kept],
        }


def most_allowed(names: int) -> int:
    """Return how many names of a model a hint may allow to lack: a tenth, or a layer's two."""
    return max(names // 10, 2)


class Counts(TypedDict):
    """Fields of a `MatchReport`."""

    loaded: int
    parameters: int
    fitting: int
    names: int


def counted(want: Mapping[str, Slot], met: Collection[str], kept: Collection[str]) -> Counts:
    """Return how much of a model is loaded: of its parameters, where it is known which these are.

    `met` are the names that are loaded, `kept` those that are not asked for.
    """
    every = {name: slot for name, slot in want.items() if name not in kept} if kept else want
    known = every
    kinds = {slot.kind for slot in every.values()}
    if "parameter" in kinds and "tensor" not in kinds:
        known = {name: slot for name, slot in every.items() if slot.kind == "parameter"}
    elif "extra" in kinds:
        known = {n: slot for n, slot in every.items() if slot.kind != "extra"} or every
    once = [name for name, slot in known.items() if slot.tie is None]
    if len(once) < len(known):
        tied: dict[Hashable, str] = {}
        for name, slot in known.items():
            if slot.tie is not None and (slot.tie not in tied or name in met):
                tied[slot.tie] = name
        once += tied.values()
    sizes = {name: known[name].elements for name in once}
    if not any(sizes.values()):  # there is nothing to count but names
        sizes = dict.fromkeys(known, 1)
    return {
        "loaded": sum([size for name, size in sizes.items() if name in met]),
        "parameters": sum(sizes.values()),
        "fitting": sum([name in met for name in every]),
        "names": len(every),
    }


def casts_of(
    pairs: Mapping[str, str], have: Mapping[str, Slot], want: Mapping[str, Slot]
) -> tuple[DtypeChange, ...]:
    """Return the changes of element type, in the order of the pairs; types say which lose."""
    casts = []
    for name, own in pairs.items():
        before, after = have[own].dtype, want[name].dtype
        if before != after and before is not None and after is not None:
            casts.append(DtypeChange(name, own, before, after, not holds(after, before)))
    return tuple(casts)
