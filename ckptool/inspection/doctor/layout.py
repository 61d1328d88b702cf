"""Complaints about the file's layout, whatever is in it; any rewrite as a torch zip mends them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptool.checkpoint import TORCH_REFUSES
from ckptool.inspection.doctor.complaint import Complaint, Found, Need, Severity, names_of
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.obstacles import layout_blockers, outdated_names
from ckptool.model import ByteString
from ckptool.paths import name_of, walk
from ckptool.words import listed, printable

__all__ = ["layout"]

_FORMATS: dict[str, tuple[str, str, str]] = {
    "torch-tar": (
        "tar",
        "it is a tar as torch 0.1 wrote them",
        "torch.load says: Cannot use ``weights_only=True`` with files saved in the legacy .tar "
        "format",
    ),
    "pickle": (
        "bare-pickle",
        "it is a bare pickle (pickle.dump, joblib, numpy), not a file of torch.save",
        "torch.load says: Weights only load failed, and with weights_only=False: Invalid magic "
        "number; corrupt file?",
    ),
    "torchscript": (
        "torchscript",
        "it is a TorchScript archive: a program with its weights",
        "torch.load says: Cannot use ``weights_only=True`` with TorchScript archives passed to "
        "``torch.load``; torch.jit.load gives a module, not a state dict",
    ),
    "pt2": (
        "exported-program",
        "it is an exported program (torch.export), with its weights",
        "torch.load says: PytorchStreamReader failed locating file data.pkl: file not found; "
        "torch.export.load gives a program, not a state dict",
    ),
    "npz": (
        "numpy",
        "it is an archive of numpy's (numpy.savez), not a file of torch.save",
        "torch.load says: file in archive is not in a subdirectory, or, where names have slashes: "
        'Expected hasRecord("version") to be true, but got false',
    ),
    **dict.fromkeys(
        ("safetensors-sharded", "torch-sharded"),
        (
            "shards",
            "it is an index of shards: the tensors are in several files",
            "torch.load opens one file at a time, and says of the index: Weights only load failed. "
            "... Unsupported operand 123",
        ),
    ),
}
"""Kind, what and why, by format."""


def layout(patient: Patient) -> Iterator[Found]:
    """What is wrong with how the file is laid out."""
    checkpoint = patient.checkpoint
    known = _FORMATS.get(checkpoint.format)
    if known is not None:
        yield _found(known[0], "fails", known[1], known[2])
    elif os.path.isdir(checkpoint.path):
        yield _found(
            "folder",
            "fails",
            "it is a folder: a checkpoint that was unzipped",
            "torch.load opens files only: IsADirectoryError: [Errno 21] Is a directory",
        )
    yield from _refused(patient)
    yield from _protocol(patient)
    yield from _outdated(patient)
    yield from _compressed(patient)
    if checkpoint.details.byteorder == "big":
        yield _found(
            "big-endian",
            "misleads",
            "its numbers are stored big-endian",
            "torch before 2.1, and whatever reads the records by itself, takes them as they lie: "
            "wrong values without an error",
        )
    if checkpoint.format == "torch-legacy":
        yield _found(
            "legacy",
            "note",
            "it is a stream as torch wrote them before 1.6",
            "torch.load reads it, all of it into memory; with mmap=True it says: mmap can only be "
            "used with files saved with `torch.save(..., _use_new_zipfile_serialization=True)`",
        )
    yield from _python2(patient)
    yield from _beside(patient)


def _found(
    kind: str, severity: Severity, what: str, why: str, where: tuple[str, ...] = ()
) -> Found:
    return Found(Complaint(kind, severity, what, where, why), (Need("rewrite"),))


def _refused(patient: Patient) -> Iterator[Found]:
    """What a reader noted that torch refuses about a zip's records."""
    for note in patient.checkpoint.details.notes:
        if note.startswith(TORCH_REFUSES):
            reason = note.removeprefix(TORCH_REFUSES).strip()
            why = "torch.load refuses the archive: PytorchStreamReader failed ..."
            yield _found("records", "fails", reason, why)


def _protocol(patient: Patient) -> Iterator[Found]:
    """A pickle of which `weights_only=True` does not take the opcodes."""
    details = patient.checkpoint.details
    texts = [text for text in layout_blockers(patient.checkpoint) if _is_about_pickle(text)]
    if not texts:
        return
    operand = " 149" if (details.protocol or 0) >= 4 else ""
    yield _found(
        "protocol",
        "fails",
        f"the pickle is of protocol {details.protocol}, written in a way that weights_only=True "
        f"does not read ({'; '.join(texts)})",
        f"torch.load says: Weights only load failed. ... Unsupported operand{operand}",
    )


def _outdated(patient: Patient) -> Iterator[Found]:
    """Functions by which older torch made tensors."""
    names = outdated_names(patient.checkpoint, patient.blocked)
    if names:
        yield _found(
            "outdated",
            "fails",
            f"its pickle names what today's torch does not allow: {listed(names)}",
            "torch.load says: Weights only load failed. ... Unsupported global: GLOBAL "
            f"{printable(names[0])} was not an allowed global by default",
        )


def _is_about_pickle(text: str) -> bool:
    return text.startswith(("pickle ", "no torch loads "))


def _compressed(patient: Patient) -> Iterator[Found]:
    """Records that somebody's zip program has deflated."""
    names = [
        name_of(path)
        for path, tensor in patient.checkpoint.tensors()
        if tensor.storage is not None and tensor.storage.compressed
    ]
    if names and patient.checkpoint.format != "npz":  # which torch does not take for its own
        yield _found(
            "compressed",
            "misleads",
            "its records are compressed, as torch.save never writes them",
            "torch.load(mmap=True) takes the compressed bytes for the numbers: garbage, without an "
            "error",
            names_of(names),
        )


def _python2(patient: Patient) -> Iterator[Found]:
    """Strings of Python 2 that are no UTF-8."""
    found = [
        (path, text)
        for path, leaf in walk(patient.checkpoint.root)
        for text in (*path, leaf)
        if type(text) is ByteString and not _is_utf8(text.raw)
    ]
    if found:
        byte = next(byte for byte in found[0][1].raw if byte > 127)
        yield _found(
            "python2",
            "fails",
            "it was pickled by Python 2, with text that is no UTF-8",
            f"torch.load says: UnicodeDecodeError: 'utf-8' codec can't decode byte 0x{byte:02x}; "
            "encoding='latin1' reads it",
            names_of(dict.fromkeys(name_of(path) for path, _ in found)),
        )


def _beside(patient: Patient) -> Iterator[Found]:
    """What else is in the file, that neither torch nor a rewrite takes along."""
    for text in patient.checkpoint.details.left_behind:
        why = "torch.load does not look at it, and a rewrite does not carry it over"
        yield Found(Complaint("beside", "note", text, (), why))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
