"""`ckptool doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.console import (
    Screen,
    make_files_document,
    print_document,
    print_error,
    print_lines,
    set_exit_code,
)
from ckptool.cli.like import resolve_reference
from ckptool.cli.options import PATH, OutputOptions, flag, screen_options, verb
from ckptool.conversion import apply_steps
from ckptool.core.checkpoint import Checkpoint
from ckptool.diagnosis import doctor
from ckptool.diagnosis.diagnose import FIXED, Diagnosis
from ckptool.errors import CheckpointError, UnreadableFile, UsageError
from ckptool.render.verdicts import diagnosis_lines
from ckptool.words import listed, shell
from ckptool.writing.target import choose_format


@verb(
    "doctor",
    "ckptool doctor model.pth",
    "ckptool doctor model.pth --like reference.pth",
    "ckptool doctor model.pth --like mypackage.models:build",
    "ckptool doctor model.pth --quick --devices cpu,cuda:0",
    "ckptool doctor model.pth --fix -o fixed.pth",
    problem="problem found",
)
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--like",
    metavar="REFERENCE",
    type=PATH,
    help="Check against a model: another checkpoint, or MODULE:FACTORY, as ckptool match does.",
)
@click.option("--key", metavar="NAME", help="Check this state dict, if the file has several.")
@flag("--quick", "Read only the header; do not check checksums or NaN.")
@click.option(
    "--devices",
    metavar="LIST",
    help="Check for these devices, for example cuda:0,cuda:1. [default: those of this machine]",
)
@flag("--explain", "Add locations, causes and other fixes.")
@flag("--fix", "Write a fixed file, and check it.")
@click.option("-o", "--output", type=PATH, help="Write the fixed file here.")
@flag("--model-only", "Let --fix leave out the optimizer.")
@flag("--drop-objects", "Let --fix drop objects that cannot be converted to data.")
@flag("--allow-unexpected", "Let --fix leave out tensors that the reference does not have.")
@screen_options()
def command(
    files: tuple[str, ...],
    like: str | None,
    explain: bool,
    fix: bool,
    output: str | None,
    model_only: bool,
    drop_objects: bool,
    allow_unexpected: bool,
    screen: Screen,
    **options: Any,
) -> None:
    """Explain why a checkpoint does not load, and how to fix it.

    doctor lists errors of torch.load(FILE) and load_state_dict, warnings (the file loads, but not
    as intended) and notes, and prints the command that writes a fixed file. It never changes FILE.
    Notes do not affect the exit code; with several files, the worst one decides it. --fix runs the
    command and checks the result. torch is imported only for MODULE:FACTORY.
    """
    reference = None if like is None else resolve_reference(like)
    allowed = {
        "--model-only": model_only,
        "--drop-objects": drop_objects,
        "--allow-unexpected": allow_unexpected,
    }
    given_options = [
        option for option, is_given in {**allowed, "--output": output}.items() if is_given
    ]
    if given_options and not fix:
        raise UsageError(
            f"{given_options[0]} needs --fix", hint=f"add --fix, or leave out {given_options[0]}"
        )
    if fix and len(files) > 1:
        raise UsageError("--fix accepts one file", hint=f"ckptool doctor {shell(files[0])} --fix")

    def examine(file: str) -> Diagnosis:
        """Return the diagnosis of a file, with a progress bar."""
        with screen.progress() as progress:
            return doctor(file, like=reference, named=like or "", progress=progress, **options)

    if len(files) > 1:
        _examine_several(files, examine, screen, explain=explain)
        return
    diagnosis = examine(files[0])
    if fix:
        allowed_losses = {option for option in given_options if option in allowed}
        diagnosis = _write_fixed_file(diagnosis, output, allowed_losses, examine, screen)
    set_exit_code(0 if diagnosis.ok else 1)
    screen.print(diagnosis, diagnosis_lines(diagnosis, screen.look, explain=explain))


def _examine_several(
    files: Sequence[str], examine: Callable[[str], Diagnosis], screen: Screen, *, explain: bool
) -> None:
    """Print the diagnosis of each file, and of an unreadable file the error.

    The exit code is that of the worst file.
    """
    diagnoses, errors, code = list[Diagnosis](), list[CheckpointError](), 0
    for file in files:
        try:
            diagnosis = examine(file)
        except UnreadableFile as error:
            errors.append(error)
            code = 2  # worse than 1, a file with problems
            set_exit_code(code)  # after each file: the next one may be interrupted
            print_error(error.sentence, error.hint)
            continue
        diagnoses.append(diagnosis)
        code = code or int(not diagnosis.ok)
        set_exit_code(code)
        if not screen.as_json:
            lines = diagnosis_lines(diagnosis, screen.look, explain=explain)
            print_lines(["", *lines] if len(diagnoses) > 1 else lines)
    if screen.as_json:
        print_document(make_files_document("ckptool.doctor/2", diagnoses, errors, ok=not code))


def _write_fixed_file(
    diagnosis: Diagnosis,
    output: str | None,
    allowed: Set[str],
    examine: Callable[[str], Diagnosis],
    screen: Screen,
) -> Diagnosis:
    """Execute the plan and return the diagnosis of the result, or of the file if it needs no fix.

    `allowed` are the options with a loss that the user accepts. `examine` diagnoses the result.

    Raises:
        UsageError: if there is no plan, it leaves a choice, or it has a loss that is not allowed.
    """
    plan, target = diagnosis.plan, output or diagnosis.target
    if plan.command is None and diagnosis.ok:
        return diagnosis
    # Only the user can choose between alternatives; the plan does not fix such a complaint.
    leaves_choice = any(
        complaint.severity != "note" and complaint.alternatives and not complaint.commands
        for complaint in diagnosis.complaints
    )
    if plan.command is None or target is None or leaves_choice:
        message = "no ckptool command fixes it"
        if leaves_choice:
            message = "several fixes are possible; choose one"
        hint = diagnosis.first_command or f"ckptool doctor {shell(diagnosis.file)}"
        raise UsageError(message, file=diagnosis.file, hint=hint)
    if lost := [option for option in diagnosis.losses if option not in allowed]:
        raise UsageError(
            f"the fix would lose data: {listed(lost)}",
            file=diagnosis.file,
            hint=f"add {' '.join(lost)} to accept that"
            + (f"; or, to keep all: {diagnosis.resume}" if diagnosis.resume else ""),
        )

    format = plan.format if output is None else None  # otherwise the extension decides

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Apply the steps of the plan."""
        return apply_steps(checkpoint, plan.steps, choose_format(checkpoint, target, format))

    receipt_screen = Screen(as_json=False, quiet=screen.quiet)  # --json prints only the diagnosis
    options = OutputOptions(
        target, force=False, dry_run=False, format=format, verify=None, screen=receipt_screen
    )
    write_changed(diagnosis.file, change, options, word=FIXED)
    return examine(target)
