"""The format, name and place of a file to write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import TargetExists, UsageError, WriteError
from ckptool.files import Source as Bytes
from ckptool.files.place import is_address, place_of
from ckptool.formats import REGISTRY, WRITABLE, Source, format_of, shard_of
from ckptool.words import shell

INDEX_ENDING = re.compile(r"(\.[^./\\]+)?\.index(\.[^./\\]+)?\.json$", re.IGNORECASE)


def default_target(
    source: str, word: str, format: str | None = None, *, sharded: bool = False
) -> str:
    """`model.stripped.pth` for `model.pth` and the word `stripped`, in the same folder.

    `.pth.tar` stays whole, a name without a suffix gets none, a folder's gets `.pth`. Where the
    format is chosen and the source's suffix stands for another one, the format's own is taken.

    Raises:
        UsageError: the source is `sharded`, and the format is not chosen to be of one file.
    """
    if sharded and (format is None or shard_of(format)):
        raise UsageError(
            "is a sharded checkpoint and needs a target",
            file=source,
            hint="-o model.safetensors writes one file, "
            "-o FOLDER/model.safetensors.index.json shards",
        )
    if is_address(source):  # the result lies here
        source = os.path.basename(urlsplit(source).path.rstrip("/")) or "checkpoint"
    if os.path.basename(source.rstrip(os.sep)) in ("", ".", ".."):
        source = os.path.abspath(source)  # the name of the folder that we are in
    stem, suffix = split(source.rstrip(os.sep) or source)
    if os.path.isdir(source):
        stem, suffix = stem + suffix, ".pth"
    if sharded or not all(one.writable for one in REGISTRY if suffix in one.endings):
        suffix = ".pth"
    if format and format not in _formats_for(suffix):
        suffix = next("".join(one.endings[:1]) for one in REGISTRY if one.name == format)
    return f"{stem}.{word}{suffix}"


def split(path: str) -> tuple[str, str]:
    """Return a path without its ending, and the ending: `.pth.tar` and that of an index whole."""
    index = INDEX_ENDING.search(path)
    if index:
        return path[: index.start()], index[0]
    stem, suffix = os.path.splitext(path)
    if suffix.lower() == ".tar":
        inner, before = os.path.splitext(stem)
        return (inner, before + suffix) if before else (stem, suffix)
    return stem, suffix


INDEX = ".index.json"
DEFAULT = "torch-zip"


def _formats_for(ending: str) -> list[str]:
    """Return the formats whose files a name that ends so promises; an unknown one means torch's.

    Raises:
        UsageError: it is the ending of a format that is not written.
    """
    owners = [one for one in REGISTRY if ending in one.endings]
    torchs = (one for one in REGISTRY if ".pth" in one.endings)
    written = [one.name for one in owners or torchs if one.writable]
    if not owners:
        from ckptool.formats.identify import ENDINGS  # the known endings need none of it

        other = ENDINGS.get(ending)
    else:
        other = owners[0].name if not written else None
    if other is not None:
        raise UsageError(
            f"{ending} is the extension of {other} files, which ckptool does not write",
            hint="use the extension .pth or .safetensors, or choose the format with --format",
        )
    return written


def goes_to_folder(
    target: str | os.PathLike[str],
    source: Source | Sequence[str | os.PathLike[str]],
    format: str | None = None,
    *,
    wanted: bool = False,
) -> bool:
    """Return whether a target is a folder to write into.

    It is one if it is there, if its name ends so, or if `format` is a folder. A new name without a
    known extension is one if the source is a folder or a set of files, or if `wanted`: an option
    is about a folder.

    Raises:
        UsageError: a single file is the source of a name that could be a file or a folder.
    """
    name = os.fspath(target)
    if name.endswith(os.sep) or format_of(format or "").index_name or os.path.isdir(name):
        return True
    if name in ("", "-") or _has_known_extension(name, source):
        return False
    if os.path.lexists(name) or (is_address(name) and place_of(name).exists(name)):
        return False
    if wanted or _is_set(source):
        return True
    if format is not None:
        return False
    raise UsageError(
        "has no known extension: it may be a folder or a file",
        file=name,
        hint=f"write {shell(name + os.sep)} for a folder, {shell(name + '.pth')} for a file",
    )


def _has_known_extension(name: str, source: Source | Sequence[str | os.PathLike[str]]) -> bool:
    """Return whether a target's extension is one of a format, or that of its source."""
    from ckptool.formats.identify import ENDINGS

    name = name.lower()
    ending = os.path.splitext(name)[1]
    known = {*ENDINGS, *(ending for one in REGISTRY for ending in one.endings)}
    if name.endswith(INDEX) or ending in known:
        return True
    if isinstance(source, Checkpoint):
        source = source.path
    if not ending or not isinstance(source, (str, os.PathLike)) or os.path.isdir(source):
        return False
    return os.fspath(source).lower().endswith(ending)


def _is_set(source: Source | Sequence[str | os.PathLike[str]]) -> bool:
    """Return whether a source is a folder or several files, by names alone."""
    if isinstance(source, Checkpoint):
        return os.path.isdir(source.path) or len(source.sources) > 1
    if not isinstance(source, (str, os.PathLike)):
        return len(source) > 1 or any(map(_is_set, source))
    name = os.fspath(source)
    is_single = place_of(name).is_file(name) and not INDEX_ENDING.search(name)
    return not is_single or any(
        os.path.basename(name) == format_of(one).index_name for one in WRITABLE
    )


def target_file(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    to_folder: bool,
    files_from: str | os.PathLike[str] | None = None,
) -> str:
    """Return the file to write: of a folder the one in it that the model's library looks for.

    Of a format that is a folder it is the file that names the others. The library is that of the
    weights' name, else of the folder that the configuration comes from.
    """
    name, index = os.fspath(path), format_of(format or "").index_name
    if index:
        return name if os.path.basename(name) == index else os.path.join(name, index)
    if not to_folder:
        return name
    is_safe = format is None or format_of(shard_of(format) or format).tensors_only
    from ckptool.formats.model_folder import library_in, library_of, model_file  # only for folders

    library = library_of(checkpoint.path)
    if library is None:
        from ckptool.writing.companions import folder_of_companions  # a file has none of them

        folder = files_from or folder_of_companions(checkpoint)
        library = library_in(folder) if folder and os.path.isdir(folder) else None
    return os.path.join(name, model_file(library, safe=is_safe))


def target_format(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    sharded: bool = False,
) -> str:
    """Return the name of the format: `format`, else by the target's ending, else the source's.

    A file that is replaced in place keeps its format, whatever its name ends in. `sharded` asks for
    that format in shards, where there is more of it than fits in one.

    A target that is an index (`model.safetensors.index.json`, `pytorch_model.bin.index.json`) is
    of one of the sharded formats. A source whose own format cannot be written, or has an ending
    that the target does not have, becomes a torch zip.

    Raises:
        UsageError: `format`, or what the ending promises, is none that can be written.
    """
    name = os.fspath(path).lower()
    if name.endswith(INDEX):
        single = _formats_for(os.path.splitext(name.removesuffix(INDEX))[1])[0]
        return _sharded(single, format)
    if format is None and checkpoint.format in WRITABLE and is_a_source(path, checkpoint.sources):
        format = checkpoint.format
    single = _single(checkpoint, name, format)
    return _sharded(single, format) if sharded and not format_of(single).index_name else single


def _single(checkpoint: Checkpoint, name: str, format: str | None) -> str:
    """Return the format of a target that is one file, or of shards where `format` says so."""
    if format is not None:
        if format not in WRITABLE:
            raise UsageError(
                f"{format!r} cannot be written; the format is one of {', '.join(WRITABLE)}"
            )
        return format
    written = _formats_for(os.path.splitext(name)[1])
    return checkpoint.format if checkpoint.format in written else written[0]


def _sharded(single: str, format: str | None) -> str:
    """Return the format of shards that are `single`, unless `format` names it or what they are."""
    wanted = format or (single if format_of(single).tensors_only else DEFAULT)
    shards = {one.shard: one.name for one in REGISTRY if one.shard}
    if wanted in (*shards, *shards.values()):
        return shards.get(wanted, wanted)
    raise UsageError(
        f"shards are files of {' or '.join(shards)}, not of {wanted}",
        hint="leave out --format, or name one file to write",
    )


def check_address(path: str | os.PathLike[str], *, in_place: bool, verify: bool | None) -> None:
    """Refuse what is not done with a target on another machine.

    Raises:
        UsageError: it is to be changed in place, or read back.
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


def remarks(
    checkpoint: Checkpoint, path: str | os.PathLike[str], format: str | None, written: str
) -> Iterator[str]:
    """Yield what a target may be without the user's knowing it: of this format, in a new folder."""
    folder, name = os.path.split(path)
    ending = os.path.splitext(name)[1].lower()
    is_told = format is not None or name.lower().endswith(INDEX)
    is_known = any(ending in one.endings for one in REGISTRY)
    if ending and not (is_told or is_known or checkpoint.path.lower().endswith(ending)):
        yield f"{ending} is not a known extension; the file is written as {written}"
    if folder and not is_address(path) and not os.path.isdir(folder):
        yield f"created the folder {folder}"


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
        raise UsageError(f"{name!r} is not a file name", hint="give the name of a file")
    if name == "-":
        raise UsageError(
            "ckptool cannot write to standard output", hint="write ./- for a file of that name"
        )
    if in_place and os.path.isdir(path):
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


def check_still_there(path: str | os.PathLike[str], sources: Iterable[Bytes]) -> None:
    """Refuse to write in place of a source that is not at its path any more.

    Raises:
        WriteError: another file is, or none.
    """
    if not is_a_source(path, sources):
        there = os.path.lexists(path)
        what = "the file was replaced" if there else "the file was removed"
        raise WriteError(
            f"{what} during the edit; nothing was written",
            file=path,
            hint="write the result to another file with -o FILE",
        )


def is_a_source(path: str | os.PathLike[str], sources: Iterable[Bytes]) -> bool:
    """Return whether the target, links resolved, is one of the files that will be read."""
    if is_address(path):
        return os.fspath(path) in {source.name for source in sources}
    try:
        target = os.stat(path)
    except OSError:
        return False
    open_files = (fd for source in sources if (fd := source.fd()) is not None)
    return any(os.path.samestat(target, os.fstat(fd)) for fd in open_files)
