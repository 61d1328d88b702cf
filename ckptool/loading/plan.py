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
from ckptool.loading.load import rebuild_builtin
from ckptool.loading.ranks import remove_hidden_parts
from ckptool.loading.source import StateDict, open_state_dict
from ckptool.loading.target import REFERENCE, ModelTarget, describe_target, parse_description
from ckptool.matching import Allowance, DtypeChange, Match, MatchReport, match_keys
from ckptool.matching.layouts import TransposeRules, expect_file_shapes, resolve_layouts
from ckptool.matching.report import count_loaded
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors import is_one_part, materialize, require_torch
from ckptool.tensors.bytewise import has_same_elements
from ckptool.tensors.casting import CHUNK, count_cast_losses
from ckptool.tensors.live import iterate_blocks
from ckptool.transforms.metadata import move_metadata
from ckptool.transforms.name_rules import Rule, parse_rules
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_NOT_LOADABLE = "which cannot be loaded from a file"


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
@pause_gc()
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
    transpose_rules = TransposeRules.parse(transpose, no_transpose)
    target = describe_like(like, key=like_key)
    with open_state_dict(state_dict, key=key, wanted=target.slots) as state:
        plan = plan_load(
            state, target, rename=rename, prefixes=prefixes, transpose_rules=transpose_rules
        )
        pairs = {**plan.pairs, **plan.undecided}  # a module's own code loads the second ones
        fitting = OrderedDict((name, state.value(file_key)) for name, file_key in pairs.items())
        metadata = make_metadata(state, target, plan)
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


def describe_like(like: Any, *, key: Any = None) -> ModelTarget:
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
        if key is None or not isinstance(like, Mapping):  # `key` selects in a dict of state dicts
            target = parse_description(like)
            if target is not None:
                return target
    try:
        with open_state_dict(like, key=key) as state:
            return ModelTarget(state.file or REFERENCE, state.slots, metadata=state.metadata)
    except NotFound as error:
        error.message = f"{REFERENCE}: {error.message}"
        if error.remedy is not None:  # it proposes `key=`, which here selects in the other source
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

    def refusal_error(self, allowance: Allowance) -> MatchError | None:
        """Return the error for differences that are not allowed, or None.

        The message also has the reasons why entries of the file cannot be loaded. If a module's
        own code may fill keys, the coverage is judged only after it has run.
        """
        report = self.report
        if self.unfilled:  # count everything as loaded until then
            report = replace(report, loaded=report.parameters, fitting=report.names)
        refusal = allowance.refusal_error(report)
        reasons = [
            f"{printable(name)}: {reason}"
            for name, reason in report.left_out
            if reason.endswith(_NOT_LOADABLE)
        ]
        if refusal is not None and reasons:
            refusal.message += f"\n{listed(reasons, most=2)}"
        return refusal


@pause_gc()
def plan_load(
    state: StateDict,
    target: ModelTarget,
    *,
    rename: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    transpose_rules: TransposeRules | None = None,
    assign: bool = False,
    by_type: bool = False,
    as_stored: bool = False,
) -> LoadPlan:
    """Match the keys, then compare values where a cast or a tie may lose some.

    For a file with another layout than torch's, the axes in `state` are put in torch's order.

    With `by_type`, casts are judged by dtype, and files need no torch. With `assign`, the model
    uses the tensors unchanged, so there are no casts. With `as_stored`, the target is a file:
    objects stay objects, and casts are judged by dtype.

    Raises:
        NameCollision: if the rules give two entries the same key.
        UsageError: if a string is not a rule.
        TorchMissing: if values have to be read, and torch is not installed.
        CorruptFile, DeviceError: if the values cannot be read.
    """
    has_foreign_layout = bool(load_format(state.tree.format).layout)
    kinds = target.kinds() if has_foreign_layout else None
    transpose_rules = transpose_rules or TransposeRules()
    may_permute = has_foreign_layout or bool(transpose_rules.transpose)
    match = match_keys(
        state.slots,
        expect_file_shapes(target.slots, kinds, transpose_rules) if may_permute else target.slots,
        rules=parse_rules(rename, prefixes),
        metadata=state.metadata,
        unrespelled_paths=target.unrespelled_paths,
        foreign=has_foreign_layout,
        file=state.file,
        model=target.label,
    )
    counted_pairs = match.pairs
    if may_permute:
        match = resolve_layouts(match, state.slots, target.slots, kinds, transpose_rules)
        state.permute_axes(match.report.layouts)
    plan = LoadPlan(match.pairs, undecided={}, report=match.report, match=match)
    if not as_stored:
        plan = _drop_unloadable(plan, state, target)
    if target.custom:
        plan = _leave_to_torch(plan, state, target)
    report = _compare_values(plan, state, target, assign=assign, by_type=by_type or as_stored)
    if plan.pairs is not counted_pairs:  # entries were left out after `match_keys`: count again
        not_required = dict(report.kept).keys() - set(plan.undecided)
        report = replace(report, **count_loaded(target.slots, plan.pairs, not_required))
    return plan._replace(report=report)


def _compare_values(
    plan: LoadPlan, state: StateDict, target: ModelTarget, *, assign: bool, by_type: bool
) -> MatchReport:
    """Return the report, with the casts and ties that remain after a comparison of values.

    Keys that are tied in the model but have different values in the file become `untied`. There are
    no casts with `assign`; with `by_type`, dtypes decide if casts lose values. The state dict's
    plain values are added to `left_out`.
    """
    report, pairs = plan.report, plan.pairs
    untied = tuple(_find_untied(state, target, pairs))
    untied_keys = {name for group in untied for name in group}
    tied = (
        group
        for group in report.tied
        if untied_keys.isdisjoint(group) and not pairs.keys().isdisjoint(group)
    )
    casts = () if assign else tuple(row for row in report.cast if row.name in pairs)
    plain_values = ((name, "a plain value, which no model loads") for name in state.plain_values)
    return replace(
        report,
        cast=casts if by_type else _judge_casts(state, casts),
        tied=tuple(tied),
        untied=untied,
        left_out=(*report.left_out, *plain_values),
    )


def _drop_unloadable(plan: LoadPlan, state: StateDict, target: ModelTarget) -> LoadPlan:
    """Leave out entries that cannot be loaded: objects, and uninitialized lazy parameters.

    The report lists their keys as missing. An extra state that contains a pickled object is also
    left out, because the model would get an inert copy of it.
    """
    reason_by_key = {}
    for key, file_key in plan.pairs.items():
        is_extra = target.slots[key].kind == "extra"
        reason = _explain_unloadable(state, file_key, is_extra=is_extra)
        if reason:
            reason_by_key[key] = reason
    if not reason_by_key:
        return plan
    missing = {*plan.report.missing_keys, *reason_by_key}
    left_out = ((plan.pairs[key], reason) for key, reason in reason_by_key.items())
    report = replace(
        plan.report,
        missing_keys=[key for key in target.slots if key in missing],
        left_out=(*plan.report.left_out, *left_out),
    )
    pairs = {key: file_key for key, file_key in plan.pairs.items() if key not in reason_by_key}
    return plan._replace(pairs=pairs, report=report)


def _explain_unloadable(state: StateDict, file_key: str, *, is_extra: bool) -> str:
    """Return the reason why an entry (`is_extra`: an extra state) cannot be loaded, or ""."""
    node = state.root[file_key]
    if type(node) is TensorRef and state.slots[file_key].shape is not None and not is_extra:
        return ""  # The common case comes first, because there may be many keys.
    problem = describe_opaque(node) if is_extra else "an uninitialized lazy parameter"
    return f"contains {problem}, {_NOT_LOADABLE}" if problem else ""


def describe_opaque(node: Any) -> str:
    """Describe the first value inside that is not loaded as it was saved; "" if there is none.

    Objects stay inert, and numpy arrays become tensors.
    """
    for _, leaf in walk(node):
        # Without its content: `walk` yields that too.
        if isinstance(leaf, Opaque) and rebuild_builtin(leaf, lambda inside: inside) is leaf:
            return f"an object of {printable(leaf.class_name)}"
        if isinstance(leaf, Global) and leaf.module != "torch":  # a dtype of torch is loaded
            return printable(leaf.qualified)
        if isinstance(leaf, TensorRef) and leaf.kind == "numpy":
            return "a numpy array"
    return ""


def _leave_to_torch(plan: LoadPlan, state: StateDict, target: ModelTarget) -> LoadPlan:
    """Leave unmatched keys inside modules with their own loading code to that code.

    Keys of the file that only these modules can place become `undecided`, keys of the model that
    they may fill become `unfilled`. The report no longer lists them as missing, unexpected or
    mismatched, but as kept or left out. One rank's part of a tensor is not passed on.
    """
    report = plan.report
    undecided: dict[str, str] = {}  # by model key, the file key
    for file_key in report.unexpected_keys:
        key = plan.match.renamed.get(file_key, file_key)
        if key not in plan.pairs and target.find_custom_holder(key):
            undecided[key] = file_key
    for row in report.mismatched:
        if target.find_custom_holder(row.name):
            undecided[row.name] = row.own  # the keys of the model and of the file
    undecided = {
        key: file_key for key, file_key in undecided.items() if not _is_one_part(state, file_key)
    }
    undecided_file_keys = {*undecided.values()}
    misshapen = (row.name for row in report.mismatched if row.own in undecided_file_keys)
    unfilled = [key for key in (*report.missing_keys, *misshapen) if target.find_custom_holder(key)]
    if not (undecided or unfilled):
        return plan
    custom_keys = {*unfilled, *undecided_file_keys}
    report = replace(
        report,
        missing_keys=[key for key in report.missing_keys if key not in unfilled],
        unexpected_keys=[key for key in report.unexpected_keys if key not in undecided_file_keys],
        mismatched=tuple(row for row in report.mismatched if row.own not in undecided_file_keys),
        ambiguous=tuple(
            row for row in report.ambiguous if custom_keys.isdisjoint((*row.names, *row.candidates))
        ),
        kept=(*report.kept, *((key, _explain_left_to_torch(target, key)) for key in unfilled)),
        left_out=(
            *report.left_out,
            *(
                (file_key, _explain_left_to_torch(target, key))
                for key, file_key in undecided.items()
            ),
        ),
    )
    # The pairs are copied, so that `plan_load` sees a change and counts again.
    return plan._replace(
        pairs={**plan.pairs}, undecided=undecided, report=report, unfilled=tuple(unfilled)
    )


def _explain_left_to_torch(target: ModelTarget, key: str) -> str:
    """Return the reason in the report for a key that is left to a module's own code."""
    return f"decided by torch: {target.find_custom_holder(key)} has its own loading code"


def _is_one_part(state: StateDict, file_key: str) -> bool:
    """Return True if an entry is one rank's part of a tensor."""
    ref = state.ref(file_key)
    return ref is not None and is_one_part(ref)


def make_metadata(
    state: StateDict, target: ModelTarget, plan: LoadPlan
) -> OrderedDict[str, Any] | None:
    """Return the file's `_metadata` by the paths of the model's modules, or None if it has none.

    The entry of a module moves with the keys below it. Model modules without keys of their own keep
    the model's entry, unless their own loading code uses the one in the file.
    """
    if state.metadata is None:
        return None
    # Reversed, so that the first of several tied keys of the model counts.
    key_by_file_key = {file_key: key for key, file_key in reversed([*plan.pairs.items()])}
    new_keys = {**plan.match.renamed, **key_by_file_key}
    entry_by_path = move_metadata(state.metadata, new_keys, rename_module=lambda path: path)
    if target.metadata is None:
        return OrderedDict(entry_by_path)
    metadata: OrderedDict[str, Any] = OrderedDict()
    paths_with_keys = {name.rpartition(".")[0] for name in target.slots}
    for path, live_entry in target.metadata.items():
        bare_path = remove_hidden_parts(path)  # wrappers may add components to `path` only
        entry = entry_by_path.get(path, entry_by_path.get(bare_path))
        if entry is not None:
            metadata[path] = entry
        elif bare_path not in paths_with_keys and bare_path not in target.custom:
            metadata[path] = live_entry
    return metadata


def _judge_casts(state: StateDict, casts: Iterable[DtypeChange]) -> tuple[DtypeChange, ...]:
    """Return the casts with their real loss: the values decide if the dtypes could lose some.

    A cast with a loss that cannot be computed stays `lossy`.
    """

    @cache  # tied keys of the model have one entry in the file
    def find_loss(file_key: str, after: str) -> str | None:
        """Describe the loss of one cast, as `describe_loss` does."""
        return describe_loss(state.ref(file_key) or state.value(file_key), after)

    judged = []
    for cast in casts:
        # `own` is the key in the file.
        loss = find_loss(cast.own, cast.after) if cast.lossy else None
        judged.append(cast if loss is None else replace(cast, lossy=bool(loss), loss=loss))
    return tuple(judged)


def describe_loss(value: Any, dtype: str) -> str | None:
    """Describe the loss of a cast: "" if nothing is lost, None if it is unknown.

    `value` is a tensor in memory, or one in a file, which is read block by block. The loss is
    unknown without a plain array of elements, or with dtypes that torch cannot compute with.
    """
    blocks = _iterate_blocks(value)
    if blocks is None:
        return None
    try:
        losses = count_cast_losses(blocks, str(value.dtype).removeprefix("torch."), dtype)
    except (RuntimeError, TypeError):  # the backend does not support the operation
        return None
    changed = losses.underflow + losses.precision
    counts = [(losses.overflow, "overflow"), (changed, "change")]
    return ", ".join(f"{n:,} of {losses.elements:,} {verb}" for n, verb in counts if n)


def _iterate_blocks(value: Any) -> Iterator[torch.Tensor] | None:
    """Yield the elements of a tensor in blocks, or return None if it is no plain array of elements.

    A contiguous tensor in a file is read block by block, any other at once.
    """
    import torch

    if isinstance(value, TensorRef):
        is_known = value.dtype not in PACKED and value.dtype not in NOT_IN_TORCH
        if value.has_content and value.is_contiguous and is_known:
            indexes = iterate_blocks(value.sizes, CHUNK)
            # The only index of a scalar is empty.
            return (materialize(value[index] if index else value).detach() for index in indexes)
        value = materialize(value)
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        return None
    if value.is_quantized or value.is_nested:
        return None
    return (value.detach()[index] for index in iterate_blocks(value.shape, CHUNK))


def _find_untied(
    state: StateDict, target: ModelTarget, pairs: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield groups of keys that are tied in the model but differ in the file."""
    keys_by_tie: dict[Hashable, list[str]] = {}
    for key in pairs:
        tie = target.slots[key].tie
        if tie is not None:
            keys_by_tie.setdefault(tie, []).append(key)
    for keys in keys_by_tie.values():
        first, *others = dict.fromkeys(pairs[key] for key in keys)  # the file keys, each once
        if not all(_has_same_elements(state, first, other) for other in others):
            yield tuple(keys)


def _has_same_elements(state: StateDict, first: str, second: str) -> bool:
    """Return True if two entries have the same elements, byte for byte.

    Tied entries, and tensors on the meta device, count as equal. Other objects are equal only if
    they are the same object. Two tensors in files are compared without torch.
    """
    first_slot, second_slot = state.slots[first], state.slots[second]
    if (first_slot.dtype, first_slot.shape) != (second_slot.dtype, second_slot.shape):
        return False
    if first_slot.tie is not None and first_slot.tie == second_slot.tie:
        return True
    first_ref, second_ref = state.ref(first), state.ref(second)
    if (
        first_ref is not None
        and second_ref is not None
        and first_ref.has_content
        and second_ref.has_content
    ):
        return has_same_elements(first_ref, second_ref)
    import torch

    first_value, second_value = state.value(first), state.value(second)
    if not (isinstance(first_value, torch.Tensor) and isinstance(second_value, torch.Tensor)):
        return first_value is second_value
    if first_value.is_meta or second_value.is_meta:
        return True
    try:
        first_bytes, second_bytes = (
            tensor.detach().cpu().resolve_conj().resolve_neg().ravel().view(torch.uint8)
            for tensor in (first_value, second_value)
        )
        return torch.equal(first_bytes, second_bytes)
    except RuntimeError:  # not a plain array of elements
        return torch.equal(first_value, second_value)
