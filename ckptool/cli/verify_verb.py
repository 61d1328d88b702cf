"""`ckptool verify`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.console import (
    Screen,
    complain,
    files_document,
    print_document,
    print_lines,
    set_exit_code,
)
from ckptool.cli.options import PATH, flag, screen_options, verb
from ckptool.errors import CheckpointError
from ckptool.inspection.verify import Verdict, Verifier
from ckptool.render.verdicts import manifest_line, verdict_lines, verdict_table, verify_summary
from ckptool.words import clean


@verb(
    "verify",
    "ckptool verify model.pth",
    "ckptool verify --values runs/ pretrained.safetensors",
    "ckptool verify model.pth --manifest sums.json",
    finding="a problem",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@flag("--values", "Look for NaN and infinite values, too.")
@click.option(
    "--manifest",
    metavar="FILE",
    type=PATH,
    help="Compare the SHA-256 of every tensor with FILE, or write FILE if it does not exist.",
)
@screen_options(fmt=True)
def command(paths: tuple[str, ...], screen: Screen, **how: Any) -> None:
    """Check files for damage, also where torch does not look.

    In a zip, the CRC-32 of every record and the duplicate fields of its headers are checked; in
    every format the structure, and of shards the index. Folders are searched for checkpoints. A
    manifest is the same for every format: the manifest of model.pth checks model.safetensors.
    """
    look, code = screen.look, 0
    results: list[Verdict | CheckpointError] = []
    with screen.progress() as progress:
        verifier = Verifier(progress=progress, **how)
        for found in verifier.each(paths):
            results.append(found)
            code = 2 if isinstance(found, CheckpointError) else code or int(not found.ok)
            set_exit_code(code)
            progress.wipe()
            if isinstance(found, CheckpointError):
                complain(found.sentence, found.hint)
            else:
                if not (screen.as_json or screen.fmt):
                    print_lines(verdict_lines(found, look))
                screen.say(f"note: {clean(found.file)}: {clean(note)}" for note in found.notes)
    outcome = verifier.finish()
    gone = []  # tensors that only the manifest has
    if outcome is not None and outcome.problems:
        gone = [Verdict(outcome.file, problems=outcome.problems)]
    set_exit_code(code or len(gone))
    verdicts = [found for found in results if isinstance(found, Verdict)]
    errors = [found for found in results if isinstance(found, CheckpointError)]
    if screen.as_json:
        document = files_document("ckptool.verify/1", verdicts, errors, ok=not (code or gone))
        print_document({**document, "manifest": outcome and outcome.to_dict()})
    elif screen.fmt:
        print_lines(verdict_table([*results, *gone], look))
    else:
        for one in gone:
            print_lines(verdict_lines(one, look))
        if len(results) > 1:
            print_lines([verify_summary(verdicts, len(errors), look)])
    if outcome is not None:
        screen.say([manifest_line(outcome)])
