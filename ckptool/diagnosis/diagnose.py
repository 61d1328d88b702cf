"""The diagnosis of a file: every complaint, and the plan that fixes as many as it can."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.conversion import Like, apply_steps
from ckptool.conversion.fit import Fit, Reference, match_section
from ckptool.conversion.steps import STEPS
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import MODEL_KINDS
from ckptool.core.tree import name_of
from ckptool.core.values import to_document
from ckptool.diagnosis.complaint import Choice, Complaint, Steps, Subject, fill_in_path
from ckptool.diagnosis.contents import (
    check_damage,
    check_devices,
    check_memory,
    check_quantization,
    detect_devices,
    parse_devices,
)
from ckptool.diagnosis.files import check_layout, explain_unopened, is_finding
from ckptool.diagnosis.models import check_keys, check_level, check_objects, check_versions
from ckptool.diagnosis.training import check_fit, check_training
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
from ckptool.inspection.commands import (
    TRAINING,
    collect_weights,
    convert_command,
    list_training_state,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.plan import describe_like
from ckptool.loading.target import ModelTarget
from ckptool.symbolic.encoder import find_blockers
from ckptool.transforms import Plain, Rename, Step, Strip, Take
from ckptool.transforms.plain import is_rejected
from ckptool.words import as_argument, counted, listed, shell
from ckptool.writing.save import refuse_empty
from ckptool.writing.target import choose_format, make_default_target

_CHECKS = (check_layout, check_level, check_objects, check_keys, check_fit, check_training,
           check_versions, check_memory, check_quantization, check_devices)  # fmt: skip
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
        alternatives = (
            command for complaint in self.complaints for command in complaint.alternatives
        )
        return next(iter((*self.commands, *alternatives)), None)

    @property
    def losses(self) -> tuple[str, ...]:
        """The options of the plan that lose data, which the user must accept."""
        steps = self.plan.steps
        options = {
            "--model-only": TRAINING[0] in self.training
            and any(isinstance(step, Take) and (step.model_only or step.ema) for step in steps),
            "--drop-objects": any(isinstance(step, Plain) and step.drop_objects for step in steps),
            "--allow-unexpected": any(
                isinstance(step, Fit) and step.allow_unexpected for step in steps
            ),
        }
        return tuple(option for option, is_used in options.items() if is_used)

    @property
    def would_run(self) -> tuple[str, ...]:
        """The calls that unpickling would make, except known constructors of data."""
        return next(
            (complaint.where for complaint in self.complaints if complaint.kind == "malicious"), ()
        )

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
    here = detect_devices() if devices is None else parse_devices(devices)
    with ExitStack() as stack:
        reference = None
        if like is not None:
            if isinstance(like, (str, os.PathLike)):
                named = as_argument(os.fsdecode(like))
                like = stack.enter_context(open_checkpoint(like, limits=limits))
            reference = Reference(like, named, _describe_reference(like))
        try:
            checkpoint = stack.enter_context(
                open_checkpoint(file, limits=limits)
            ).with_late_values()
        except CheckpointError as error:
            if not is_finding(error, file):
                raise
            complaints = tuple(explain_unopened(error, file))
            return Diagnosis(file, None, here, complaints, complaints[0].commands)
        return diagnose(
            Subject(checkpoint, key, here, reference), quick=quick, progress=progress, limits=limits
        )


def diagnose(
    subject: Subject,
    *,
    quick: bool = True,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diagnosis:
    """Return the diagnosis of an open checkpoint; with `quick` only of its header."""
    # First, because the key may be missing.
    complaints = [complaint for check in _CHECKS for complaint in check(subject)]
    if subject.companion is not None:
        complaints = [complaint for complaint in complaints if complaint.kind not in _OF_OBJECTS]
    damage = [] if quick else list(check_damage(subject, limits, progress))
    return _assemble(subject, [*damage, *complaints])


def _describe_reference(like: Like) -> ModelTarget:
    """Return the keys and shapes of the reference.

    Raises:
        UsageError: it does not have exactly one state dict.
    """
    try:
        return describe_like(like)
    except (NotFound, AmbiguousName) as error:
        path = like.path if isinstance(like, Checkpoint) else ""
        raise UsageError(
            f"the reference must have exactly one state dict: {error.message}",
            file=path or None,
            hint=f"ckptool extract {shell(path)} --key NAME -o reference.pth",
        ) from error


def _assemble(subject: Subject, complaints_found: list[Complaint]) -> Diagnosis:
    """Build the diagnosis: complaints with commands, and the plan. No plan for a hopeless file."""
    is_hopeless = any(complaint.kind in _HOPELESS for complaint in complaints_found)
    planner = Planner(subject, [] if is_hopeless else complaints_found)
    plan = planner.plan()
    hint = ""
    if is_hopeless:
        kinds = {complaint.kind for complaint in complaints_found}
        hint = "no command can recover the weights from this file"
        if "damaged" in kinds:
            hint = "first get an intact file"
        elif "part" in kinds:
            hint = "get all parts of the checkpoint first"
    path = without_query(subject.checkpoint.path)
    complaints = [_add_commands(complaint, planner, plan, hint) for complaint in complaints_found]
    complaints = [
        replace(complaint, hint=fill_in_path(complaint.hint or "", path))
        for complaint in complaints
    ]
    if any((complaint.hint or "").startswith(_UNFIXABLE) for complaint in complaints):
        text = "no command fixes only this, because the file would still not load"
        complaints = [
            replace(complaint, commands=(), hint=complaint.hint or text)
            if complaint.commands
            else complaint
            for complaint in complaints
        ]
        plan = FixPlan()
    reader = fill_in_path(_find_reader(subject), path)
    fails = bool(reader) or any(complaint.severity != "note" for complaint in complaints)
    resumes = subject.is_training and load_format(subject.checkpoint.format).resumes
    resume = planner.plan(resume=True) if fails and resumes else FixPlan()
    commands = (plan.command,) if plan.command is not None else ()
    return Diagnosis(
        path,
        subject.checkpoint.format,
        subject.devices,
        tuple(sorted(complaints, key=_urgency_key)),
        commands,
        plan.command,
        plan.target or None,
        resume.command if commands else None,
        list_training_state(subject.checkpoint),
        _make_resume_code(subject) if resumes and not is_hopeless else "",
        reader,
        plan,
    )


def _find_reader(subject: Subject) -> str:
    """Return the call that reads the file as is, with FILE for its path; "" for torch.load."""
    refusal = load_format(subject.checkpoint.format).refusal
    if subject.companion is not None:
        return subject.companion.reader
    return refusal.reader if refusal is not None else ""


def _make_resume_code(subject: Subject) -> str:
    """Return the Python line that resumes with the model of the reference; "" without one."""
    if subject.reference is None or subject.model is None:
        return ""
    if not match_section(subject.checkpoint, subject.model, subject.reference.target).fits:
        return ""
    file = without_query(subject.checkpoint.path)
    key = f", key={subject.key!r}" if subject.key is not None else ""
    optimizer = ", optimizer=optimizer" if subject.optimizers else ""
    is_counted = TRAINING[1] in list_training_state(subject.checkpoint)
    epoch = f"; epoch = ckptool.load({file!r})['epoch']" if is_counted else ""
    return f"ckptool.load_into(model, {file!r}{optimizer}{key}){epoch}"


def _add_commands(
    complaint: Complaint, planner: Planner, plan: FixPlan, hint_first: str
) -> Complaint:
    """Return a complaint with its commands; `hint_first` is its hint if no command helps yet."""
    if hint_first:
        return replace(
            complaint, hint=complaint.hint or (hint_first if complaint.fix is not None else None)
        )
    attempts = [(choice, planner.find_command(choice, plan)) for choice in complaint.choices]
    alternatives = tuple(dict.fromkeys(result[0] for _, result in attempts if result is not None))
    code_lines = (
        choice.code.replace("FILE", repr(result[1]))
        for choice, result in attempts
        if result and choice.code
    )
    complaint = replace(complaint, code="; ".join(code_lines))
    if plan.command is not None and complaint.kind in plan.fixed:
        return replace(complaint, commands=(plan.command,), alternatives=alternatives)
    hint = complaint.hint
    if complaint.fix is not None and not alternatives and not hint:
        hint = _UNFIXABLE + (f": {plan.obstacle}" if plan.obstacle else "")
    return replace(complaint, alternatives=alternatives, hint=hint)


def _urgency_key(complaint: Complaint) -> tuple[int, int, bool]:
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

    def __init__(self, subject: Subject, complaints: Iterable[Complaint]) -> None:
        """Prepare plans for the complaints that the checks found."""
        self._subject = subject
        self._fixes = sorted(
            (complaint for complaint in complaints if complaint.fix is not None), key=_fix_order_key
        )
        self._taken: set[str] = set()
        self._commands: dict[tuple[str, ...], tuple[str, str]] = {}

    def plan(self, *, resume: bool = False) -> FixPlan:
        """Return the conversion that fixes most; `resume` keeps the training state."""
        plan: FixPlan | None = None
        state = self._subject.checkpoint
        fixed: set[str] = set()
        obstacle = error_text = ""
        for complaint in self._fixes:
            fix, format = complaint.fix or (), complaint.format
            if resume and (format or any(isinstance(step, _OF_A_MODEL) for step in fix)):
                if complaint.resume is None:
                    continue
                fix, format = complaint.resume, None
            is_plain = any(isinstance(step, Plain) for step in fix)
            if plan is not None and is_plain and not find_blockers(state.root):
                fixed.add(complaint.kind)  # earlier steps removed the objects
                continue
            for steps in (fix, *self._alternatives_to_plain())[: None if is_plain else 1]:
                merged = FixPlan(
                    steps=_merge(plan.steps if plan else (), steps),
                    format=(plan and plan.format) or format,
                )
                try:
                    converted_state = state if merged == plan else self._apply(merged)
                    if any(isinstance(step, Take) for step in steps) and is_plain:
                        _refuse_blocked(converted_state)
                    state = converted_state
                except CheckpointError as error:
                    is_last = steps is not fix and isinstance(steps[0], Take)
                    error_text = error_text if is_last else error.message
                    continue
                plan = merged
                fixed.add(complaint.kind)
                break
            else:
                obstacle = obstacle or error_text
        if plan is None:
            return FixPlan(obstacle=obstacle)
        command, target = self._make_command(plan, RESUMED if resume else FIXED)
        return replace(
            plan, command=command, target=target, fixed=frozenset(fixed), obstacle=obstacle
        )

    def _alternatives_to_plain(self) -> Iterator[Steps]:
        """Yield steps for objects that cannot become plain data, the least loss first."""
        yield (Plain(drop_objects=True),)
        if self._subject.model is not None:
            yield (Take(self._subject.key, model_only=True),)

    def find_command(self, option: Choice, plan: FixPlan) -> tuple[str, str] | None:
        """Return the command of a choice combined with the plan, and its target; None if it fails.

        The command reads the source file, so the plan does not have to run first.
        """
        for base_plan in (plan, FixPlan()):
            format = base_plan.format if option.word else "safetensors"
            combined = FixPlan(steps=_merge(base_plan.steps, option.steps), format=format)
            key = (str(format), *(word for step in combined.steps for word in step.words()))
            with suppress(CheckpointError):
                if key not in self._commands:
                    self._apply(combined)
                    self._commands[key] = self._make_command(combined, option.word)
                return self._commands[key]
        return None

    def _apply(self, plan: FixPlan) -> Checkpoint:
        """Convert the header with the steps of a plan.

        Raises:
            CheckpointError: the conversion fails, cannot be written, or would lose weights.
        """
        source, format = self._subject.checkpoint, self._choose_format(plan)
        state = apply_steps(source, plan.steps, format)
        refuse_placeholders(state)
        refuse_empty(state, load_writable_format(format).plan(state))
        if any(isinstance(step, Plain) and step.drop_objects for step in plan.steps):
            is_model_only = any(isinstance(step, Take) and step.model_only for step in plan.steps)
            _refuse_lost_weights(source, state, is_model_only=is_model_only)
        return state

    def _choose_format(self, plan: FixPlan) -> str:
        """Return the format of the plan, else safetensors or torch as the source."""
        if plan.format is not None:
            return plan.format
        checkpoint = self._subject.checkpoint
        is_flat = load_format(checkpoint.format).tensors_only
        return "safetensors" if is_flat else "torch-zip"

    def _make_command(self, plan: FixPlan, word: str) -> tuple[str, str]:
        """Return the command of a conversion, and its unique target."""
        checkpoint, format = self._subject.checkpoint, self._choose_format(plan)
        target = make_default_target(checkpoint.path, word or FIXED, format, sharded=True)
        if not (
            word or shard_format_of(checkpoint.format)
        ):  # it would be a second index in the folder
            target = f"{target.removesuffix(f'.{FIXED}.safetensors')}.safetensors"
        target = find_unused_path(target, self._taken)
        self._taken.add(target)
        format_option = format if choose_format(checkpoint, target) != format else None
        return convert_command(checkpoint.path, target, plan.steps, format=format_option), target


def _merge(steps: Iterable[Step], more: Iterable[Step]) -> Steps:
    """Merge steps into one of each kind, in the order of `STEPS`.

    With `Fit` the keys are those of the reference, wrapper prefixes included.
    """
    merged: dict[type[Step], Step] = {}
    for step in (*steps, *more):
        kind = type(step)
        merged[kind] = _merge_options(merged[kind], step) if kind in merged else step
    if Fit in merged:
        merged.pop(Strip, None)
        if isinstance(take := merged.get(Take), Take):
            merged[Take] = replace(take, lazy=True)
    return tuple(merged[kind] for kind in STEPS if kind in merged)


def _merge_options(first: Step, second: Step) -> Step:
    """Merge the options of two steps: lists are concatenated, else the second step wins."""
    options: dict[str, Any] = {}
    for field in fields(first):
        old, new = getattr(first, field.name), getattr(second, field.name)
        if isinstance(new, tuple):
            new = tuple(dict.fromkeys((*old, *new)))
        options[field.name] = old if new == field.default else new
    if options.get("ema"):  # averages are already only the state dict of the model
        options.update(key=None, model_only=False)
    return replace(first, **options)


def _fix_order_key(complaint: Complaint) -> tuple[int, bool]:
    """Return the sort key of a fix: by format, then by the order of its steps; any rewrite last.

    The model is extracted before some of its tensors are left out.
    """
    if complaint.format:
        return -1, False
    steps = complaint.fix or ()
    is_partial_take = any(
        isinstance(step, Take) and not (step.key or step.model_only) for step in steps
    )
    return min((STEPS.index(type(step)) for step in steps), default=len(STEPS)), is_partial_take


def _refuse_blocked(checkpoint: Checkpoint) -> None:
    """Refuse a result that `weights_only=True` rejects.

    Raises:
        NotRepresentable: the result has objects.
    """
    if names := find_blockers(checkpoint.root):
        raise NotRepresentable(f"the result still has objects: {listed(names)}")


def _refuse_lost_weights(before: Checkpoint, after: Checkpoint, *, is_model_only: bool) -> None:
    """Refuse a conversion that drops tensors of a model or optimizer together with objects.

    Raises:
        NotRepresentable: some of these tensors are dropped.
    """
    kinds = MODEL_KINDS if is_model_only else (*MODEL_KINDS, "optimizer")
    tensors = collect_weights(before.root, kinds)
    if len(collect_weights(after.root, kinds)) < len(tensors):
        refused = [pair for pair in tensors if is_rejected(pair[1])] or tensors
        names = [name_of(path) for path, _ in refused]
        raise NotRepresentable(
            f"dropping the objects would drop {counted(len(names), 'tensor')} of the weights: "
            f"{listed(names, most=3)}"
        )
