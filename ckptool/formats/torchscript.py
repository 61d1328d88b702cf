"""Read TorchScript archives as the state dict of their module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import Global, Opaque, OrderedMap, Storage, TensorRef, find_tensors
from ckptool.core.modules import Visits, has_tensors
from ckptool.core.sections import CONSTANT
from ckptool.errors import CorruptFile, LimitExceeded, NotRepresentable
from ckptool.formats.archive import open_archive, parse_count, parse_counts, read_json, read_text
from ckptool.formats.base import (
    OPAQUE_CONSTANTS,
    Archive,
    Format,
    Probe,
    Refusal,
    add_error_context,
)
from ckptool.formats.torch_zip import Storages, read_contents
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.symbolic import unpickle
from ckptool.words import counted, few

_DTYPE_BY_CODE = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT64": "int64",
    "INT32": "int32", "INT16": "int16", "INT8": "int8", "UINT8": "uint8", "BYTE": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""`caffe2::TensorProto::DataType` by name."""


def _read_model_json(archive: Archive, limits: Limits) -> tuple[OrderedMap, str]:
    """Return the weights by full name, and the writer of the archive."""
    document = read_json(archive.records["model.json"], limits)
    with add_error_context(archive.path, "record 'model.json'", rules_of="TorchScript"):
        model = _Model(archive, document, limits)
        model.collect(document["mainModule"], prefix="", depth=0)
    version = document.get("producerVersion", "1.0")
    writer = f"torch.jit of torch {version:.20}" if isinstance(version, str) else ""
    return model.weights, writer


class _Model:
    """The weights that `model.json` of torch 1.0 describes, by full name.

    It has a list of all tensors, and nested modules that refer to them by their position there.
    """

    def __init__(self, archive: Archive, document: Mapping[str, Any], limits: Limits) -> None:
        """Make the tensors of `document`, the content of `model.json`."""
        self.archive = archive
        self.limits = limits
        self.weights = OrderedMap()
        """The result, which `collect` fills."""
        self.storages: dict[str, Storage] = {}
        """The storages, by the name of the record."""
        attributes = archive.records.get("attributes.pkl")
        self.attribute_values = unpickle(attributes.data, limits=limits).root if attributes else ()
        """The values of module attributes, by their `id` in `model.json`."""
        self.tensors = [self._make_tensor(item) for item in document.get("tensors", [])]
        """The tensors, by their `tensorId` in `model.json`."""

    def collect(self, module: Any, prefix: str, depth: int) -> None:
        """Add parameters, then buffers, then submodules, as `state_dict()` orders them.

        A tensor may also be the value of an attribute, where the pickle has a call of
        `build_tensor_from_id` with its position.
        """
        if depth > self.limits.max_depth:
            raise LimitExceeded(f"modules are nested deeper than {self.limits.max_depth}")
        for item in sorted(
            module.get("parameters", []), key=lambda item: bool(item.get("isBuffer"))
        ):
            # The file is a protobuf message as JSON, which leaves out zeros.
            self._add_tensor(prefix, item, item.get("tensorId", 0))
        for item in module.get("attributes", []):
            match self.attribute_values[parse_count(item.get("id", 0))]:
                case Opaque(func=Global(name="build_tensor_from_id"), args=(tensor_id,)):
                    self._add_tensor(prefix, item, tensor_id)
        for child in module.get("submodules", []):
            self.collect(child, prefix + child["name"] + ".", depth + 1)

    def _add_tensor(self, prefix: str, item: Mapping[str, Any], tensor_id: Any) -> None:
        """Add the tensor at the position `tensor_id` under the name in `item`."""
        self.weights[prefix + item["name"]] = self.tensors[parse_count(tensor_id)]

    def _make_tensor(self, item: Mapping[str, Any]) -> TensorRef:
        """Return the tensor that an item of `tensors` describes."""
        key, device = item["data"]["key"], item.get("device", "cpu")
        if not isinstance(device, str):
            raise TypeError("a device is not text")
        if key not in self.storages:
            record = self.archive.records[key]
            data, crc = record.data, record.crc32
            self.storages[key] = Storage(key, data, data.length, device, crc32=crc)
        return TensorRef(
            dtype=_DTYPE_BY_CODE[item["dataType"]],
            shape=parse_counts(item.get("dims", []), self.limits),
            stride=parse_counts(item.get("strides", []), self.limits),
            offset=parse_count(item.get("offset", 0)),
            storage=self.storages[key],
            device=device,
            requires_grad=item.get("requiresGrad") is True,
        )


_PROGRAM_PACKAGE = "__torch__"
_CLASS = re.compile(r"class ([^\s(:]+)(?:\((.*)\))?:")
_TENSOR_LIST = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WEIGHT_FOLDERS = ("data/", "tensors/")
_CONSTANTS_FOLDER = "constants/"
PACKED = ("__torch__.torch.classes.quantized.", "__torch__.torch.classes.xnnpack.")
"""The prefixes of classes of packed weights."""
PACKED_WEIGHTS = "its weights are packed for quantized layers, so it has no plain state dict"
RUN_IT = "run it with torch.jit.load, and take the state dict from the original model"
_READ_RECORDS = frozenset(
    {"data.pkl", "constants.pkl", "model.json", "attributes.pkl", "version", "byteorder"}
)


class TorchScript(Format):
    """The format `torchscript`."""

    name = "torchscript"
    is_program = True
    refusal = Refusal(
        "torchscript",
        "it is a TorchScript archive: a program with its weights",
        quote("torchscript"),
        instead="torch.jit.load returns a module, not a state dict",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether a zip has `constants.pkl` and `data.pkl`, or `model.json` of 1.0."""
        find = probe.compute_once(open_archive).find
        if find("constants.pkl") is not None and find("data.pkl") is not None:
            return True
        return find("model.json") is not None and find("version") is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the weights by full name; read only the directory, the pickle and the source."""
        archive = probe.compute_once(open_archive)
        if "model.json" in archive.records and "data.pkl" not in archive.records:  # torch 1.0
            root, writer = _read_model_json(archive, probe.limits)
            details = _describe_file(archive, writer=writer)
        else:
            root, details = _read_pickled(archive, probe.limits)
        return Checkpoint(root, self.name, probe.path, details, sources=archive.sources)

    def refuse_unusable(self, checkpoint: Checkpoint) -> None:
        """Refuse packed weights: the code to unpack them is in the program, which is left out."""
        if has_packed_weights(checkpoint.root):
            raise NotRepresentable(PACKED_WEIGHTS, file=checkpoint.path or None, hint=RUN_IT)


def has_packed_weights(root: Any) -> bool:
    """Return whether modules have a packed state that only their code can convert to weights."""
    values = root.values() if isinstance(root, dict) else (root,)
    return any(not isinstance(value, TensorRef) and has_tensors(value) for value in values)


TORCHSCRIPT = TorchScript()


def _read_pickled(archive: Archive, limits: Limits) -> tuple[OrderedMap, Details]:
    """Return the weights by full name, and the details, of an archive with `data.pkl`.

    A frozen module (its attribute `training` is gone) has weights among the constants, too.
    """
    contents = read_contents(archive, limits)
    unpickled = contents.unpickled
    collector = _Collector(archive, limits)
    weights = collector.collect(unpickled.root)
    weight_ids = {id(tensor) for tensor in find_tensors(weights)}
    other_count = sum(1 for tensor in find_tensors(unpickled.root) if id(tensor) not in weight_ids)
    is_frozen = "training" not in unpickled.root.attributes
    if is_frozen:
        weights.update(_read_constants(archive, contents.storages.byteorder, limits))
    unread_phrases = []
    if collector.unstored_constants:
        count = counted(collector.unstored_constants, "weight")
        unread_phrases.append(f"{count}: {OPAQUE_CONSTANTS}")
    if other_count:
        unread_phrases.append(
            f"{other_count:,} tensors that are neither parameters nor buffers (not listed)"
        )
    versions = "2.1 or newer" if "byteorder" in contents.small_records else "1.3 to 2.0"
    details = _describe_file(
        archive,
        writer=f"torch.jit of torch {versions}",
        left_behind=tuple(unread_phrases),
        is_frozen=is_frozen,
        byteorder=contents.storages.byteorder,
        protocol=unpickled.protocol,
        globals=unpickled.globals,
        opcodes=unpickled.opcodes,
    )
    return weights, details


def _read_constants(archive: Archive, byteorder: str, limits: Limits) -> Iterator[tuple[str, Any]]:
    """Yield the tensors among the constants of a frozen program, by their names in its code.

    The code refers to them as `CONSTANTS.c0`, `CONSTANTS.c1`, by their positions in the pickle.
    """
    record = archive.find("constants.pkl")
    if record is None:
        return
    storages = Storages(archive, byteorder, (_CONSTANTS_FOLDER,))
    root = unpickle(record.data, persistent_load=storages.load, limits=limits).root
    for position, value in enumerate(root if isinstance(root, tuple) else ()):
        if has_tensors(value):
            yield f"{CONSTANT}{position}", value


@dataclass(frozen=True, slots=True)
class _ClassSource:
    """The names of parameters and buffers in the source of a class.

    None for a list that old torch did not write.
    """

    is_module: bool
    parameters: tuple[str, ...] | None = None
    buffers: tuple[str, ...] | None = None


_UNKNOWN_CLASS = _ClassSource(is_module=True)


class _Collector:
    """Walks a module tree, and gives its tensors the keys of `state_dict()`."""

    def __init__(self, archive: Archive, limits: Limits) -> None:
        """Start without weights; `limits` bounds the code and the modules to visit."""
        self.archive = archive
        self.code_left = limits.max_code_bytes
        """The bytes of source code that may still be read."""
        self.visits = Visits(limits)
        self.classes_by_file: dict[str, dict[str, _ClassSource]] = {}
        """The classes by name in each source file that was read."""
        self.unstored_constants = 0
        """The number of weights that the code uses and the file does not contain."""
        self.weights = OrderedMap()
        self.metadata = OrderedMap()
        """The `_metadata` of the state dict."""

    def collect(self, root: Any) -> OrderedMap:
        """Return the weights below `root`, parameters before buffers before submodules.

        `_metadata` has version 1 for each module, as torch has for scripted modules.
        """
        if not isinstance(root, Opaque):
            raise CorruptFile("the pickle contains no TorchScript module")
        self.weights.attributes["_metadata"] = self.metadata
        self._collect_module(root, prefix="", depth=0)
        return self.weights

    def _collect_module(self, module: Opaque, prefix: str, depth: int) -> None:
        """Add the weights of a module under `prefix`, then those of its submodules.

        `prefix` is empty or ends with a dot. A class that is no module has no weights.
        """
        self.visits.enter(module, len(module.attributes), depth)
        source = self._find_class_source(module)
        if not source.is_module:
            return
        self.metadata[prefix.removesuffix(".")] = {"version": 1}  # the default of nn.Module
        attributes = module.attributes
        for name in _list_tensor_names(source, attributes):
            tensor = attributes.get(name)
            if isinstance(tensor, TensorRef):
                self.weights[f"{prefix}{name}"] = tensor
        for name, child in attributes.items():
            if not isinstance(child, Opaque) or not _is_scripted(child):
                continue
            # The parameters of a quantized layer are packed: its code makes tensors of its state.
            if not isinstance(child.state, dict) and has_tensors(child):
                self.weights[f"{prefix}{name}"] = child.state
            else:
                self._collect_module(child, f"{prefix}{name}.", depth + 1)

    def _find_class_source(self, module: Opaque) -> _ClassSource:
        """Return the names of parameters and buffers that the module's class lists in `code/`.

        Without its source, as in a lite archive, each tensor of a module counts as a weight.
        """
        func = module.func
        if not isinstance(func, Global):
            return _UNKNOWN_CLASS
        file = f"code/{func.module.replace('.', '/')}.py"
        if file not in self.classes_by_file:
            self.classes_by_file[file] = self._parse_file(file)
        return self.classes_by_file[file].get(func.name, _UNKNOWN_CLASS)

    def _parse_file(self, file: str) -> dict[str, _ClassSource]:
        """Return the parameter and buffer names of each class in a source file, by class name.

        Empty if the file is missing.

        Also counts its mkldnn constants, which torch does not save.
        """
        record = self.archive.records.get(file)
        if record is None:
            return {}
        text = read_text(record, self.code_left)
        self.code_left -= len(text)
        self.unstored_constants += text.count("= ops.prim.ConstantMKLDNNTensor()")
        return dict(_parse_classes(text))


def _list_tensor_names(source: _ClassSource, attributes: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the names of parameters, then of buffers.

    If the source does not list buffers, any other attribute may be one.
    """
    parameters = source.parameters or ()
    if source.buffers is not None:
        return (*parameters, *source.buffers)
    return (*parameters, *(name for name in attributes if name not in parameters))


def _is_scripted(node: Opaque) -> bool:
    """Return whether an object has a class of the program, which is in the package `__torch__`."""
    func = node.func
    return isinstance(func, Global) and func.module.partition(".")[0] == _PROGRAM_PACKAGE


def _parse_classes(text: str) -> Iterator[tuple[str, _ClassSource]]:
    """Yield the classes of a source file, which lists parameters and buffers on one line each.

    For example `__parameters__ = ["weight", "bias", ]` in the line after `class Linear(Module):`.
    """
    name, is_module = "", False
    lists: dict[str, tuple[str, ...]] = {}  # by `parameters` or `buffers`
    for line in text.splitlines():
        if line.startswith("class "):
            if name:  # the class before this one is complete
                yield name, _ClassSource(is_module, **lists)
            match = _CLASS.match(line)
            name, is_module = (match[1], match[2] == "Module") if match else ("", False)
            lists = {}
        elif line.startswith("  __") and (match := _TENSOR_LIST.match(line)):
            lists[match[1]] = tuple(_QUOTED.findall(match[2]))
    if name:
        yield name, _ClassSource(is_module, **lists)


def _describe_file(
    archive: Archive,
    *,
    writer: str,
    left_behind: tuple[str, ...] = (),
    is_frozen: bool = False,
    **pickle_details: Any,
) -> Details:
    """Return the details of an archive, with those of its pickle by name.

    The constants of a frozen module are weights; those of another one are not read.
    """
    folders = (*_WEIGHT_FOLDERS, _CONSTANTS_FOLDER) if is_frozen else _WEIGHT_FOLDERS
    records = [record for name, record in archive.records.items() if name.startswith(folders)]
    return Details(
        size=archive.size,
        writer=writer,
        storage_bytes=sum(record.data.length for record in records),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=(*left_behind, *_describe_unread(archive, folders)),
        **pickle_details,
    )


def _describe_unread(archive: Archive, weight_folders: tuple[str, ...]) -> Iterator[str]:
    """Yield a phrase on the code, the constants and the other records that are not read.

    `.data/` has records of the archive itself, for example its version.
    """
    names = [
        name
        for name in archive.records
        if name not in _READ_RECORDS and not name.startswith((*weight_folders, ".data/"))
    ]
    code = [name for name in names if name.startswith("code/")]
    if code:
        yield f"the program ({len(code):,} code records; only its weights are read)"
    constants = [name for name in names if name.startswith(_CONSTANTS_FOLDER)]
    if constants:
        yield f"{len(constants):,} constants of the program (not listed)"
    others = [name for name in names if not name.startswith(("code/", _CONSTANTS_FOLDER))]
    if others:
        yield f"{counted(len(others), 'other record')} of the archive: {few(others, 3)}"
