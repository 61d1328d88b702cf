"""`load_into`: load any file into a model completely, or raise an error and change nothing."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptool._lazy import pause_gc
from ckptool.core.placeholders import find_placeholders
from ckptool.core.quantization_config import quantization_config
from ckptool.core.quantizers import LIBRARIES, find_quantized
from ckptool.errors import (
    CheckpointError,
    DeviceError,
    MatchError,
    NotFound,
    UnreadableFile,
    UsageError,
    warn,
)
from ckptool.loading.fill import (
    Fill,
    ReplacementMaker,
    can_fill,
    check_bytes,
    check_pickles,
    count_stored_bytes,
    fill,
    have_separate_memory,
)
from ckptool.loading.plan import LoadPlan, check_lists, make_metadata, plan_load
from ckptool.loading.ranks import (
    Ranks,
    distribute_like,
    find_ranks,
    list_fsdp_modules,
    remove_hidden_parts,
)
from ckptool.loading.snapshot import Snapshot, delay_signals, iterate_layers, list_tensors
from ckptool.loading.source import Source, StateDict, open_state_dict
from ckptool.loading.target import (
    ModelTarget,
    describe_target,
    loads_by_name,
    overrides_load,
    read_state_dict,
    runs_foreign_code,
)
from ckptool.matching import Allowance, Allowed, MatchReport
from ckptool.matching.layouts import TransposeRules
from ckptool.matching.report import count_loaded
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors import require_torch
from ckptool.tensors.dequantizing import can_dequantize
from ckptool.tensors.live import locate_tensor
from ckptool.tensors.storages import MapLocation, Placement
from ckptool.transforms.name_rules import Rule
from ckptool.words import a_class, listed, printable, shell

if TYPE_CHECKING:
    import torch

    from ckptool.loading.optimizer import OptimizerPlan

_MAX_COPIED_BYTES = 128 << 20
"""Bytes of tensors copied before a file is read over them, so that a read error can be undone.
For larger models the copy would need too much memory."""
_MAX_CHECKED_BYTES = 1 << 30
"""Bytes up to which a file is checked before loading, unless the caller decides."""
_PARTLY_FILLED = "the model is partly filled"
_NEEDS_POSITION = 'loading only an optimizer needs optimizer_order="position"'
_HINT_OPTIMIZER_ONLY = (
    "load_into(model, {'model': model.state_dict(), 'optimizer': ckptool.load(FILE)}, "
    "optimizer=..., optimizer_order='position')"
)


@refuse_renamed_arguments(rules="use rename instead")
def load_into(
    model: torch.nn.Module,
    source: Source,
    *,
    strict: bool = True,
    allow_missing: Allowed = None,
    allow_unexpected: Allowed = None,
    allow_mismatched: Allowed = False,
    allow_lossy_cast: Allowed = False,
    min_coverage: float | None = None,
    rename: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    transpose: Iterable[str] = (),
    no_transpose: Iterable[str] = (),
    map_location: MapLocation = "cpu",
    assign: bool | None = None,
    verify: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    key: Any = None,
    optimizer_key: Any = None,
    optimizer_order: str | None = None,
    optimizer_partial: bool = False,
) -> MatchReport:
    """Load a file or a state dict into `model`, or raise an error and change nothing.

    Keys are matched as in `ckptool.match`, and the match is checked before the model changes. The
    report lists everything loaded, renamed, cast and left out. docs/loading.md describes exactly
    what is restored after an error.

    - A model on the `meta` device receives tensors that are mapped from the file: **do not truncate
      or overwrite the file while the model exists**, or the process may crash or values change.
    - A model distributed over processes (DDP, FSDP, DTensors) is loaded in all or in none:
      **call `load_into` in every process**, each with its own `source`.

    Args:
        model: A model on any device, with or without wrappers.
        source: A file, a folder, an open checkpoint, a state dict, or a dict that contains one.
        strict: False allows missing and unexpected keys, as in torch.
        allow_missing: True, or globs of model keys that may be missing from the file.
        allow_unexpected: True, or globs of file keys that the model may not have.
        allow_mismatched: True, or globs of keys to skip if the shapes differ.
        allow_lossy_cast: True, or globs of keys with values that a cast may change.
        min_coverage: The share of the model's parameters that must be loaded, from 0 to 1.
        rename: Rules `REGEX=>REPL`, applied to the keys of the file first.
        prefixes: Rules `OLD=NEW`, applied after `rename`.
        transpose: As in `ckptool.match`.
        no_transpose: As in `ckptool.match`.
        map_location: The device of assigned tensors, as in `torch.load`.
        assign: True assigns all tensors, with the dtypes of the file; None only meta tensors.
        verify: Check the file's checksums first. None checks up to 1 GiB that is not mapped.
        optimizer: An optimizer to load from the same file or folder: by parameter name, or by
            position if the file has no names and positions identify the parameters.
        key: The path of the state dict, such as `"ema"`, if the source has several.
        optimizer_key: The path of the optimizer state, or the name of its file in the folder.
        optimizer_order: `"position"` if the optimizer has its parameters in the order of the file,
            in the same groups or others.
        optimizer_partial: Let new parameters start without state, and leave out the state of
            others. Groups that differ from the file keep their own options; the report lists them.

    Raises:
        MatchError: if the source does not fit, another process failed or did not call, or codes of
            quantized weights would be loaded as values.
        UnreadableFile: if the file cannot be opened, or fails its checksums (`CorruptFile`).
        NotFound: if the source has no state dict, or none at `key` (`AmbiguousName`: if several).
        NameCollision: if `rename` gives two entries the same key.
        DeviceError: if the device in `map_location` is not available.
        UsageError: if an argument has a wrong type or value.
    """
    require_torch()
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model is {a_class(model)}, expected a torch.nn.Module",
            hint="call load_into(model, path)",
        )
    ranks = find_ranks(model)
    with ExitStack() as stack:
        stack.enter_context(pause_gc())
        with ranks.raise_on_all_ranks(), _allow_gradients():
            check_lists(
                rename=rename, prefixes=prefixes, transpose=transpose, no_transpose=no_transpose
            )
            _check_arguments(map_location, optimizer_order, assign=assign, verify=verify)
            allowance = Allowance(
                strict=strict,
                missing=allow_missing,
                unexpected=allow_unexpected,
                mismatched=allow_mismatched,
                lossy_cast=allow_lossy_cast,
                min_coverage=min_coverage,
            )
            target = describe_target(model)
            # True if torch would only copy tensors by key: ckptool then fills them itself.
            by_name = not target.custom and loads_by_name(model, iterate_layers(optimizer))
            state = _open_source(
                stack,
                source,
                target,
                key=key,
                map_location=map_location,
                assign=assign,
                by_name=by_name,
                with_optimizer=optimizer is not None,
            )
            plan = plan_load(
                state,
                target,
                rename=rename,
                prefixes=prefixes,
                transpose_rules=TransposeRules.parse(transpose, no_transpose),
                assign=bool(assign),
            )
            _refuse_placeholders(state, plan)
            _check_codes(state, target, plan)
            optimizer_plan: OptimizerPlan | None = None
            if optimizer is not None:
                # Imported here: rarely needed.
                from ckptool.loading.optimizer import plan_optimizer

                optimizer_plan = plan_optimizer(
                    optimizer,
                    model,
                    state,
                    target,
                    plan,
                    key=optimizer_key,
                    order=optimizer_order,
                    partial=optimizer_partial,
                    allowance=allowance,
                )
                plan = plan.with_changes(optimizer=optimizer_plan.report)
            loading = _Loading(
                model,
                target,
                state,
                plan,
                optimizer_plan,
                allowance,
                assign=assign,
                by_name=by_name,
            )
            _refuse_misfit(state, plan, allowance)
        loading.run(verify=verify, ranks=ranks)
        report = replace(loading.plan.report, accepted=True)
        return _warn_about_meta(model, target, report)


def _open_source(
    stack: ExitStack,
    source: Source,
    target: ModelTarget,
    *,
    key: Any,
    map_location: MapLocation,
    assign: bool | None,
    by_name: bool,
    with_optimizer: bool,
) -> StateDict:
    """Open the state dict to load, until `stack` is closed.

    Tensors that torch copies, or that become part of a model on the meta device, are mapped. With
    `by_name`, torch usually copies none: ckptool reads from the file directly into the model's
    tensors, and those that `assign` replaces get memory of their own. `map_location` applies only
    to tensors that become part of the model: with `assign`, or on the meta device.
    """
    has_meta_tensors = any(tensor.is_meta for tensor in target.entries.values())
    opening = open_state_dict(
        source,
        key=key,
        wanted=target.slots,
        map_location=map_location if has_meta_tensors or assign else "cpu",
        mmap=has_meta_tensors or not by_name,
        with_values=with_optimizer,
    )
    try:
        return stack.enter_context(opening)
    except NotFound as error:
        if with_optimizer and key is None:  # the file may contain only an optimizer
            error.message += f"; {_NEEDS_POSITION}"
            error.advise(_HINT_OPTIMIZER_ONLY)
        raise


def _refuse_placeholders(state: StateDict, plan: LoadPlan) -> None:
    """Refuse a state dict with tensors without values, except for lazy parameters.

    Lazy parameters are already in the report of `plan`, as missing.
    """
    placeholders = find_placeholders(state.tree, state.section)
    if placeholders and placeholders.kind != "lazy":
        raise MatchError(
            placeholders.text,
            file=state.file or None,
            hint=placeholders.hint,
            report=plan.report,
        )


def _refuse_misfit(state: StateDict, plan: LoadPlan, allowance: Allowance) -> None:
    """Refuse a plan with differences that are not allowed; the error mentions lazy parameters."""
    refusal = plan.refusal_error(allowance)
    if refusal is None:
        return
    lazy_parameters = find_placeholders(state.tree, state.section)
    if lazy_parameters:
        refusal.message += f"\n{lazy_parameters.text}"
    raise refusal


def _check_codes(state: StateDict, target: ModelTarget, plan: LoadPlan) -> None:
    """Check that no codes of quantized weights are loaded as values.

    That happens if a parameter of a floating-point dtype would get codes of another dtype. A model
    that also loads the companions of the codes (their scales) can interpret them.

    Raises:
        MatchError: if codes would be loaded as values.
    """
    quantized_by_key = find_quantized(state.root)
    if not quantized_by_key:
        return
    loaded_file_keys = {*plan.pairs.values()}
    for key, file_key in plan.pairs.items():
        quantized = quantized_by_key.get(file_key)
        if quantized is None or not quantized.companions:
            continue
        model_dtype = target.slots[key].dtype or ""
        has_values = model_dtype.startswith(("float", "bfloat", "complex"))
        is_cast = model_dtype != state.slots[file_key].dtype
        if loaded_file_keys.issuperset(quantized.companions) or not (has_values and is_cast):
            continue
        library = LIBRARIES.get(quantized.scheme, "the library that wrote it")
        hint = f"load it into a {library} model"
        config = quantization_config(state.tree)
        if not state.tree.in_memory and can_dequantize(state.root, file_key, quantized, config):
            hint = f"convert it first: ckptool cast --dequantize bfloat16 {shell(state.file)}"
        raise MatchError(
            f"{printable(file_key)!r} {quantized}: {target.label} would load its codes as "
            f"values, without {listed(quantized.companions)}",
            file=state.file or None,
            hint=hint,
            report=plan.report,
        )


class _Loading:
    """One load of a model, and of its optimizer, planned before anything changes.

    A tensor is loaded in one of three ways: torch's `load_state_dict` copies or assigns it, it is
    filled directly from the file, or it is replaced by a new tensor.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        target: ModelTarget,
        state: StateDict,
        plan: LoadPlan,
        optimizer: OptimizerPlan | None,
        allowance: Allowance,
        *,
        assign: bool | None,
        by_name: bool,
    ) -> None:
        """Decide how each tensor is loaded; the model does not change yet.

        Tensors on the meta device, and all with `assign`, are replaced. `by_name` means that torch
        would only copy each tensor to the one of its key: then plain tensors are filled directly
        from the file. Otherwise torch loads them from tensors created from the file.

        Raises:
            UsageError: if tensors would be replaced, but `assign` is False or `optimizer` has them.
        """
        self._model, self._target, self._state = model, target, state
        self.plan = plan
        """The plan. After `run`, its report includes the result of the model's own loading code."""
        self._allowance, self._assign = allowance, assign
        self._optimizer = optimizer
        self._file_key_by_key = {**plan.pairs, **plan.undecided}
        """The file's key for each key of the model that is loaded, or left to torch."""
        self._replaced_keys = self._find_replaced_keys(by_name=by_name)
        """The keys of tensors that a new tensor replaces."""
        self._check_replaced_keys()
        self._fills = self._plan_fills() if by_name else None
        """The tensors to fill directly from the file; None if torch loads all."""
        filled_bytes = sum(item.tensor.nbytes for item in self._fills or ())
        self._is_undoable = self._fills is None or filled_bytes <= _MAX_COPIED_BYTES
        """True if the snapshot has a copy of all elements that change."""

    def _find_replaced_keys(self, *, by_name: bool) -> set[str]:
        """Return the keys of tensors to replace: all with `assign`, or those on the meta device.

        If torch's `load_state_dict` runs (not `by_name`), it assigns all tensors or none, so one
        tensor on the meta device means all. Keys in `report.kept` may be filled by the model's own
        code, so they count too.
        """
        entries = self._target.entries
        kept_keys = (name for name, _ in self.plan.report.kept)
        keys = {name for name in (*self._file_key_by_key, *kept_keys) if name in entries}
        replaced_keys = {name for name in keys if self._assign or entries[name].is_meta}
        return keys if replaced_keys and not by_name else replaced_keys

    def _check_replaced_keys(self) -> None:
        """Refuse to replace tensors if `assign` is False, or if the optimizer has one of them."""
        if self._assign is False and self._replaced_keys:
            raise UsageError(
                f"cannot copy to tensors on the meta device: "
                f"{listed(map(printable, sorted(self._replaced_keys)))}",
                hint="use assign=None or assign=True",
            )
        replaced_ids = {id(self._target.entries[name]) for name in self._replaced_keys}
        groups = self._optimizer.optimizer.param_groups if self._optimizer is not None else ()
        if any(id(parameter) in replaced_ids for group in groups for parameter in group["params"]):
            raise UsageError(
                "the optimizer has parameters that would be replaced",
                hint="load the model, build the optimizer, then call load_into(model, path, "
                "optimizer=...)",
            )

    def _plan_fills(self) -> list[Fill] | None:
        """Return the tensors to fill directly from the source, without those that are replaced.

        Returns None if torch has to load all: if an entry of the model is not a tensor, if a tensor
        or its source is not a plain array, if the source is memory of the model itself, or if
        tensors share memory.
        """
        fill_by_id: dict[int, Fill] = {}
        for key, file_key in self.plan.pairs.items():
            tensor = self._target.entries.get(key)
            if tensor is None:
                return None
            if key in self._replaced_keys:
                continue
            ref = self._state.ref(file_key)
            # torch's cast ignores the negative bit of a tensor; `fill` resolves it first.
            source = self._state.value(file_key) if ref is None or ref.flags else ref
            if not can_fill(tensor, source) or self._uses_model_storage(source):
                return None
            fill_by_id.setdefault(id(tensor), Fill(tensor, source))  # tied keys have one tensor
        fills = list(fill_by_id.values())
        return fills if have_separate_memory(item.tensor for item in fills) else None

    @cached_property
    def _model_storages(self) -> set[int]:
        """The identities of the storages of the model's tensors."""
        locations = map(locate_tensor, self._target.entries.values())
        return {location.storage for location in locations if location}

    def _uses_model_storage(self, source: Any) -> bool:
        """Return True if a tensor in memory uses one of the model's own storages."""
        import torch

        if not self._state.tree.in_memory or not isinstance(source, torch.Tensor):
            return False
        location = locate_tensor(source)
        return location is not None and location.storage in self._model_storages

    def run(self, *, verify: bool | None, ranks: Ranks) -> None:
        """Load, or restore everything on an error.

        The direct fill is the last step, and signals wait for its end. If it fails, it is undone if
        at most 128 MiB are filled; otherwise the error reports a partly filled model. Each step
        begins after all processes of `ranks` have finished the previous one.
        """
        with ranks.raise_on_all_ranks():
            self._check_bytes(verify)
        with ranks.raise_on_all_ranks(), _allow_gradients():
            new_state = self._make_state_for_torch()
            snapshot = self._take_snapshot()
        is_done = False
        try:
            with ranks.raise_on_all_ranks():
                if self._fills is None:  # torch loads all tensors
                    self._load_with_torch(new_state)
                if self._optimizer is not None:
                    self._optimizer.apply()
            with delay_signals():
                with ranks.raise_on_all_ranks("" if self._is_undoable else _PARTLY_FILLED):
                    self._fill_and_replace(new_state)
                is_done = True
        except BaseException:
            if not is_done:
                with delay_signals():
                    snapshot.restore()
            raise

    def _take_snapshot(self) -> Snapshot:
        """Record the model and the optimizer, with a copy of the elements that will change.

        If torch loads all, that is every tensor, else those to fill, if they are few enough to undo
        it. Code that is not torch's could also write to the optimizer's state, so this is copied.
        """
        filled_ids = {id(item.tensor) for item in self._fills or ()} if self._is_undoable else set()
        is_loaded_by_torch = self._fills is None
        optimizer = self._optimizer and self._optimizer.optimizer
        return Snapshot(
            self._model,
            optimizer,
            copied=lambda tensor: is_loaded_by_torch or id(tensor) in filled_ids,
            with_state=any(map(runs_foreign_code, iterate_layers(optimizer))),
        )

    def _check_bytes(self, verify: bool | None) -> None:
        """Check the bytes that will be read, to find damage before the model changes.

        If `verify` is None, tensors are checked only if they are not mapped and at most 1 GiB. The
        pickles, which are small, are checked unless `verify` is False.
        """
        # Mapped tensors are not read now, so checking them is an extra read: only if asked.
        mapped_keys = self._replaced_keys if self._state.mmap and not verify else ()
        tensors = (
            (file_key, self._state.ref(file_key))
            for key, file_key in self._file_key_by_key.items()
            if key not in mapped_keys
        )
        refs = {file_key: ref for file_key, ref in tensors if ref is not None}
        if verify or (verify is None and count_stored_bytes(refs.items()) <= _MAX_CHECKED_BYTES):
            check_bytes(refs.items())
        if verify is not False:
            check_pickles(self._state.tree.sources)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise an error if the file was written to after it was opened."""
        for source in self._state.tree.sources:
            source.check_unchanged()

    def _make_state_for_torch(self) -> OrderedDict[str, Any]:
        """Return the values for `load_state_dict` by model key.

        If the tensors are filled directly (`_fills`), only the replacements are returned.
        """
        entries, slots = self._target.entries, self._target.slots
        replacements = ReplacementMaker(cast=self._assign is None)
        given: OrderedDict[str, Any] = OrderedDict()
        for key, file_key in self._file_key_by_key.items():
            if self._fills is not None and key not in self._replaced_keys:
                continue
            value, tensor = self._state.value(file_key), entries.get(key)
            if tensor is not None:
                value = distribute_like(tensor, value)
            # Undecided keys are not in `pairs`: the model's own code gets them as in the file.
            if tensor is not None and key in self._replaced_keys and key in self.plan.pairs:
                try:
                    value = replacements.make(tensor, slots[key].tie, value)
                except RuntimeError as error:  # torch does not support this parameter or cast
                    raise self._load_error(f"{printable(key)}: {error}") from error
            elif self._uses_model_storage(value):  # torch would read it after it has changed
                value = value.detach().clone()
            given[key] = value
        return given

    def _load_with_torch(self, given: OrderedDict[str, Any]) -> None:
        """Call the model's `load_state_dict`, including all hooks, and judge its answer."""
        metadata = make_metadata(self._state, self._target, self.plan)
        if metadata is not None:
            vars(given)["_metadata"] = {path: dict(entry) for path, entry in metadata.items()}
        options = self._choose_load_options(given)
        entries = self._target.entries
        # By key that the model's own code may fill: its version, to see if the code does.
        version_before = {
            name: _version_of(entries[name]) for name in self.plan.unfilled if name in entries
        }
        try:
            answer = self._model.load_state_dict(given, **options)
        except RuntimeError as error:
            message = str(error)
            if not message.startswith("Error(s) in loading state_dict"):
                raise
            # torch puts each reason on a line of its own after a tab: the first one is shown.
            raise self._load_error(message.partition("\n\t")[2].partition("\n")[0]) from error
        self._copy_kept_mappings(given)
        # FSDP gathers each state dict into new tensors, whose versions say nothing.
        can_compare = bool(version_before) and not list_fsdp_modules(self._model)
        state_after = read_state_dict(self._model) if can_compare else {}
        touched = {
            name
            for name, version in version_before.items()
            if name in state_after and _version_of(state_after[name]) != version
        }
        self._judge_answer(answer, touched)

    def _choose_load_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options for the model's `load_state_dict` that it accepts.

        With tensors on the meta device, or `assign=True`, torch assigns all given tensors. The call
        is not strict, because ckptool judges the keys that it reports as missing or unexpected; an
        override that may report none is called with `strict` if nothing has to be allowed.
        """
        requested: dict[str, Any] = {"strict": False}
        if self._replaced_keys:
            requested["assign"] = True
        elif overrides_load(self._model):  # it may return nothing instead of the keys
            allowed = self._allowance
            expected_keys = {*given, *self.plan.unfilled}
            requested["strict"] = self._target.slots.keys() <= expected_keys and not (
                allowed.missing or allowed.unexpected or not allowed.strict
            )
        parameters = inspect.signature(self._model.load_state_dict).parameters.values()
        names = {parameter.name for parameter in parameters}
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        options = {name: value for name, value in requested.items() if accepts_any or name in names}
        if "assign" in requested and "assign" not in options:
            raise self._load_error(
                f"{type(self._model).__name__}.load_state_dict does not accept assign=, "
                "which is needed"
            )
        return options

    def _copy_kept_mappings(self, given: Mapping[str, Any]) -> None:
        """Copy tensors of the model that use memory of `given`, if it is mapped from the file.

        torch copies the elements, so only a hook can have kept a given tensor. Replaced tensors
        stay mapped, as documented.
        """
        if not self._state.mmap or self._replaced_keys or self._state.tree.in_memory:
            return
        import torch

        tensors = (value for value in given.values() if isinstance(value, torch.Tensor))
        mapped = {location.storage for location in map(locate_tensor, tensors) if location}
        for tensor in list_tensors(self._model):
            location = locate_tensor(tensor)
            if location is not None and location.storage in mapped:
                tensor.data = tensor.data.clone()

    def _judge_answer(self, answer: Any, touched: set[str]) -> None:
        """Update the report of the plan, and raise an error for keys that were not loaded.

        `answer` is the result of `load_state_dict`: it loaded all keys that are not in its
        `missing_keys` or `unexpected_keys`. Of the model's keys left to its own code (`unfilled` in
        the plan), it loaded those in `touched`, and did not need the others. Keys of the file left
        to this code (`undecided`) were loaded if they are not unexpected. Allowed keys raise no
        error.
        """
        report, own_code_keys = self.plan.report, self.plan.unfilled
        not_required = {row.name for row in report.mismatched}
        not_required.update(name for name, _ in report.kept if name not in own_code_keys)
        expected_missing = {*report.missing_keys, *not_required}
        not_loaded = [
            name
            for name in getattr(answer, "missing_keys", [])
            if remove_hidden_parts(name) not in expected_missing
        ]
        unexpected = getattr(answer, "unexpected_keys", [])
        key_by_loaded_file_key = {
            file_key: key for key, file_key in self.plan.undecided.items() if key not in unexpected
        }
        if not (not_loaded or unexpected or own_code_keys or key_by_loaded_file_key):
            return
        kept = [(name, reason) for name, reason in report.kept if name not in own_code_keys]
        for name in own_code_keys:
            if name not in not_loaded:
                verb = "filled" if name in touched else "not required"
                kept.append((name, self._credit_own_code(name, verb)))
        left_out = []
        undecided_file_keys = {*self.plan.undecided.values()}
        for file_key, reason in report.left_out:
            if file_key in key_by_loaded_file_key:
                key = key_by_loaded_file_key[file_key]
                left_out.append((file_key, self._credit_own_code(key, "loaded")))
            elif file_key not in undecided_file_keys:  # the others are in `unexpected`
                left_out.append((file_key, reason))
        self.plan = self.plan.with_changes(
            missing_keys=[*report.missing_keys, *not_loaded],
            unexpected_keys=[
                *report.unexpected_keys,
                *(self._file_key_by_key.get(name, name) for name in unexpected),
            ],
            kept=tuple(kept),
            left_out=tuple(left_out),
            **count_loaded(
                self._target.slots,
                {*self.plan.pairs, *touched} - set(not_loaded),
                not_required - set(report.missing_keys),
            ),
        )
        refusal = self._allowance.refusal_error(self.plan.report)
        if refusal is not None:
            raise refusal

    def _credit_own_code(self, key: str, verb: str) -> str:
        """Return a reason for the report, such as "filled by Encoder's own loading code"."""
        return f"{verb} by {self._target.find_custom_holder(key)}'s own loading code"

    def _load_error(self, reason: str) -> MatchError:
        """Return the error for a failure of `load_state_dict`."""
        report = self.plan.report
        return MatchError(
            f"{report.file or 'the state dict'} cannot be loaded into {report.model}: {reason}",
            file=report.file or None,
            report=report,
        )

    def _fill_and_replace(self, given: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors from the file, and put the replacements in `given`, by key, into the model.

        A replacement takes the place of a tensor everywhere, also under tied keys. If torch has
        loaded all tensors, this only checks that the file has not changed.
        """
        if self._fills is None:
            self._check_unchanged()
            return
        self._fill_tensors(self._fills)
        replacement_by_id = {
            id(self._target.entries[name]): tensor for name, tensor in given.items()
        }
        if not replacement_by_id:
            return
        for module in self._model.modules():
            dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in dicts:
                tensors.update(
                    (name, replacement_by_id[id(old)])
                    for name, old in tensors.items()
                    if id(old) in replacement_by_id
                )

    def _fill_tensors(self, fills: list[Fill]) -> None:
        """Fill tensors from the file, and check that the file has not changed.

        An error leaves the model partly filled. If this cannot be undone, the error reports it.
        """
        import torch

        try:
            with torch.no_grad():
                for item in fills:
                    item.tensor.copy_(item.tensor)  # A no-op that shows autograd the change.
            fill(fills)
            self._check_unchanged()
        except Exception as error:  # including device and memory errors
            if self._is_undoable:
                raise
            is_of_the_file = isinstance(error, (UnreadableFile, OSError))
            raise (UnreadableFile if is_of_the_file else CheckpointError)(
                f"{_PARTLY_FILLED}, because loading failed: {type(error).__name__}: {error}",
                file=self._state.file or None,
                hint="load an intact file before you use the model",
            ) from error


def _version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes if the tensor is written to or replaced."""
    try:
        return id(tensor), tensor._version
    except (RuntimeError, ValueError):  # an inference tensor, a lazy parameter
        return id(tensor), -1


@contextmanager
def _allow_gradients() -> Iterator[None]:
    """Leave the caller's inference mode, in which torch can create no trainable tensors."""
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # still without recording operations
        yield


def _check_arguments(map_location: Any, optimizer_order: Any, **switches: Any) -> None:
    """Refuse a wrong device, optimizer order, or switch (each is True, False or None)."""
    import torch

    Placement(map_location)
    if isinstance(map_location, str):
        try:
            torch.device(map_location)
        except RuntimeError:
            raise DeviceError(
                f"map_location={map_location!r} is not a device",
                hint="use 'cpu' or 'cuda:0', for example",
            ) from None
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{name}={value!r} is not True, False or None")
    if optimizer_order is not None and optimizer_order != "position":
        raise UsageError(f"optimizer_order={optimizer_order!r} is not 'position' or None")


def _warn_about_meta(
    model: torch.nn.Module, target: ModelTarget, report: MatchReport
) -> MatchReport:
    """Warn about tensors that are still on the meta device; return the report with this note."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if not on_meta:
        return report
    note = f"still on the meta device: {listed(map(printable, on_meta))}"
    warn(f"loaded {target.label}, but some tensors are {note}")
    return replace(report, notes=(*report.notes, note))
