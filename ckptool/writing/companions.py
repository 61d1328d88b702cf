"""The files that `from_pretrained` needs next to weights: configuration, tokenizer, processor."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.quantization_config import SEPARATE_CONFIGS
from ckptool.errors import FileMissing
from ckptool.files import ByteRange, FileSource
from ckptool.files.atomic import FileOutput
from ckptool.files.place import place_of
from ckptool.formats import load_format, shard_format_of
from ckptool.formats.base import NewFile, WritePlan
from ckptool.formats.model_folder import ADAPTER_CONFIG, identify_library
from ckptool.words import listed
from ckptool.writing.configuration import Edited, edit_configuration

_CONFIG = "config.json"
PATTERNS = (
    _CONFIG,
    ADAPTER_CONFIG,
    "params.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "spm*.model",
    "*.spm",
    "normalizer.json",
    "*.tiktoken",
    "tekken.json",
    "chat_template.*",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    *SEPARATE_CONFIGS,
)
"""Names of the files that are copied: neither weights nor code."""
_FOLDERS = ("", "huggingface", "hf")
"""Their folders inside that of a checkpoint: verl has `huggingface`, Megatron-Bridge `hf`."""


def find_companion_folder(checkpoint: Checkpoint) -> str | None:
    """Return the folder with the companion files of a checkpoint, or None.

    A single file has companions only if a library looks for its name (`model.safetensors`) or it is
    an index. Of several folders, one with `config.json` comes first.
    """
    root, format = checkpoint.path, checkpoint.format
    if not os.path.isdir(root):
        has_index = shard_format_of(format) or load_format(format).index_name
        if not (has_index or identify_library(root)):
            return None
        root = os.path.dirname(root) or os.curdir
    folders = [folder for name in _FOLDERS if os.path.isdir(folder := os.path.join(root, name))]
    with_config = (folder for folder in folders if os.path.isfile(os.path.join(folder, _CONFIG)))
    with_files = (folder for folder in folders if _select_companions(os.listdir(folder)))
    return next(with_config, None) or next(with_files, None)


def _select_companions(names: Iterable[str], library: str | None = None) -> list[str]:
    """Return the names of companion files; that of an adapter only for peft or no known library."""
    companions = (name for name in names if any(fnmatchcase(name, pattern) for pattern in PATTERNS))
    return [name for name in companions if name != ADAPTER_CONFIG or library in (None, "peft")]


def with_companions(
    plan: WritePlan,
    path: str,
    folder: str | os.PathLike[str],
    checkpoint: Checkpoint,
    *,
    keeps_existing: bool = False,
) -> tuple[WritePlan, Sequence[Change]]:
    """Return `plan` with the files of `folder` next to the weights at `path`, and warnings.

    The copy of `config.json` reflects the changes of `checkpoint`. A warning reports statements
    that do not match the weights. `keeps_existing`: existing files in the target stay, with a note.
    Separate quantization files are not copied if the weights were dequantized.

    Raises:
        FileMissing: if the folder does not exist, or has none of these files.
    """
    target = os.path.dirname(path)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
    except OSError as error:
        raise FileMissing("is not a readable folder", file=folder) from error
    companions = _select_companions(names, identify_library(path) or "")
    if not companions:
        hint = f"give a folder with {listed(PATTERNS, 4)}"
        raise FileMissing("has no configuration or tokenizer file", file=folder, hint=hint)
    existing = {
        name
        for name in companions
        if keeps_existing and place_of(target).exists(os.path.join(target, name))
    }
    is_plain = any(change.kind == "dequantize" for change in checkpoint.changes)
    outdated = {name for name in companions if name in SEPARATE_CONFIGS and is_plain}
    copied = [name for name in companions if name not in existing | outdated]
    # The plan of a single file has no path of its own.
    weights = plan.files if plan.index else (plan.files[0]._replace(path=path),)
    config_edit = Edited()
    if _CONFIG in copied:
        config_edit = edit_configuration(os.path.join(folder, _CONFIG), checkpoint)
    new_files = (
        _plan_bytes(config_edit.data, os.path.join(target, name))
        if name == _CONFIG and config_edit.data is not None
        else _plan_copy(folder, name, target)
        for name in copied
    )
    notes = (
        *_describe_files(os.fspath(folder), names, copied, existing, outdated),
        *config_edit.notes,
    )
    plan = replace(plan, files=(*new_files, *weights), notes=(*plan.notes, *notes))
    return plan, config_edit.warnings


def _plan_bytes(data: bytes, path: str) -> NewFile:
    """Return the plan of a file with these bytes."""
    return NewFile(len(data), lambda output: output.write(data), path=path)


def _plan_copy(folder: str | os.PathLike[str], name: str, target: str) -> NewFile:
    """Return the plan of a copy of a file in the folder `target`."""
    path = os.path.join(folder, name)
    size = os.path.getsize(path)

    def write(output: FileOutput) -> None:
        """Copy the file to the output."""
        with closing(FileSource(path)) as source:
            output.copy(ByteRange(source, 0, size))

    return NewFile(size, write, path=os.path.join(target, name))


def _describe_files(
    folder: str,
    names: Iterable[str],
    copied: Collection[str],
    existing: Iterable[str],
    outdated: Collection[str],
) -> Iterator[str]:
    """Yield the notes on the files of `folder` that were copied or skipped."""
    if copied:
        yield f"copied {listed(copied)} from {folder}"
    if existing:
        yield f"kept {listed(sorted(existing))} of the target (not copied from {folder})"
    if outdated:
        yield f"skipped {listed(sorted(outdated))} of {folder} (the weights are dequantized)"
    code = [name for name in names if name.endswith(".py")]
    if code:
        yield f"skipped code of {folder}: {listed(code)}"
