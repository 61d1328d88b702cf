"""The diagnosis of a file: every complaint, and the plan that fixes as many as it can."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.conversion import Like, converted
from ckptool.conversion.fit import Fit, Reference, compared
from ckptool.conversion.steps import STEPS
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import MODEL_KINDS
from ckptool.core.tree import name_of
from ckptool.core.values import to_document
from ckptool.diagnosis.complaint import Choice, Complaint, Steps, Subject, with_file
from ckptool.diagnosis.contents import (
    damage,
    devices_here,
    memory,
    parsed_devices,
    placement,
    quantization,
)
from ckptool.diagnosis.files import is_finding, layout, unopened
from ckptool.diagnosis.models import level, naming, objects, versions
from ckptool.diagnosis.training import fit, training
from ckptool.errors import (
    AmbiguousName,
    CheckpointError,
    NotFound,
    NotRepresentable,
    UsageError,
    without_query,
)
from ckptool.files.source import Progress
from ckptool.formats import load_format, load_writable_format, open_checkpoint, shard_format_of
from ckptool.formats.identify import find_unused_path
from ckptool.inspection.commands import TRAINING, convert_command, training_in, weights
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.plan import target_like
from ckptool.loading.target import ModelTarget
from ckptool.symbolic.encoder import blockers
from ckptool.transforms import Plain, Rename, Step, Strip, Take
from ckptool.transforms.plain import is_refused
from ckptool.words import as_argument, counted, listed, shell
from ckptool.writing.save import refuse_empty
from ckptool.writing.target import default_target, target_format

_CHECKS = (layout, level, objects, naming, fit, training, versions, memory,
           quantization, placement)  # fmt: skip
_RANK = {"fails": 0, "misleads": 0, "note": 1}
_ORDER = {
    "malicious": -3, "damaged": -2, "part": -1, "meta": -1, "packed": -1, "frozen": -1,
    "format-unnamed": 1,
}  # fmt: skip
"""Kinds of complaint that come before or after all others."""
_UNFIXABLE = "no command fixes it"
_HOPELESS = frozenset({"damaged", "part", "meta", "packed", "frozen"})
"""Kinds of complaint after which no command is useful."""
_OF_OBJECTS = frozenset({"objects", "numpy", "protocol", "outdated"})
"""Kinds of complaint that do not apply if the reader of the file needs its objects."""


@dataclass(frozen=True, slots=True)
class FixPlan:
    """A conversion, and the complaints that it fixes."""

    command: str | None = None
    target: str = ""
    steps: Steps = ()
    format: str | None = None
    """None: safetensors or torch, as the source."""
    fixed: frozenset[str] = frozenset()
    """Kinds of complaint that the target does not have."""
    obstacle: str = ""
    """The error of the first step that failed."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Result):
    """Every complaint about a file, and the command that fixes them."""

    file: str
    """The given path."""
    format: str | None
    """None if the file does not open."""
    devices: tuple[str, ...]
    """The devices of the target machine."""
    complaints: tuple[Complaint, ...]
    """Those that the plan fixes, then the others, then the notes."""
    commands: tuple[str, ...] = ()
    """The plan to use the weights: one command, or several that download the file."""
    all_at_once: str | None = None
    """The command that does the whole plan."""
    target: str | None = None
    """The file that the plan writes; the source is never changed."""
    resume: str | None = None
    """The command to resume training: it keeps optimizer, epoch and schedule."""
    training: tuple[str, ...] = TRAINING
    """The ones that the file has."""
    code: str = ""
    """The same in Python, if the file fits the model."""
    reader: str = ""
    """The library that reads the file as is, if not torch."""
    plan: FixPlan = FixPlan()
    """The steps of `all_at_once`."""

    @property
    def ok(self) -> bool:
        """True if nothing fails or misleads. Notes do not count."""
        return all(complaint.severity == "note" for complaint in self.complaints)

    @property
    def first_command(self) -> str | None:
        """The command to run first: of the plan, or one of the alternatives."""
        others = (command for one in self.complaints for command in one.alternatives)
        return next(iter((*self.commands, *others)), None)

    @property
    def losses(self) -> tuple[str, ...]:
        """The options of the plan that lose data, which the user must accept."""
        steps = self.plan.steps
        asked = {
            "--model-only": TRAINING[0] in self.training
            and any(isinstance(step, Take) and (step.model_only or step.ema) for step in steps),
            "--drop-objects": any(isinstance(step, Plain) and step.drop_objects for step in steps),
            "--allow-unexpected": any(
                isinstance(step, Fit) and step.allow_unexpected for step in steps
            ),
        }
        return tuple(option for option, is_asked in asked.items() if is_asked)

    @property
    def would_run(self) -> tuple[str, ...]:
        """The calls that unpickling would make, except known constructors of data."""
        return next((one.where for one in self.complaints if one.kind == "malicious"), ())

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.doctor/1`."""
        return {
            "schema": "ckptool.doctor/1",
            "file": self.file,
            "format": self.format,
            "ok": self.ok,
            "would_run": list(self.would_run),
            **to_document(self, "file", "format", "training", "code", "plan"),
        }


def doctor(
    path: str | os.PathLike[str],
    *,
    like: Like | None = None,
    named: str = "MODULE:FACTORY",
    key: str | None = None,
    quick: bool = False,
    devices: str | Iterable[object] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diagnosis:
    """Find every reason why a plain `torch.load` and `load_state_dict` fail or mislead.

    The diagnosis has the commands that help. Imports torch only if `like` is not a file.

    Args:
        path: The file or folder. A file that does not open as a checkpoint has a diagnosis too.
        like: The model to load the file into, or a checkpoint of its architecture.
        named: The name of a `like` that is not a file in commands, for example `net:Net`.
        key: The path of the state dict, if the file has several.
        quick: Read only the header, without checking checksums and NaN.
        devices: The devices of the target machine, `"cuda:0,cuda:1"` or a list [default: this
            machine's].
        progress: Called with the bytes done and the total bytes.
        limits: Limits for hostile files.

    Raises:
        UnreadableFile: the file or `like` cannot be read (`FileMissing`: it does not exist).
        UsageError: `like` does not have exactly one state dict, or a device is unknown.
        NotFound: `key` is missing.
    """
    file = os.fsdecode(path)
    here = devices_here() if devices is None else parsed_devices(devices)
    with ExitStack() as stack:
        reference = None
        if like is not None:
            if isinstance(like, (str, os.PathLike)):
                named = as_argument(os.fsdecode(like))
                like = stack.enter_context(open_checkpoint(like, limits=limits))
            reference = Reference(like, named, _target_of(like))
        try:
            checkpoint = stack.enter_context(
                open_checkpoint(file, limits=limits)
            ).with_late_values()
        except CheckpointError as error:
            if not is_finding(error, file):
                raise
            complaints = tuple(unopened(error, file))
            return Diagnosis(file, None, here, complaints, complaints[0].commands)
        return diagnosed(
            Subject(checkpoint, key, here, reference), quick=quick, progress=progress, limits=limits
        )


def diagnosed(
    subject: Subject,
    *,
    quick: bool = True,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diagnosis:
    """Return the diagnosis of an open checkpoint; with `quick` only of its header."""
    # First, because the key may be missing.
    found = [one for check in _CHECKS for one in check(subject)]
    if subject.companion is not None:
        found = [one for one in found if one.kind not in _OF_OBJECTS]
    harm = [] if quick else list(damage(subject, limits, progress))
    return _assemble(subject, [*harm, *found])


def _target_of(like: Like) -> ModelTarget:
    """Return the keys and shapes of the reference.

    Raises:
        UsageError: it does not have exactly one state dict.
    """
    try:
        return target_like(like)
    except (NotFound, AmbiguousName) as error:
        path = like.path if isinstance(like, Checkpoint) else ""
        raise UsageError(
            f"the reference must have exactly one state dict: {error.message}",
            file=path or None,
            hint=f"ckptool extract {shell(path)} --key NAME -o reference.pth",
        ) from error


def _assemble(subject: Subject, found: list[Complaint]) -> Diagnosis:
    """Build the diagnosis. A damaged or partial file gets no command."""
    hopeless = any(one.kind in _HOPELESS for one in found)
    planner = Planner(subject, [] if hopeless else found)
    plan = planner.plan()
    first = ""
    if hopeless:
        kinds = {one.kind for one in found}
        first = "no command can recover the weights from this file"
        if "damaged" in kinds:
            first = "first get an intact file"
        elif "part" in kinds:
            first = "get all parts of the checkpoint first"
    path = without_query(subject.checkpoint.path)
    complaints = [_add_commands(one, planner, plan, first) for one in found]
    complaints = [replace(one, hint=with_file(one.hint or "", path)) for one in complaints]
    if any((one.hint or "").startswith(_UNFIXABLE) for one in complaints):
        rest = "no command for only this: the file would still not load"
        complaints = [
            replace(one, commands=(), hint=one.hint or rest) if one.commands else one
            for one in complaints
        ]
        plan = FixPlan()
    reader = with_file(_reader(subject), path)
    fails = bool(reader) or any(one.severity != "note" for one in complaints)
    resumes = subject.is_training and load_format(subject.checkpoint.format).resumes
    resume = planner.plan(resume=True) if fails and resumes else FixPlan()
    commands = (plan.command,) if plan.command is not None else ()
    return Diagnosis(
        path,
        subject.checkpoint.format,
        subject.devices,
        tuple(sorted(complaints, key=_urgency)),
        commands,
        plan.command,
        plan.target or None,
        resume.command if commands else None,
        training_in(subject.checkpoint),
        _resume_line(subject) if resumes and not hopeless else "",
        reader,
        plan,
    )


def _reader(subject: Subject) -> str:
    refusal = load_format(subject.checkpoint.format).refusal
    if subject.companion is not None:
        return subject.companion.reader
    return refusal.reader if refusal is not None else ""


def _resume_line(subject: Subject) -> str:
    """Return the Python line that resumes with the model of the reference; "" without one."""
    if subject.reference is None or subject.model is None:
        return ""
    if not compared(subject.checkpoint, subject.model, subject.reference.target).fits:
        return ""
    file = without_query(subject.checkpoint.path)
    key = f", key={subject.key!r}" if subject.key is not None else ""
    optimizer = ", optimizer=optimizer" if subject.optimizers else ""
    is_counted = TRAINING[1] in training_in(subject.checkpoint)
    epoch = f"; epoch = ckptool.load({file!r})['epoch']" if is_counted else ""
    return f"ckptool.load_into(model, {file!r}{optimizer}{key}){epoch}"


def _add_commands(found: Complaint, planner: Planner, plan: FixPlan, first: str) -> Complaint:
    """Return a complaint with its commands, or with `first` as its hint if no command helps yet."""
    if first:
        return replace(found, hint=found.hint or (first if found.fix is not None else None))
    tried = [(one, planner.choice(one, plan)) for one in found.choices]
    others = tuple(dict.fromkeys(made[0] for _, made in tried if made is not None))
    lines = (one.code.replace("FILE", repr(made[1])) for one, made in tried if made and one.code)
    found = replace(found, code="; ".join(lines))
    if plan.command is not None and found.kind in plan.fixed:
        return replace(found, commands=(plan.command,), alternatives=others)
    hint = found.hint
    if found.fix is not None and not others and not hint:
        hint = _UNFIXABLE + (f": {plan.obstacle}" if plan.obstacle else "")
    return replace(found, alternatives=others, hint=hint)


def _urgency(complaint: Complaint) -> tuple[int, int, bool]:
    """Return the sort key of a complaint: worst first, then fixed by the plan, notes last."""
    return _ORDER.get(complaint.kind, 0), _RANK[complaint.severity], not complaint.commands


FIXED, RESUMED = "fixed", "resume"
"""The words before the extension of the file that a plan writes."""
_OF_A_MODEL = (Take, Strip, Rename, Fit)
"""Steps after which the training that saved the file cannot resume from it."""


class Planner:
    """Makes plans for one file: each is one `convert` that fixes as much as possible.

    Each complaint has the steps that fix it, which a test proves over all fixtures. The planner
    adds them one complaint after the other, and keeps them if the conversion of the header
    succeeds. A conversion with `Fit` succeeds only if the result fits the reference.
    """

    def __init__(self, subject: Subject, found: Iterable[Complaint]) -> None:
        """Prepare plans for the complaints that the checks found."""
        self._subject = subject
        self._fixes = sorted((one for one in found if one.fix is not None), key=_fix_order)
        self._taken: set[str] = set()
        self._commands: dict[tuple[str, ...], tuple[str, str]] = {}

    def plan(self, *, resume: bool = False) -> FixPlan:
        """Return the conversion that fixes most; `resume` keeps the training state."""
        plan: FixPlan | None = None
        state = self._subject.checkpoint
        fixed: set[str] = set()
        obstacle = problem = ""
        for one in self._fixes:
            fix, format = one.fix or (), one.format
            if resume and (format or any(isinstance(step, _OF_A_MODEL) for step in fix)):
                if one.resume is None:
                    continue
                fix, format = one.resume, None
            is_plain = any(isinstance(step, Plain) for step in fix)
            if plan is not None and is_plain and not blockers(state.root):
                fixed.add(one.kind)  # earlier steps removed the objects
                continue
            for more in (fix, *self._instead_of_plain())[: None if is_plain else 1]:
                merged = FixPlan(
                    steps=_merge(plan.steps if plan else (), more),
                    format=(plan and plan.format) or format,
                )
                try:
                    made = state if merged == plan else self._apply(merged)
                    if any(isinstance(step, Take) for step in more) and is_plain:
                        _refuse_blocked(made)
                    state = made
                except CheckpointError as error:
                    is_last = more is not fix and isinstance(more[0], Take)
                    problem = problem if is_last else error.message
                    continue
                plan = merged
                fixed.add(one.kind)
                break
            else:
                obstacle = obstacle or problem
        if plan is None:
            return FixPlan(obstacle=obstacle)
        command, target = self._command(plan, RESUMED if resume else FIXED)
        return replace(
            plan, command=command, target=target, fixed=frozenset(fixed), obstacle=obstacle
        )

    def _instead_of_plain(self) -> Iterator[Steps]:
        """Yield steps for objects that cannot become plain data, the least loss first."""
        yield (Plain(drop_objects=True),)
        if self._subject.model is not None:
            yield (Take(self._subject.key, model_only=True),)

    def choice(self, choice: Choice, plan: FixPlan) -> tuple[str, str] | None:
        """Return the command of a choice combined with the plan, and its target; None if it fails.

        The command reads the source file, so the plan does not have to run first.
        """
        for base in (plan, FixPlan()):
            format = base.format if choice.word else "safetensors"
            chosen = FixPlan(steps=_merge(base.steps, choice.steps), format=format)
            known = (str(format), *(word for step in chosen.steps for word in step.words()))
            with suppress(CheckpointError):
                if known not in self._commands:
                    self._apply(chosen)
                    self._commands[known] = self._command(chosen, choice.word)
                return self._commands[known]
        return None

    def _apply(self, plan: FixPlan) -> Checkpoint:
        """Convert the header.

        Raises:
            CheckpointError: the conversion fails, cannot be written, or would lose weights.
        """
        source, format = self._subject.checkpoint, self._format(plan)
        state = converted(source, plan.steps, format)
        refuse_placeholders(state)
        refuse_empty(state, load_writable_format(format).plan(state))
        if any(isinstance(step, Plain) and step.drop_objects for step in plan.steps):
            alone = any(isinstance(step, Take) and step.model_only for step in plan.steps)
            _refuse_lost_weights(source, state, alone=alone)
        return state

    def _format(self, plan: FixPlan) -> str:
        """Return the format of the plan, else safetensors or torch as the source."""
        if plan.format is not None:
            return plan.format
        checkpoint = self._subject.checkpoint
        flat = load_format(checkpoint.format).tensors_only
        return "safetensors" if flat else "torch-zip"

    def _command(self, plan: FixPlan, word: str) -> tuple[str, str]:
        """Return the command of a conversion, and its unique target."""
        checkpoint, format = self._subject.checkpoint, self._format(plan)
        target = default_target(checkpoint.path, word or FIXED, format, sharded=True)
        if not (
            word or shard_format_of(checkpoint.format)
        ):  # it would be a second index in the folder
            target = f"{target.removesuffix(f'.{FIXED}.safetensors')}.safetensors"
        target = find_unused_path(target, self._taken)
        self._taken.add(target)
        chosen = format if target_format(checkpoint, target) != format else None
        return convert_command(checkpoint.path, target, plan.steps, format=chosen), target


def _merge(steps: Iterable[Step], more: Iterable[Step]) -> Steps:
    """Merge steps into one of each kind, in the order of `STEPS`.

    With `Fit` the keys are those of the reference, wrapper prefixes included.
    """
    made: dict[type[Step], Step] = {}
    for step in (*steps, *more):
        kind = type(step)
        made[kind] = _merge_options(made[kind], step) if kind in made else step
    if Fit in made:
        made.pop(Strip, None)
        if isinstance(take := made.get(Take), Take):
            made[Take] = replace(take, lazy=True)
    return tuple(made[kind] for kind in STEPS if kind in made)


def _merge_options(first: Step, second: Step) -> Step:
    """Merge the options of two steps: lists are concatenated, else the second step wins."""
    given: dict[str, Any] = {}
    for field in fields(first):
        old, new = getattr(first, field.name), getattr(second, field.name)
        if isinstance(new, tuple):
            new = tuple(dict.fromkeys((*old, *new)))
        given[field.name] = old if new == field.default else new
    if given.get("ema"):  # averages are already only the state dict of the model
        given.update(key=None, model_only=False)
    return replace(first, **given)


def _fix_order(one: Complaint) -> tuple[int, bool]:
    """Return the sort key of a fix: by format, then by the order of its steps; any rewrite last.

    The model is extracted before some of its tensors are left out.
    """
    if one.format:
        return -1, False
    steps = one.fix or ()
    part = any(isinstance(step, Take) and not (step.key or step.model_only) for step in steps)
    return min((STEPS.index(type(step)) for step in steps), default=len(STEPS)), part


def _refuse_blocked(checkpoint: Checkpoint) -> None:
    """Refuse a result that `weights_only=True` rejects.

    Raises:
        NotRepresentable: the result has objects.
    """
    if names := blockers(checkpoint.root):
        raise NotRepresentable(f"the result still has objects: {listed(names)}")


def _refuse_lost_weights(before: Checkpoint, after: Checkpoint, *, alone: bool) -> None:
    """Refuse a conversion that drops tensors of a model or optimizer together with objects.

    Raises:
        NotRepresentable: some of these tensors are dropped.
    """
    kinds = MODEL_KINDS if alone else (*MODEL_KINDS, "optimizer")
    tensors = weights(before.root, kinds)
    if len(weights(after.root, kinds)) < len(tensors):
        refused = [pair for pair in tensors if is_refused(pair[1])] or tensors
        names = [name_of(path) for path, _ in refused]
        raise NotRepresentable(
            f"dropping the objects would drop {counted(len(names), 'tensor')} of the weights: "
            f"{listed(names, most=3)}"
        )
