"""`load_into`: a whole model out of whatever file there is, or nothing changed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ckptool._lazy import uncollected
from ckptool.errors import UsageError, warn
from ckptool.loading.arguments import advising, check_arguments
from ckptool.loading.filling.agreement import agreement
from ckptool.loading.filling.assigning import trainable
from ckptool.loading.filling.installing import Installation
from ckptool.loading.fitting.models import Target, target_of
from ckptool.loading.fitting.plans import planned
from ckptool.loading.fitting.states import Source, stated
from ckptool.loading.fitting.unmade import why_unmade
from ckptool.loading.live.spreading import without_hidden
from ckptool.matching import Allowance, Allowed, Match, MatchReport
from ckptool.tensors import require_torch
from ckptool.tensors.materialise import MapLocation
from ckptool.transforms.name_rules import Rule
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["load_into"]


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
    rules: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    map_location: MapLocation = "cpu",
    assign: bool | None = None,
    verify: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    key: Any = None,
    optimizer_key: Any = None,
    optimizer_order: str | None = None,
) -> MatchReport:
    """Load the whole of a file, or a state dict, into `model`; or change nothing and say why.

    Names are made to fit as `match` does it: wrappers on either side, prefixes, known and inferred
    renames. The plan is judged before the model is touched, and what goes wrong later (a hook of
    the model's that raises, Ctrl-C) leaves its parameters, buffers, modules and extra states as
    they were. Not put back is what such code changes in objects that no module has as a tensor or
    extra state of its own, nor, of more than 128 MiB, a read that fails at the very end: the model
    is filled in part then, and the error says so. From there on Ctrl-C waits, and the model is
    loaded. All that torch does when it loads is done: hooks, versions, extra state, lazy
    parameters. What a `state_dict` of the model's own leaves out and torch asks for (a frozen part)
    is missing in its files: `allow_missing`.

    A model on the `meta` device is filled by assignment over the privately mapped file: nothing is
    copied, and **the file must not be truncated or written to while the model lives**, which would
    end the process or change its numbers. Names that are one tensor in the model stay one; those
    that only the file ties become two.

    Where no code but torch's own runs, nothing of a model's size is held beside it. A hook, a
    loading or an extra state of any one module may look at all of the model and write to it: of
    that a copy is kept then, until all is done (the model is there twice). What a hook takes out of
    the state dict, or a `load_state_dict` of the model's own is given, is held as well. With
    `assign=True` the tensors that are replaced live as long.

    A model that DDP, FSDP or DTensors spread over processes is loaded by all of them, **each of
    which calls this** with its own `source`, or by none: a process that is refused stops the
    others, which say why. One that does not come is an error in those that wait for it, once the
    timeout of the process group has passed.

    Args:
        model: On any device, in any wrapper.
        source: A file, the folder of a model or of a trainer's checkpoint, an open checkpoint, a
            state dict, or a dict that holds one.
        strict: False allows missing and unexpected names, as torch does.
        allow_missing: True, or globs of the model's names that may be missing in the file.
        allow_unexpected: True, or globs of the file's names that the model need not have.
        allow_mismatched: True, or globs of names whose shape may differ: those are not loaded.
        allow_lossy_cast: True, or globs of names whose numbers may change, being of another type.
        min_coverage: The least share of the model's parameters that must be loaded, 0 to 1.
        rules: `REGEX=>REPL`, applied to the file's names before anything else.
        prefixes: `OLD=NEW`, as well.
        map_location: Where tensors go that are assigned, as `torch.load` takes it.
        assign: None: on the meta device alone; True: everywhere, with the types of the file.
        verify: Whether the file is read and held against its checksums before the model is
            touched. None: where it has at most 1 GiB to load and is not mapped.
        optimizer: Loaded from the same file, by the names of its parameters; of a folder whose
            model file has none, from `optimizer.pt` (or `optimizer.bin`) in it.
        key: Which state dict of the source, as `load_state_dict` takes it.
        optimizer_key: Which optimizer's state, where there are several: an address in the file, or
            the name of its own file in the folder.
        optimizer_order: `"position"`: the optimizer is over the same parameters in the same order.

    Raises:
        MatchError: it does not fit; `report` says all about it, `hint` what helps. Or another
            process of a spread model failed, or did not come.
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        CorruptFile: its bytes are not what they were when it was written.
        AmbiguousName, NotFound: it holds several state dicts and no `key`, or none.
        NameCollision: `rules` make two names one.
        DeviceError: `map_location` sends a tensor to a device that is not here.
        UsageError: `model` is no module, an argument cannot be meant, or `assign=False` and the
            model is on the meta device.
        TorchMissing: torch is not installed.
    """
    require_torch()
    _check_model(model)
    together = agreement(model)
    with ExitStack() as held:
        held.enter_context(uncollected())
        with together.reached(), trainable():
            check_arguments(
                switches={"assign": assign, "verify": verify},
                lists={"rules": rules, "prefixes": prefixes},
                map_location=map_location,
                optimizer_order=optimizer_order,
            )
            allowance = Allowance(
                strict=strict,
                missing=allow_missing,
                unexpected=allow_unexpected,
                mismatched=allow_mismatched,
                lossy_cast=allow_lossy_cast,
                min_coverage=min_coverage,
            )
            rules, prefixes = list(rules), list(prefixes)
            held.enter_context(
                advising(
                    strict=strict,
                    rules=rules,
                    prefixes=prefixes,
                    allow_missing=allow_missing,
                    allow_unexpected=allow_unexpected,
                    allow_mismatched=allow_mismatched,
                    allow_lossy_cast=allow_lossy_cast,
                    min_coverage=min_coverage,
                    key=key,
                    optimizer_key=optimizer_key,
                    optimizer_order=optimizer_order,
                )
            )
            target = target_of(model)
            mapped = any(tensor.is_meta for tensor in target.entries.values())
            place = map_location if mapped or assign else "cpu"
            state = held.enter_context(
                stated(source, key=key, wanted=target.slots, map_location=place, mmap=mapped)
            )
            match = planned(state, target, rules=rules, prefixes=prefixes, assign=bool(assign))
            installation = Installation(
                model,
                target,
                state,
                match,
                allowance,
                assign=assign,
                mapped=mapped,
                optimizers=_layers(optimizer),
            )
            report, plan = match.report, None
            if optimizer is not None:
                _check_optimizer(optimizer, installation)
                from ckptool.loading.optimizers.planning import planned_optimizer  # seldom needed

                plan = planned_optimizer(
                    optimizer,
                    _named(model, target),
                    state,
                    target,
                    match,
                    key=optimizer_key,
                    order=optimizer_order,
                    allowance=allowance,
                )
                report = report.with_changes(optimizer=plan.report)
            _accept(match._replace(report=report), allowance)
        installation.run(verify=verify, together=together, beside=plan)
        done = installation.report
        report = report.with_changes(
            missing_keys=done.missing_keys, unexpected_keys=done.unexpected_keys
        )
        return _finished(model, target, report)


def _accept(match: Match, allowance: Allowance) -> None:
    """Raise what speaks against loading, if anything does."""
    refusal = allowance.refusal(match.report, untried=match.untried)
    if refusal is None:
        return
    why = why_unmade(match.report)
    refusal.message += f"\n{why}" if why else ""
    raise refusal


def _check_model(model: Any) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"a model to load into is wanted, not a {type(model).__name__}",
            hint="load_into(model, path)",
        )


def _check_optimizer(optimizer: Any, installation: Installation) -> None:
    groups = getattr(optimizer, "param_groups", ())
    if any(
        id(parameter) in installation.assigned for group in groups for parameter in group["params"]
    ):
        raise UsageError(
            "the optimizer is over parameters that others take the place of",
            hint="load the model, build the optimizer, then load_into(model, path, optimizer=...)",
        )


def _layers(optimizer: Any) -> Iterable[Any]:
    """An optimizer, and those that it wraps."""
    if optimizer is None:
        return ()
    from ckptool.loading.optimizers.undo import layers  # seldom needed

    return layers(optimizer)


def _named(model: torch.nn.Module, target: Target) -> dict[int, str]:
    """The model's name of each parameter, by its `id`."""
    named: dict[int, str] = {}
    for name, tensor in target.entries.items():  # of one under several names, the first
        named.setdefault(id(tensor), name)
    for name, parameter in model.named_parameters():  # FSDP's are no entries
        named.setdefault(id(parameter), without_hidden(name))
    return named


def _finished(model: torch.nn.Module, target: Target, report: MatchReport) -> MatchReport:
    """The report, with what is still on the meta device, of which the caller is warned."""
    every = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in every if tensor.is_meta]
    if not left:
        return report
    note = f"without elements, on the meta device: {listed(map(printable, left))}"
    warn(f"{target.label} is loaded, but for some tensors that are {note}")
    return report.with_changes(notes=(*report.notes, note))
