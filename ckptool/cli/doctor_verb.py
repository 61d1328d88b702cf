"""`ckptool doctor`."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import click

from ckptool.cli.changing import write_changed
from ckptool.cli.console import (
    Screen,
    complain,
    files_document,
    print_document,
    print_lines,
    set_exit_code,
)
from ckptool.cli.like import referred
from ckptool.cli.options import PATH, OutputOptions, flag, screen_options, verb
from ckptool.conversion import converted
from ckptool.core.checkpoint import Checkpoint
from ckptool.diagnosis import doctor
from ckptool.diagnosis.diagnose import FIXED, Diagnosis
from ckptool.errors import CheckpointError, UnreadableFile, UsageError
from ckptool.render.verdicts import diagnosis_lines
from ckptool.words import listed, shell
from ckptool.writing.target import target_format


@verb(
    "doctor",
    "ckptool doctor model.pth",
    "ckptool doctor model.pth --like reference.pth",
    "ckptool doctor model.pth --like mypackage.models:build",
    "ckptool doctor model.pth --quick --devices cpu,cuda:0",
    "ckptool doctor model.pth --fix -o fixed.pth",
    finding="something fails or misleads",
)
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--like",
    metavar="REFERENCE",
    type=PATH,
    help="Check against the model: another checkpoint of it, or MODULE:FACTORY (ckptool match).",
)
@click.option("--key", metavar="NAME", help="The state dict to check, if there are several.")
@flag("--quick", "Read only the header: no checksums, no NaN.")
@click.option(
    "--devices",
    metavar="LIST",
    help="Devices of the machine that will load it: cpu, or cuda:0,cuda:1. Default: this one's.",
)
@flag("--explain", "Add where and why, and what else helps.")
@flag("--fix", "Write a file without the problems, and check it.")
@click.option("-o", "--output", type=PATH, help="Write the result of --fix to this file.")
@flag("--model-only", "Let --fix leave out the optimizer.")
@flag("--drop-objects", "Let --fix drop objects that cannot be turned into data.")
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
    **how: Any,
) -> None:
    """Explain why a checkpoint does not load, and how to fix it.

    doctor lists every error of torch.load(FILE) and load_state_dict, every warning (it loads, but
    wrongly) and notes, and prints the command that writes a file without them. FILE itself is
    never changed. Notes do not change the exit code; of several files the worst counts. --fix does
    what the command does, and ends with the verdict on the result. torch is not imported, except
    for MODULE:FACTORY.
    """
    reference = None if like is None else referred(like)
    allowed = {
        "--model-only": model_only,
        "--drop-objects": drop_objects,
        "--allow-unexpected": allow_unexpected,
    }
    given = [option for option, is_given in {**allowed, "--output": output}.items() if is_given]
    if given and not fix:
        raise UsageError(f"{given[0]} needs --fix", hint=f"add --fix to {given[0]}")
    if fix and len(files) > 1:
        raise UsageError("--fix takes one file", hint=f"ckptool doctor {shell(files[0])} --fix")

    def examined(file: str) -> Diagnosis:
        with screen.progress() as progress:
            return doctor(file, like=reference, named=like or "", progress=progress, **how)

    if len(files) == 1:
        found = examined(files[0])
        if fix:
            found = _fixed(
                found, output, {one for one in given if one in allowed}, examined, screen
            )
        set_exit_code(0 if found.ok else 1)
        screen.print(found, diagnosis_lines(found, screen.look, explain=explain))
        return
    every, errors, code = list[Diagnosis](), list[CheckpointError](), 0
    for file in files:
        try:
            found = examined(file)
        except UnreadableFile as error:
            errors.append(error)
            complain(error.sentence, error.hint)
        else:
            every.append(found)
        code = 2 if errors else code or int(not found.ok)
        set_exit_code(code)
        if every and every[-1].file == file and not screen.as_json:
            lines = diagnosis_lines(found, screen.look, explain=explain)
            print_lines(["", *lines] if len(every) > 1 else lines)
    if screen.as_json:
        print_document(files_document("ckptool.doctor/2", every, errors, ok=not code))


def _fixed(
    found: Diagnosis,
    output: str | None,
    allowed: Set[str],
    examined: Callable[[str], Diagnosis],
    screen: Screen,
) -> Diagnosis:
    """Carry out the plan, and return the diagnosis of the result; of the file if it is fine.

    Raises:
        UsageError: there is no plan, it leaves a choice, or it would lose what was not allowed.
    """
    plan, target = found.plan, output or found.target
    if plan.command is None and found.ok:
        return found
    open_choices = [
        one for one in found.complaints if one.severity != "note" and one.alternatives
        and not one.commands
    ]  # fmt: skip
    if plan.command is None or target is None or open_choices:
        file = shell(found.file)
        several = "several fixes are possible; choose one"
        what = several if open_choices else "no ckptool command fixes it"
        raise UsageError(
            what, file=found.file, hint=found.first_command or f"ckptool doctor {file}"
        )
    if lost := [option for option in found.losses if option not in allowed]:
        raise UsageError(
            f"the fix would lose data: {listed(lost)}",
            file=found.file,
            hint=f"add {' '.join(lost)} to accept that"
            + (f"; or, to keep all: {found.resume}" if found.resume else ""),
        )

    format = plan.format if output is None else None  # else its extension decides

    def change(checkpoint: Checkpoint) -> Checkpoint:
        return converted(checkpoint, plan.steps, target_format(checkpoint, target, format))

    quiet = Screen(as_json=False, quiet=screen.quiet)
    options = OutputOptions(
        target, force=False, dry_run=False, format=format, verify=None, screen=quiet
    )
    write_changed(found.file, change, options, word=FIXED)
    return examined(target)
