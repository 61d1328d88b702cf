"""`ckptool verify`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.console import (
    Screen,
    make_files_document,
    print_document,
    print_error,
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
    problem="problem found",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@flag("--values", "Also look for NaN and infinite values.")
@click.option(
    "--manifest",
    metavar="FILE",
    type=PATH,
    help="Compare the SHA-256 of every tensor with FILE, or write FILE if it does not exist.",
)
@screen_options(fmt=True)
def command(paths: tuple[str, ...], screen: Screen, **options: Any) -> None:
    """Check files for damage, even where torch does not look.

    verify checks the structure of every format, the CRC-32 of every zip record, duplicate zip
    header fields, and the index of shards. Folders are searched for checkpoints. Manifests do not
    depend on the format: the manifest of model.pth also checks model.safetensors.
    """
    look, code = screen.look, 0
    results: list[Verdict | CheckpointError] = []
    with screen.progress() as progress:
        verifier = Verifier(progress=progress, **options)
        for result in verifier.verify_all(paths):
            results.append(result)
            code = 2 if isinstance(result, CheckpointError) else code or int(not result.ok)
            set_exit_code(code)
            progress.wipe()
            if isinstance(result, CheckpointError):
                print_error(result.sentence, result.hint)
            else:
                if not (screen.as_json or screen.fmt):
                    print_lines(verdict_lines(result, look))
                screen.say(f"note: {clean(result.file)}: {clean(note)}" for note in result.notes)
    outcome = verifier.finish()
    missing = []  # tensors that only the manifest has
    if outcome is not None and outcome.problems:
        missing = [Verdict(outcome.file, problems=outcome.problems)]
    set_exit_code(code or len(missing))
    verdicts = [result for result in results if isinstance(result, Verdict)]
    errors = [result for result in results if isinstance(result, CheckpointError)]
    if screen.as_json:
        document = make_files_document(
            "ckptool.verify/1", verdicts, errors, ok=not (code or missing)
        )
        print_document({**document, "manifest": outcome and outcome.to_dict()})
    elif screen.fmt:
        print_lines(verdict_table([*results, *missing], look))
    else:
        for verdict in missing:
            print_lines(verdict_lines(verdict, look))
        if len(results) > 1:
            print_lines([verify_summary(verdicts, len(errors), look)])
    if outcome is not None:
        screen.say([manifest_line(outcome)])
