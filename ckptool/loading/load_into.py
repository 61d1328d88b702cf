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
    Assigned,
    Fill,
    are_apart,
    can_fill,
    check_bytes,
    check_pickles,
    fill,
    stored_bytes,
)
from ckptool.loading.plan import LoadPlan, check_lists, metadata_for, plan_load
from ckptool.loading.ranks import Ranks, ranks_of, sharded, spread_like, without_hidden
from ckptool.loading.snapshot import Snapshot, held_back, layers, tensors_of
from ckptool.loading.source import Source, StateDict, open_state_dict
from ckptool.loading.target import (
    ModelTarget,
    describe_target,
    loads_by_name,
    overrides_load,
    runs_foreign_code,
    state_dict_of,
)
from ckptool.matching import Allowance, Allowed, MatchReport
from ckptool.matching.layouts import TransposeRules
from ckptool.matching.report import counted
from ckptool.renamed import refuse_renamed_arguments
from ckptool.tensors import require_torch
from ckptool.tensors.dequantizing import can_dequantize
from ckptool.tensors.live import locate_tensor
from ckptool.tensors.materialize import MapLocation, Placement
from ckptool.transforms.name_rules import Rule
from ckptool.words import a_class, listed, printable, shell

if TYPE_CHECKING:
    import torch

    from ckptool.loading.optimizer import OptimizerPlan

_COPIED = 128 << 20
"""Bytes of tensors copied before a file is read over them, so that a read error can be undone.
For larger models the copy would need too much memory."""
_CHECKED = 1 << 30
"""Bytes up to which a file is checked before loading, unless the caller decides."""
_IN_PART = "the model is partly filled"
_NO_MODEL = 'loading only an optimizer needs optimizer_order="position"'
_OPTIMIZER_ONLY = (
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
    together = ranks_of(model)
    with ExitStack() as held:
        held.enter_context(pause_gc())
        with together.raise_on_all_ranks(), _trainable():
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
            on_meta = any(tensor.is_meta for tensor in target.entries.values())
            by_name = not target.custom and loads_by_name(model, layers(optimizer))
            stating = open_state_dict(
                source,
                key=key,
                wanted=target.slots,
                map_location=map_location if on_meta or assign else "cpu",
                mmap=on_meta or not by_name,
                with_values=optimizer is not None,
            )
            try:
                state = held.enter_context(stating)
            except NotFound as error:
                if optimizer is not None and key is None:
                    error.message += f"; {_NO_MODEL}"
                    error.advise(_OPTIMIZER_ONLY)
                raise
            plan = plan_load(
                state,
                target,
                rename=rename,
                prefixes=prefixes,
                choices=TransposeRules.of(transpose, no_transpose),
                assign=bool(assign),
            )
            without_values = find_placeholders(state.tree, state.section)
            if without_values and without_values.kind != "lazy":  # lazy parameters count as missing
                raise MatchError(
                    without_values.text,
                    file=state.file or None,
                    hint=without_values.hint,
                    report=plan.report,
                )
            _check_codes(state, target, plan)
            filled = None
            if optimizer is not None:
                from ckptool.loading.optimizer import planned_optimizer  # rarely needed

                filled = planned_optimizer(
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
                plan = plan.with_changes(optimizer=filled.report)
            loading = _Loading(
                model, target, state, plan, filled, allowance, assign=assign, by_name=by_name
            )
            refusal = loading.plan.refusal(allowance)
            if refusal is not None:
                if without_values:
                    refusal.message += f"\n{without_values.text}"
                raise refusal
        loading.run(verify=verify, together=together)
        report = replace(loading.plan.report, accepted=True)
        return _warn_about_meta(model, target, report)


def _check_codes(state: StateDict, target: ModelTarget, plan: LoadPlan) -> None:
    """Check that no codes of quantized weights are loaded as values.

    A model that also loads the companions of the codes can interpret them.

    Raises:
        MatchError: if codes would be loaded as values.
    """
    known, taken = find_quantized(state.root), {*plan.pairs.values()}
    for name, own in plan.pairs.items() if known else ():
        found, wanted = known.get(own), target.slots[name].dtype or ""
        if (
            found is not None
            and found.companions
            and not taken.issuperset(found.companions)
            and wanted.startswith(("float", "bfloat", "complex"))
            and wanted != state.slots[own].dtype
        ):
            library = LIBRARIES.get(found.scheme, "the library that wrote it")
            hint = f"load it into a {library} model"
            config = quantization_config(state.tree)
            if not state.tree.in_memory and can_dequantize(state.root, own, found, config):
                hint = f"convert it first: ckptool cast --dequantize bfloat16 {shell(state.file)}"
            raise MatchError(
                f"{printable(own)!r} {found}: {target.label} would load its codes as values, "
                f"without {listed(found.companions)}",
                file=state.file or None,
                hint=hint,
                report=plan.report,
            )


class _Loading:
    """One load, planned before anything changes."""

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
        """Decide how each tensor is filled.

        Tensors on the meta device, and all with `assign`, are replaced. If torch would only copy
        `by_name`, plain tensors are filled directly from the file. Otherwise torch loads them from
        tensors created from the file.
        """
        self._model, self._target, self._state, self.plan = model, target, state, plan
        """At the end, its report includes the result of the model's own loading code."""
        self._allowance, self._assign = allowance, assign
        self._optimizer = optimizer
        self._given_names = {**plan.pairs, **plan.undecided}
        names = (*self._given_names, *(name for name, _ in plan.report.kept))
        entries = target.entries
        self._assigned = {
            name for name in names if name in entries and (assign or entries[name].is_meta)
        }
        if self._assigned and not by_name:  # torch assigns all or none
            self._assigned = {name for name in names if name in entries}
        if assign is False and self._assigned:
            raise UsageError(
                f"cannot copy to tensors on the meta device: "
                f"{listed(map(printable, sorted(self._assigned)))}",
                hint="use assign=None or assign=True",
            )
        replaced = {id(entries[name]) for name in self._assigned}
        groups = optimizer.optimizer.param_groups if optimizer is not None else ()
        if any(id(one) in replaced for group in groups for one in group["params"]):
            raise UsageError(
                "the optimizer has parameters that would be replaced",
                hint="load the model, build the optimizer, then call load_into(model, path, "
                "optimizer=...)",
            )
        self._fills = self._direct_fills() if by_name else None
        size = sum(one.tensor.nbytes for one in self._fills or ())
        self._copies_all = self._fills is None or size <= _COPIED

    def _direct_fills(self) -> list[Fill] | None:
        """Return the tensors to fill directly from the source, or None if torch has to load."""
        found: dict[int, Fill] = {}
        for name, own in self.plan.pairs.items():
            tensor = self._target.entries.get(name)
            if tensor is None:
                return None
            if name in self._assigned:
                continue
            ref = self._state.ref(own)
            # torch's cast ignores the negative bit of a tensor; `fill` resolves it first.
            source = self._state.value(own) if ref is None or ref.flags else ref
            if not can_fill(tensor, source) or self._is_own(source):
                return None
            found.setdefault(id(tensor), Fill(tensor, source))
        is_apart = are_apart(one.tensor for one in found.values())
        return list(found.values()) if is_apart else None

    @cached_property
    def _storages(self) -> set[int]:
        places = map(locate_tensor, self._target.entries.values())
        return {place.storage for place in places if place}

    def _is_own(self, source: Any) -> bool:
        """Return True if a tensor in memory uses one of the model's own storages."""
        import torch

        if not self._state.tree.in_memory or not isinstance(source, torch.Tensor):
            return False
        place = locate_tensor(source)
        return place is not None and place.storage in self._storages

    def run(self, *, verify: bool | None, together: Ranks) -> None:
        """Load, or restore everything on an error.

        The direct fill is the last step, and signals wait for its end. If it fails, it is undone if
        at most 128 MiB are filled; otherwise the error reports a partly filled model. Each step
        begins after all processes of `together` have finished the previous one.
        """
        with together.raise_on_all_ranks():
            self._check(verify)
        with together.raise_on_all_ranks(), _trainable():
            given = self._state_for_torch()
            filled = {id(one.tensor) for one in self._fills or ()} if self._copies_all else set()
            optimizer = self._optimizer and self._optimizer.optimizer
            undo = Snapshot(
                self._model,
                optimizer,
                copied=lambda tensor: self._fills is None or id(tensor) in filled,
                with_state=any(map(runs_foreign_code, layers(optimizer))),
            )
        done = False
        try:
            with together.raise_on_all_ranks():
                if self._fills is None:
                    self._load(given)
                if self._optimizer is not None:
                    self._optimizer.apply()
            with held_back():
                with together.raise_on_all_ranks("" if self._copies_all else _IN_PART):
                    self._finish(given)
                done = True
        except BaseException:
            if not done:
                with held_back():
                    undo.restore()
            raise

    def _check(self, verify: bool | None) -> None:
        """Check the bytes that will be read, to find damage before the model changes."""
        mapped = self._assigned if self._state.mmap and not verify else ()
        read = (
            (own, self._state.ref(own)) for n, own in self._given_names.items() if n not in mapped
        )
        refs = {own: ref for own, ref in read if ref is not None}
        if verify or (verify is None and stored_bytes(refs.items()) <= _CHECKED):
            check_bytes(refs.items())
        if verify is not False:
            check_pickles(self._state.tree.sources)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise an error if the file was written to after it was opened."""
        for source in self._state.tree.sources:
            source.check_unchanged()

    def _state_for_torch(self) -> OrderedDict[str, Any]:
        """Return the tensors for torch, or only the replacements if torch does not load."""
        entries, slots = self._target.entries, self._target.slots
        made = Assigned(cast=self._assign is None)
        given: OrderedDict[str, Any] = OrderedDict()
        for name, own in self._given_names.items():
            if self._fills is not None and name not in self._assigned:
                continue
            value, tensor = self._state.value(own), entries.get(name)
            if tensor is not None:
                value = spread_like(tensor, value)
            if tensor is not None and name in self._assigned and name in self.plan.pairs:
                try:
                    value = made.made(tensor, slots[name].tie, value)
                except RuntimeError as error:  # torch does not support this parameter or cast
                    raise self._refused(f"{printable(name)}: {error}") from error
            elif self._is_own(value):  # torch would read it after it has changed
                value = value.detach().clone()
            given[name] = value
        return given

    def _load(self, given: OrderedDict[str, Any]) -> None:
        """Call torch's `load_state_dict`, including all hooks.

        With tensors on the meta device, or `assign=True`, torch assigns all given tensors.
        """
        found = metadata_for(self._state, self._target, self.plan)
        if found is not None:
            vars(given)["_metadata"] = {path: dict(entry) for path, entry in found.items()}
        wanted: dict[str, Any] = {"strict": False}
        if self._assigned:
            wanted["assign"] = True
        elif overrides_load(self._model):  # an override may return nothing, so it has to be strict
            allowed = self._allowance
            known = {*given, *self.plan.unfilled}
            wanted["strict"] = self._target.slots.keys() <= known and not (
                allowed.missing or allowed.unexpected or not allowed.strict
            )
        parameters = inspect.signature(self._model.load_state_dict).parameters.values()
        names = {parameter.name for parameter in parameters}
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        options = {name: value for name, value in wanted.items() if is_open or name in names}
        if "assign" in wanted and "assign" not in options:
            kind = type(self._model).__name__
            raise self._refused(f"{kind}.load_state_dict does not accept assign=, which is needed")
        entries = self._target.entries
        before = {name: _version(entries[name]) for name in self.plan.unfilled if name in entries}
        try:
            answer = self._model.load_state_dict(given, **options)
        except RuntimeError as error:
            message = str(error)
            if not message.startswith("Error(s) in loading state_dict"):
                raise
            raise self._refused(message.partition("\n\t")[2].partition("\n")[0]) from error
        self._unmap(given)
        after = state_dict_of(self._model) if before and not sharded(self._model) else {}
        touched = (n for n in before if n in after and _version(after[n]) != before[n])
        self._judge(answer, set(touched))

    def _unmap(self, given: Mapping[str, Any]) -> None:
        """Copy tensors that a hook kept, which would otherwise stay mapped to the file."""
        if not self._state.mmap or self._assigned or self._state.tree.in_memory:
            return
        import torch

        tensors = (one for one in given.values() if isinstance(one, torch.Tensor))
        mapped = {place.storage for place in map(locate_tensor, tensors) if place}
        for tensor in tensors_of(self._model):
            place = locate_tensor(tensor)
            if place is not None and place.storage in mapped:
                tensor.data = tensor.data.clone()

    def _judge(self, answer: Any, touched: set[str]) -> None:
        """Raise an error for keys that torch or the model's code did not load, unless allowed.

        Keys that `answer` does not report as missing or unexpected were loaded. Of the keys left to
        the model's own code, those in `touched` were loaded.
        """
        report, target, decided = self.plan.report, self._target, self.plan.unfilled
        known = {*report.missing_keys, *(one.name for one in report.mismatched)}
        known.update(name for name, _ in report.kept if name not in decided)
        missing = getattr(answer, "missing_keys", [])
        unexpected = getattr(answer, "unexpected_keys", [])
        lost = [name for name in missing if without_hidden(name) not in known]
        taken = {own: name for name, own in self.plan.undecided.items() if name not in unexpected}
        if not (lost or unexpected or decided or taken):
            return

        def by(name: str, verb: str) -> str:
            return f"{verb} by {target.custom_holder(name)}'s own loading code"

        own = [name for name in decided if name not in lost]
        undecided = {*self.plan.undecided.values()}
        self.plan = self.plan.with_changes(
            missing_keys=[*report.missing_keys, *lost],
            unexpected_keys=[
                *report.unexpected_keys,
                *(self._given_names.get(name, name) for name in unexpected),
            ],
            kept=(
                *((name, why) for name, why in report.kept if name not in decided),
                *((n, by(n, "filled" if n in touched else "not required")) for n in own),
            ),
            left_out=tuple(
                (own, by(taken[own], "loaded") if own in taken else why)
                for own, why in report.left_out
                if own in taken or own not in undecided
            ),
            **counted(
                target.slots,
                {*self.plan.pairs, *touched} - set(lost),
                known - set(report.missing_keys),
            ),
        )
        refusal = self._allowance.refusal(self.plan.report)
        if refusal is not None:
            raise refusal

    def _refused(self, reason: str) -> MatchError:
        report = self.plan.report
        return MatchError(
            f"{report.file or 'the state dict'} cannot be loaded into {report.model}: {reason}",
            file=report.file or None,
            report=report,
        )

    def _finish(self, given: Mapping[str, torch.Tensor]) -> None:
        """Fill and replace the tensors that torch did not load; signals are delayed."""
        import torch

        if self._fills is None:
            self._check_unchanged()
            return
        try:
            with torch.no_grad():
                for one in self._fills:
                    one.tensor.copy_(one.tensor)  # a no-op that makes autograd see the change
            fill(self._fills)
            self._check_unchanged()
        except Exception as error:  # including device and memory errors
            if self._copies_all:
                raise
            is_of_the_file = isinstance(error, (UnreadableFile, OSError))
            raise (UnreadableFile if is_of_the_file else CheckpointError)(
                f"{_IN_PART}, because loading failed: {type(error).__name__}: {error}",
                file=self._state.file or None,
                hint="load an intact file before you use the model",
            ) from error
        new = {id(self._target.entries[name]): tensor for name, tensor in given.items()}
        for module in self._model.modules() if new else ():
            homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for home in homes:
                home.update((name, new[id(one)]) for name, one in home.items() if id(one) in new)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes if the tensor is written to or replaced."""
    try:
        return id(tensor), tensor._version
    except (RuntimeError, ValueError):  # an inference tensor, a lazy parameter
        return id(tensor), -1


@contextmanager
def _trainable() -> Iterator[None]:
    """Create trainable tensors, even if the caller is in inference mode."""
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _check_arguments(map_location: Any, optimizer_order: Any, **switches: Any) -> None:
    """Check the arguments that would otherwise be misunderstood."""
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
    """Return the report, and warn about tensors that are still on the meta device."""
    every = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in every if tensor.is_meta]
    if not left:
        return report
    note = f"still on the meta device: {listed(map(printable, left))}"
    warn(f"loaded {target.label}, but some tensors are {note}")
    return replace(report, notes=(*report.notes, note))
