"""The state of an optimizer: found in a file, matched with parameters, and loaded.

`Optimizer.load_state_dict` goes by position alone: parameters of one shape in another order get
each other's moments without a word. Here names decide, or the user who vouches for the order.

transformers writes `optimizer.pt` beside the model, accelerate `optimizer.bin` and, where there are
more of them, `optimizer_1.bin`; each is the whole of one `state_dict()`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.errors import MatchError, NameCollision, UsageError
from ckptool.loading.fill import check_bytes
from ckptool.loading.memory import dtype_name, shape_of
from ckptool.loading.plan import Plan, inert, loss_of
from ckptool.loading.ranks import is_spread, spread_like, without_hidden
from ckptool.loading.snapshot import layers
from ckptool.loading.source import State
from ckptool.loading.target import Target
from ckptool.matching import Allowance, Cast, OptimizerReport, Slot, matched
from ckptool.matching.refusal import escaped_glob
from ckptool.matching.slots import holds
from ckptool.model import Shape, TensorRef
from ckptool.names import strip_names
from ckptool.optimizers import OPTIONS, groups_of, kept_by, model_of, options_of
from ckptool.optimizers import shape_of as shape_kept
from ckptool.remedies import Remedy
from ckptool.statedict import MODEL_KINDS, Section, is_optimizer, noted_owners, sections
from ckptool.tensors import is_one_part
from ckptool.tree import name_of, resolve, walk
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["OptimizerPlan", "planned_optimizer"]

_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
_ALONE = "without optimizer= the model alone is loaded"
_VOUCH = Remedy(
    (("optimizer_order", "position"),),
    " where the optimizer was built over its parameters in the order of the file",
    instead=(Remedy(note="save it again with ckptool.save, which writes the names"),),
)
_SPREAD = (
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True "
    "loads such state, by names"
)
_FLAT = ("prev_flat_grad", "old_dirs")
"""Keys of LBFGS, which keeps with its first parameter one state of all of them, in their order."""

_MARKS = {"Adamax": "exp_inf", "NAdam": "mu_product"}
"""State that one kind alone keeps, of the kinds that have the options of Adam."""


class _Refused(Exception):
    """Why the state is not loaded, as a sentence, and what helps."""

    def __init__(self, text: str, remedy: Remedy | str = _ALONE) -> None:
        """Keep both."""
        super().__init__(text)
        self.remedy = remedy


@dataclass(frozen=True, eq=False)
class OptimizerPlan:
    """What is to be loaded into an optimizer."""

    optimizer: torch.optim.Optimizer
    report: OptimizerReport
    _made: Callable[[], dict[str, Any]] | None = None
    _saved: _Saved | None = None

    def apply(self) -> None:
        """Load the state by the optimizer's own `load_state_dict`, with all of its hooks.

        Raises:
            MatchError: the report has problems.
            CorruptFile: bytes of the state are not what they were when the file was written.
            UnreadableFile: its file was written to meanwhile.
            DeviceError, UnsupportedFormat: a tensor cannot be made here.
        """
        if self._made is None or self._saved is None or self.report.problems:
            raise MatchError("; ".join(self.report.problems), hint=self.report.remedy or None)
        path = self._saved.section.path
        leaves = ((name_of((*path, *p)), leaf) for p, leaf in walk(self._saved.section.node))
        check_bytes((name, leaf) for name, leaf in leaves if isinstance(leaf, TensorRef))
        self.optimizer.load_state_dict(self._made())
        for source in self._saved.tree.sources:
            source.check_unchanged()


class _Saved(NamedTuple):
    """What `Optimizer.state_dict()` was, in a file."""

    tree: Checkpoint
    section: Section
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> list[dict[Any, Any]]:
        """The groups: learning rates and other options."""
        groups: list[dict[Any, Any]] = self.section.node["param_groups"]
        return groups

    @property
    def keys(self) -> list[tuple[int, Any]]:
        """The group and the number or name of each parameter, in the order of the groups."""
        return [(at, key) for at, keys in enumerate(groups_of(self.section)) for key in keys]

    def state(self, key: Any) -> Any:
        """Return the state of a parameter; None where it is empty: `momentum_buffer: None`."""
        held = self.section.node["state"].get(key)
        is_empty = isinstance(held, dict) and all(value is None for value in held.values())
        return None if is_empty else held

    def shape(self, key: Any) -> Shape | None:
        """Return the shape of a parameter, where its state shows that."""
        held = self.state(key)
        return None if _is_flat(held) else shape_kept(held)

    def names(self) -> list[str] | None:
        """Return the names of all parameters in the file, each another; None: it keeps none."""
        held: list[Any] = [group.get("param_names") for group in self.options]
        names = [key for _, key in self.keys]
        if all(isinstance(one, (list, tuple)) for one in held):
            names = [name for one in held for name in one]
        distinct = {name for name in names if isinstance(name, str)}
        return names if names and len(distinct) == len(names) == len(self.keys) else None

    def place(self, key: Any, *inside: Any) -> str:
        """Return the address of the state of a parameter."""
        return name_of((*self.section.path, "state", key, *inside))


def planned_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    state: State,
    target: Target,
    plan: Plan,
    *,
    key: Any = None,
    order: str | None = None,
    allowance: Allowance,
) -> OptimizerPlan:
    """Plan how the state of an optimizer in the file of `state` goes into this one.

    Parameters are matched by the names that the file keeps of them, as `plan` matches the names of
    the model; with `order="position"` by position, for which the caller vouches. `key` is the
    address of the optimizer where the file has several, or the name of its file in the folder.

    Raises:
        UsageError: it is no optimizer.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
        CorruptFile: elements cannot be read that a cast may change.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise UsageError(f"optimizer= takes an optimizer, not a {type(optimizer).__name__}")
    wanted = _Wanted(optimizer, model, target)
    report = OptimizerReport("names", 0, len(wanted.parameters))
    try:
        saved = _found(state, key)
        report = replace(report, notes=tuple(_notes(saved, optimizer, target, plan)))
        _check_kind(saved, optimizer)
        wanted.check()
        try:
            numbers = _by_names(saved, wanted, state, target, plan)
        except _Refused:
            if order is None:
                raise
            numbers = list(range(len(saved.keys)))
            report = replace(report, by="position")
            if [len(keys) for keys in groups_of(saved.section)] != wanted.sizes:
                raise _Refused(_misfit(saved, wanted)) from None
        groups = _groups(saved, wanted, numbers)
        kept = {
            number: key
            for number, (_, key) in zip(numbers, saved.keys, strict=True)
            if saved.state(key) is not None
        }
        if numbers != sorted(numbers) and any(_is_flat(saved.state(key)) for key in kept.values()):
            raise _Refused("the optimizer keeps one state of all its parameters, in another order")
        _check_state(saved, wanted, kept)
    except _Refused as refused:
        return OptimizerPlan(
            optimizer, replace(report, problems=(str(refused),), remedy=refused.remedy)
        )
    casts = tuple(_casts(optimizer, state, saved, wanted, kept))
    lossy = [
        one
        for one in casts
        if one.lossy and not allowance.takes_cast(one.name, one.name.partition("/")[0])
    ]
    report = replace(report, matched=len(kept), cast=casts)
    if lossy:
        first, kinds = lossy[0], dict.fromkeys(one.name.partition("/")[2] for one in lossy)
        more = f", and of {counted(len(lossy) - 1, 'more tensor')}" if len(lossy) > 1 else ""
        text = (
            f"of the optimizer's state {printable(first.name)} does not survive {first.before} -> "
            f"{first.after}{f' ({first.loss})' if first.loss else ''}{more}"
        )
        globs = tuple(f"*/{escaped_glob(kind)}" for kind in kinds)
        report = replace(report, problems=(text,), remedy=Remedy((("allow_lossy_cast", globs),)))
    maker = _Maker(state, saved, wanted, kept, groups)
    return OptimizerPlan(optimizer, report, lambda: maker.state_dict(optimizer), saved)


# which state is meant


def _found(state: State, key: Any) -> _Saved:
    """Return the optimizer that belongs to the model of `state`, or the one under `key`.

    It is in the file of the model; where that has none, and a folder was given, in the one file of
    an optimizer in it. `key` is an address in that, or the name of such a file.

    Raises:
        _Refused: there is none, or none that is certain.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
        UnreadableFile: the file of the optimizer cannot be opened.
    """
    names = [] if state.folder is None else _files(state.folder)
    found = _optimizers(state.tree)
    if key not in names and (found or not names):
        return _Saved(state.tree, _chosen(state.tree, found, state.section, key, state.file))
    if key is None and len(names) > 1:
        raise _Refused(
            f"there are {len(names)} files of optimizers beside the model: {listed(names)}",
            Remedy(instead=tuple(Remedy((("optimizer_key", name),)) for name in names)),
        )
    name = key if key in names else names[0]
    tree = state.opened(os.path.join(state.folder or "", name))
    try:
        section = _chosen(tree, _optimizers(tree), None, None if key in names else key, "")
    except _Refused as refused:
        raise _Refused(f"{name!r}, beside the model: {refused}", refused.remedy) from None
    return _Saved(tree, section, (f"the state is that of {name!r}, beside the model",))


def _files(folder: str) -> list[str]:
    with suppress(OSError):
        return sorted(filter(_FILE.fullmatch, os.listdir(folder)))
    return []


def _optimizers(tree: Checkpoint) -> list[Section]:
    every = (one for one in sections(tree.root) if one.kind == "optimizer")
    return list({id(one.holder): one for one in every}.values())


def _chosen(
    tree: Checkpoint, found: Sequence[Section], model: Section | None, key: Any, file: str
) -> Section:
    """Return the optimizer under `key`, else the only one of the file, or that of `model`."""
    if key is not None:
        path, node = resolve(
            tree, key, accept=lambda one: isinstance(one, dict) and is_optimizer(one)
        )
        return Section(path, "optimizer", node, node)
    models = [one for one in sections(tree.root) if one.kind in MODEL_KINDS]
    models = list({id(one.holder): one for one in models}.values())
    owners = [model_of(one, models, found) for one in found]
    own = [
        one
        for one, owner in zip(found, owners, strict=True)
        if owner is not None and model is not None and owner.holder is model.holder
    ]
    if len(own) == 1 or (len(found) == 1 and (model is None or owners[0] is None)):
        return (own or found)[0]
    ways = tuple(Remedy((("optimizer_key", one.name),)) for one in found)
    if not found:
        folder = os.path.dirname(file) or "."
        beside = _files(folder) if file else []
        text = "the state of an optimizer is wanted, and there is none in the file"
        if beside:
            hint = f"load_into(model, {folder!r}, optimizer=...) looks there too"
            raise _Refused(f"{text}, but {listed(beside)} beside it", hint)
        raise _Refused(
            text,
            "load_into(model, {'model': ..., 'optimizer': ckptool.load(FILE)}, optimizer=...) "
            "where it is in a file of its own",
        )
    if len(found) == 1:
        owner = owners[0]
        whose = printable(owner.name) if owner is not None else ""
        text = f"the only optimizer, {printable(found[0].name)}, is that of {whose}"
        raise _Refused(f"{text}, which is not the model chosen", Remedy(note=_ALONE, instead=ways))
    names = listed(one.name for one in found)
    raise _Refused(f"there are {len(found)} optimizers: {names}", Remedy(instead=ways))


# which parameter it is of


class _Wanted:
    """The parameters of the optimizer that is to be filled."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, target: Target
    ) -> None:
        """Find the model's names of them."""
        groups = optimizer.param_groups
        self.parameters: list[torch.Tensor] = [one for group in groups for one in group["params"]]
        self.sizes = [len(group["params"]) for group in groups]
        self.group = [at for at, group in enumerate(groups) for _ in group["params"]]
        self.whole = {name: slot.shape for name, slot in target.slots.items()}
        named: dict[int, str] = {}
        for name, tensor in target.entries.items():  # the first, where one has several
            named.setdefault(id(tensor), name)
        for name, parameter in model.named_parameters():  # FSDP's are no entries
            named.setdefault(id(parameter), without_hidden(name))
        self.in_model = [id(one) in named for one in self.parameters]
        self.names = [
            named.get(id(one), f"parameter {number}") for number, one in enumerate(self.parameters)
        ]

    def check(self) -> None:
        """Refuse parameters that no state can be put beside."""
        for parameter, name in zip(self.parameters, self.names, strict=True):
            whole, shape = self.whole.get(name), shape_of(parameter)
            if parameter.is_meta:
                raise _Refused(
                    f"the optimizer's {printable(name)} is on the meta device, and loading puts "
                    "another in its place",
                    "load the model, build the optimizer, then load again with it",
                )
            if getattr(parameter, "_is_flat_param", False) or (whole and shape and whole != shape):
                raise _Refused(
                    f"the optimizer's {printable(name)} is of FSDP, of which every rank has a part",
                    _SPREAD,
                )
        if self.parameters and not any(self.in_model):
            raise _Refused(
                "the optimizer's parameters are not the model's: none of them is in it",
                "build the optimizer over the parameters of the model that is loaded",
            )


def _by_names(
    saved: _Saved, wanted: _Wanted, state: State, target: Target, plan: Plan
) -> list[int]:
    """Return the number of the parameter that each name of the file's optimizer leads to."""
    names = saved.names()
    if names is None:
        raise _Refused(
            "the file does not name the parameters of its optimizer, and shapes and order are no "
            "proof of whose state is whose",
            _vouching(saved, wanted),
        )
    numbers: dict[str, int | str] = {name: at for at, name in enumerate(wanted.names)}
    for tied in plan.report.tied:
        known = next((numbers[name] for name in tied if name in numbers), None)
        if known is not None:
            numbers.update((name, known) for name in tied)
    # The model's other parameters count too: a name may lead to one that is not the optimizer's.
    leads = {own: numbers.get(name, name) for name, own in plan.pairs.items()}
    shapes = [saved.shape(key) for _, key in saved.keys]
    have = {name: Slot(shape) for name, shape in zip(names, shapes, strict=True)}
    want = {name: slot for name, slot in target.slots.items() if slot.kind == "parameter"}
    want |= {
        name: Slot(shape_of(wanted.parameters[at]))
        for name, at in numbers.items()
        if isinstance(at, int)
    }
    bare = dict(zip(_bare([*leads]), leads.values(), strict=True))
    pairs = matched(have, want).pairs.items()
    matches = {own: numbers.get(name, name) for name, own in pairs}
    readings = [
        [leads.get(name) for name in names],  # as the file's model has them
        [bare.get(name) for name in _bare(names)],  # without wrappers on either side
        [matches.get(name) for name in names],  # as the model here has them, a prefix off or on
    ]
    if not noted_owners(state.section):
        readings += _as_of_parts(names, shapes, leads, state)
    whole = [one for one in readings if None not in one and len({*one}) == len(names)]
    for one in whole[1:]:
        if one != whole[0]:
            both = zip(names, whole[0], one, strict=True)
            name, *answers = next(each for each in both if each[1] != each[2])
            could = (wanted.names[at] if isinstance(at, int) else str(at) for at in answers)
            raise _Refused(
                f"{printable(name)} of the file's optimizer could be "
                f"{' or '.join(map(printable, could))}",
                _vouching(saved, wanted),
            )
    best = max(readings, key=lambda one: len({at for at in one if isinstance(at, int)}))
    if whole:
        best = whole[0]
    found = [at for at in best if isinstance(at, int)]
    if len({*found}) == len(names) == len(wanted.names):
        return found
    alone = [name for name, at in zip(names, best, strict=True) if not isinstance(at, int)]
    lacking = [name for at, name in enumerate(wanted.names) if at not in found]
    first = [
        f"{printable(some[0])} is in the {whose} only"
        for some, whose in ((alone, "file"), (lacking, "optimizer"))
        if some
    ]
    raise _Refused(_misfit(saved, wanted, " and ".join(first)), _vouching(saved, wanted))


def _as_of_parts(
    names: Sequence[str], shapes: Sequence[Shape | None], leads: Mapping[str, Any], state: State
) -> Iterator[list[Any]]:
    """Yield where the names lead below each module that has all of them, with such shapes.

    `model.head.named_parameters()` gives names that another part, or the model itself, has too.
    """
    for first in leads:
        if names and first.endswith(f".{names[0]}"):
            front = first.removesuffix(names[0])
            inside = [state.slots.get(f"{front}{name}") for name in names]
            if all(
                slot is not None and shape in (None, slot.shape)
                for slot, shape in zip(inside, shapes, strict=True)
            ):
                yield [leads.get(f"{front}{name}") for name in names]


def _vouching(saved: _Saved, wanted: _Wanted) -> Remedy | str:
    """Return the advice to load by position, unless the number of parameters or a shape differs."""
    if len(saved.keys) != len(wanted.names):
        return _ALONE
    for (_, key), parameter in zip(saved.keys, wanted.parameters, strict=True):
        kept, shape = saved.shape(key), shape_of(parameter)
        if kept is not None and shape is not None and kept != shape:
            return _ALONE
    return _VOUCH


def _bare(names: Sequence[str]) -> list[str]:
    try:
        renamed = strip_names(names).renamed
    except NameCollision:
        renamed = {}
    return [renamed.get(name, name) for name in names]


def _misfit(saved: _Saved, wanted: _Wanted, difference: str = "") -> str:
    there, here = [len(keys) for keys in groups_of(saved.section)], wanted.sizes
    if there == here:
        return f"the file's optimizer is over other parameters: {difference}"
    text = (
        f"the file's optimizer has {counted(sum(there), 'parameter')} in groups of "
        f"{listed(map(str, there))}, the optimizer {sum(here):,} in {listed(map(str, here))}"
    )
    return f"{text}; first difference: {difference}" if difference else text


def _groups(saved: _Saved, wanted: _Wanted, numbers: Sequence[int]) -> list[int]:
    """Return for each group of the optimizer that of the file."""
    found: dict[int, int] = {}
    for number, (group, _) in zip(numbers, saved.keys, strict=True):
        here = wanted.group[number]
        if found.setdefault(here, group) != group:
            raise _Refused(
                f"{printable(wanted.names[number])} is in group {group} of the file, and others of "
                f"group {here} of the optimizer are in group {found[here]}"
            )
    empty = [at for at in range(len(saved.options)) if at not in found.values()]
    is_same = len(set(found.values())) == len(found) and len(saved.options) == len(wanted.sizes)
    if not is_same:
        raise _Refused(_misfit(saved, wanted))
    return [found[at] if at in found else empty.pop(0) for at in range(len(wanted.sizes))]


def _check_kind(saved: _Saved, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another kind of optimizer: the next `step()` would fail, or go wrong.

    Torch takes it without a word.
    """
    *_, inner = (one for one in layers(optimizer) if hasattr(one, "param_groups"))
    there, defaults = options_of(saved.section), set(getattr(inner, "defaults", ()))
    here = defaults & {*OPTIONS}
    if saved.options and defaults and here != there:
        words = [("has", sorted(there - here)), ("lacks", sorted(here - there))]
        told = " and ".join(f"{verb} {listed(names, 3)}" for verb, names in words if names)
        raise _Refused(
            f"the file's optimizer is of another kind than {type(inner).__name__}: it {told}"
        )
    kinds = [one.__name__ for one in type(inner).__mro__ if one.__module__.startswith("torch.")]
    kept, own = kept_by(saved.section), {_MARKS[kind] for kind in kinds if kind in _MARKS}
    if kept and kinds[:1] != ["Optimizer"] and kept & {*_MARKS.values()} != own:
        odd = listed(sorted((kept & {*_MARKS.values()}) ^ own))
        raise _Refused(
            f"the file's optimizer is of another kind than {type(inner).__name__}: one of them "
            f"keeps {odd} of each parameter"
        )


def _check_state(saved: _Saved, wanted: _Wanted, kept: Mapping[int, Any]) -> None:
    """Refuse state of another shape, and state that cannot be made or dealt out to ranks."""
    for number, key in kept.items():
        parameter, shape, held = wanted.parameters[number], saved.shape(key), saved.state(key)
        mine = shape_of(parameter)
        if shape is not None and mine is not None and shape != mine:
            raise _Refused(
                f"the state of {printable(wanted.names[number])} has the shape {list(shape)}, and "
                f"the parameter {list(mine)}"
            )
        for path, leaf in walk(held):
            where, what = printable(saved.place(key, *path)), inert(leaf)
            if isinstance(leaf, TensorRef) and is_one_part(leaf):
                what = "the part that one rank had of a tensor"
            if what:
                raise _Refused(f"{where} is {what}, which is not made from a file")
            spread = is_spread(parameter) and isinstance(leaf, TensorRef)
            if spread and leaf.shape not in ((), mine):
                raise _Refused(
                    f"{where} has the shape {list(leaf.shape)}, and its parameter, a DTensor, "
                    f"{list(mine or ())}: it is not known which rank has which part of it"
                )


def _is_flat(state: Any) -> bool:
    return isinstance(state, dict) and any(key in state for key in _FLAT)


def _notes(
    saved: _Saved, optimizer: torch.optim.Optimizer, target: Target, plan: Plan
) -> Iterator[str]:
    """Yield what is worth knowing, and no reason to refuse."""
    yield from saved.notes
    known = {key for _, key in saved.keys}
    strays = [key for key in saved.section.node["state"] if key not in known | _shared(saved)]
    if strays:
        count = counted(len(strays), "parameter")
        yield f"the file keeps state of {count} that no group of its optimizer has: left out"
    for number, group in enumerate(saved.options):
        objects = [str(key) for key, node in group.items() if inert(node)]
        if objects:
            yield f"group {number} keeps its own {listed(objects)}: the file has objects there"
        own = optimizer.param_groups[number] if number < len(optimizer.param_groups) else {}
        bound = [key for key in ("capturable", "fused") if group.get(key) and not own.get(key)]
        if bound:  # torch takes them over too, and step() fails on a device that has no such
            yield f"group {number} is {' and '.join(bound)} now, as the file has it"
    if target.custom and plan.undecided:
        yield "state goes by the names as they are, whatever the model's own code makes of tensors"


def _shared(saved: _Saved) -> set[Any]:
    """Return the keys of state that is of the optimizer as a whole, by a word of its own."""
    known = {key for _, key in saved.keys}
    if any(isinstance(key, str) for key in known):
        return set()
    return {key for key in saved.section.node["state"] if isinstance(key, str)} - known


def _casts(
    optimizer: Any, state: State, saved: _Saved, wanted: _Wanted, kept: Mapping[int, Any]
) -> Iterator[Cast]:
    """Yield the tensors whose type `torch.optim.Optimizer.load_state_dict` changes.

    The state of a floating parameter gets its type, but for `step`.
    """
    import torch

    *_, inner = layers(optimizer)
    if type(inner).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for number, key in kept.items():
        parameter = wanted.parameters[number]
        after = dtype_name(parameter)
        for path, leaf in walk(saved.state(key)) if parameter.is_floating_point() else ():
            if not isinstance(leaf, TensorRef) or leaf.dtype == after or path[-1:] == ("step",):
                continue
            lossy, loss = not holds(after, leaf.dtype), ""
            if lossy:
                value = leaf if leaf.has_content else state.made(leaf)
                found = loss_of(value, after)
                lossy, loss = found is None or bool(found), found or ""
            name = name_of((wanted.names[number], *path))
            yield Cast(name, saved.place(key, *path), leaf.dtype, after, lossy, loss)


class _Maker(NamedTuple):
    """Makes the state dict that the optimizer itself takes, position by position."""

    state: State
    saved: _Saved
    wanted: _Wanted
    kept: Mapping[int, Any]
    groups: Sequence[int]

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Make it, tensors where their parameters are; `step` and shared ones on the CPU.

        Raises:
            DeviceError, CorruptFile, UnsupportedFormat: as `State.made`.
        """
        node = self.saved.section.node
        made: dict[Any, Any] = {
            number: self._of_parameter(self.saved.state(key), self.wanted.parameters[number])
            for number, key in self.kept.items()
        }
        held = {key: node["state"][key] for key in _shared(self.saved)}
        made |= {key: self._here(one) for key, one in held.items() if not inert(one)}
        beside = {
            key: self._here(one)
            for key, one in node.items()
            if key not in ("state", "param_groups") and not inert(one)
        }
        return {**beside, "state": made, "param_groups": list(self._options(optimizer))}

    def _of_parameter(self, node: Any, parameter: torch.Tensor) -> Any:
        """Make the state of one parameter; this rank's part, where it is spread over ranks."""
        device = str(parameter.device) if parameter.device.type == "cuda" else "cpu"
        if not isinstance(node, dict):
            return self._here(node, device)
        made = {
            key: self._here(value, "cpu" if key == "step" else device)
            for key, value in node.items()
        }
        if not is_spread(parameter):
            return made
        return {
            key: _mapped(
                value,
                lambda one: spread_like(parameter, one) if one.shape == parameter.shape else one,
            )
            for key, value in made.items()
        }

    def _here(self, node: Any, device: str = "cpu") -> Any:
        """Make a node on a device. Nothing of it is the caller's own: steps will change it."""
        made = self.state.made(node, device)
        if self.saved.tree.format != "memory":
            return made
        return _mapped(made, lambda tensor: tensor.detach().to(device, copy=True))

    def _options(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        """Yield the groups with the options of the file, and those that it does not have."""
        import torch

        first = 0
        for own, number in zip(optimizer.param_groups, self.groups, strict=True):
            options = {}
            for key, node in self.saved.options[number].items():
                if key in ("params", "param_names") or inert(node):
                    continue
                made = options[key] = self._here(node)
                if isinstance(made, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                    options[key] = made.to(own[key].device)  # a learning rate
            group = {key: value for key, value in own.items() if key != "params"} | options
            after = first + len(own["params"])
            if "param_names" in self.saved.options[number] and all(self.wanted.in_model):
                group.setdefault("param_names", _bare(self.wanted.names)[first:after])
            yield {**group, "params": list(range(first, after))}
            first = after


def _mapped(node: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree with other tensors, in new containers."""
    import torch

    if isinstance(node, torch.Tensor):
        return change(node)
    if isinstance(node, dict):
        return {key: _mapped(value, change) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)([_mapped(value, change) for value in node])
    return node
