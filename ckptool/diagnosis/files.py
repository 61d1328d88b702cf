"""Complaints about the file itself: what does not open, what torch refuses about its layout."""

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
from ckptool.formats import format_of
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
from ckptool.transforms import Plain
from ckptool.words import listed, printable

_COMMAND = re.compile(
    r"(?:^|: )((?:git|dvc|mkdir|gzip|bzip2|xz|zstd|lz4|7z|unrar|python -m torch\S*) .+)$"
)
"""A hint that is a command, or ends with one, which gets the checkpoint itself."""
_HEADER = "safetensors says: Error while deserializing header"


def layout(subject: Subject) -> Iterator[Complaint]:
    """Yield what is wrong with how the file is named and laid out."""
    checkpoint = subject.checkpoint
    known = format_of(checkpoint.format)
    if runs := would_run(checkpoint):
        yield _malicious(runs)
    part = missing_weights(checkpoint)
    if part is not None:
        why = "load_state_dict fails on names or shapes, or loads a model that was never trained"
        where = names_of(part.where)
        yield Complaint(
            part.kind, part.text, where, hint=part.hint, severity=part.severity, why=why
        )
    yield from _misnamed(subject)
    if known.refusal is not None:
        severity: Severity = "note" if known.refusal.reader else "fails"
        yield _rewritten(known.refusal.kind, severity, known.refusal.what, known.refusal.says)
    elif os.path.isdir(checkpoint.path):
        what = "it is a folder: a checkpoint that was unzipped"
        yield _rewritten("folder", "fails", what, A_FOLDER)
    yield from _refused(subject)
    yield from _compressed(subject)
    if checkpoint.details.byteorder == "big":
        yield _rewritten(
            "big-endian",
            "misleads",
            "its numbers are stored big-endian",
            "torch before 2.1, and programs that read the records themselves, do not swap the "
            "bytes: wrong values without an error",
        )
    if known.legacy:
        yield _rewritten(
            "legacy",
            "note",
            "it is a stream as torch wrote them before 1.6",
            "torch.load reads all of it into memory; torch.load(mmap=True) says: mmap can only be "
            "used with files saved with `torch.save(..., _use_new_zipfile_serialization=True)",
        )
    yield from _python2(subject)
    for text in checkpoint.details.left_behind:
        why = "torch.load does not look at it, and a rewrite does not carry it over"
        yield Complaint("beside", text, severity="note", why=why)


def _rewritten(
    kind: str, severity: Severity, what: str, why: str, where: tuple[str, ...] = ()
) -> Complaint:
    return Complaint(kind, what, where, severity=severity, why=why, fix=())


def _malicious(calls: tuple[str, ...]) -> Complaint:
    return Complaint(
        "malicious",
        f"loading it would run {listed(first_calls(calls))}",
        calls,
        hint="take the weights alone, or none of it",
        why="torch.load(weights_only=False), and pickle.load, run it; ckptool never does",
        fix=(Plain(),),
    )


def _misnamed(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about a wrong ending, and about a header without `format: pt`."""
    checkpoint = subject.checkpoint
    what = misnamed(checkpoint)
    if what is None:
        if unnamed(checkpoint):
            why = (
                "safetensors loads it; transformers says: The safetensors archive passed at ... "
                "does not contain the valid metadata, and mlx asks for it too"
            )
            what = "its header does not say format: pt"
            yield _rewritten("format-unnamed", "note", what, why)
    elif format_of(checkpoint.format).tensors_only:
        why = f"{_operand(_head(checkpoint.path)[:1])}; with the ending .safetensors it loads"
        yield Complaint("misnamed", what, why=why, fix=(), format="torch-zip")
    else:
        why = f"{_HEADER}: header too large; torch.load opens it"
        format = "torch-zip" if subject.is_training else "safetensors"
        yield Complaint("misnamed", what, why=why, fix=(), format=format)


def _refused(subject: Subject) -> Iterator[Complaint]:
    """Yield what torch refuses about zip records and pickle opcodes, whatever the data is."""
    checkpoint, details = subject.checkpoint, subject.checkpoint.details
    for note in details.notes:
        if note.startswith(TORCH_REFUSES):
            reason = note.removeprefix(TORCH_REFUSES).strip()
            yield _rewritten("records", "fails", reason, "torch.load refuses the archive")
    texts = [text for text in layout_blockers(checkpoint) if text.startswith(_ABOUT_PICKLE)]
    if texts:
        operand = " 149" if (details.protocol or 0) >= 4 else ""
        yield _rewritten(
            "protocol",
            "fails",
            f"the pickle is of protocol {details.protocol}, written in a way that "
            f"weights_only=True does not read ({'; '.join(texts)})",
            f"torch.load says: Weights only load failed. ... Unsupported operand{operand}",
        )
    names = outdated_names(checkpoint, subject.blocked)
    if names:
        yield _rewritten(
            "outdated",
            "fails",
            f"its pickle names what today's torch does not allow: {listed(names)}",
            "torch.load says: Weights only load failed. ... Unsupported global: GLOBAL "
            f"{printable(names[0])} was not an allowed global by default",
        )


_ABOUT_PICKLE = ("pickle ", "no torch loads ")


def _compressed(subject: Subject) -> Iterator[Complaint]:
    names = [
        name_of(path)
        for path, tensor in subject.checkpoint.tensors()
        if tensor.storage is not None and tensor.storage.compressed
    ]
    if names and format_of(subject.checkpoint.format).refusal is None:
        yield _rewritten(
            "compressed",
            "misleads",
            "its records are compressed, as torch.save never writes them",
            "torch.load(mmap=True) reads the compressed bytes as numbers: garbage, without an "
            "error",
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
            "it was pickled by Python 2, with text that is not UTF-8",
            "torch.load says: 'utf-8' codec can't decode byte ...; encoding='latin1' reads it",
            names_of(places),
        )


def is_finding(error: CheckpointError, path: str) -> bool:
    """Return whether an error in opening a file is about its content.

    A file that is missing is none, a missing shard is one.
    """
    if isinstance(error, FileMissing):
        return os.path.lexists(path)
    return isinstance(error, (NotACheckpoint, UnsupportedFormat, CorruptFile))


def unopened(error: CheckpointError, path: str) -> Iterator[Complaint]:
    """Yield the complaints about a file that does not open as a checkpoint."""
    what = error.message.removeprefix(f"{path} is ")
    command = _COMMAND.search(error.hint or "")
    yield Complaint(
        _kind(error),
        what if what == error.message else f"it is {what}",
        (error.file,) if error.file and error.file != path else (),
        hint=None if command else error.hint or "download, copy or save it again",
        why=_says(error, path),
        commands=(command[1],) if command else (),
    )
    found = would_run_of([path])
    if found:
        yield replace(_malicious(found), hint="take none of it")


def _kind(error: CheckpointError) -> str:
    if isinstance(error, TruncatedFile):
        return "truncated"
    if isinstance(error, FileMissing):
        return "missing-shard"
    if isinstance(error, CorruptFile):
        return "damaged"
    return "unsupported" if isinstance(error, UnsupportedFormat) else "not-a-checkpoint"


def _says(error: CheckpointError, path: str) -> str:
    """Return what the library says that would be asked to load the file."""
    if os.path.isdir(path):
        return A_FOLDER
    if isinstance(error, FileMissing):
        return "what is in the missing file stays as the model was initialized, or loading fails"
    if path.lower().endswith(".safetensors"):
        return _HEADER
    head = _head(path)
    if not head:
        return "torch.load raises an EOFError without a message (before 2.6: Ran out of input)"
    if head.startswith(b"PK\x03\x04"):
        return (
            "torch.load says: PytorchStreamReader failed reading zip archive: failed finding "
            "central directory; or it fails on the pickle"
        )
    if head[:1] == b"\x80":
        return "torch.load fails on the pickle, or where a storage ends too early"
    return _operand(head[:1])


def _operand(first: bytes) -> str:
    byte = first[0] if first else 0
    shown = f"'{first.decode()}'" if 32 < byte < 127 else f"'\\x{byte:02x}'"
    return (
        f"torch.load says: Weights only load failed. ... Unsupported operand {byte}; before torch "
        f"2.6: invalid load key, {shown}. weights_only=False, which it proposes, never helps here"
    )


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return b""
