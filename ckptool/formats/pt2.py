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
    open_archive,
    parse_count,
    parse_counts,
    read_json,
    read_text,
    read_zip,
)
from ckptool.formats.base import Archive, Format, Probe, Record, Refusal, add_error_context
from ckptool.formats.torch_zip import SHORT, check_byteorder, read_contents
from ckptool.limits import Limits
from ckptool.quotes import quote

_FORMAT_RECORD = "archive_format"
_STATE_DICT_RECORDS = ("serialized_state_dict.pt", "serialized_state_dict.json")
"""Up to 2.7; 2.1 used the extension `.json` for the same bytes."""
_PROGRAM_RECORD = "serialized_exported_program.json"
_MODELS_FOLDER, _WEIGHTS_FOLDER, _CONSTANTS_FOLDER = "models/", "data/weights/", "data/constants/"
_COMPILED_FOLDER, _COMPILED_CONFIG_NAME = "data/aotinductor/", "/weights_config.json"

_DTYPE_BY_CODE = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
    28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
"""`ScalarType` of torch/_export/serde/schema.py."""

_VERSION = re.compile(rb'"torch_version": ?"([0-9A-Za-z.+-]{1,40})"')
_TAIL_BYTES = 4096


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
        """Return whether `archive_format` is pt2, or a zip has a program and its state."""
        archive = probe.compute_once(open_archive)
        stated = archive.records.get(_FORMAT_RECORD)
        # The length is checked first: a record of another kind may be long.
        if stated is not None and stated.data.length == 3 and stated.data.read() == b"pt2":
            return True
        return _PROGRAM_RECORD in archive.records and _find_flat_record(archive) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the weights by name; for several models, under the name of each.

        Archives up to torch 2.7 have one record with the state dict.
        """
        archive = probe.compute_once(open_archive)
        reader = _Reader(archive, probe.limits)
        flat = _find_flat_record(archive)
        if flat is not None:
            root = _read_nested_file(flat, probe.limits)
        else:
            models = reader.read_models()
            root = next(iter(models.values())) if len(models) == 1 else models
        return Checkpoint(
            root, self.name, probe.path, _describe_file(archive, reader), sources=archive.sources
        )


PT2 = PT2Archive()


def _find_flat_record(archive: Archive) -> Record | None:
    """Return the torch.save file in an archive of torch 2.1 to 2.7; None in later ones."""
    return next(
        (archive.records[name] for name in _STATE_DICT_RECORDS if name in archive.records), None
    )


def _read_nested_file(record: Record, limits: Limits) -> Any:
    """Return the tree of the torch.save file in a record."""
    return read_contents(read_zip(record.data, limits), limits).unpickled.root


class _Reader:
    """Reads the descriptions in one archive; weights in one record share a storage."""

    def __init__(self, archive: Archive, limits: Limits) -> None:
        """Read the byte order of `archive`; the weights are read on demand."""
        self.archive = archive
        self.limits = limits
        self.storages: dict[str, Storage] = {}
        """The storages, by the name of the record."""
        self.saved: dict[str, TensorRef] = {}
        """Tensors in torch.save files of their own, by path."""
        record = archive.records.get("byteorder")
        self.byteorder = check_byteorder(read_text(record, SHORT) if record else "little")

    def read_models(self) -> OrderedMap:
        """Return the weights of each exported model by its name.

        Compiled models follow; one that is exported as well is left out, with the same weights.
        """
        models = OrderedMap()
        records = self.archive.records
        for name in records:
            if name.startswith(_MODELS_FOLDER) and name.endswith(".json"):
                model = name.removeprefix(_MODELS_FOLDER).removesuffix(".json")
                models[model] = self._read_exported(model)
        for name in records:
            if name.startswith(_COMPILED_FOLDER) and name.endswith(_COMPILED_CONFIG_NAME):
                model = name.removeprefix(_COMPILED_FOLDER).removesuffix(_COMPILED_CONFIG_NAME)
                if model not in models:
                    models[model] = self._read_compiled(records[name])
        return models

    def _read_exported(self, model: str) -> Any:
        """Return the weights of an exported program: from a torch.save file, or a record each."""
        saved = self.archive.records.get(f"{_WEIGHTS_FOLDER}{model}.pt")
        if saved is not None:
            return _read_nested_file(saved, self.limits)
        name = f"{_WEIGHTS_FOLDER}{model}_weights_config.json"
        record = self.archive.records.get(name)
        config = read_json(record, self.limits).get("config") if record else None
        if not isinstance(config, dict):
            raise CorruptFile(f"record {name!r} is missing or describes no tensors")
        return OrderedMap(
            (key, self._read_weight(key, description)) for key, description in config.items()
        )

    def _read_weight(self, name: str, description: Any) -> TensorRef:
        """Return a weight from its description in the configuration."""
        with add_error_context(self.archive.path, f"weight {name!r}", rules_of="PT2"):
            if description.get("use_pickle") is True:
                return self._read_saved_tensor(description["path_name"])
            tensor = self._make_tensor(description["path_name"], description["tensor_meta"])
            if description.get("is_param") is True:
                return replace(tensor, wrapping=(Wrapping("parameter", tensor.requires_grad),))
            return tensor

    def _make_tensor(self, path: str, meta: Mapping[str, Any]) -> TensorRef:
        """Return the tensor over a record, with dtype, shape and device from `meta`.

        Without bytes in the record, it is a meta tensor.
        """
        record, device = self.archive.records[f"{_WEIGHTS_FOLDER}{path}"], meta["device"]
        tensor = TensorRef(
            dtype=_DTYPE_BY_CODE[meta["dtype"]],
            shape=parse_counts(meta["sizes"], self.limits),
            stride=parse_counts(meta["strides"], self.limits),
            offset=parse_count(meta["storage_offset"]),
            storage=None,
            device=f"{device['type']}:{device.get('index')}".removesuffix(":None"),
            requires_grad=meta.get("requires_grad") is True,
            kind="meta",
        )
        if record.data.length == 0 and tensor.numel:
            return tensor  # exported with fake weights: torch loads zeros
        return replace(tensor, storage=self._find_storage(record, tensor.device), kind="strided")

    def _find_storage(self, record: Record, device: str) -> Storage:
        """Return the storage of a record, one object for all its tensors."""
        if record.name not in self.storages:
            data = record.data
            self.storages[record.name] = Storage(
                record.name.rsplit("/", 1)[-1], data, data.length, device, self.byteorder,
                record.crc32,
            )  # fmt: skip
        return self.storages[record.name]

    def _read_saved_tensor(self, path: str) -> TensorRef:
        """Return the tensor of a record that is a torch.save file."""
        if path not in self.saved:
            tensor = _read_nested_file(
                self.archive.records[f"{_WEIGHTS_FOLDER}{path}"], self.limits
            )
            if not isinstance(tensor, TensorRef):
                raise CorruptFile("is not a tensor")
            self.saved[path] = tensor
        return self.saved[path]

    def _read_compiled(self, record: Record) -> OrderedMap:
        """Return the weights of a compiled package by name, each a view of a saved tensor.

        `record` is a JSON object: name -> [path of the saved tensor, shape, stride, offset].
        """
        weights = OrderedMap()
        for name, view in read_json(record, self.limits).items():
            with add_error_context(self.archive.path, f"weight {name!r}", rules_of="PT2"):
                path, shape, stride, offset = view
                weights[name] = replace(
                    self._read_saved_tensor(path),
                    shape=parse_counts(shape, self.limits),
                    stride=parse_counts(stride, self.limits),
                    offset=parse_count(offset),
                )
        return weights


def _describe_file(archive: Archive, reader: _Reader) -> Details:
    """Return the details of an archive: writer, sizes, and a phrase for each part not read."""
    flat = _find_flat_record(archive)
    if flat is not None:  # one record has all weights
        versions, tensor_records = "2.1 to 2.7", [flat]
    else:
        versions = "2.8 or newer"
        tensor_records = [
            record
            for name, record in archive.records.items()
            if name.startswith((_WEIGHTS_FOLDER, _CONSTANTS_FOLDER)) and not name.endswith(".json")
        ]
    return Details(
        size=archive.size,
        writer=f"torch.export of torch {versions}",
        torch_version=_read_torch_version(archive),
        byteorder=reader.byteorder,
        storage_bytes=sum(record.data.length for record in tensor_records),
        dead_bytes=archive.dead_bytes,
        notes=archive.notes,
        left_behind=tuple(_describe_unread(archive)),
    )


def _read_torch_version(archive: Archive) -> str | None:
    """Return the torch version that an exported program states, or None.

    Only the end of its JSON is searched, which has the version: a program can have many megabytes.
    """
    for name, record in archive.records.items():
        if name.startswith(_MODELS_FOLDER) and name.endswith(".json"):
            start = max(record.data.length - _TAIL_BYTES, 0)
            stated = _VERSION.search(record.data.read(start))
            return stated[1].decode() if stated else None
    return None


def _describe_unread(archive: Archive) -> Iterator[str]:
    """Yield a phrase for each part of the archive that is not read."""
    yield "the exported program (only its weights are read)"
    constants = [
        name
        for name in archive.records
        if name.startswith(_CONSTANTS_FOLDER) and not name.endswith(".json")
    ]
    if constants:
        yield (
            f"{len(constants):,} records of constants and non-persistent buffers, which are "
            "not part of the state dict"
        )
