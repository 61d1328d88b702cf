"""`ckptool scan`."""

from __future__ import annotations

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
from ckptool.inspection.scan import Scan, find_files, scan
from ckptool.inspection.scan_calls import DATA
from ckptool.render.verdicts import scan_lines, scan_summary
from ckptool.words import clean

_FEW = 20
"""Above this number of files, only files with a finding are printed."""


@verb(
    "scan",
    "ckptool scan model.pth",
    "ckptool scan --strict downloads/",
    "ckptool scan --json 'runs/*.ckpt'",
    problem="a file runs code or cannot be judged (with --strict: or needs code)",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@flag("--strict", "Also exit with 1 if a file needs code.")
@screen_options()
def command(paths: tuple[str, ...], strict: bool, screen: Screen) -> None:
    """Show what loading a file would run, without running it.

    Pickles are read symbolically, in torch files of every version, bare pickles, numpy and joblib
    files, zip and tar archives and compressed files, with any extension. The verdict is "data"
    (weights_only=True accepts it), "needs code" (classes are imported and their instances filled
    in), "runs" (other calls are made; each is printed with its arguments) or "cannot tell". Folders
    are searched.
    """
    results, errors = list[Scan](), list[CheckpointError]()
    files = list(find_files(paths))
    with screen.progress() as progress:
        for done, file in enumerate(files):
            progress(done, len(files), f"{done:,} of {len(files):,} files")
            try:
                report = scan(file)
            except CheckpointError as error:
                errors.append(error)
                progress.wipe()
                print_error(error.sentence, error.hint)
                continue
            results.append(report)
            if not screen.as_json and (len(files) <= _FEW or report.verdict != DATA):
                progress.wipe()
                print_lines(scan_lines(report, screen.look))
                screen.say(f"note: {clean(report.file)}: {clean(note)}" for note in report.notes)
    is_ok = all(result.ok(strict=strict) for result in results)
    set_exit_code(2 if errors else int(not is_ok))
    if screen.as_json:
        print_document(
            make_files_document("ckptool.scan/1", results, errors, ok=is_ok and not errors)
        )
    elif len(files) > 1:
        print_lines([scan_summary(results, len(errors), screen.look)])
