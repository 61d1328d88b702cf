"""The format, name and place of a file to write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from ckptool.checkpoint import Checkpoint
from ckptool.errors import TargetExists, UsageError, WriteError
from ckptool.files import FileSource
from ckptool.files.atomic import refuse_target
from ckptool.formats import SHARD_FORMATS, WRITABLE

__all__ = [
    "FLAT",
    "check_still_there",
    "check_target",
    "default_target",
    "in_folder",
    "is_a_source",
    "target_format",
]

_INDEX_ENDING = re.compile(r"(\.[^./\\]+)?\.index(\.[^./\\]+)?\.json$", re.IGNORECASE)
_UNWRITABLE = (".pt2", ".ptl", ".pkl")
"""Endings of formats that are read, and become torch files."""
_SUFFIXES = {"safetensors": ".safetensors", "torch-zip": ".pth", "torch-legacy": ".pth"}


def default_target(
    source: str, word: str, format: str | None = None, *, sharded: bool = False
) -> str:
    """`model.stripped.pth` for `model.pth` and the word `stripped`, in the same folder.

    `.pth.tar` stays whole, a name without a suffix gets none, a folder's gets `.pth`. Where the
    format is chosen and the source's suffix stands for another one, the format's own is taken.

    Raises:
        UsageError: the source is `sharded`, and the format is not chosen to be of one file.
    """
    if sharded and (format is None or format in SHARD_FORMATS):
        raise UsageError(
            "is a checkpoint in shards: -o must say where the result goes",
            file=source,
            hint="-o model.safetensors writes one file, "
            "-o FOLDER/model.safetensors.index.json shards",
        )
    if os.path.basename(source.rstrip(os.sep)) in ("", ".", ".."):
        source = os.path.abspath(source)  # the name of the folder that we are in
    stem, suffix = _split(source.rstrip(os.sep) or source)
    if os.path.isdir(source):
        stem, suffix = stem + suffix, ".pth"
    if suffix in _UNWRITABLE or sharded:
        suffix = ".pth"
    if format and (suffix == ".safetensors") != (format == "safetensors"):
        suffix = _SUFFIXES[format]
    return f"{stem}.{word}{suffix}"


def _split(path: str) -> tuple[str, str]:
    index = _INDEX_ENDING.search(path)
    if index:
        return path[: index.start()], index[0]
    stem, suffix = os.path.splitext(path)
    if suffix == ".tar":
        inner, before = os.path.splitext(stem)
        return (inner, before + suffix) if before else (stem, suffix)
    return stem, suffix


FLAT = ("safetensors", *SHARD_FORMATS)
"""The formats that hold one flat state dict."""

_BY_ENDING = {".safetensors": "safetensors"}
_OTHERS = {
    ".gguf": "GGUF",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".keras": "Keras",
    ".msgpack": "Flax",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".onnx": "ONNX",
    ".pb": "TensorFlow",
    ".pt2": "torch.export",
    ".tflite": "TensorFlow Lite",
}
"""Endings that promise a format which is not written."""
_INDEX = ".index.json"
DEFAULT = "torch-zip"


def in_folder(path: str | os.PathLike[str]) -> str:
    """Return the file to write: of a folder the one in it that `from_pretrained` looks for."""
    name = os.fspath(path)
    return os.path.join(name, "model.safetensors") if _is_folder(name) else name


def _is_folder(name: str) -> bool:
    return name.endswith(os.sep) or os.path.isdir(name)


def target_format(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    sharded: bool = False,
) -> str:
    """The name of the format to write: `format`, else the target's ending, else the source's.

    A file that is replaced in place keeps its format, whatever its name ends in. `sharded` asks for
    that format in shards, where there is more of it than fits in one.

    A target that is an index (`model.safetensors.index.json`, `pytorch_model.bin.index.json`) is
    of one of the sharded formats. A source whose own format cannot be written, or has an ending
    that the target does not have, becomes a torch zip.

    Raises:
        UsageError: `format`, or what the ending promises, is none that can be written.
    """
    name = os.fspath(path).lower()
    if name.endswith(_INDEX):
        return _sharded(name.endswith(f".safetensors{_INDEX}"), format)
    if format is None and checkpoint.format in WRITABLE and is_a_source(path, checkpoint.sources):
        format = checkpoint.format
    single = _single(checkpoint, name, format)
    return _sharded(single.startswith("safetensors"), format) if sharded else single


def _single(checkpoint: Checkpoint, name: str, format: str | None) -> str:
    """The format of a target that is one file, or of shards where `format` says so."""
    if format is not None:
        if format not in (*WRITABLE, *SHARD_FORMATS):
            raise UsageError(
                f"{format!r} cannot be written; the format is one of "
                f"{', '.join((*WRITABLE, *SHARD_FORMATS))}"
            )
        return format
    ending = os.path.splitext(name)[1]
    if ending in _BY_ENDING:
        return _BY_ENDING[ending]
    if ending in _OTHERS:
        raise UsageError(
            f"{ending} is the ending of {_OTHERS[ending]} files, which are not written",
            hint="name a .pth or .safetensors file, or say with --format what is to be written",
        )
    kept = checkpoint.format in WRITABLE and checkpoint.format not in _BY_ENDING.values()
    return checkpoint.format if kept else DEFAULT


def _sharded(of_safetensors: bool, format: str | None) -> str:
    """The format of a target that is an index; `format` may name it, or what a shard is."""
    if format is None:
        return "safetensors-sharded" if of_safetensors else "torch-sharded"
    for sharded, single in SHARD_FORMATS.items():
        if format in (sharded, single):
            return sharded
    raise UsageError(
        f"shards are files of {' or '.join(SHARD_FORMATS.values())}, not of {format}",
        hint="leave --format out, or name one file to write",
    )


def check_target(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, overwrite: bool, in_place: bool
) -> None:
    """Refuse a target that is no file name, the source, or a file that is not to be replaced.

    Raises:
        UsageError: it is empty, or ends like a folder's name.
        TargetExists: the file is there; the hint says what would allow it.
        WriteDenied: it is a device, a pipe or the like.
    """
    name = os.fspath(path)
    if not name or name.endswith(os.sep):
        raise UsageError(f"{name!r} names no file to write", hint="give the name of a file")
    if name == "-":
        raise UsageError(
            "nothing is written to standard output", hint="./- names a file that is called so"
        )
    if not is_a_source(path, checkpoint.sources):
        refuse_target(path, overwrite=overwrite)
    elif not in_place:
        raise TargetExists(
            "is the source itself",
            file=path,
            hint="choose another name; verbs that take --in-place change the file itself",
        )
    folder = os.path.realpath(checkpoint.path)
    if os.path.isdir(folder) and os.path.realpath(path).startswith(folder + os.sep):
        raise TargetExists(
            "lies in the folder that is the source", file=path, hint="choose another folder"
        )


def check_still_there(path: str | os.PathLike[str], sources: Iterable[FileSource]) -> None:
    """Refuse to write in place of a source that is not at its path any more.

    Raises:
        WriteError: another file is, or none.
    """
    if not is_a_source(path, sources):
        there = os.path.lexists(path)
        what = "another file has taken its place" if there else "it has been removed"
        raise WriteError(
            f"{what} meanwhile; nothing was written",
            file=path,
            hint="write the result to another file",
        )


def is_a_source(path: str | os.PathLike[str], sources: Iterable[FileSource]) -> bool:
    """Whether the target, links resolved, is one of the files that will be read."""
    try:
        target = os.stat(path)
    except OSError:
        return False
    return any(os.path.samestat(target, os.fstat(source.fileno())) for source in sources)
