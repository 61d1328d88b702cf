"""`match`, and the load plan: which entry fills which key, checked by values where needed."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool._lazy import pause_gc
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Global, Opaque, TensorRef
from ckptool.core.tree import walk
from ckptool.dtypes import NOT_IN_TORCH, PACKED
from ckptool.errors import MatchError, NotFound, UsageError
from ckptool.formats import load_format
from ckptool.loading.load import unpickled
from ckptool.loading.ranks import without_hidden
from ckptool.loading.source import StateDict, open_state_dict
from ckptool.loading.target import REFERENCE, ModelTarget, describe_target, slots_like
from ckptool.matching import Allowance, DtypeChange, Match, MatchReport, matched
from ckptool.matching.layouts import TransposeRules, laid_out, wanted_by
from ckptool.matching.report import counted
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors import is_one_part, materialize, require_torch
from ckptool.tensors.bytewise import has_same_elements
from ckptool.tensors.casting import CHUNK, count_cast_losses
from ckptool.tensors.live import iterate_blocks
from ckptool.transforms.name_rules import Rule, rules_of
from ckptool.transforms.names import moved_metadata
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_NOT_LOADED = "which cannot be loaded from a file"


@pause_gc()
class MatchedState(NamedTuple):
    """The entries of a state dict that fit a model, and a report on all entries."""

    state_dict: OrderedDict[str, Any]
    """The entries that fit, with the keys of the model."""
    report: MatchReport
    """The matched and unmatched entries."""

    def __repr__(self) -> str:
        """Return the one-line summary of the report."""
        return repr(self.report)


@refuse_renamed_arguments(rules="use rename instead")
def match(
    state_dict: Mapping[Any, Any] | str | os.PathLike[str] | Checkpoint,
    like: torch.nn.Module | Mapping[str, Any] | Iterable[str] | os.PathLike[str] | Checkpoint,
    *,
    rename: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    transpose: Iterable[str] = (),
    no_transpose: Iterable[str] = (),
    key: Any = None,
    like_key: Any = None,
) -> MatchedState:
    """Return the entries of a state dict that fit a model, with the model's keys, and a report.

    Wrapper prefixes are removed or added, then one common prefix, then torch's own renames apply.
    Other renames are only proposed in the report. `report.fits` is True if everything fits.
    docs/matching.md lists the rules. The result is a new dict with the same tensors, in the order
    of the model, with `_metadata`. Tied keys of the model all receive the tensor of one of them.

    Args:
        state_dict: A state dict, a dict that contains one, a file, or an open checkpoint.
        like: A model on any device, or a description of one: a state dict, a dict of keys to
            shapes, a list of keys, the path of a reference file, or an open checkpoint.
        rename: Rules `REGEX=>REPL`, applied to the keys of `state_dict` first.
        prefixes: Rules `OLD=NEW`, applied after `rename` to whole components at the start of a key.
        transpose: Globs of model keys with tensors stored as [..., in, out] in a TensorFlow, Keras
            or Flax file, or stored with given axes: `"depthwise.*=2,3,0,1"`.
        no_transpose: Globs of model keys with tensors stored in torch's order in these files.
        key: The path of the state dict, such as `"ema"`, if there are several.
        like_key: The path of the state dict in `like`, if there are several.

    Raises:
        UnreadableFile: if a file cannot be opened as a checkpoint; see `ckptool.open`.
        NotFound: if there is no state dict, or none at `key` (`AmbiguousName`: if several).
        NameCollision: if the rules give two entries the same key.
        UsageError: if an argument has a wrong type, or a string is not a rule.
        UnsupportedFormat: if the file has only one rank's part of a DTensor or ShardedTensor.
    """
    require_torch()
    check_lists(rename=rename, prefixes=prefixes, transpose=transpose, no_transpose=no_transpose)
    choices = TransposeRules.of(transpose, no_transpose)
    target = target_like(like, key=like_key)
    with open_state_dict(state_dict, key=key, wanted=target.slots) as state:
        plan = plan_load(state, target, rename=rename, prefixes=prefixes, choices=choices)
        every = {**plan.pairs, **plan.undecided}
        fitting = OrderedDict((name, state.value(own)) for name, own in every.items())
        metadata = metadata_for(state, target, plan)
        if metadata is not None:
            vars(fitting)["_metadata"] = metadata
        return MatchedState(fitting, plan.report)


def check_lists(**lists: Any) -> None:
    """Check that the named arguments are lists."""
    for name, value in lists.items():
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            hint = (
                f"use {name}=[{value!r}]" if isinstance(value, str) else f"give a list for {name}"
            )
            raise UsageError(f"{name}={value!r} is not a list", hint=hint)


def target_like(like: Any, *, key: Any = None) -> ModelTarget:
    """Return the target that `like` describes; `key` selects one of several state dicts.

    `like` is a model on any device, a state dict, a dict of keys to shapes, a list of keys, or a
    file or open checkpoint. Of a file only the header is read, without torch.

    Raises:
        TorchMissing: if `like` is not a file, and torch is not installed.
        UnreadableFile: if the file cannot be opened as a checkpoint.
        AmbiguousName, NotFound: if there are several state dicts and no `key`, or none.
        UsageError: if `like` is something else.
    """
    if not isinstance(like, (str, os.PathLike, Checkpoint)):
        require_torch()
        import torch

        if isinstance(like, torch.nn.Module):
            return describe_target(like)
        found = slots_like(like) if key is None or not isinstance(like, Mapping) else None
        if found is not None:
            return found
    try:
        with open_state_dict(like, key=key) as state:
            return ModelTarget(
                state.file or REFERENCE,
                state.slots,
                metadata=state.metadata,
            )
    except NotFound as error:
        error.message = f"{REFERENCE}: {error.message}"
        if error.remedy is not None:
            error.advise(error.remedy.with_names({"key": "like_key"}))
        elif isinstance(like, Mapping) and error.hint is None:
            error.message = f"{REFERENCE} is not a state dict or a dict of shapes"
            error.advise("give shapes as tuples of sizes: {'weight': (4, 3)}")
        raise


class LoadPlan(NamedTuple):
    """The entry of a state dict for each key of a model, and the report."""

    pairs: Mapping[str, str]
    """Model key to file key for every entry to load, in the model's order."""
    undecided: Mapping[str, str]
    """Model key to file key inside modules with their own loading code: torch decides."""
    report: MatchReport
    match: Match
    unfilled: tuple[str, ...] = ()
    """The other model keys inside these modules, which their code may fill."""

    def with_changes(self, **changes: Any) -> LoadPlan:
        """Return the plan with changes to its report."""
        return self._replace(report=replace(self.report, **changes))

    def refusal(self, allowance: Allowance) -> MatchError | None:
        """Return the error to raise before anything changes, or None."""
        report = self.report
        if self.unfilled:
            report = replace(report, loaded=report.parameters, fitting=report.names)
        refusal = allowance.refusal(report)
        not_made = [
            f"{printable(n)}: {why}" for n, why in report.left_out if why.endswith(_NOT_LOADED)
        ]
        if refusal is not None and not_made:
            refusal.message += f"\n{listed(not_made, most=2)}"
        return refusal


@pause_gc()
def plan_load(
    state: StateDict,
    target: ModelTarget,
    *,
    rename: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    choices: TransposeRules | None = None,
    assign: bool = False,
    by_type: bool = False,
    as_stored: bool = False,
) -> LoadPlan:
    """Match the keys, then compare values where a cast or a tie may lose some.

    For a file with another layout than torch's, the axes in `state` are put in torch's order.

    With `by_type`, casts are judged by dtype, and files need no torch. With `assign`, the model
    uses the tensors unchanged. With `as_stored`, the target is a file: objects stay objects.

    Raises:
        NameCollision: if the rules give two entries the same key.
        UsageError: if a string is not a rule.
        TorchMissing: if values have to be read, and torch is not installed.
        CorruptFile, DeviceError: if the values cannot be read.
    """
    layout, choices = load_format(state.tree.format).layout, choices or TransposeRules()
    kinds = target.kinds() if layout else None
    is_turned = bool(layout or choices.transpose)
    found = matched(
        state.slots,
        wanted_by(target.slots, kinds, choices) if is_turned else target.slots,
        rules=rules_of(rename, prefixes),
        metadata=state.metadata,
        closed=target.closed,
        foreign=bool(layout),
        file=state.file,
        model=target.label,
    )
    given = found.pairs
    if is_turned:
        found = laid_out(found, state.slots, target.slots, kinds, choices)
        state.lay_out(found.report.layouts)
    plan = LoadPlan(found.pairs, {}, found.report, found)
    if not as_stored:
        plan = _without_objects(plan, state, target)
    if target.custom:
        plan = _left_to_torch(plan, state, target)
    report, pairs = plan.report, plan.pairs
    untied = tuple(_untied(state, target, pairs))
    apart = {name for group in untied for name in group}
    casts = () if assign else tuple(one for one in report.cast if one.name in pairs)
    tied = (one for one in report.tied if not (apart & {*one} or pairs.keys().isdisjoint(one)))
    beside = ((name, "a plain value, which no model loads") for name in state.beside)
    report = replace(
        report,
        cast=casts if by_type or as_stored else _judge_casts(state, casts),
        tied=tuple(tied),
        untied=untied,
        left_out=(*report.left_out, *beside),
    )
    if plan.pairs is not given:
        kept = dict(report.kept).keys() - set(plan.undecided)
        report = replace(report, **counted(target.slots, pairs, kept))
    return plan._replace(report=report)


def _without_objects(plan: LoadPlan, state: StateDict, target: ModelTarget) -> LoadPlan:
    """Leave out entries that cannot be loaded: objects, and parameters without data.

    An extra state that contains a pickled object would reach the model as something else.
    """
    report = plan.report
    found = {
        name: why
        for name, own in plan.pairs.items()
        if (why := _why_not_loadable(state, own, is_extra=target.slots[name].kind == "extra"))
    }
    if not found:
        return plan
    missing = {*report.missing_keys, *found}
    report = replace(
        report,
        missing_keys=[name for name in target.slots if name in missing],
        left_out=(*report.left_out, *((plan.pairs[name], why) for name, why in found.items())),
    )
    pairs = {name: own for name, own in plan.pairs.items() if name not in found}
    return plan._replace(pairs=pairs, report=report)


def _why_not_loadable(state: StateDict, own: str, *, is_extra: bool) -> str:
    """Return why an entry cannot be loaded, or ""."""
    node = state.root[own]
    if type(node) is TensorRef and state.slots[own].shape is not None and not is_extra:
        return ""  # the common case first: there may be many keys
    what = opaque_kind(node) if is_extra else "an uninitialized lazy parameter"
    return f"contains {what}, {_NOT_LOADED}" if what else ""


def opaque_kind(node: Any) -> str:
    """Describe the first value inside that is not loaded as it was saved; "" if there is none.

    Objects stay inert, and numpy arrays become tensors.
    """
    for _, leaf in walk(node):
        if isinstance(leaf, Opaque) and unpickled(leaf, lambda inside: inside) is leaf:
            return f"an object of {printable(leaf.class_name)}"
        if isinstance(leaf, Global) and leaf.module != "torch":
            return printable(leaf.qualified)
        if isinstance(leaf, TensorRef) and leaf.kind == "numpy":
            return "a numpy array"
    return ""


def _left_to_torch(plan: LoadPlan, state: StateDict, target: ModelTarget) -> LoadPlan:
    """Leave unmatched keys inside modules with their own loading code to torch.

    Tensors that only their class can create are not passed to that code.
    """
    report, renamed = plan.report, plan.match.renamed
    undecided = {
        name: own
        for own in report.unexpected_keys
        if target.custom_holder(name := renamed.get(own, own)) and name not in plan.pairs
    }
    undecided |= {one.name: one.own for one in report.mismatched if target.custom_holder(one.name)}
    undecided = {name: own for name, own in undecided.items() if not _is_one_part(state, own)}
    own = {*undecided.values()}
    misshapen = (one.name for one in report.mismatched if one.own in own)
    unfilled = [n for n in (*report.missing_keys, *misshapen) if target.custom_holder(n)]
    if not (undecided or unfilled):
        return plan

    def reason(name: str) -> str:
        return f"decided by torch: {target.custom_holder(name)} has its own loading code"

    report = replace(
        report,
        missing_keys=[name for name in report.missing_keys if name not in unfilled],
        unexpected_keys=[name for name in report.unexpected_keys if name not in own],
        mismatched=tuple(one for one in report.mismatched if one.own not in own),
        ambiguous=tuple(
            one for one in report.ambiguous if not {*unfilled, *own} & {*one.names, *one.candidates}
        ),
        kept=(*report.kept, *((name, reason(name)) for name in unfilled)),
        left_out=(*report.left_out, *((old, reason(name)) for name, old in undecided.items())),
    )
    left = tuple(unfilled)
    return plan._replace(pairs={**plan.pairs}, undecided=undecided, report=report, unfilled=left)


def _is_one_part(state: StateDict, own: str) -> bool:
    ref = state.ref(own)
    return ref is not None and is_one_part(ref)


def metadata_for(
    state: StateDict, target: ModelTarget, plan: LoadPlan
) -> OrderedDict[str, Any] | None:
    """Return the file's `_metadata` by the paths of the model's modules, or None.

    A version follows the keys below its module. Model modules without keys of their own keep the
    model's version, unless their own loading code uses the one in the file.
    """
    if state.metadata is None:
        return None
    own = {**plan.match.renamed, **{old: new for new, old in reversed([*plan.pairs.items()])}}
    followed = moved_metadata(state.metadata, own, lambda path: path)
    if target.metadata is None:
        return OrderedDict(followed)
    made: OrderedDict[str, Any] = OrderedDict()
    holders = {name.rpartition(".")[0] for name in target.slots}
    for path, default in target.metadata.items():
        clean = without_hidden(path)
        held = followed.get(path, followed.get(clean))
        if held is not None:
            made[path] = held
        elif clean not in holders and clean not in target.custom:
            made[path] = default
    return made


def _judge_casts(state: StateDict, casts: Iterable[DtypeChange]) -> tuple[DtypeChange, ...]:
    """Judge casts by their values, if their dtypes alone could lose something."""
    judged = []
    lost = cache(lambda own, after: loss_of(state.ref(own) or state.value(own), after))
    for cast in casts:
        if cast.lossy and (loss := lost(cast.own, cast.after)) is not None:
            cast = replace(cast, lossy=bool(loss), loss=loss)
        judged.append(cast)
    return tuple(judged)


def loss_of(value: Any, dtype: str) -> str | None:
    """Describe the loss of a cast: "" if nothing is lost, None if it is unknown.

    `value` is a tensor in memory, or one in a file, which is read block by block. The loss is
    unknown without a plain array of elements, or with dtypes that torch cannot compute with.
    """
    blocks = _blocks(value)
    if blocks is None:
        return None
    try:
        losses = count_cast_losses(blocks, str(value.dtype).removeprefix("torch."), dtype)
    except (RuntimeError, TypeError):  # the backend does not support the operation
        return None
    changed = losses.underflow + losses.precision
    counts = [(losses.overflow, "overflow"), (changed, "change")]
    return ", ".join(f"{n:,} of {losses.elements:,} {verb}" for n, verb in counts if n)


def _blocks(value: Any) -> Iterator[torch.Tensor] | None:
    """Return the elements of a tensor in any order, block by block from a file."""
    import torch

    if isinstance(value, TensorRef):
        is_known = value.dtype not in PACKED and value.dtype not in NOT_IN_TORCH
        if value.has_content and value.is_contiguous and is_known:
            places = iterate_blocks(value.sizes, CHUNK)
            return (materialize(value[at] if at else value).detach() for at in places)
        value = materialize(value)
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        return None
    if value.is_quantized or value.is_nested:
        return None
    return (value.detach()[at] for at in iterate_blocks(value.shape, CHUNK))


def _untied(
    state: StateDict, target: ModelTarget, pairs: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield groups of keys that are tied in the model but differ in the file."""
    groups: dict[Hashable, list[str]] = {}
    for name in pairs:
        tie = target.slots[name].tie
        if tie is not None:
            groups.setdefault(tie, []).append(name)
    for names in groups.values():
        first, *others = dict.fromkeys(pairs[name] for name in names)
        if not all(_has_same_elements(state, first, other) for other in others):
            yield tuple(names)


def _has_same_elements(state: StateDict, one: str, other: str) -> bool:
    """Return True if two entries have the same elements, byte for byte.

    Tensors on the meta device count as equal.
    """
    mine, theirs = state.slots[one], state.slots[other]
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    if mine.tie is not None and mine.tie == theirs.tie:
        return True
    a, b = state.ref(one), state.ref(other)
    if a is not None and b is not None and a.has_content and b.has_content:
        return has_same_elements(a, b)
    import torch

    x, y = state.value(one), state.value(other)
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return x is y
    if x.is_meta or y.is_meta:
        return True
    try:
        plain = [tensor.detach().cpu().resolve_conj().resolve_neg().ravel() for tensor in (x, y)]
        return torch.equal(*(tensor.view(torch.uint8) for tensor in plain))
    except RuntimeError:  # not a plain array of elements
        return torch.equal(x, y)
