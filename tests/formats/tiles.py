"""A format for tests: a folder of an index and three files, each with tiles of all tensors.

It stands for the formats to come: it has what a new one needs, and nothing beside it is changed.
"""

import json
import sys
from contextlib import closing
from pathlib import Path
from zlib import crc32

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, Storage, TensorRef
from ckptool.files import ByteRange, MemorySource
from ckptool.files.tiled import Tile, join_tiles, make_late_range
from ckptool.formats import registry
from ckptool.formats.base import (
    Checksum,
    Findings,
    Format,
    Probe,
    Refusal,
    add_error_context,
    check_limit,
)
from ckptool.formats.safetensors_header import parse_json
from ckptool.quotes import quote

INDEX = "tiles.json"


class Tiles(Format):
    name = "tiles"
    flat = True
    refusal = Refusal("tiles", "it is a folder of tiles", quote("folder"))

    def recognize(self, probe: Probe) -> bool:
        return INDEX in probe.entries

    def read(self, probe: Probe) -> Checkpoint:
        size = sum(probe.place.size(f"{probe.path}/{name}") for name in probe.entries)
        with add_error_context(probe.path, INDEX, rules_of="tiles"):
            index = self._index(probe)
            root = OrderedMap((name, self._tensor(probe, name, one)) for name, one in index.items())
        return Checkpoint(root, self.name, probe.path, Details(size=size, writer="a test"))

    def collect_findings(self, probe: Probe) -> Findings:
        with add_error_context(probe.path, INDEX, rules_of="tiles"):
            every = [(name, t) for name, one in self._index(probe).items() for t in one["tiles"]]
            sums = [Checksum(name, self._data(probe, tile), tile["crc32"]) for name, tile in every]
            return Findings(checksums=tuple(sums))

    def _index(self, probe: Probe) -> dict:
        with closing(probe.place.open(f"{probe.path}/{INDEX}")) as source:
            check_limit("the index has", source.size, "bytes", probe.limits.max_json_bytes)
            return parse_json(source.read(0, source.size).decode(), "the index")

    def _tensor(self, probe: Probe, name: str, one: dict) -> TensorRef:
        tiles = [
            Tile(tuple(t["at"]), tuple(t["sizes"]), self._late(probe, t)) for t in one["tiles"]
        ]
        shape = tuple(one["shape"])
        data = join_tiles(probe.path, shape, 4, tiles)
        stride = tuple(one["stride"])
        return TensorRef("float32", shape, stride, 0, Storage(name, data, data.length), "cpu")

    def _late(self, probe: Probe, tile: dict) -> ByteRange:
        find = lambda: (self._data(probe, tile), tile["crc32"])  # noqa: E731
        return make_late_range(f"{probe.path}/{tile['file']}", tile["length"], find)

    def _data(self, probe: Probe, tile: dict) -> ByteRange:
        file = probe.place.open(f"{probe.path}/{tile['file']}")
        source = MemorySource(file.read(0, file.size), file.name)
        file.close()
        return ByteRange(source, tile["offset"], tile["length"])


TILES = Tiles()


def register(monkeypatch) -> None:
    """Let ckptool know of the format, as a line in the registry would."""
    entry = registry.RegisteredFormat("tiles", "tiles", folder=True)
    monkeypatch.setitem(sys.modules, "ckptool.formats.tiles", sys.modules[__name__])
    monkeypatch.setattr(registry, "REGISTRY", (entry, *registry.REGISTRY))


def write(folder: Path, tensors: dict) -> None:
    """Lay float32 tensors out: each cut in three along its last axis, a part to a file."""
    files = {f"{number}.bin": b"" for number in range(3)}
    index = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        tiles, start = [], 0
        for file, part in zip(files, tensor.tensor_split(3, -1), strict=True):
            raw = part.contiguous().numpy().tobytes()
            at = [*[0] * (tensor.dim() - 1), start]
            place = {"file": file, "offset": len(files[file]), "length": len(raw)}
            tiles.append({**place, "at": at, "sizes": list(part.shape), "crc32": crc32(raw)})
            files[file] += raw
            start += part.shape[-1]
        index[name] = {"shape": list(tensor.shape), "stride": tensor.stride(), "tiles": tiles}
    for file, raw in files.items():
        (folder / file).write_bytes(raw)
    (folder / INDEX).write_text(json.dumps(index))
