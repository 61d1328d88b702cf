"""A file's whole diagnosis: every complaint, and the plan that mends what can be mended."""

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
from ckptool.core.values import documented
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
from ckptool.formats import format_of, open_checkpoint, shard_of, writer
from ckptool.formats.identify import unused
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
"""Kinds of complaint that come before all others, or behind them."""
_UNMENDED = "no command fixes it"
_HOPELESS = frozenset({"damaged", "part", "meta", "packed", "frozen"})
"""Kinds of complaint after which no command is worth running."""
_OF_OBJECTS = frozenset({"objects", "numpy", "protocol", "outdated"})
"""Kinds of complaint that are none about a file whose reader makes the objects in it."""


@dataclass(frozen=True, slots=True)
class FixPlan:
    """One conversion, and what it mends."""

    command: str | None = None
    target: str = ""
    steps: Steps = ()
    format: str | None = None
    """None: safetensors or torch, as the source is."""
    mended: frozenset[str] = frozenset()
    """Kinds of complaint that are not in the target."""
    obstacle: str = ""
    """What stood in the way of the first step that could not be taken."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Result):
    """Every complaint about a file, and the command that mends them."""

    file: str
    """The path as it was given."""
    format: str | None
    """None of a file that does not open."""
    devices: tuple[str, ...]
    """The devices of the machine that it was held against."""
    complaints: tuple[Complaint, ...]
    """Those that the plan mends, then the others, notes last."""
    commands: tuple[str, ...] = ()
    """The plan, for who wants the weights: one command, or several that fetch the file."""
    all_at_once: str | None = None
    """The one command that does what the plan does."""
    target: str | None = None
    """The file that the plan writes; the source is never changed."""
    resume: str | None = None
    """The command for who resumes the training: optimizer, epoch and schedule stay."""
    training: tuple[str, ...] = TRAINING
    """Which of these the file has."""
    code: str = ""
    """The same in Python, where the file fits the model."""
    reader: str = ""
    """The library that reads the file as it is, if that is not torch."""
    plan: FixPlan = FixPlan()
    """The steps of `all_at_once`."""

    @property
    def ok(self) -> bool:
        """Whether nothing fails or misleads; notes do not count."""
        return all(complaint.severity == "note" for complaint in self.complaints)

    @property
    def first_command(self) -> str | None:
        """The command to run first: of the plan, or one of the alternatives."""
        others = (command for one in self.complaints for command in one.alternatives)
        return next(iter((*self.commands, *others)), None)

    @property
    def losses(self) -> tuple[str, ...]:
        """The options in the plan by which something is lost: the user must have agreed to them."""
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
        """The calls that unpickling the file would make, beyond known constructors of data."""
        return next((one.where for one in self.complaints if one.kind == "malicious"), ())

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.doctor/1`."""
        return {
            "schema": "ckptool.doctor/1",
            "file": self.file,
            "format": self.format,
            "ok": self.ok,
            "would_run": list(self.would_run),
            **documented(self, "file", "format", "training", "code", "plan"),
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

    The diagnosis has the commands that help. Torch is imported only for a `like` that is no file.

    Args:
        path: The file or folder. A file that does not open as a checkpoint has a diagnosis too.
        like: The model that the file is to load into, or a checkpoint of its architecture.
        named: How a command names a `like` that is no file: `net:Net`, code that builds it.
        key: The address of the state dict, if the file has several.
        quick: Read the header only: check neither checksums nor NaN.
        devices: Those of the machine: `"cuda:0,cuda:1"`, or a list; default: of this machine.
        progress: Called with the bytes done and the bytes in all.
        limits: Bounds for what a hostile file may cost.

    Raises:
        UnreadableFile: the file or `like` cannot be read (`FileMissing`: it does not exist).
        UsageError: `like` has no state dict, or several; or a word is not a device.
        NotFound: there is nothing at `key`.
    """
    file = os.fsdecode(path)
    here = devices_here() if devices is None else parsed_devices(devices)
    with ExitStack() as stack:
        reference = None
        if like is not None:
            if isinstance(like, (str, os.PathLike)):
                named = as_argument(os.fsdecode(like))
                like = stack.enter_context(open_checkpoint(like, limits=limits))
            reference = Reference(like, named, _wanted(like))
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
    """Return the diagnosis of an open checkpoint; `quick`: of its header alone."""
    # before all of it is read: the key may name nothing
    found = [one for check in _CHECKS for one in check(subject)]
    if subject.companion is not None:
        found = [one for one in found if one.kind not in _OF_OBJECTS]
    harm = [] if quick else list(damage(subject, limits, progress))
    return _assembled(subject, [*harm, *found])


def _wanted(like: Like) -> ModelTarget:
    """Return what the reference wants, which must have one state dict alone.

    Raises:
        UsageError: it has none, or several.
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


def _assembled(subject: Subject, found: list[Complaint]) -> Diagnosis:
    """Build the diagnosis; a damaged or partial file gets no command."""
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
            first = "first get all parts"
    path = without_query(subject.checkpoint.path)
    complaints = [_answered(one, planner, plan, first) for one in found]
    complaints = [replace(one, hint=with_file(one.hint or "", path)) for one in complaints]
    if any((one.hint or "").startswith(_UNMENDED) for one in complaints):
        rest = "no command for only this: the file would still not load"
        complaints = [
            replace(one, commands=(), hint=one.hint or rest) if one.commands else one
            for one in complaints
        ]
        plan = FixPlan()
    reader = with_file(_reader(subject), path)
    fails = bool(reader) or any(one.severity != "note" for one in complaints)
    resumes = subject.is_training and format_of(subject.checkpoint.format).resumes
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
        _code(subject) if resumes and not hopeless else "",
        reader,
        plan,
    )


def _reader(subject: Subject) -> str:
    refusal = format_of(subject.checkpoint.format).refusal
    if subject.companion is not None:
        return subject.companion.reader
    return refusal.reader if refusal is not None else ""


def _code(subject: Subject) -> str:
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


def _answered(found: Complaint, planner: Planner, plan: FixPlan, first: str) -> Complaint:
    """Return a complaint with its commands, or with what must come first (`first`)."""
    if first:
        return replace(found, hint=found.hint or (first if found.fix is not None else None))
    tried = [(one, planner.choice(one, plan)) for one in found.choices]
    others = tuple(dict.fromkeys(made[0] for _, made in tried if made is not None))
    lines = (one.code.replace("FILE", repr(made[1])) for one, made in tried if made and one.code)
    found = replace(found, code="; ".join(lines))
    if plan.command is not None and found.kind in plan.mended:
        return replace(found, commands=(plan.command,), alternatives=others)
    hint = found.hint
    if found.fix is not None and not others and not hint:
        hint = _UNMENDED + (f": {plan.obstacle}" if plan.obstacle else "")
    return replace(found, alternatives=others, hint=hint)


def _urgency(complaint: Complaint) -> tuple[int, int, bool]:
    """Return the sort key of a complaint: worst first, then mended by the plan, notes last."""
    return _ORDER.get(complaint.kind, 0), _RANK[complaint.severity], not complaint.commands


MENDED, RESUMED = "fixed", "resume"
"""The words before the ending of the file that a plan writes."""
_OF_A_MODEL = (Take, Strip, Rename, Fit)
"""Steps after which the training that saved the file cannot resume from it."""


class Planner:
    """Makes plans for one file: each is one `convert` that fixes what can be fixed.

    Each complaint names the steps that fix it; a test proves this over all fixtures. They are
    added one complaint after the other, and stay where the conversion of the header succeeds: one
    with `Fit` succeeds only if the result fits the reference.
    """

    def __init__(self, subject: Subject, found: Iterable[Complaint]) -> None:
        """Take what the checks found."""
        self._subject = subject
        self._fixes = sorted((one for one in found if one.fix is not None), key=_place)
        self._taken: set[str] = set()
        self._commands: dict[tuple[str, ...], tuple[str, str]] = {}

    def plan(self, *, resume: bool = False) -> FixPlan:
        """Return the conversion that fixes most; `resume` keeps all that training needs."""
        plan: FixPlan | None = None
        state = self._subject.checkpoint
        mended: set[str] = set()
        obstacle = problem = ""
        for one in self._fixes:
            fix, format = one.fix or (), one.format
            if resume and (format or any(isinstance(step, _OF_A_MODEL) for step in fix)):
                if one.resume is None:
                    continue
                fix, format = one.resume, None
            is_plain = any(isinstance(step, Plain) for step in fix)
            if plan is not None and is_plain and not blockers(state.root):
                mended.add(one.kind)  # the objects are gone with what was left out
                continue
            for more in (fix, *self._instead_of_plain())[: None if is_plain else 1]:
                merged = FixPlan(
                    steps=_merged(plan.steps if plan else (), more),
                    format=(plan and plan.format) or format,
                )
                try:
                    made = state if merged == plan else self._applied(merged)
                    if any(isinstance(step, Take) for step in more) and is_plain:
                        _refuse_blocked(made)
                    state = made
                except CheckpointError as error:
                    is_last = more is not fix and isinstance(more[0], Take)
                    problem = problem if is_last else error.message
                    continue
                plan = merged
                mended.add(one.kind)
                break
            else:
                obstacle = obstacle or problem
        if plan is None:
            return FixPlan(obstacle=obstacle)
        command, target = self._command(plan, RESUMED if resume else MENDED)
        return replace(
            plan, command=command, target=target, mended=frozenset(mended), obstacle=obstacle
        )

    def _instead_of_plain(self) -> Iterator[Steps]:
        """Yield steps against objects that cannot be made plain, the least loss first."""
        yield (Plain(drop_objects=True),)
        if self._subject.model is not None:
            yield (Take(self._subject.key, model_only=True),)

    def choice(self, choice: Choice, plan: FixPlan) -> tuple[str, str] | None:
        """Return the command of a choice combined with the plan, and its target; None if it fails.

        The command reads the source: the plan need not have run.
        """
        for base in (plan, FixPlan()):
            format = base.format if choice.word else "safetensors"
            chosen = FixPlan(steps=_merged(base.steps, choice.steps), format=format)
            known = (str(format), *(word for step in chosen.steps for word in step.words()))
            with suppress(CheckpointError):
                if known not in self._commands:
                    self._applied(chosen)
                    self._commands[known] = self._command(chosen, choice.word)
                return self._commands[known]
        return None

    def _applied(self, plan: FixPlan) -> Checkpoint:
        """Convert the header.

        Raises:
            CheckpointError: it cannot be done, or written, or would lose weights with objects.
        """
        source, format = self._subject.checkpoint, self._format(plan)
        state = converted(source, plan.steps, format)
        refuse_placeholders(state)
        refuse_empty(state, writer(format).plan(state))
        if any(isinstance(step, Plain) and step.drop_objects for step in plan.steps):
            alone = any(isinstance(step, Take) and step.model_only for step in plan.steps)
            _refuse_lost_weights(source, state, alone=alone)
        return state

    def _format(self, plan: FixPlan) -> str:
        """Return the target format: that of the plan, else safetensors or torch as the source."""
        if plan.format is not None:
            return plan.format
        checkpoint = self._subject.checkpoint
        flat = format_of(checkpoint.format).tensors_only
        return "safetensors" if flat else "torch-zip"

    def _command(self, plan: FixPlan, word: str) -> tuple[str, str]:
        """Return the command of a conversion, and its target, which is no other command's."""
        checkpoint, format = self._subject.checkpoint, self._format(plan)
        target = default_target(checkpoint.path, word or MENDED, format, sharded=True)
        if not (word or shard_of(checkpoint.format)):  # beside an index it would be a second one
            target = f"{target.removesuffix(f'.{MENDED}.safetensors')}.safetensors"
        target = unused(target, self._taken)
        self._taken.add(target)
        chosen = format if target_format(checkpoint, target) != format else None
        return convert_command(checkpoint.path, target, plan.steps, format=chosen), target


def _merged(steps: Iterable[Step], more: Iterable[Step]) -> Steps:
    """Return both in the order of `STEPS`, one of each kind: their lists are put together.

    With `Fit` the keys are the reference's, wrappers and all.
    """
    made: dict[type[Step], Step] = {}
    for step in (*steps, *more):
        kind = type(step)
        made[kind] = _joined(made[kind], step) if kind in made else step
    if Fit in made:
        made.pop(Strip, None)
        if isinstance(take := made.get(Take), Take):
            made[Take] = replace(take, lazy=True)
    return tuple(made[kind] for kind in STEPS if kind in made)


def _joined(one: Step, other: Step) -> Step:
    """Return a step with the options of both; the other's win, and lists are put together."""
    given: dict[str, Any] = {}
    for field in fields(one):
        old, new = getattr(one, field.name), getattr(other, field.name)
        if isinstance(new, tuple):
            new = tuple(dict.fromkeys((*old, *new)))
        given[field.name] = old if new == field.default else new
    if given.get("ema"):  # the averages are the state dict of the model, without anything else
        given.update(key=None, model_only=False)
    return replace(one, **given)


def _place(one: Complaint) -> tuple[int, bool]:
    """Return where a complaint is tried: by its format, then its steps; any rewrite comes last.

    The model is taken before some of its tensors are left out.
    """
    if one.format:
        return -1, False
    steps = one.fix or ()
    part = any(isinstance(step, Take) and not (step.key or step.model_only) for step in steps)
    return min((STEPS.index(type(step)) for step in steps), default=len(STEPS)), part


def _refuse_blocked(checkpoint: Checkpoint) -> None:
    """Refuse a result that `weights_only=True` does not load.

    Raises:
        NotRepresentable: it has objects.
    """
    if names := blockers(checkpoint.root):
        raise NotRepresentable(f"the result still has objects: {listed(names)}")


def _refuse_lost_weights(before: Checkpoint, after: Checkpoint, *, alone: bool) -> None:
    """Refuse a conversion in which tensors of a model or an optimizer go with objects.

    Raises:
        NotRepresentable: they do.
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
