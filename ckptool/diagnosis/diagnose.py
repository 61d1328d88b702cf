"""The diagnosis of a file: every complaint, and the plan that fixes as many as it can."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Set
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
_SEVERITY_RANK = {"fails": 0, "misleads": 0, "note": 1}
"""Sort rank by severity: notes come last."""
_KIND_RANK = {
    "malicious": -3, "damaged": -2, "part": -1, "meta": -1, "packed": -1, "frozen": -1,
    "format-unnamed": 1,
}  # fmt: skip
"""Sort rank by kind of complaint; 0 for the other kinds."""
_HINT_UNFIXABLE = "no command fixes it"
_HOPELESS_KINDS = frozenset({"damaged", "part", "meta", "packed", "frozen"})
"""Kinds of complaint after which no command is useful."""
_OBJECT_KINDS = frozenset({"objects", "numpy", "protocol", "outdated"})
"""Kinds of complaint that do not apply to a file that its library reads with its objects."""


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
            "--model-only": "optimizer" in self.training
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
    target_devices = detect_devices() if devices is None else parse_devices(devices)
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
            return Diagnosis(
                file,
                format=None,
                devices=target_devices,
                complaints=complaints,
                commands=complaints[0].commands,
            )
        subject = Subject(checkpoint, key, target_devices, reference)
        return diagnose(subject, quick=quick, progress=progress, limits=limits)


def diagnose(
    subject: Subject,
    *,
    quick: bool = True,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diagnosis:
    """Return the diagnosis of an open checkpoint; with `quick` only of its header.

    Complaints about objects are left out for a file that a trainer reads with its objects.
    """
    # Before the slow check of all bytes: a key that the file does not have raises an error here.
    complaints = [complaint for check in _CHECKS for complaint in check(subject)]
    if subject.companion is not None:
        complaints = [complaint for complaint in complaints if complaint.kind not in _OBJECT_KINDS]
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
    """Build the diagnosis: complaints with commands, and the plan.

    A file that no command makes load (a hopeless one, or one with a complaint that no step fixes)
    has no plan.
    """
    hopeless_hint = _hint_for_hopeless({complaint.kind for complaint in complaints_found})
    planner = Planner(subject, [] if hopeless_hint else complaints_found)
    plan = planner.plan()
    path = without_query(subject.checkpoint.path)
    complaints = [
        _add_commands(complaint, planner, plan, hopeless_hint) for complaint in complaints_found
    ]
    complaints = [
        replace(complaint, hint=fill_in_path(complaint.hint or "", path))
        for complaint in complaints
    ]
    if any((complaint.hint or "").startswith(_HINT_UNFIXABLE) for complaint in complaints):
        # The file would not load after the plan either.
        plan, complaints = FixPlan(), list(map(_withdraw_commands, complaints))
    reader = fill_in_path(_find_reader(subject), path)
    # A plain torch.load does not read a file that another library reads.
    fails = bool(reader) or any(complaint.severity != "note" for complaint in complaints)
    # The other command to offer next to the plan: it keeps the training state.
    can_resume = subject.is_training and load_format(subject.checkpoint.format).resumes
    resume_plan = planner.plan(resume=True) if fails and can_resume else FixPlan()
    return Diagnosis(
        path,
        subject.checkpoint.format,
        subject.devices,
        tuple(sorted(complaints, key=_urgency_key)),
        commands=(plan.command,) if plan.command is not None else (),
        all_at_once=plan.command,
        target=plan.target or None,
        resume=resume_plan.command if plan.command is not None else None,
        training=list_training_state(subject.checkpoint),
        code=_make_resume_code(subject) if can_resume and not hopeless_hint else "",
        reader=reader,
        plan=plan,
    )


def _hint_for_hopeless(kinds: Set[str]) -> str:
    """Return the hint for a file that no command can fix, by its complaints; "" for others."""
    if kinds.isdisjoint(_HOPELESS_KINDS):
        return ""
    if "damaged" in kinds:
        return "first get an intact file"
    if "part" in kinds:
        return "get all parts of the checkpoint first"
    return "no command can recover the weights from this file"


def _find_reader(subject: Subject) -> str:
    """Return the call that reads the file as is, with FILE for its path; "" for torch.load."""
    if subject.companion is not None:  # not a model: a file that a trainer saved next to it
        return subject.companion.reader
    refusal = load_format(subject.checkpoint.format).refusal  # by torch.load
    return refusal.reader if refusal is not None else ""


def _make_resume_code(subject: Subject) -> str:
    """Return the Python line that resumes with the model of the reference.

    "" without a reference, or if the file does not fit it.
    """
    if subject.reference is None or subject.model is None:
        return ""
    if not match_section(subject.checkpoint, subject.model, subject.reference.target).fits:
        return ""
    file = without_query(subject.checkpoint.path)
    key = f", key={subject.key!r}" if subject.key is not None else ""
    optimizer = ", optimizer=optimizer" if subject.optimizers else ""
    has_epoch = "epoch" in list_training_state(subject.checkpoint)
    epoch = f"; epoch = ckptool.load({file!r})['epoch']" if has_epoch else ""
    return f"ckptool.load_into(model, {file!r}{optimizer}{key}){epoch}"


def _add_commands(
    complaint: Complaint, planner: Planner, plan: FixPlan, hopeless_hint: str
) -> Complaint:
    """Return a complaint with its commands: the plan if it fixes it, and its alternatives.

    A complaint without a command gets a hint. A `hopeless_hint` is given if no command can make the
    file load: then none gets commands.
    """
    if hopeless_hint:
        can_be_fixed_later = complaint.fix is not None
        hint = complaint.hint or (hopeless_hint if can_be_fixed_later else None)
        return replace(complaint, hint=hint)
    alternatives: list[str] = []
    code_lines: list[str] = []
    for choice in complaint.choices:
        if (command_and_target := planner.find_command(choice, plan)) is not None:
            command, target = command_and_target
            alternatives += [command] if command not in alternatives else []
            code_lines += [choice.code.replace("FILE", repr(target))] if choice.code else []
    complaint = replace(complaint, code="; ".join(code_lines), alternatives=tuple(alternatives))
    if plan.command is not None and complaint.kind in plan.fixed:
        return replace(complaint, commands=(plan.command,))
    if complaint.fix is not None and not alternatives and not complaint.hint:
        reason = f": {plan.obstacle}" if plan.obstacle else ""
        return replace(complaint, hint=f"{_HINT_UNFIXABLE}{reason}")
    return complaint


def _withdraw_commands(complaint: Complaint) -> Complaint:
    """Return a complaint without the command of a plan that is not offered; a hint says why."""
    if not complaint.commands:
        return complaint
    text = "no command fixes only this, because the file would still not load"
    return replace(complaint, commands=(), hint=complaint.hint or text)


def _urgency_key(complaint: Complaint) -> tuple[int, int, bool]:
    """Return the sort key of a complaint: by its kind, then notes last, then fixable ones first."""
    return (
        _KIND_RANK.get(complaint.kind, 0),
        _SEVERITY_RANK[complaint.severity],
        not complaint.commands,
    )


FIXED, RESUMED = "fixed", "resume"
"""The word before the extension of the file that a plan writes: `model.fixed.pth`."""
_STEPS_WITHOUT_RESUME = (Take, Strip, Rename, Fit)
"""Steps after which the training that saved the file cannot resume from it."""


class Planner:
    """Makes plans for one file: each is one `convert` that fixes as much as possible.

    Each complaint has the steps that fix it, which a test proves over all fixtures. The planner
    adds them one complaint after the other, and keeps them if the conversion of the header
    succeeds. A conversion with `Fit` succeeds only if the result fits the reference.
    """

    def __init__(self, subject: Subject, complaints: Iterable[Complaint]) -> None:
        """Sort the complaints that steps can fix in the order of these steps."""
        self._subject = subject
        self._fixable_complaints = sorted(
            (complaint for complaint in complaints if complaint.fix is not None), key=_fix_order_key
        )
        self._used_targets: set[str] = set()
        """Files that some command already writes."""
        self._commands: dict[tuple[str, ...], tuple[str, str]] = {}
        """Command and target, by the format and the options of a conversion."""

    def plan(self, *, resume: bool = False) -> FixPlan:
        """Return the conversion that fixes most complaints; fixes that fail are left out.

        With `resume` only steps that keep the training state, in the same format.
        """
        plan: FixPlan | None = None
        converted = self._subject.checkpoint
        fixed_kinds: set[str] = set()
        first_error = ""
        for complaint in self._fixable_complaints:
            fix, format = complaint.fix or (), complaint.format
            if resume and (format or any(isinstance(step, _STEPS_WITHOUT_RESUME) for step in fix)):
                if complaint.resume is None:
                    continue
                fix, format = complaint.resume, None
            is_plain = any(isinstance(step, Plain) for step in fix)
            if plan is not None and is_plain and not find_blockers(converted.root):
                fixed_kinds.add(complaint.kind)  # earlier steps removed the objects
                continue
            attempts = (fix, *self._iterate_alternatives_to_plain()) if is_plain else (fix,)
            errors: list[str] = []
            for steps in attempts:
                try:
                    extended, result = self._extend(plan, converted, steps, format)
                    if is_plain and any(isinstance(step, Take) for step in steps):
                        _refuse_blocked(result)  # the model itself may have objects
                except CheckpointError as error:
                    errors.append(error.message)
                else:
                    plan, converted = extended, result
                    fixed_kinds.add(complaint.kind)
                    break
            else:
                # The error after dropping the objects (the second attempt) names the weights among
                # them; the error of taking only the model (the third) does not.
                first_error = first_error or errors[:2][-1]
        if plan is None:
            return FixPlan(obstacle=first_error)
        command, target = self._make_command(plan, RESUMED if resume else FIXED)
        return replace(
            plan,
            command=command,
            target=target,
            fixed=frozenset(fixed_kinds),
            obstacle=first_error,
        )

    def _extend(
        self, plan: FixPlan | None, converted: Checkpoint, steps: Steps, format: str | None
    ) -> tuple[FixPlan, Checkpoint]:
        """Return a plan with more steps, and the checkpoint that it makes.

        `converted` is the checkpoint that `plan` makes. The format of the first fix that needs one
        stays.

        Raises:
            CheckpointError: the conversion fails.
        """
        extended = FixPlan(
            steps=_merge_steps(plan.steps if plan else (), steps),
            format=(plan and plan.format) or format,
        )
        return extended, converted if extended == plan else self._apply(extended)

    def _iterate_alternatives_to_plain(self) -> Iterator[Steps]:
        """Yield steps for objects that cannot become plain data, the least loss first.

        Dropping the objects; then taking only the model, without its training state.
        """
        yield (Plain(drop_objects=True),)
        if self._subject.model is not None:
            yield (Take(self._subject.key, model_only=True),)

    def find_command(self, choice: Choice, plan: FixPlan) -> tuple[str, str] | None:
        """Return the command of a choice combined with the plan, and the file that it writes.

        If the combination fails, it is the command of the choice by itself; None if that fails too.
        The command reads the source file, so the plan does not have to run first.
        """
        for base_plan in (plan, FixPlan()):
            # The new file has the choice's word in its name. Without one, only the extension tells
            # it from the source: that of safetensors.
            format = base_plan.format if choice.word else "safetensors"
            combined = FixPlan(steps=_merge_steps(base_plan.steps, choice.steps), format=format)
            key = (str(format), *(option for step in combined.steps for option in step.words()))
            with suppress(CheckpointError):
                if key not in self._commands:
                    self._apply(combined)
                    self._commands[key] = self._make_command(combined, choice.word)
                return self._commands[key]
        return None

    def _apply(self, plan: FixPlan) -> Checkpoint:
        """Return the checkpoint with the steps of a plan applied to its header.

        Raises:
            CheckpointError: the conversion fails, cannot be written, or would lose weights.
        """
        source, format = self._subject.checkpoint, self._choose_format(plan)
        state = apply_steps(source, plan.steps, format)
        refuse_placeholders(state)
        refuse_empty(state, load_writable_format(format).plan(state))
        drops_objects = any(isinstance(step, Plain) and step.drop_objects for step in plan.steps)
        if drops_objects:  # which may have weights in them
            is_model_only = any(isinstance(step, Take) and step.model_only for step in plan.steps)
            _refuse_lost_weights(source, state, is_model_only=is_model_only)
        return state

    def _choose_format(self, plan: FixPlan) -> str:
        """Return the format of the plan, else the one of the source: safetensors or torch's."""
        if plan.format is not None:
            return plan.format
        source_format = load_format(self._subject.checkpoint.format)
        return "safetensors" if source_format.tensors_only else "torch-zip"

    def _make_command(self, plan: FixPlan, word: str) -> tuple[str, str]:
        """Return the command of a conversion, and the file that it writes, which no other does.

        Without a `word`, a safetensors file is named like the source: `model.safetensors` for
        `model.pth`.
        """
        checkpoint, format = self._subject.checkpoint, self._choose_format(plan)
        target = make_default_target(checkpoint.path, word or FIXED, format, sharded=True)
        # Next to an index such a name would look like that of a second model.
        if not word and not shard_format_of(checkpoint.format):
            target = f"{target.removesuffix(f'.{FIXED}.safetensors')}.safetensors"
        target = find_unused_path(target, self._used_targets)
        self._used_targets.add(target)
        format_option = format if choose_format(checkpoint, target) != format else None
        return convert_command(checkpoint.path, target, plan.steps, format=format_option), target


def _merge_steps(steps: Iterable[Step], added: Iterable[Step]) -> Steps:
    """Merge steps into one of each kind, in the order of `STEPS`.

    `Fit` replaces `Strip`, because it writes the keys of the reference with their wrapper prefixes.
    Before a `Fit`, `Take` keeps lazy parameters, which the reference may not have.
    """
    merged: dict[type[Step], Step] = {}
    for step in (*steps, *added):
        kind = type(step)
        merged[kind] = _merge_options(merged[kind], step) if kind in merged else step
    if Fit in merged:
        merged.pop(Strip, None)
        if isinstance(take := merged.get(Take), Take):
            merged[Take] = replace(take, lazy=True)
    return tuple(merged[kind] for kind in STEPS if kind in merged)


def _merge_options(first: Step, second: Step) -> Step:
    """Merge two steps of one kind: lists are concatenated, else the second step wins.

    An option with its default value never wins.
    """
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
    """Return the sort key of a complaint by its fix.

    First the fixes that need a certain format, then by the first step, last those that any rewrite
    fixes. The model is extracted (`key`, `model_only`) before some of its tensors are left out.
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
        # If no tensor is rejected itself, an object around some of them is: all are listed.
        dropped = [(path, node) for path, node in tensors if is_rejected(node)] or tensors
        names = [name_of(path) for path, _ in dropped]
        raise NotRepresentable(
            f"dropping the objects would drop {counted(len(names), 'tensor')} of the weights: "
            f"{listed(names, most=3)}"
        )
