"""Complaints about the file: errors on opening it, and layouts that torch rejects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from ckptool.core.checkpoint import TORCH_REFUSES
from ckptool.core.finding import Severity
from ckptool.core.model import ByteString
from ckptool.core.tree import name_of, walk
from ckptool.diagnosis.complaint import Complaint, Subject, names_of
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.formats import load_format
from ckptool.formats.base import A_FOLDER
from ckptool.inspection.blockers import (
    first_calls,
    layout_blockers,
    misnamed,
    missing_weights,
    outdated_names,
    unnamed,
    would_run,
    would_run_of,
)
from ckptool.inspection.neighbors import neighbor_notes
from ckptool.quotes import Quote, quote
from ckptool.transforms import Plain
from ckptool.words import listed, printable

_COMMAND = re.compile(
    r"(?:^|: )((?:git|dvc|mkdir|gzip|bzip2|xz|zstd|lz4|7z|unrar|python -m torch\S*) .+)$"
)
"""A hint that is or ends with a command that downloads the checkpoint."""


def layout(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about the name and the layout of the file."""
    checkpoint = subject.checkpoint
    known = load_format(checkpoint.format)
    if runs := would_run(checkpoint):
        yield _malicious(runs)
    part = missing_weights(checkpoint)
    if part is not None:
        effect = "load_state_dict fails on keys or shapes, or leaves the model untrained."
        where = names_of(part.where)
        yield Complaint(
            part.kind, part.text, where, hint=part.hint, severity=part.severity, effect=effect
        )
    yield from _misnamed(subject)
    if known.refusal is not None:
        refused = known.refusal
        severity: Severity = "note" if refused.reader else "fails"
        yield _rewritten(refused.kind, severity, refused.what, refused.instead, said=refused.quote)
    elif os.path.isdir(checkpoint.path):
        what = "it is an unzipped checkpoint folder"
        yield _rewritten("folder", "fails", what, said=A_FOLDER)
    yield from _refused(subject)
    yield from _compressed(subject)
    if checkpoint.details.byteorder == "big":
        yield _rewritten(
            "big-endian",
            "misleads",
            "its numbers are big-endian",
            "torch before 2.1, and programs that read the records directly, do not swap the "
            "bytes: the values are wrong, without an error.",
        )
    if known.legacy:
        yield _rewritten(
            "legacy",
            "note",
            "it is a legacy stream, which torch wrote before 1.6",
            "torch.load reads all of it into memory",
            said=quote("mmap"),
        )
    yield from _python2(subject)
    for text in checkpoint.details.left_behind:
        effect = "torch.load ignores it, and rewriting the file drops it."
        yield Complaint("beside", text, severity="note", effect=effect)
    for text in neighbor_notes(checkpoint):
        yield Complaint("neighbors", text, severity="note")


def _rewritten(
    kind: str,
    severity: Severity,
    what: str,
    effect: str = "",
    where: tuple[str, ...] = (),
    *,
    said: Quote | None = None,
) -> Complaint:
    return Complaint(kind, what, where, severity=severity, quote=said, effect=effect, fix=())


def _malicious(calls: tuple[str, ...]) -> Complaint:
    return Complaint(
        "malicious",
        f"loading it would run {listed(first_calls(calls))}",
        calls,
        hint="use only the weights, or nothing from it",
        effect="torch.load(weights_only=False) and pickle.load run it. ckptool never does.",
        fix=(Plain(),),
    )


def _misnamed(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about a wrong extension, and about a header without `format: pt`."""
    checkpoint = subject.checkpoint
    what = misnamed(checkpoint)
    if what is None:
        if unnamed(checkpoint):
            effect = "safetensors loads it; mlx requires the entry too"
            what = 'its header lacks the entry "format": "pt"'
            yield _rewritten("format-unnamed", "note", what, effect, said=quote("no-format"))
    elif load_format(checkpoint.format).tensors_only:
        said, effect = _operand(_head(checkpoint.path)[:1])
        effect = f"{effect}; it loads if its extension is .safetensors"
        yield Complaint("misnamed", what, quote=said, effect=effect, fix=(), format="torch-zip")
    else:
        format = "torch-zip" if subject.is_training else "safetensors"
        yield Complaint(
            "misnamed",
            what,
            quote=quote("long-header"),
            effect="torch.load opens it",
            fix=(),
            format=format,
        )


def _refused(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about zip records and pickle opcodes that torch rejects for any data."""
    checkpoint, details = subject.checkpoint, subject.checkpoint.details
    for note in details.notes:
        if note.startswith(TORCH_REFUSES):
            reason = note.removeprefix(TORCH_REFUSES).strip()
            yield _rewritten("records", "fails", reason, "torch.load rejects the archive.")
    texts = [text for text in layout_blockers(checkpoint) if text.startswith(_ABOUT_PICKLE)]
    if texts:
        is_framed = (details.protocol or 0) >= 4
        yield _rewritten(
            "protocol",
            "fails",
            f"weights_only=True cannot read this protocol {details.protocol} pickle "
            f"({'; '.join(texts)})",
            said=quote("operand", 149) if is_framed else quote("any-operand"),
        )
    names = outdated_names(checkpoint, subject.blocked)
    if names:
        yield _rewritten(
            "outdated",
            "fails",
            f"its pickle refers to {listed(names)}, which current torch does not allow",
            said=quote("global", printable(names[0])),
        )


_ABOUT_PICKLE = ("pickle ", "no torch loads ")


def _compressed(subject: Subject) -> Iterator[Complaint]:
    names = [
        name_of(path)
        for path, tensor in subject.checkpoint.tensors()
        if tensor.storage is not None and tensor.storage.compressed
    ]
    if names and load_format(subject.checkpoint.format).refusal is None:
        yield _rewritten(
            "compressed",
            "misleads",
            "its records are compressed, which torch.save never does",
            "torch.load(mmap=True) reads the compressed bytes as numbers, without an error.",
            names_of(names),
        )


def _python2(subject: Subject) -> Iterator[Complaint]:
    places = {
        name_of(path): None
        for path, leaf in walk(subject.checkpoint.root)
        for text in (*path, leaf)
        if type(text) is ByteString and text.raw != text.raw.decode(errors="ignore").encode()
    }
    if places:
        yield _rewritten(
            "python2",
            "fails",
            "Python 2 pickled it, with text that is not UTF-8",
            "torch.load(encoding='latin1') reads it",
            names_of(places),
            said=quote("not-utf-8"),
        )


def is_finding(error: CheckpointError, path: str) -> bool:
    """Return True if an error in opening a file is about its content.

    A missing shard counts, a missing file does not.
    """
    if isinstance(error, FileMissing):
        return os.path.lexists(path)
    return isinstance(error, (NotACheckpoint, UnsupportedFormat, CorruptFile))


def unopened(error: CheckpointError, path: str) -> Iterator[Complaint]:
    """Yield complaints about a file that does not open as a checkpoint."""
    what = error.message.removeprefix(f"{path} is ")
    command = _COMMAND.search(error.hint or "")
    said, effect = _failure(error, path)
    yield Complaint(
        _kind(error),
        what if what == error.message else f"it is {what}",
        (error.file,) if error.file and error.file != path else (),
        hint=None if command else error.hint or "download, copy or save it again",
        quote=said,
        effect=effect,
        commands=(command[1],) if command else (),
    )
    found = would_run_of([path])
    if found:
        yield replace(_malicious(found), hint="use nothing from it")


def _kind(error: CheckpointError) -> str:
    if isinstance(error, TruncatedFile):
        return "truncated"
    if isinstance(error, FileMissing):
        return "missing-shard"
    if isinstance(error, CorruptFile):
        return "damaged"
    return "unsupported" if isinstance(error, UnsupportedFormat) else "not-a-checkpoint"


def _failure(error: CheckpointError, path: str) -> tuple[Quote | None, str]:
    """Return the error of the library that would load the file, and the effect."""
    if os.path.isdir(path):
        return A_FOLDER, ""
    if isinstance(error, FileMissing):
        return None, "The weights in the missing file keep their initial values, or loading fails."
    if path.lower().endswith(".safetensors"):
        return quote("header"), ""
    head = _head(path)
    if not head:
        return None, "torch.load raises EOFError (before 2.6: Ran out of input)."
    if head.startswith(b"PK\x03\x04"):
        return quote("no-directory"), "or it fails on the pickle"
    if head[:1] == b"\x80":
        return None, "torch.load fails on the pickle, or on a storage that is truncated."
    return _operand(head[:1])


def _operand(first: bytes) -> tuple[Quote, str]:
    byte = first[0] if first else 0
    shown = f"'{first.decode()}'" if 32 < byte < 127 else f"'\\x{byte:02x}'"
    effect = f"before torch 2.6: invalid load key, {shown}. weights_only=False, which it proposes, "
    return quote("operand", byte), f"{effect}never helps here"


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return b""
