"""A file's whole diagnosis: every complaint, and the plan that mends what can be mended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptool.errors import CheckpointError
from ckptool.formats import open_checkpoint
from ckptool.inspection.doctor.buffers import buffers
from ckptool.inspection.doctor.choices import choice_command
from ckptool.inspection.doctor.complaint import Complaint, Found
from ckptool.inspection.doctor.fit import fit, reference_model
from ckptool.inspection.doctor.layout import layout
from ckptool.inspection.doctor.level import level
from ckptool.inspection.doctor.machine import devices_here, parsed_devices
from ckptool.inspection.doctor.memory import memory
from ckptool.inspection.doctor.naming import naming
from ckptool.inspection.doctor.objects import objects
from ckptool.inspection.doctor.overflow import overflow
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.doctor.placement import placement
from ckptool.inspection.doctor.plan import Plan, planned
from ckptool.inspection.doctor.training import training
from ckptool.inspection.doctor.unopened import is_finding, unopened
from ckptool.limits import DEFAULT_LIMITS, Limits

__all__ = ["Diagnosis", "diagnose"]

Progress = Callable[[int, int], None]
_FINDERS = (layout, level, objects, naming, fit, training, buffers, memory, placement)
_RANK = {"fails": 0, "misleads": 0, "note": 1}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every complaint about a file, and what mends them."""

    file: str
    """As it was given."""
    format: str | None
    """None of a file that does not open."""
    devices: tuple[str, ...]
    """The devices of the machine that it was held against."""
    complaints: tuple[Complaint, ...]
    """Those that the plan mends in its order, then the others, notes last."""
    commands: tuple[str, ...] = ()
    """The plan: each command once, in the order to run them."""
    all_at_once: str | None = None
    """The one command that does what the plan does."""
    target: str | None = None
    """The file that the plan writes; the source is never changed."""

    @property
    def ok(self) -> bool:
        """Whether nothing fails or misleads; notes do not count."""
        return all(complaint.severity == "note" for complaint in self.complaints)

    def to_dict(self) -> dict[str, Any]:
        """The document `ckptool.doctor/1`."""
        return {
            "schema": "ckptool.doctor/1",
            "file": self.file,
            "format": self.format,
            "ok": self.ok,
            "devices": list(self.devices),
            "complaints": [complaint.to_dict() for complaint in self.complaints],
            "commands": list(self.commands),
            "all_at_once": self.all_at_once,
            "target": self.target,
        }


def diagnose(
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    key: str | None = None,
    quick: bool = False,
    devices: str | Iterable[object] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Diagnosis:
    """Every reason why a plain `torch.load` and `load_state_dict` fail or mislead.

    Torch is not imported, and nothing of the file is run.

    Args:
        path: The file or folder; one that does not open has a diagnosis too.
        like: A checkpoint of the architecture that it is to load into.
        key: The state dict that is meant, by its address, where there are several.
        quick: Look at the header alone: neither checksums nor NaN.
        devices: The devices that the machine has (`cuda:0,cuda:1`, or a list of words or of
            `torch.device`); None: as far as this one tells.
        progress: Told bytes done and in all, of what is read.
        limits: What a hostile file may cost.

    Raises:
        FileMissing: there is no such file (a missing shard is a finding).
        UnreadableFile: the system refuses it, or it asks for more than `limits`; or the reference
            cannot be read.
        UsageError: the reference holds no state dict, or several; or a word is no device.
        NotFound: nothing answers to `key`.
    """
    file = os.fsdecode(path)
    here = devices_here() if devices is None else parsed_devices(devices)
    with ExitStack() as stack:
        reference = None
        if like is not None:
            reference = stack.enter_context(open_checkpoint(like, limits=limits))
            reference_model(reference)
        try:
            checkpoint = stack.enter_context(open_checkpoint(file, limits=limits))
        except CheckpointError as error:
            if not is_finding(error, file):
                raise
            return _of_unopened(file, here, unopened(error, file))
        patient = Patient(checkpoint, key, here, reference)
        found = list(_found(patient))  # before all of it is read: the key may name nothing
        harm = [] if quick else _harm(patient, limits, progress)
        return _assembled(patient, [*harm, *found])


def _of_unopened(file: str, devices: tuple[str, ...], complaint: Complaint) -> Diagnosis:
    return Diagnosis(file, None, devices, (complaint,), complaint.commands)


def _harm(patient: Patient, limits: Limits, progress: Progress | None) -> list[Found]:
    from ckptool.inspection.doctor.damage import damage  # reading takes more than a header

    return [*damage(patient, limits, progress), *overflow(patient)]


def _found(patient: Patient) -> Iterator[Found]:
    for finder in _FINDERS:
        yield from finder(patient)


def _assembled(patient: Patient, found: list[Found]) -> Diagnosis:
    """The complaints with their commands; a damaged file is not worth any."""
    damaged = any(one.complaint.kind == "damaged" for one in found)
    needs = [need for one in found for need in one.needs]
    plan = planned(patient, () if damaged else needs)
    taken: set[str] = {plan.target} if plan.commands else set()
    complaints = [_with_commands(patient, plan, one, damaged, taken) for one in found]
    return Diagnosis(
        patient.checkpoint.path,
        patient.checkpoint.format,
        patient.devices,
        tuple(sorted(complaints, key=lambda complaint: _place(complaint, plan))),
        plan.commands,
        plan.all_at_once,
        plan.target if plan.commands else None,
    )


def _with_commands(
    patient: Patient, plan: Plan, found: Found, damaged: bool, taken: set[str]
) -> Complaint:
    """A complaint with the commands that mend it, or with why none does."""
    complaint = found.complaint
    if damaged and (found.needs or found.choices):
        return replace(complaint, remedy="the file is damaged: get it whole first")
    met = all(need in plan.by_need for need in found.needs)
    wanted = {command for need in found.needs for command in plan.by_need.get(need, ())}
    if found.needs and not met:
        remedy = complaint.remedy or f"no command mends it{_because(plan.obstacle)}"
        return replace(complaint, remedy=remedy)
    tried = (choice_command(patient, plan, one, taken) for one in found.choices)
    return replace(
        complaint,
        commands=tuple(command for command in plan.commands if command in wanted),
        alternatives=tuple(command for command in tried if command is not None),
    )


def _because(obstacle: str) -> str:
    return f": {obstacle}" if obstacle else ""


def _place(complaint: Complaint, plan: Plan) -> tuple[int, int]:
    """Where a complaint stands: damage first, then in the order of the plan, notes last."""
    order = {command: at for at, command in enumerate(plan.commands)}
    places = [order[command] for command in complaint.commands]
    first = -1 if complaint.kind == "damaged" else len(order)
    return _RANK[complaint.severity], max(places, default=first)
