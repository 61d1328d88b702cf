"""`ckptool verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from ckptool.cli.console import (
    Progress,
    complain,
    print_document,
    print_lines,
    say,
    settle,
    stdout_look,
)
from ckptool.cli.options import PATH, fmt_option, json_option, quiet_option, verb
from ckptool.errors import CheckpointError
from ckptool.inspection.verify import ManifestOutcome, Verdict, Verifier
from ckptool.render.verify import manifest_line, summary_line, verdict_lines, verdict_table
from ckptool.words import clean

__all__ = ["command"]


@verb(
    "verify",
    "ckptool verify model.pth",
    "ckptool verify --values runs/ pretrained.safetensors",
    "ckptool verify model.pth --manifest sums.json",
    finding="a problem",
)
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=PATH,
    metavar="PATH...",
)
@click.option("--values", is_flag=True, help="Look for NaN and infinite values, too.")
@click.option(
    "--manifest",
    metavar="FILE",
    type=PATH,
    help="Compare the SHA-256 of every tensor with FILE, or write FILE if it does not exist.",
)
@fmt_option
@json_option
@quiet_option
def command(
    paths: tuple[str, ...],
    values: bool,
    manifest: str | None,
    fmt: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check files for damage, also where torch does not look.

    In a zip, the CRC-32 of every record and the duplicate fields of its headers are checked; in
    every format the structure, and of shards the index. Folders are searched for checkpoints. A
    manifest is the same for every format: the manifest of model.pth checks model.safetensors.
    """
    verifier = Verifier(values=values, manifest=manifest)
    results: list[Verdict | CheckpointError] = []
    for result in _looked_at(verifier, paths, quiet):
        results.append(result)
        settle(_exit_code(results, None))
        _tell(result, quiet=quiet, silent=as_json or bool(fmt))
    outcome = verifier.finish()
    settle(_exit_code(results, outcome))
    verdicts = [result for result in results if isinstance(result, Verdict)]
    errors = [result for result in results if isinstance(result, CheckpointError)]
    if as_json:
        print_document(_document(verdicts, errors, outcome))
    elif fmt:
        print_lines(verdict_table(results, outcome, stdout_look(fmt)))
    else:
        print_lines(_last_lines(verdicts, len(errors), outcome))
    if outcome is not None:
        say([manifest_line(outcome)], quiet=quiet)


def _exit_code(
    results: Sequence[Verdict | CheckpointError], outcome: ManifestOutcome | None
) -> int:
    """2 where a file could not be looked at, 1 where there is a problem."""
    if any(isinstance(result, CheckpointError) for result in results):
        return 2
    fine = all(result.ok for result in results if isinstance(result, Verdict))
    return 0 if fine and not (outcome and outcome.problems) else 1


def _looked_at(
    verifier: Verifier, paths: Sequence[str], quiet: bool
) -> Iterator[Verdict | CheckpointError]:
    """Yield what is found, one after the other; no bar is left when it is told."""
    flow = verifier.each(paths)
    while True:
        with Progress(quiet=quiet) as verifier.progress:
            result = next(flow, None)
        if result is None:
            return
        yield result


def _tell(result: Verdict | CheckpointError, *, quiet: bool, silent: bool) -> None:
    """Say at once what was found of a file; `silent`: it is printed at the end, all together."""
    if isinstance(result, CheckpointError):
        complain(result.sentence, result.hint)
        return
    if not silent:
        print_lines(verdict_lines(result, stdout_look()))
    say((f"note: {clean(result.file)}: {clean(note)}" for note in result.notes), quiet=quiet)


def _last_lines(
    verdicts: Sequence[Verdict], errors: int, outcome: ManifestOutcome | None
) -> Iterator[str]:
    look = stdout_look()
    if outcome is not None and outcome.problems:
        yield from verdict_lines(Verdict(outcome.file, problems=outcome.problems), look)
    if len(verdicts) + errors > 1:
        yield summary_line(verdicts, errors, look)


def _document(
    verdicts: Sequence[Verdict],
    errors: Sequence[CheckpointError],
    outcome: ManifestOutcome | None,
) -> dict[str, Any]:
    """Return the document `ckptool.verify/1`."""
    fine = all(verdict.ok for verdict in verdicts) and not (outcome and outcome.problems)
    return {
        "schema": "ckptool.verify/1",
        "ok": fine and not errors,
        "files": [verdict.to_dict() for verdict in verdicts],
        "errors": [
            {"file": error.file, "text": error.message, "hint": error.hint} for error in errors
        ],
        "manifest": outcome.to_dict() if outcome is not None else None,
    }
