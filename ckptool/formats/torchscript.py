"""TorchScript archives (`torch.jit.save`): the weights, listed as `state_dict()` would.

Since 1.3 `data.pkl` holds the module tree as objects of classes whose source is in `code/`, and
that source tells parameters and buffers from other tensors (torch/csrc/jit/serialization/
python_print.cpp). A frozen module has none: its weights are constants of the program, with no names
but those in its code (torch/csrc/jit/passes/freeze_module.cpp). 1.0 to 1.2 had `model.json` instead
(caffe2/proto/torch.proto). The program itself is left alone: never run, never rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint, Details
from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.formats.archive import read_text
from ckptool.formats.base import Archive, Probe
from ckptool.formats.torch_zip import Storages, few, read_contents
from ckptool.formats.torchscript_json import read_model_json
from ckptool.limits import Limits
from ckptool.model import Global, Opaque, OrderedMap, TensorRef, find_tensors
from ckptool.modules import holds_tensors
from ckptool.symbolic import unpickle

__all__ = ["TORCHSCRIPT", "TorchScript"]

_ROOT = "__torch__"
_CLASS = re.compile(r"class ([^\s(:]+)(?:\((.*)\))?:")
_NAMES = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WEIGHTS = ("data/", "tensors/")
_CONSTANTS = "constants/"
_KNOWN = frozenset(
    {"data.pkl", "constants.pkl", "model.json", "attributes.pkl", "version", "byteorder"}
)


class TorchScript:
    """The format `torchscript`."""

    name = "torchscript"

    def recognise(self, probe: Probe) -> bool:
        """Whether there is `constants.pkl` beside `data.pkl`, or 1.0's `model.json`."""
        archive = probe.archive
        if archive is None:
            return False
        find = Storages(archive, "little").find
        if find("constants.pkl") is not None and find("data.pkl") is not None:
            return True
        return find("model.json") is not None and find("version") is not None

    def read(self, probe: Probe) -> Checkpoint:
        """The weights by their full names, over the directory, the pickle and the source.

        Raises:
            CorruptFile: the archive, its pickle or its JSON is damaged.
            LimitExceeded: it asks for more than `probe.limits`.
        """
        archive = probe.archive
        if archive is None:
            raise CorruptFile("this is no zip", file=probe.path)
        if "model.json" in archive.records and "data.pkl" not in archive.records:
            root, writer = read_model_json(archive, probe.limits)
            details = _details(archive, writer=writer)
        else:
            root, details = _read_pickled(archive, probe.limits)
        return Checkpoint(root, self.name, probe.path, details, sources=archive.sources)


TORCHSCRIPT = TorchScript()


def _read_pickled(archive: Archive, limits: Limits) -> tuple[OrderedMap, Details]:
    contents = read_contents(archive, limits)
    unpickled = contents.unpickled
    names = _Collector(archive, limits).collect(unpickled.root)
    listed = {id(tensor) for tensor in find_tensors(names)}
    frozen = "training" not in unpickled.root.attributes
    if frozen:
        names.update(_constants(archive, contents.storages.byteorder, limits))
    others = sum(1 for tensor in find_tensors(unpickled.root) if id(tensor) not in listed)
    sentence = f"{others:,} tensors that are neither parameters nor buffers are not listed"
    since = "2.1 or newer" if "byteorder" in contents.facts else "1.3 to 2.0"
    details = _details(
        archive,
        writer=f"torch.jit of torch {since}",
        left_behind=(sentence,) if others else (),
        frozen=frozen,
        byteorder=contents.storages.byteorder,
        protocol=unpickled.protocol,
        globals=unpickled.globals,
        opcodes=unpickled.opcodes,
    )
    return names, details


def _constants(archive: Archive, byteorder: str, limits: Limits) -> Iterator[tuple[str, Any]]:
    """What holds tensors among the constants of a frozen program, as its code names it."""
    storages = Storages(archive, byteorder, (_CONSTANTS,))
    record = storages.find("constants.pkl")
    if record is None:
        return
    root = unpickle(record.data, persistent_load=storages.load, limits=limits).root
    for number, value in enumerate(root if isinstance(root, tuple) else ()):
        if holds_tensors(value):
            yield f"CONSTANTS.c{number}", value


@dataclass(frozen=True, slots=True)
class _ClassSource:
    """What the source of a class says; None for a list that old torch did not write."""

    is_module: bool
    parameters: tuple[str, ...] | None = None
    buffers: tuple[str, ...] | None = None


_UNKNOWN = _ClassSource(is_module=True)


class _Collector:
    """Walks a module tree and gives its tensors the names that `state_dict()` would."""

    def __init__(self, archive: Archive, limits: Limits) -> None:
        self.archive = archive
        self.limits = limits
        self.code_left = limits.max_code_bytes
        self.visits_left = limits.max_repeats
        self.files: dict[str, dict[str, _ClassSource]] = {}
        self.names = OrderedMap()
        self.metadata = OrderedMap()

    def collect(self, root: Any) -> OrderedMap:
        """The weights below `root`, parameters before buffers before submodules.

        `_metadata` says version 1 of each module, which is what torch says of a scripted one.
        """
        if not isinstance(root, Opaque):
            raise CorruptFile("its pickle holds no TorchScript module", file=self.archive.path)
        self.names.attributes["_metadata"] = self.metadata
        self._module(root, "", 0)
        return self.names

    def _module(self, module: Opaque, prefix: str, depth: int) -> None:
        self.visits_left -= 1
        if depth > self.limits.max_depth or self.visits_left < 0:
            raise LimitExceeded(
                f"its modules are nested deeper than {self.limits.max_depth}, "
                f"or mentioned more than {self.limits.max_repeats:,} times",
                file=self.archive.path,
            )
        source = self._source(module)
        if not source.is_module:
            return
        self.metadata[prefix[:-1]] = {"version": 1}
        attributes = module.attributes
        for name in _tensor_names(source, attributes):
            tensor = attributes.get(name)
            if isinstance(tensor, TensorRef):
                self.names[f"{prefix}{name}"] = tensor
        for name, child in attributes.items():
            if not isinstance(child, Opaque) or not _is_scripted(child):
                continue
            if not isinstance(child.state, dict) and holds_tensors(child):  # packed parameters
                self.names[f"{prefix}{name}"] = child.state
            else:
                self._module(child, f"{prefix}{name}.", depth + 1)

    def _source(self, module: Opaque) -> _ClassSource:
        """What `code/` says about the module's class; a lite archive may have no source."""
        func = module.func
        if not isinstance(func, Global):
            return _UNKNOWN
        file = f"code/{func.module.replace('.', '/')}.py"
        if file not in self.files:
            self.files[file] = self._parse(file)
        return self.files[file].get(func.name, _UNKNOWN)

    def _parse(self, file: str) -> dict[str, _ClassSource]:
        record = self.archive.records.get(file)
        if record is None:
            return {}
        text = read_text(record, self.code_left)
        self.code_left -= len(text)
        return dict(_classes(text))


def _tensor_names(source: _ClassSource, attributes: dict[Any, Any]) -> tuple[Any, ...]:
    """Parameters, then buffers: every other attribute, where the source does not tell them."""
    parameters = source.parameters or ()
    if source.buffers is not None:
        return (*parameters, *source.buffers)
    return (*parameters, *(name for name in attributes if name not in parameters))


def _is_scripted(node: Opaque) -> bool:
    func = node.func
    return isinstance(func, Global) and func.module.split(".", 1)[0] == _ROOT


def _classes(text: str) -> Iterator[tuple[str, _ClassSource]]:
    """The classes of a source file: names of parameters and buffers stand on a line each."""
    name, is_module = "", False
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if line.startswith("class "):
            if name:
                yield name, _ClassSource(is_module, **found)
            match = _CLASS.match(line)
            name, is_module = (match[1], match[2] == "Module") if match else ("", False)
            found = {}
        elif line.startswith("  __") and (match := _NAMES.match(line)):
            found[match[1]] = tuple(_QUOTED.findall(match[2]))
    if name:
        yield name, _ClassSource(is_module, **found)


def _details(
    archive: Archive,
    *,
    writer: str,
    left_behind: tuple[str, ...] = (),
    frozen: bool = False,
    **facts: Any,
) -> Details:
    folders = (*_WEIGHTS, _CONSTANTS) if frozen else _WEIGHTS
    weights = [r for name, r in archive.records.items() if name.startswith(folders)]
    return Details(
        size=archive.size,
        writer=writer,
        storage_bytes=sum(record.data.length for record in weights),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=(*left_behind, *_left_behind(archive, folders)),
        **facts,
    )


def _left_behind(archive: Archive, weights: tuple[str, ...]) -> Iterator[str]:
    """Sentences on what is in the archive beside the records of weights."""
    names = [
        name
        for name in archive.records
        if name not in _KNOWN and not name.startswith((*weights, ".data/"))
    ]
    code = [name for name in names if name.startswith("code/")]
    if code:
        yield f"the program ({len(code):,} records of code): only the weights are read"
    constants = [name for name in names if name.startswith(_CONSTANTS)]
    if constants:
        yield f"{len(constants):,} constants of the program are not listed"
    rest = [name for name in names if not name.startswith(("code/", _CONSTANTS))]
    if rest:
        yield f"{few(rest)} not part of the weights"
