"""TorchScript of torch 1.0 to 1.2: modules and tensors described in `model.json`.

The JSON form of `ModelDef` (caffe2/proto/torch.proto), written by
torch/csrc/jit/export.cpp (`ScriptModuleSerializer`): a tree of modules whose parameters and
buffers name entries of one list of tensors, whose bytes are records. 1.2 keeps buffers among the
attributes, in a pickle that names entries of that list; nothing tells them from other tensors
there, so that every tensor attribute is listed.
"""

from __future__ import annotations

from typing import Any

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.formats.archive import read_json
from ckptool.formats.base import Archive
from ckptool.limits import Limits
from ckptool.model import Global, Opaque, OrderedMap, Storage, TensorRef
from ckptool.symbolic import unpickle

__all__ = ["read_model_json"]

_DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT64": "int64",
    "INT32": "int32", "INT16": "int16", "INT8": "int8", "UINT8": "uint8", "BYTE": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""`caffe2::TensorProto::DataType` by name."""


def read_model_json(archive: Archive, limits: Limits) -> tuple[OrderedMap, str]:
    """The weights by full name, and who wrote the archive.

    Raises:
        CorruptFile: the JSON breaks the form, or names a record that is not there.
        LimitExceeded: it is larger or nested deeper than `limits` allows.
    """
    document = read_json(archive.records["model.json"], limits)
    attributes = archive.records.get("attributes.pkl")
    model = _Model(archive, document.get("tensors", []), limits)
    if attributes is not None:
        model.attributes = unpickle(attributes.data, limits=limits).root
    model.collect(document.get("mainModule"), "", 0)
    version = document.get("producerVersion", "1.0")
    return model.names, f"torch.jit of torch {version:.20}" if isinstance(version, str) else ""


class _Model:
    def __init__(self, archive: Archive, tensors: Any, limits: Limits) -> None:
        self.archive = archive
        self.limits = limits
        self.names = OrderedMap()
        self.storages: dict[str, Storage] = {}
        self.attributes: Any = ()
        self.tensors = [self._tensor(item) for item in self._list(tensors)]

    def collect(self, module: Any, prefix: str, depth: int) -> None:
        """Parameters, then buffers, then submodules, as `state_dict()` orders them."""
        if depth > self.limits.max_depth:
            raise LimitExceeded(
                f"its modules are nested deeper than {self.limits.max_depth}",
                file=self.archive.path,
            )
        if not isinstance(module, dict):
            raise self._corrupt("a module that is no object")
        tensors = self._list(module.get("parameters", []))
        for wanted in (False, True):
            for item in tensors:
                if isinstance(item, dict) and bool(item.get("isBuffer", False)) is wanted:
                    self._add(prefix, item.get("name"), self._count(item.get("tensorId", 0)))
        for item in self._list(module.get("attributes", [])):
            index = self._attribute(item)
            if index is not None:
                self._add(prefix, item.get("name"), index)
        for child in self._list(module.get("submodules", [])):
            name = child.get("name") if isinstance(child, dict) else None
            if not isinstance(name, str):
                raise self._corrupt("a submodule without a name")
            self.collect(child, f"{prefix}{name}.", depth + 1)

    def _add(self, prefix: str, name: Any, index: int) -> None:
        if not isinstance(name, str) or index >= len(self.tensors):
            raise self._corrupt(f"a parameter of tensor {index:,}, which is none")
        self.names[f"{prefix}{name}"] = self.tensors[index]

    def _attribute(self, item: Any) -> int | None:
        """The tensor that an attribute is, by number; None for one that is something else."""
        if not isinstance(item, dict):
            raise self._corrupt("an attribute that is no object")
        index = self._count(item.get("id", 0))
        if not isinstance(self.attributes, (list, tuple)) or index >= len(self.attributes):
            raise self._corrupt(f"attribute {index:,}, which 'attributes.pkl' does not hold")
        match self.attributes[index]:
            case Opaque(func=Global(name="build_tensor_from_id"), args=(int() as number,)):
                return self._count(number)
        return None

    def _tensor(self, item: Any) -> TensorRef:
        match item:
            case {"dataType": str() as kind, "data": {"key": str() as key}} if kind in _DTYPES:
                device = item.get("device", "cpu")
            case _:
                raise self._corrupt("a tensor without element type or record")
        if not isinstance(device, str):
            raise self._corrupt("a tensor whose device is no text")
        return TensorRef(
            dtype=_DTYPES[kind],
            shape=tuple(self._count(size) for size in self._list(item.get("dims", []))),
            stride=tuple(self._count(step) for step in self._list(item.get("strides", []))),
            offset=self._count(item.get("offset", 0)),
            storage=self._storage(key, device),
            device=device,
            requires_grad=item.get("requiresGrad") is True,
        )

    def _storage(self, key: str, device: str) -> Storage:
        if key not in self.storages:
            record = self.archive.records.get(key)
            if record is None:
                raise self._corrupt(f"a tensor whose record {key!r} is missing")
            data = record.data
            self.storages[key] = Storage(key, data, data.length, device, crc32=record.crc32)
        return self.storages[key]

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._corrupt("something else where a list should be")
        return value

    def _count(self, value: Any) -> int:
        """A count; the JSON of protobuf spells 64-bit integers as text."""
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise self._corrupt("something else where a count should be")

    def _corrupt(self, what: str) -> CorruptFile:
        return CorruptFile(f"record 'model.json' has {what}", file=self.archive.path)
