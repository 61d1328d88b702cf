"""The format, name and folder of a file to write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import TargetExists, UsageError, WriteError
from ckptool.files import Source as Bytes
from ckptool.files.place import is_address, place_of
from ckptool.formats import REGISTRY, WRITABLE, Source, load_format, shard_format_of
from ckptool.words import shell

_INDEX_NAME = re.compile(r"(\.[^./\\]+)?\.index(\.[^./\\]+)?\.json$", re.IGNORECASE)


def make_default_target(
    source: str, word: str, format: str | None = None, *, sharded: bool = False
) -> str:
    """Return `model.stripped.pth` for `model.pth` and the word `stripped`, in the same folder.

    `.pth.tar` counts as one extension, a name without an extension gets none, and a folder gets
    `.pth`; so does a source whose extension is that of a format that cannot be written. If `format`
    is given and the extension is that of another format, it is replaced.

    Raises:
        UsageError: if the source is `sharded`, and `format` is not a format of one file.
    """
    if sharded and (format is None or shard_format_of(format)):
        raise UsageError(
            "is a sharded checkpoint and needs a target",
            file=source,
            hint="-o model.safetensors writes one file; "
            "-o FOLDER/model.safetensors.index.json writes shards",
        )
    if is_address(source):  # the result of a remote file is written to the current folder
        source = os.path.basename(urlsplit(source).path.rstrip("/")) or "checkpoint"
    if os.path.basename(source.rstrip(os.sep)) in ("", ".", ".."):
        source = os.path.abspath(source)  # `.` has no name to add the word to
    stem, extension = split_extension(source.rstrip(os.sep) or source)
    if os.path.isdir(source):  # a dot in the name of a folder starts no extension
        stem, extension = stem + extension, ".pth"
    extension_formats = [candidate for candidate in REGISTRY if extension in candidate.endings]
    if sharded or not all(candidate.writable for candidate in extension_formats):
        extension = ".pth"
    if format and format not in _find_formats(extension):
        [target_format] = (entry for entry in REGISTRY if entry.name == format)
        extension = target_format.endings[0] if target_format.endings else ""
    return f"{stem}.{word}{extension}"


def split_extension(path: str) -> tuple[str, str]:
    """Split a path into stem and extension; `.pth.tar` and `.safetensors.index.json` are one."""
    index = _INDEX_NAME.search(path)
    if index:
        return path[: index.start()], index[0]
    stem, extension = os.path.splitext(path)
    if extension.lower() == ".tar":
        stem, inner_extension = os.path.splitext(stem)
        extension = inner_extension + extension
    return stem, extension


INDEX_SUFFIX = ".index.json"
_DEFAULT_FORMAT = "torch-zip"
"""The format for shards of a source whose format may contain more than tensors."""


def _find_formats(extension: str) -> list[str]:
    """Return the names of the formats to write for an extension, the default first.

    An unknown extension means torch's.

    Raises:
        UsageError: if it is the extension of a format that cannot be written, or of another kind of
            file (`.zip`).
    """
    extension_formats = [candidate for candidate in REGISTRY if extension in candidate.endings]
    torch_formats = [candidate for candidate in REGISTRY if ".pth" in candidate.endings]
    candidates = extension_formats or torch_formats
    writable_names = [candidate.name for candidate in candidates if candidate.writable]
    unwritable_name: str | None
    if extension_formats:
        unwritable_name = None if writable_names else extension_formats[0].name
    else:
        # Imported here: known extensions do not need it.
        from ckptool.formats.identify import PRODUCT_BY_EXTENSION

        unwritable_name = PRODUCT_BY_EXTENSION.get(extension)
    if unwritable_name is not None:
        raise UsageError(
            f"{extension} is the extension of {unwritable_name} files, which ckptool does not "
            "write",
            hint="use the extension .pth or .safetensors, or choose the format with --format",
        )
    return writable_names


def is_folder_target(
    target: str | os.PathLike[str],
    source: Source | Sequence[str | os.PathLike[str]],
    format: str | None = None,
    *,
    needs_folder: bool = False,
) -> bool:
    """Return True if a target is a folder to write into.

    This is the case for an existing folder, a name with a final `/`, and a `format` that is a
    folder. A new name without a known extension is a folder if the source is a folder or several
    files, or if an option needs a folder (`needs_folder`).

    Raises:
        UsageError: if the source is a single file and the name could be a file or a folder.
    """
    name = os.fspath(target)
    is_folder_format = bool(format and load_format(format).index_name)
    if name.endswith(os.sep) or is_folder_format or os.path.isdir(name):
        return True
    if name in ("", "-") or _has_known_extension(name, source):
        return False
    if os.path.lexists(name) or (is_address(name) and place_of(name).exists(name)):
        return False
    if needs_folder or _is_set(source):
        return True
    if format is not None:
        return False
    raise UsageError(
        "has no known extension: it may be a folder or a file",
        file=name,
        hint=f"write {shell(name + os.sep)} for a folder, {shell(name + '.pth')} for a file",
    )


def _has_known_extension(name: str, source: Source | Sequence[str | os.PathLike[str]]) -> bool:
    """Return True if the extension of a target is known, or the same as that of its source."""
    from ckptool.formats.identify import PRODUCT_BY_EXTENSION

    name = name.lower()
    extension = os.path.splitext(name)[1]
    extensions = {
        *PRODUCT_BY_EXTENSION,
        *(extension for format in REGISTRY for extension in format.endings),
    }
    if name.endswith(INDEX_SUFFIX) or extension in extensions:
        return True
    if isinstance(source, Checkpoint):
        source = source.path
    if not extension or not isinstance(source, (str, os.PathLike)) or os.path.isdir(source):
        return False
    return os.fspath(source).lower().endswith(extension)


def _is_set(source: Source | Sequence[str | os.PathLike[str]]) -> bool:
    """Return True if a source is a folder, an index (judging by its name) or several files."""
    if isinstance(source, Checkpoint):
        return os.path.isdir(source.path) or len(source.sources) > 1
    if not isinstance(source, (str, os.PathLike)):
        return len(source) > 1 or any(map(_is_set, source))
    path = os.fspath(source)
    index_names = {load_format(format).index_name for format in WRITABLE}
    # The name is "" for a format without an index.
    is_index = _INDEX_NAME.search(path) or os.path.basename(path) in index_names - {""}
    return bool(is_index) or not place_of(path).is_file(path)


def choose_file(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    to_folder: bool,
    files_from: str | os.PathLike[str] | None = None,
) -> str:
    """Return the file to write for the target `path`.

    For a format that is always a folder, it is the file that lists the others. Else it is the
    target itself or, with `to_folder`, the file in it that the model's library looks for: that of
    the pickles if `format`, or the format of its shards, is a pickle, else that of safetensors. The
    library is known from the name of the source, else from `files_from` or the source's folder.
    """
    # `index_name` is only set for folders such as those of DCP, not for shards with an index.
    name, index = os.fspath(path), load_format(format or "").index_name
    if index:
        return name if os.path.basename(name) == index else os.path.join(name, index)
    if not to_folder:
        return name
    # Only folders need the names that libraries look for.
    from ckptool.formats.model_folder import find_library, identify_library, weights_file_name

    # "torch-sharded" has shards of "torch-zip"; a format of a single file has no shard format.
    file_format = format and (shard_format_of(format) or format)
    is_safetensors = file_format is None or load_format(file_format).tensors_only
    library = identify_library(checkpoint.path)
    if library is None:
        from ckptool.writing.companions import find_companion_folder  # a file needs no library

        folder = files_from or find_companion_folder(checkpoint)
        library = find_library(folder) if folder and os.path.isdir(folder) else None
    return os.path.join(name, weights_file_name(library, safe=is_safetensors))


def choose_format(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    sharded: bool = False,
) -> str:
    """Return the name of the format: `format`, else that of the target's extension or the source.

    A file that is replaced in place keeps its format, whatever its extension. `sharded` chooses
    shards if the content does not fit in one file.

    The name of an index (`model.safetensors.index.json`, `pytorch_model.bin.index.json`) means a
    sharded format. A source in a format that cannot be written, or has another extension than the
    target, becomes a torch zip.

    Raises:
        UsageError: if the format, or that of the extension, cannot be written.
    """
    name = os.fspath(path).lower()
    if name.endswith(INDEX_SUFFIX):
        _, extension = os.path.splitext(name.removesuffix(INDEX_SUFFIX))
        default, *_ = _find_formats(extension)
        return _choose_sharded_format(default, format)
    if format is None and checkpoint.format in WRITABLE and is_a_source(path, checkpoint.sources):
        format = checkpoint.format
    single = _choose_single_format(checkpoint, name, format)
    is_folder_format = bool(load_format(single).index_name)
    if sharded and not is_folder_format:
        return _choose_sharded_format(single, format)
    return single


def _choose_single_format(checkpoint: Checkpoint, name: str, format: str | None) -> str:
    """Return `format`, else the source's if it fits the extension of `name`, else its first.

    Raises:
        UsageError: if `format` cannot be written.
    """
    if format is not None:
        if format not in WRITABLE:
            raise UsageError(
                f"{format!r} cannot be written; the format is one of {', '.join(WRITABLE)}"
            )
        return format
    candidates = _find_formats(os.path.splitext(name)[1])
    return checkpoint.format if checkpoint.format in candidates else candidates[0]


def _choose_sharded_format(single: str, format: str | None) -> str:
    """Return the format of shards and their index: `safetensors-sharded` for `safetensors`.

    A given `format` decides: the format of the shards, or already a sharded one. Otherwise it is
    `single`, or the default if files of `single` may contain more than tensors.

    Raises:
        UsageError: if no shards have this format.
    """
    shard_format = format or (single if load_format(single).tensors_only else _DEFAULT_FORMAT)
    sharded_by_single = {entry.shard: entry.name for entry in REGISTRY if entry.shard}
    if shard_format in sharded_by_single.values():
        return shard_format
    if shard_format in sharded_by_single:
        return sharded_by_single[shard_format]
    raise UsageError(
        f"shards are files of {' or '.join(sharded_by_single)}, not of {shard_format}",
        hint="leave out --format, or name one file to write",
    )


def check_address(path: str | os.PathLike[str], *, in_place: bool, verify: bool | None) -> None:
    """Refuse options that are not possible with a remote target.

    Raises:
        UsageError: if it would be edited in place, or read back.
    """
    if is_address(path) and in_place:
        raise UsageError(
            "is remote, and remote files cannot be edited in place",
            hint="write to another file with -o",
        )
    if is_address(path) and verify:
        raise UsageError(
            "a remote file is not read back; only its size is checked",
            hint="compare them afterwards: ckptool diff SOURCE TARGET",
        )


def describe_surprises(
    checkpoint: Checkpoint, path: str | os.PathLike[str], format: str | None, written_format: str
) -> Iterator[str]:
    """Yield notes on a target that the user may not expect: its format, a new folder.

    `format` is the one that the user chose, if any.
    """
    folder, name = os.path.split(path)
    extension = os.path.splitext(name)[1].lower()
    is_given = format is not None or name.lower().endswith(INDEX_SUFFIX)
    is_known = any(extension in registered.endings for registered in REGISTRY)
    if extension and not (is_given or is_known or checkpoint.path.lower().endswith(extension)):
        yield f"{extension} is not a known extension; the file is written as {written_format}"
    if folder and not is_address(path) and not os.path.isdir(folder):
        yield f"created the folder {folder}"


def check_target(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, overwrite: bool, in_place: bool
) -> None:
    """Refuse a target that is not a file name, is the source, or must not be replaced.

    Raises:
        UsageError: if it is empty, or ends like the name of a folder.
        TargetExists: if the file exists; the hint shows how to replace it.
        WriteDenied: if it is a device, a pipe or similar.
    """
    name = os.fspath(path)
    if not name or name.endswith(os.sep):
        raise UsageError(f"{name!r} is not a file name", hint="give the name of a file")
    if name == "-":
        raise UsageError(
            "ckptool cannot write to standard output", hint="write ./- for a file of that name"
        )
    if in_place and os.path.isdir(path):  # for a folder with an index, the path is the index
        raise TargetExists(
            "is a folder without an index and cannot be edited in place",
            file=path,
            hint="write to another file or folder with -o",
        )
    if not is_a_source(path, checkpoint.sources):
        place_of(path).refuse_target(name, overwrite=overwrite)
    elif not in_place:
        raise TargetExists(
            "is the source itself",
            file=path,
            hint="choose another target with -o, or use a command with --in-place, for "
            "example remap",
        )
    folder = os.path.realpath(checkpoint.path)
    is_inside = os.path.isdir(folder) and os.path.realpath(path).startswith(folder + os.sep)
    if is_inside and not in_place:
        raise TargetExists("is inside the source folder", file=path, hint="choose another folder")


def check_still_source(path: str | os.PathLike[str], sources: Iterable[Bytes]) -> None:
    """Refuse to write in place if the source is no longer at its path.

    Raises:
        WriteError: if the source was replaced or removed.
    """
    if not is_a_source(path, sources):
        exists = os.path.lexists(path)
        fact = "the file was replaced" if exists else "the file was removed"
        raise WriteError(
            f"{fact} during the edit; nothing was written",
            file=path,
            hint="write the result to another file with -o FILE",
        )


def is_a_source(path: str | os.PathLike[str], sources: Iterable[Bytes]) -> bool:
    """Return True if the target, with links resolved, is one of the sources."""
    if is_address(path):
        return os.fspath(path) in {source.name for source in sources}
    try:
        # A folder that is still missing may be followed by "..": links and dots are resolved first.
        target = os.stat(os.path.realpath(path))
    except OSError:
        return False
    open_files = (fd for source in sources if (fd := source.fd()) is not None)
    return any(os.path.samestat(target, os.fstat(fd)) for fd in open_files)
