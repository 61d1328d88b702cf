"""Zip archives that are no checkpoint of torch's, told by the names in them."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ckptool.errors import CheckpointError, NotACheckpoint, TruncatedFile, UnsupportedFormat
from ckptool.files import ByteRange
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import Finding, few, shell, unused
from ckptool.formats.zip_directory import find_end, read_directory
from ckptool.limits import Limits

__all__ = ["ZIP_KINDS", "ZipKind", "find"]

_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")
_WEIGHTS = re.compile(r"(?:.*\.(?:pth|pt|ckpt|bin|safetensors|th|pth\.tar)|.*/data\.pkl)\Z")


class ZipKind(NamedTuple):
    """Names that a kind of archive has, all of them, and what to do about it."""

    names: tuple[str, ...]
    """Patterns; each must match the whole of some name."""
    what: str
    hint: str
    kind: type[CheckpointError] = NotACheckpoint


_OFFICE = "an office document"
_GIVE = "give the checkpoint itself"

ZIP_KINDS: tuple[ZipKind, ...] = (
    ZipKind(
        (r"config\.json", r"model\.weights\.(?:h5|npz)"),
        "a Keras model (.keras)",
        "Keras reads it: keras.models.load_model",
        UnsupportedFormat,
    ),
    ZipKind(
        (r"(?:[^/]*/)?\.data/extern_modules",),
        "a torch.package archive",
        "torch.package.PackageImporter reads it; it runs the code in the archive",
        UnsupportedFormat,
    ),
    ZipKind(
        (r"[^/]+/version", r"[^/]+/(?:byteorder|\.data/serialization_id)"),
        "what a torch.save that failed has left: it holds no data.pkl",
        "save it again; the error that torch.save raised says what was in its way",
        TruncatedFile,
    ),
    ZipKind((r"\[Content_Types\]\.xml", r"word/.*"), "a Word document", _GIVE),
    ZipKind((r"\[Content_Types\]\.xml", r"xl/.*"), "an Excel workbook", _GIVE),
    ZipKind((r"\[Content_Types\]\.xml", r"ppt/.*"), "a PowerPoint presentation", _GIVE),
    ZipKind((r"mimetype", r"content\.xml"), _OFFICE, _GIVE),
    ZipKind((r"AndroidManifest\.xml",), "an Android app", _GIVE),
    ZipKind((r"META-INF/MANIFEST\.MF",), "a Java archive", _GIVE),
    ZipKind((r"[^/]+\.dist-info/WHEEL",), "a Python wheel", "pip install {file}"),
    ZipKind(
        (r"(?:.*/)?saved_model\.pb",),
        "a zip archive of a TensorFlow SavedModel",
        "unzip {file}; TensorFlow reads the folder: tf.saved_model.load",
        UnsupportedFormat,
    ),
)


def find(probe: Probe) -> Finding | None:
    """What kind of zip it is, with its first names; None if it is no zip."""
    if probe.source is None or not probe.head.startswith(_SIGNATURES):
        return None
    try:
        names = _names(ByteRange(probe.source, 0, probe.source.size), probe.limits)
    except CheckpointError as error:
        return Finding(f"a damaged zip archive: {error.message}", error.hint, type(error))
    file = shell(probe.path)
    for row in ZIP_KINDS:
        if all(any(map(re.compile(name).fullmatch, names)) for name in row.names):
            return Finding(row.what, row.hint.format(file=file), row.kind)
    return _other(names, probe.path)


def _names(data: ByteRange, limits: Limits) -> list[str]:
    end = find_end(data)
    if end is None:
        raise TruncatedFile(
            "its end, where its directory stands, is missing",
            file=data.source.name,
            hint="download or copy it again",
        )
    return [entry.name for entry in read_directory(data, end, limits)]


def _other(names: list[str], path: str) -> Finding:
    file = shell(path)
    inside = next((name for name in names if _WEIGHTS.fullmatch(name)), None)
    if inside is None:
        return Finding(f"a zip archive of other files: it holds {few(names)}", f"unzip -l {file}")
    folder = unused(f"{path}.unpacked")
    target = os.path.join(folder, inside.removesuffix("/data.pkl"))
    return Finding(
        f"a zip archive with a checkpoint in it: it holds {few(names)}",
        f"unzip {file} -d {shell(folder)} && ckptool list {shell(target)}",
    )
