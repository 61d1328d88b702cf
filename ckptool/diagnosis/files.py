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
from ckptool.diagnosis.complaint import Complaint, Subject, summarize_names
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.formats import load_format
from ckptool.formats.base import FOLDER_QUOTE
from ckptool.inspection.blockers import (
    describe_wrong_extension,
    detect_missing_weights,
    find_calls_in_files,
    find_layout_blockers,
    find_outdated_names,
    find_unpickling_calls,
    is_format_entry_missing,
    summarize_calls,
)
from ckptool.inspection.neighbors import describe_neighbors
from ckptool.quotes import Quote, quote
from ckptool.transforms import Plain
from ckptool.words import listed, printable

_COMMAND_IN_HINT = re.compile(
    r"(?:^|: )((?:git|dvc|mkdir|gzip|bzip2|xz|zstd|lz4|7z|unrar|python -m torch\S*) .+)$"
)
"""A hint that is or ends with a command that downloads, unpacks or converts the checkpoint."""


def check_layout(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about the name and the layout of the file, and about files next to it.

    Also about calls that unpickling would run, and weights that are in other files.
    """
    checkpoint = subject.checkpoint
    format = load_format(checkpoint.format)
    if calls := find_unpickling_calls(checkpoint):
        yield _complain_of_calls(calls)
    missing = detect_missing_weights(checkpoint)
    if missing is not None:
        effect = "load_state_dict fails on keys or shapes, or leaves the model untrained."
        where = summarize_names(missing.where)
        yield Complaint(
            missing.kind,
            missing.text,
            where,
            hint=missing.hint,
            severity=missing.severity,
            effect=effect,
        )
    yield from _check_extension(subject)
    if format.refusal is not None:
        refusal = format.refusal
        severity: Severity = "note" if refusal.reader else "fails"
        yield _complain_fixed_by_rewrite(
            refusal.kind, severity, refusal.what, refusal.instead, quoted=refusal.quote
        )
    elif os.path.isdir(checkpoint.path):
        what = "it is an unzipped checkpoint folder"
        yield _complain_fixed_by_rewrite("folder", "fails", what, quoted=FOLDER_QUOTE)
    yield from _check_rejected_parts(subject)
    yield from _check_compression(subject)
    if checkpoint.details.byteorder == "big":
        yield _complain_fixed_by_rewrite(
            "big-endian",
            "misleads",
            "its numbers are big-endian",
            "torch before 2.1, and programs that read the records directly, do not swap the "
            "bytes: the values are wrong, without an error.",
        )
    if format.legacy:
        yield _complain_fixed_by_rewrite(
            "legacy",
            "note",
            "it is a legacy stream, which torch wrote before 1.6",
            "torch.load reads all of it into memory",
            quoted=quote("mmap"),
        )
    yield from _check_python2_text(subject)
    for text in checkpoint.details.left_behind:
        effect = "torch.load ignores it, and rewriting the file drops it."
        yield Complaint("beside", text, severity="note", effect=effect)
    for text in describe_neighbors(checkpoint):
        yield Complaint("neighbors", text, severity="note")


def _complain_fixed_by_rewrite(
    kind: str,
    severity: Severity,
    text: str,
    effect: str = "",
    where: tuple[str, ...] = (),
    *,
    quoted: Quote | None = None,
) -> Complaint:
    """Return a complaint that any rewrite of the file fixes; `quoted` is the library's error."""
    return Complaint(kind, text, where, severity=severity, quote=quoted, effect=effect, fix=())


def _complain_of_calls(calls: tuple[str, ...]) -> Complaint:
    """Return the complaint about the calls that loading the file would run."""
    return Complaint(
        "malicious",
        f"loading it would run {listed(summarize_calls(calls))}",
        calls,
        hint="use only the weights, or nothing from it",
        effect="torch.load(weights_only=False) and pickle.load run it. ckptool never does.",
        fix=(Plain(),),
    )


def _check_extension(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about a wrong extension, and about a header without `format: pt`.

    The fix is a rewrite (no steps, so `fix` is empty) in the format that the extension promises;
    but safetensors cannot store the state of a training, so such a file stays one of torch.
    """
    checkpoint = subject.checkpoint
    text = describe_wrong_extension(checkpoint)
    if text is None:
        if is_format_entry_missing(checkpoint):
            effect = "safetensors loads it; mlx requires the entry too"
            text = 'its header lacks the entry "format": "pt"'
            yield _complain_fixed_by_rewrite(
                "format-unnamed", "note", text, effect, quoted=quote("no-format")
            )
    elif load_format(checkpoint.format).tensors_only:  # such as safetensors, called .pth
        operand_error, effect = _quote_operand_error(_read_head(checkpoint.path))
        effect = f"{effect}; it loads if its extension is .safetensors"
        yield Complaint(
            "misnamed", text, quote=operand_error, effect=effect, fix=(), format="torch-zip"
        )
    else:  # a file of torch.save, called .safetensors
        format = "torch-zip" if subject.is_training else "safetensors"
        yield Complaint(
            "misnamed",
            text,
            quote=quote("long-header"),  # safetensors takes the first bytes for a length
            effect="torch.load opens it",
            fix=(),
            format=format,
        )


def _check_rejected_parts(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about zip records, pickle opcodes and class names that torch rejects."""
    checkpoint, details = subject.checkpoint, subject.checkpoint.details
    for note in details.notes:
        if note.startswith(TORCH_REFUSES):
            reason = note.removeprefix(TORCH_REFUSES).strip()
            yield _complain_fixed_by_rewrite(
                "records", "fails", reason, "torch.load rejects the archive."
            )
    # Other complaints are about the other blockers.
    texts = [
        text for text in find_layout_blockers(checkpoint) if text.startswith(_PICKLE_BLOCKER_STARTS)
    ]
    if texts:
        # The error of torch names the opcode at which it stops: from protocol 4 the first frame.
        is_framed = (details.protocol or 0) >= 4
        yield _complain_fixed_by_rewrite(
            "protocol",
            "fails",
            f"weights_only=True cannot read this protocol {details.protocol} pickle "
            f"({'; '.join(texts)})",
            quoted=quote("operand", _FRAME_OPCODE) if is_framed else quote("any-operand"),
        )
    names = find_outdated_names(checkpoint, subject.blocked)
    if names:
        yield _complain_fixed_by_rewrite(
            "outdated",
            "fails",
            f"its pickle refers to {listed(names)}, which current torch does not allow",
            quoted=quote("global", printable(names[0])),
        )


_PICKLE_BLOCKER_STARTS = ("pickle ", "no torch loads ")
"""The starts of the blockers that are about the pickle."""
_FRAME_OPCODE = 149


def _check_compression(subject: Subject) -> Iterator[Complaint]:
    """Yield a complaint about compressed records, which only mmap reads wrongly."""
    names = [
        name_of(path)
        for path, tensor in subject.checkpoint.tensors()
        if tensor.storage is not None and tensor.storage.compressed
    ]
    is_opened_by_torch = load_format(subject.checkpoint.format).refusal is None
    if names and is_opened_by_torch:
        yield _complain_fixed_by_rewrite(
            "compressed",
            "misleads",
            "its records are compressed, which torch.save never does",
            "torch.load(mmap=True) reads the compressed bytes as numbers, without an error.",
            summarize_names(names),
        )


def _check_python2_text(subject: Subject) -> Iterator[Complaint]:
    """Yield a complaint about text that Python 2 pickled and that is not UTF-8."""
    names = {
        name_of(path): None  # a dict, because it keeps the order
        for path, leaf in walk(subject.checkpoint.root)
        for text in (*path, leaf)
        if type(text) is ByteString and text.raw != text.raw.decode(errors="ignore").encode()
    }
    if names:
        yield _complain_fixed_by_rewrite(
            "python2",
            "fails",
            "Python 2 pickled it, with text that is not UTF-8",
            "torch.load(encoding='latin1') reads it",
            summarize_names(names),
            quoted=quote("not-utf-8"),
        )


def is_finding(error: CheckpointError, path: str) -> bool:
    """Return True if an error in opening a file is about its content.

    A missing shard counts, a missing file does not.
    """
    if isinstance(error, FileMissing):
        return os.path.lexists(path)
    return isinstance(error, (NotACheckpoint, UnsupportedFormat, CorruptFile))


def explain_unopened(error: CheckpointError, path: str) -> Iterator[Complaint]:
    """Yield complaints about a file that does not open as a checkpoint.

    A command in the hint of the error becomes the command of the complaint.
    """
    message = error.message.removeprefix(f"{path} is ")
    if message != error.message:
        message = f"it is {message}"
    command = _COMMAND_IN_HINT.search(error.hint or "")
    load_error, effect = _describe_load_failure(error, path)
    yield Complaint(
        _kind_of_error(error),
        message,
        (error.file,) if error.file and error.file != path else (),
        hint=None if command else error.hint or "download, copy or save it again",
        quote=load_error,
        effect=effect,
        commands=(command[1],) if command else (),
    )
    # A pickle that fails later may have run code before, so it is scanned too.
    if calls := find_calls_in_files([path]):
        yield replace(_complain_of_calls(calls), hint="use nothing from it")


def _kind_of_error(error: CheckpointError) -> str:
    """Return the kind of complaint for an error in opening a file."""
    if isinstance(error, TruncatedFile):
        return "truncated"
    if isinstance(error, FileMissing):
        return "missing-shard"
    if isinstance(error, CorruptFile):
        return "damaged"
    return "unsupported" if isinstance(error, UnsupportedFormat) else "not-a-checkpoint"


def _describe_load_failure(error: CheckpointError, path: str) -> tuple[Quote | None, str]:
    """Return the error of the library that would load the file, and the effect.

    The effect is a sentence, or continues that of the error; it is empty if the error says it all.
    """
    if os.path.isdir(path):
        return FOLDER_QUOTE, ""
    if isinstance(error, FileMissing):
        return None, "The weights in the missing file keep their initial values, or loading fails."
    if path.lower().endswith(".safetensors"):
        return quote("header"), ""
    head = _read_head(path)
    if not head:
        return None, "torch.load raises EOFError (before 2.6: Ran out of input)."
    if head.startswith(b"PK\x03\x04"):
        return quote("no-directory"), "or it fails on the pickle"
    if head[:1] == b"\x80":  # the opcode PROTO, with which pickles begin
        return None, "torch.load fails on the pickle, or on a storage that is truncated."
    return _quote_operand_error(head)


def _quote_operand_error(head: bytes) -> tuple[Quote, str]:
    """Return torch's error for a file that does not begin like a pickle, and the effect.

    torch calls the first byte of `head`, the start of the file, an operand.
    """
    byte = head[0] if head else 0
    shown = f"'{chr(byte)}'" if 32 < byte < 127 else f"'\\x{byte:02x}'"
    effect = f"before torch 2.6: invalid load key, {shown}. weights_only=False, which it proposes, "
    return quote("operand", byte), f"{effect}never helps here"


def _read_head(path: str) -> bytes:
    """Return the first 16 bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return b""
