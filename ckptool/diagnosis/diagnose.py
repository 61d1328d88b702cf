"""A file's whole diagnosis: every complaint, and the plan that mends what can be mended."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.checkpoint import Checkpoint
from ckptool.conversion import Like
from ckptool.diagnosis.complaint import Complaint, Found, Patient, Reference
from ckptool.diagnosis.contents import damage, memory, placement
from ckptool.diagnosis.files import is_finding, layout, unopened
from ckptool.diagnosis.machine import devices_here, parsed_devices
from ckptool.diagnosis.models import level, naming, objects, versions
from ckptool.diagnosis.plan import Plan, Planner
from ckptool.diagnosis.training import fit, training
from ckptool.errors import AmbiguousName, CheckpointError, NotFound, UsageError, without_query
from ckptool.files.source import Progress
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.plan import target_like
from ckptool.loading.target import Target
from ckptool.words import as_argument, shell

__all__ = ["Diagnosis", "doctor"]

_CHECKS = (layout, level, objects, naming, fit, training, versions, memory, placement)
_RANK = {"fails": 0, "misleads": 0, "note": 1}
_FIRST = {"malicious": -3, "damaged": -2, "part": -1, "meta": -1, "packed": -1}
_UNMENDED = "no command fixes it"
_HOPELESS = frozenset({"damaged", "part", "meta", "packed"})
"""Kinds of complaint after which no command is worth running."""


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

    @property
    def ok(self) -> bool:
        """Whether nothing fails or misleads; notes do not count."""
        return all(complaint.severity == "note" for complaint in self.complaints)

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
            "devices": list(self.devices),
            "complaints": [complaint.to_dict() for complaint in self.complaints],
            "commands": list(self.commands),
            "all_at_once": self.all_at_once,
            "target": self.target,
            "resume": self.resume,
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
            checkpoint = stack.enter_context(open_checkpoint(file, limits=limits)).settled()
        except CheckpointError as error:
            if not is_finding(error, file):
                raise
            complaints = tuple(unopened(error, file))
            return Diagnosis(file, None, here, complaints, complaints[0].commands)
        patient = Patient(checkpoint, key, here, reference)
        # before all of it is read: the key may name nothing
        found = [one for check in _CHECKS for one in check(patient)]
        harm = [] if quick else list(damage(patient, limits, progress))
        return _assembled(patient, [*harm, *found])


def _wanted(like: Like) -> Target:
    """Return what the reference wants, which must have one state dict alone.

    Raises:
        UsageError: it has none, or several.
    """
    try:
        return target_like(like)
    except (NotFound, AmbiguousName) as error:
        path = like.path if isinstance(like, Checkpoint) else ""
        raise UsageError(
            f"the reference must hold one state dict: {error.message}",
            file=path or None,
            hint=f"ckptool extract {shell(path)} --key NAME -o reference.pth",
        ) from error


def _assembled(patient: Patient, found: list[Found]) -> Diagnosis:
    """Build the diagnosis; a damaged or partial file gets no command."""
    hopeless = any(one.kind in _HOPELESS for one in found)
    planner = Planner(patient, [] if hopeless else found)
    plan = planner.plan()
    complaints = [_answered(one, planner, plan, hopeless) for one in found]
    if any(one.remedy.startswith(_UNMENDED) for one in complaints):
        rest = "no command for this alone: the file would still not load"
        complaints = [
            replace(one, commands=(), remedy=one.remedy or rest) if one.commands else one
            for one in complaints
        ]
        plan = Plan()
    fails = any(one.severity != "note" for one in complaints)
    resume = planner.plan(resume=True) if fails and patient.is_training else Plan()
    commands = (plan.command,) if plan.command is not None else ()
    return Diagnosis(
        without_query(patient.checkpoint.path),
        patient.checkpoint.format,
        patient.devices,
        tuple(sorted(complaints, key=_place)),
        commands,
        plan.command,
        plan.target or None,
        resume.command if commands else None,
    )


def _answered(found: Found, planner: Planner, plan: Plan, hopeless: bool) -> Complaint:
    """Return a complaint with its commands, or with the reason why no command helps."""
    if hopeless:
        remedy = "first get an intact file" if found.fix is not None else ""
        return found.answered((), (), found.remedy or remedy)
    tried = [planner.choice(one, plan) for one in found.choices]
    others = tuple(dict.fromkeys(command for command in tried if command is not None))
    remedy = found.remedy
    if plan.command is not None and found.kind in plan.mended:
        return found.answered((plan.command,), others, remedy)
    if found.fix is not None and not others and not remedy:
        remedy = _UNMENDED + (f": {plan.obstacle}" if plan.obstacle else "")
    return found.answered((), others, remedy)


def _place(complaint: Complaint) -> tuple[int, int, bool]:
    """Return the sort key of a complaint: worst first, then mended by the plan, notes last."""
    first = _FIRST.get(complaint.kind, 0)
    return first, _RANK[complaint.severity], not complaint.commands
