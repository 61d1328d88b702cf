"""Zips made by hand, for the tests: any lie a directory can tell; and a place to write to."""

import hashlib
import io
import struct
import tarfile
import zlib
from dataclasses import dataclass, field

import torch

from ckptool.errors import CheckpointError
from ckptool.files import ByteRange, MemorySource
from ckptool.formats import WritePlan
from ckptool.formats.archive import read_zip
from ckptool.formats.base import Probe
from ckptool.limits import DEFAULT_LIMITS

FAR = 0xFFFFFFFF


@dataclass
class Entry:
    """A record as its headers state it; what is None is told truly."""

    name: str
    data: bytes = b""
    method: int = 0
    flags: int = 0
    crc: int | None = None
    packed_size: int | None = None
    size: int | None = None
    header: int | None = None
    local_name: str | None = None
    disk: int = 0
    extra: bytes = b""
    """Of the directory's entry alone."""
    local_extra: bytes = b""
    hidden: bool = False
    """Not in the directory."""


@dataclass
class End:
    """What the end record states; what is None is told truly."""

    entries: int | None = None
    on_disk: int | None = None
    disk: int = 0
    length: int | None = None
    offset: int | None = None
    comment: bytes = b""
    zip64: dict = field(default_factory=dict)
    """Fields of a zip64 end record; none is written where this is empty."""


def build(entries, end=None, *, before=b"", gap=b""):
    """The bytes of a zip of `entries`, each an `Entry` or (name, bytes)."""
    entries = [entry if isinstance(entry, Entry) else Entry(*entry) for entry in entries]
    end = end or End()
    out = bytearray(before)
    directory = bytearray()
    for entry in entries:
        packed = entry.data
        if entry.method == 8:
            compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = compressor.compress(entry.data) + compressor.flush()
        header = len(out)
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        size = len(entry.data) if entry.size is None else entry.size
        packed_size = len(packed) if entry.packed_size is None else entry.packed_size
        name = entry.name.encode()
        local = name if entry.local_name is None else entry.local_name.encode()
        fixed = (20, entry.flags, entry.method, 0, 0, crc, packed_size, size)
        out += struct.pack("<4s5H3I2H", b"PK\3\4", *fixed, len(local), len(entry.local_extra))
        out += local + entry.local_extra + packed
        if entry.hidden:
            continue
        header = header if entry.header is None else entry.header
        lengths = (len(name), len(entry.extra), 0)
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, *fixed, *lengths, entry.disk, 0, 0, header
        )
        directory += name + entry.extra
    offset = len(out)
    out += (
        directory
        + gap
        + end_records(end, sum(not entry.hidden for entry in entries), len(directory), offset)
    )
    return bytes(out)


def end_records(end, count, length, offset):
    """The end record, a zip64 one before it if asked for."""
    out = b""
    if end.zip64:
        told = {"entries": count, "on_disk": count, "length": length, "offset": offset}
        told = {**told, "at": offset + length, "disks": 1, "signature": b"PK\6\6", **end.zip64}
        out += struct.pack(
            "<4sQ2H2I4Q", told["signature"], 44, 45, 45, 0, 0, told["on_disk"], told["entries"],
            told["length"], told["offset"],
        )  # fmt: skip
        out += struct.pack("<4sIQI", b"PK\6\7", 0, told["at"], told["disks"])
    entries = count if end.entries is None else end.entries
    return (
        out
        + struct.pack(
            "<4s4H2IH",
            b"PK\5\6",
            end.disk,
            end.disk,
            entries if end.on_disk is None else end.on_disk,
            entries,
            length if end.length is None else end.length,
            offset if end.offset is None else end.offset,
            len(end.comment),
        )
        + end.comment
    )


def archive(data, limits=DEFAULT_LIMITS):
    """The archive in `data`."""
    return read_zip(ByteRange(MemorySource(data, "test.zip"), 0, len(data)), limits)


def read(form, path, limits=DEFAULT_LIMITS):
    """What a format reads from `path`, once it has recognized it."""
    probe = Probe(path, limits)
    try:
        assert form.recognize(probe)
        return form.read(probe)
    except CheckpointError:
        probe.close()
        raise


def save(folder, data, name="model.pth"):
    path = folder / name
    path.write_bytes(data)
    return path


def saved(content):
    """The bytes that torch saves."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def resaved(path, change):
    """Change what torch saved into a file."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def tarred(members, form=tarfile.PAX_FORMAT, mtime=1500000000.25):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def records_of(data):
    return {name: record.data.read() for name, record in archive(data).records.items()}


def changed(path, edit, folder):
    """A copy of a zip in another folder, its records put through `edit`."""
    records = records_of(path.read_bytes())
    records = edit(records) or records
    return save(folder, build([(f"a/{name}", data) for name, data in records.items()]), "new.pt2")


def values(ref):
    """The elements of a tensor as numbers of Python."""
    return list(memoryview(ref.read()).cast({"float32": "f", "int64": "q"}[ref.dtype]))


class Sink:
    """An `Output` into memory; `copied` counts the bytes that were not looked at."""

    def __init__(self):
        self.data = bytearray()
        self.copied = 0

    def tell(self):
        return len(self.data)

    def write(self, data):
        self.data += data

    def copy(self, data):
        self.copied += data.length
        self.data += data.read()

    def copy_with_crc(self, data):
        return self.write_blocks(data.iterate_blocks())

    def write_blocks(self, blocks):
        crc = 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self.data += block
        return crc


class Holes:
    """An `Output` into a file, with holes where tensors are."""

    def __init__(self, file):
        self.file = file
        self.tell = file.tell
        self.write = file.write

    def copy_with_crc(self, data):
        return self.skip(data.length)

    def skip(self, size):
        self.file.seek(size, io.SEEK_CUR)
        return 0


def written(plan):
    """The bytes that the plan of one file writes, or of a zip; they are as many as it said."""
    sink = Sink()
    (plan.files[0] if isinstance(plan, WritePlan) else plan).write(sink)
    assert len(sink.data) == plan.size
    return bytes(sink.data)


FACTS = {
    "path": lambda path, tensor: list(path),
    "dtype": lambda path, tensor: tensor.dtype,
    "shape": lambda path, tensor: list(tensor.shape),
    "device": lambda path, tensor: tensor.device,
    "sha256": lambda path, tensor: hashlib.sha256(tensor.read()).hexdigest(),
}


def assert_as_told(checkpoint, oracle):
    """Every tensor of a checkpoint is what torch read, in torch's order."""
    told = [{name: t[name] for name in FACTS if name in t} for t in oracle["tensors"]]
    # Torch itself does not list what a numpy array or an unknown object holds.
    paths = [t["path"] for t in told]
    listed = [(path, t) for path, t in checkpoint.tensors() if list(path) in paths]
    found = [
        {name: FACTS[name](path, tensor) for name in facts}
        for (path, tensor), facts in zip(listed, told, strict=True)
    ]
    assert found == told
