"""Find the model file in a folder that a library saved one model into.

It uses only names: those that transformers, diffusers, peft and accelerate save and look for.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ckptool.errors import warn
from ckptool.files.json_object import read_json_object
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Probe
from ckptool.formats.sharded import open_index
from ckptool.words import few, printable, quoted


class _Names(NamedTuple):
    """The names of files with one model: of several in a folder, the first is read."""

    library: str
    """The library with this order."""
    files: tuple[str, ...]


_MODELS = (
    _Names("transformers", ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")),
    _Names("diffusers", ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")),
    _Names("peft", ("adapter_model.safetensors", "adapter_model.bin")),
)
_SECOND_MODEL_NAME = re.compile(r"(pytorch_)?model(_fsdp)?_\d+\.(safetensors|bin)")
"""The names that accelerate gives to the second and further models of a run."""
_PICKLE_INDEX_EXTENSION = ".bin.index.json"
_SAFETENSORS_EXTENSION = ".safetensors"
_INDEX_BY_LIBRARY = {
    model.library: f"{name}.index.json"
    for model in _MODELS
    for name in model.files
    if name.endswith(_SAFETENSORS_EXTENSION)
}
"""By library, the index that it looks for before it reads a pickle."""
_INDEXES = {model.library: [f"{name}.index.json" for name in model.files] for model in _MODELS}
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


def identify_library(path: str) -> str | None:
    """Return the library that uses this name for weights or an index of shards, or None."""
    name = os.path.basename(path)
    for model in _MODELS:
        if name in model.files or name in _INDEXES[model.library]:
            return model.library
    return None


def find_library(folder: str | os.PathLike[str]) -> str | None:
    """Return the library of the model in a folder, from its weights or its configuration, or None.

    Without weights under the name of a library, the configuration shows peft or diffusers.
    """
    names = sorted(os.listdir(folder))
    for name in names:
        if library := identify_library(name):
            return library
    if ADAPTER_CONFIG in names:
        return "peft"
    config = read_json_object(os.path.join(folder, CONFIG))
    return "diffusers" if "_diffusers_version" in config else None


def weights_file_name(library: str | None, *, safe: bool) -> str:
    """Return the name that a library uses for weights: of safetensors if `safe`, else of a pickle.

    For None or an unknown library it is the name of transformers.
    """
    files = next((model.files for model in _MODELS if model.library == library), _MODELS[0].files)
    return next(name for name in files if name.endswith(_SAFETENSORS_EXTENSION) == safe)


def resolve_model_file(probe: Probe) -> Probe:
    """Return the probe of the only model in a folder; return any other probe unchanged.

    If a model is there twice, as safetensors and as a pickle, the file that its library prefers is
    read, with a warning. A folder with two models is not resolved.

    Raises:
        CheckpointError: an index of shards is damaged or not the only one; the file cannot be
            opened.
    """
    choice = _choose_files(probe)
    if choice is None:
        return probe
    library, (chosen, *unread) = choice
    folder = probe.path
    if chosen != _INDEX_BY_LIBRARY[library]:  # the probe of the folder itself reads its index
        file = Probe(os.path.join(folder, chosen), probe.limits)
        probe.close()
        probe = file
    if unread:
        warn(
            f"{printable(folder)}: reading {quoted(chosen)}, as {library} does, and not "
            f"{few(unread)}"
        )
    return probe


def _choose_files(probe: Probe) -> _Names | None:
    """Return the library, the file of the only model in a folder, then the files that are not read.

    None if the folder is an unzipped archive, or does not have exactly one model. An index of
    safetensors comes before single files, and these before an index of pickles. Where an index is
    to be read and no choice was made, the result is also None: the formats of indexes open the
    folder.
    """
    if not probe.is_folder or probe.compute_once(open_archive).records:
        return None
    # A broken link counts as a file.
    is_folder = probe.place.is_folder
    known_names = probe.entries.intersection(name for model in _MODELS for name in model.files)
    existing = {name for name in known_names if not is_folder(os.path.join(probe.path, name))}
    models = [
        _Names(model.library, tuple(name for name in model.files if name in existing))
        for model in _MODELS
        if not existing.isdisjoint(model.files)
    ]
    if len(models) != 1 or any(map(_SECOND_MODEL_NAME.fullmatch, probe.entries)):
        return None
    ((library, files),) = models
    shard_index = probe.compute_once(open_index)
    if shard_index is None:
        return _Names(library, files)
    index_name = os.path.basename(shard_index.path)
    if index_name == _INDEX_BY_LIBRARY[library]:  # of safetensors, which the library reads first
        return _Names(library, (index_name, *files))
    if index_name.endswith(_PICKLE_INDEX_EXTENSION) and files[0].endswith(_SAFETENSORS_EXTENSION):
        return _Names(library, (*files, index_name))
    return None  # an index of pickles beside a pickle, or one that the library does not look for
