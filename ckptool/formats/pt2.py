"""PT2 archives (`torch.export.save`): the weights of an exported program.

Now a zip with `archive_format` = pt2, where `data/weights/MODEL_weights_config.json` has the name,
dtype, shape and record of each weight (torch/export/pt2_archive/_package.py); at first it had
`data/weights/MODEL.pt` instead, a torch.save file as a record. Up to 2.7 it was a plain zip with
another such file, `serialized_state_dict.pt`. Compiled packages (AOTInductor) list views of saved
tensors in `data/aotinductor/MODEL/weights_config.json`.

The result is `ExportedProgram.state_dict`: parameters and persistent buffers. Constants and
non-persistent buffers are not part of it; a note counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, Storage, TensorRef, Wrapping
from ckptool.errors import CorruptFile
from ckptool.formats.archive import (
    count_of,
    counts_of,
    open_archive,
    read_json,
    read_text,
    zip_archive,
)
from ckptool.formats.base import Archive, Format, Probe, Record, Refusal, naming
from ckptool.formats.torch_zip import known_byteorder, read_contents
from ckptool.limits import Limits
from ckptool.quotes import quote

_FORMAT = "archive_format"
_FLAT = ("serialized_state_dict.pt", "serialized_state_dict.json")
"""Up to 2.7; 2.1 used the extension `.json` for the same bytes."""
_FLAT_PROGRAM = "serialized_exported_program.json"
_MODELS, _WEIGHTS, _CONSTANTS = "models/", "data/weights/", "data/constants/"
_COMPILED, _COMPILED_CONFIG = "data/aotinductor/", "/weights_config.json"

_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
    28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
"""`ScalarType` of torch/_export/serde/schema.py."""

_VERSION = re.compile(rb'"torch_version": ?"([0-9A-Za-z.+-]{1,40})"')
_TAIL = 4096


class PT2Archive(Format):
    """The format `pt2`."""

    name = "pt2"
    is_program = True
    refusal = Refusal(
        "exported-program",
        "it is an exported program (torch.export), with its weights",
        quote("no-pickle"),
        instead="torch.export.load returns a program, not a state dict",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether `archive_format` is pt2, or it has a program and its state."""
        archive = probe.ask(open_archive)
        mark = archive.records.get(_FORMAT)
        if mark is not None and mark.data.length == 3 and mark.data.read() == b"pt2":
            return True
        return _FLAT_PROGRAM in archive.records and _flat_record(archive) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the weights by name; for several models, under the name of each."""
        archive = probe.ask(open_archive)
        reader = _Reader(archive, probe.limits)
        flat = _flat_record(archive)
        if flat is not None:
            root = _nested(flat, probe.limits)
        else:
            models = reader.models()
            root = next(iter(models.values())) if len(models) == 1 else models
        return Checkpoint(
            root, self.name, probe.path, _details(archive, reader), sources=archive.sources
        )


PT2 = PT2Archive()


def _flat_record(archive: Archive) -> Record | None:
    return next((archive.records[name] for name in _FLAT if name in archive.records), None)


def _nested(record: Record, limits: Limits) -> Any:
    return read_contents(zip_archive(record.data, limits), limits).unpickled.root


class _Reader:
    """Reads the descriptions in one archive; weights in one record share a storage."""

    def __init__(self, archive: Archive, limits: Limits) -> None:
        self.archive = archive
        self.limits = limits
        self.storages: dict[str, Storage] = {}
        self.saved: dict[str, TensorRef] = {}
        order = archive.records.get("byteorder")
        self.byteorder = known_byteorder(read_text(order, 64) if order else "little")

    def models(self) -> OrderedMap:
        """Return the weights of each model, by the model's name."""
        models = OrderedMap()
        names = self.archive.records
        for name in names:
            if name.startswith(_MODELS) and name.endswith(".json"):
                model = name[len(_MODELS) : -len(".json")]
                models[model] = self._exported(model)
        for name in names:
            if name.startswith(_COMPILED) and name.endswith(_COMPILED_CONFIG):
                model = name[len(_COMPILED) : -len(_COMPILED_CONFIG)]
                if model not in models:
                    models[model] = self._compiled(names[name])
        return models

    def _exported(self, model: str) -> Any:
        saved = self.archive.records.get(f"{_WEIGHTS}{model}.pt")
        if saved is not None:
            return _nested(saved, self.limits)
        name = f"{_WEIGHTS}{model}_weights_config.json"
        record = self.archive.records.get(name)
        config = read_json(record, self.limits).get("config") if record else None
        if not isinstance(config, dict):
            raise CorruptFile(f"record {name!r} is missing or describes no tensors")
        return OrderedMap((key, self._weight(key, about)) for key, about in config.items())

    def _weight(self, name: str, about: Any) -> TensorRef:
        with naming(self.archive.path, f"weight {name!r}", rules_of="PT2"):
            if about.get("use_pickle") is True:
                return self._saved(about["path_name"])
            tensor = self._tensor(about["path_name"], about["tensor_meta"])
            if about.get("is_param") is True:
                return replace(tensor, wrapping=(Wrapping("parameter", tensor.requires_grad),))
            return tensor

    def _tensor(self, path: str, meta: Mapping[str, Any]) -> TensorRef:
        record, device = self.archive.records[f"{_WEIGHTS}{path}"], meta["device"]
        tensor = TensorRef(
            dtype=_DTYPES[meta["dtype"]],
            shape=counts_of(meta["sizes"], self.limits),
            stride=counts_of(meta["strides"], self.limits),
            offset=count_of(meta["storage_offset"]),
            storage=None,
            device=f"{device['type']}:{device.get('index')}".removesuffix(":None"),
            requires_grad=meta.get("requires_grad") is True,
            kind="meta",
        )
        if record.data.length == 0 and tensor.numel:
            return tensor  # exported with fake weights: torch loads zeros
        return replace(tensor, storage=self._storage(record, tensor.device), kind="strided")

    def _storage(self, record: Record, device: str) -> Storage:
        if record.name not in self.storages:
            data = record.data
            self.storages[record.name] = Storage(
                record.name.rsplit("/", 1)[-1], data, data.length, device, self.byteorder,
                record.crc32,
            )  # fmt: skip
        return self.storages[record.name]

    def _saved(self, path: str) -> TensorRef:
        """Return the tensor of a record that is a torch.save file."""
        if path not in self.saved:
            tensor = _nested(self.archive.records[f"{_WEIGHTS}{path}"], self.limits)
            if not isinstance(tensor, TensorRef):
                raise CorruptFile("is not a tensor")
            self.saved[path] = tensor
        return self.saved[path]

    def _compiled(self, record: Record) -> OrderedMap:
        weights = OrderedMap()
        for name, about in read_json(record, self.limits).items():
            with naming(self.archive.path, f"weight {name!r}", rules_of="PT2"):
                path, shape, stride, offset = about
                weights[name] = replace(
                    self._saved(path),
                    shape=counts_of(shape, self.limits),
                    stride=counts_of(stride, self.limits),
                    offset=count_of(offset),
                )
        return weights


def _details(archive: Archive, reader: _Reader) -> Details:
    payloads = [
        record
        for name, record in archive.records.items()
        if name.startswith((_WEIGHTS, _CONSTANTS)) and not name.endswith(".json")
    ]
    flat = _flat_record(archive)
    return Details(
        size=archive.size,
        writer="torch.export of torch 2.1 to 2.7" if flat else "torch.export of torch 2.8 or newer",
        torch_version=_torch_version(archive),
        byteorder=reader.byteorder,
        storage_bytes=sum(record.data.length for record in (flat and [flat]) or payloads),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=tuple(_left_behind(archive)),
    )


def _torch_version(archive: Archive) -> str | None:
    """Return the torch version of an exported program, which is at the end of many megabytes."""
    for name, record in archive.records.items():
        if name.startswith(_MODELS) and name.endswith(".json"):
            start = max(record.data.length - _TAIL, 0)
            stated = _VERSION.search(record.data.read(start))
            return stated[1].decode() if stated else None
    return None


def _left_behind(archive: Archive) -> Iterator[str]:
    yield "the exported program (only its weights are read)"
    constants = [
        name
        for name in archive.records
        if name.startswith(_CONSTANTS) and not name.endswith(".json")
    ]
    if constants:
        yield (
            f"{len(constants):,} records of constants and non-persistent buffers, which are "
            "not part of the state dict"
        )
