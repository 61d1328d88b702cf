"""Files of every format, damaged at random; and which of their bytes nothing covers.

A bit that is turned over in a byte that is covered must be found by `verify`. What is covered by
nothing is worked out here from the bytes alone, not by asking ckptool; docs/reliability.md has it
as a table.
"""

import contextlib
import io
import json
import pickletools
import re
import shutil
import struct
import tarfile
import zipfile
from dataclasses import dataclass, field

from ckptool.cli import main
from tests.formats.shards import loaded
from tests.test_fixtures import FIXTURES, judge

CENTRAL = struct.Struct("<4s6H3I5H2I")
PICKLES = 5
"""That a legacy stream begins with."""
LOCAL = struct.Struct("<26x2H")
FOLDER_BIT = 1 << 4
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Bits:
    """Bits of a file, by byte; none of a byte that is not there."""

    masks: dict[int, int] = field(default_factory=dict)

    def add(self, start, stop, mask=0xFF):
        for offset in range(start, stop):
            self.masks[offset] = self.masks.get(offset, 0) | mask

    def __contains__(self, bit):
        return bool(self.masks.get(bit >> 3, 0) & 1 << (bit & 7))


def of_a_zip(data):
    """Of zips that torch wrote, nothing; of others, what no reader reads.

    That is who made it, attributes (but the bit that says "a folder"), comments, and extra fields
    of other tools; what an edit in place left between the records; the last bits of a compressed
    record, behind its end mark.
    """
    bits = Bits()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        position, infos = archive.start_dir, archive.infolist()
    spans = []
    for info in sorted(infos, key=lambda info: info.header_offset):
        name, extra = LOCAL.unpack_from(data, info.header_offset)
        start = info.header_offset + 30 + name + extra
        stop = start + info.compress_size
        padded = b"FB" in data[start - extra : start]
        spans.append((info.header_offset, stop + (16 if info.flag_bits & 8 else 0)))
        if info.compress_type:
            bits.add(stop - 1, stop)
        info.comment = b"torch's" if padded else b""
    for info in infos:
        assert data[position : position + 4] == b"PK\1\2"
        name, extra, comment = CENTRAL.unpack_from(data, position)[10:13]
        if info.comment != b"torch's":
            bits.add(position + 4, position + 6)
            bits.add(position + 36, position + 38)
            bits.add(position + 38, position + 42)
            bits.masks[position + 38] &= ~FOLDER_BIT
            bits.add(position + 46 + name + extra, position + 46 + name + extra + comment)
        position += 46 + name + extra + comment
    reached = 0
    for start, stop in [*sorted(spans), (archive.start_dir, 0)]:
        bits.add(reached, start)
        reached = stop
    return bits


def of_a_stream(data):
    """All but the magic number of a legacy stream: neither pickles nor storages have checksums.

    Of protocols 4 and 5 the lengths of frames are covered. The count before each storage is as
    well, but where it stands only the pickle tells.
    """
    bits = Bits()
    bits.add(0, len(data))
    position = 0
    for _ in range(PICKLES):
        for opcode, _, offset in pickletools.genops(data[position:]):
            if opcode.name == "FRAME":
                covered = range(position + offset + 1, position + offset + 9)
            elif opcode.name == "LONG1" and not position:
                covered = range(offset, offset + 13)
            else:
                continue
            for place in covered:
                del bits.masks[place]
        position += offset + 1
    return bits


def of_a_table(data):
    """Where the footer of TensorFlow's index leads, and its second block, which nobody reads."""
    bits = Bits()
    footer = len(data) - 48
    start, size, *_ = re.findall(rb"[\x80-\xff]*[\0-\x7f]", data[footer:])
    start, size = (
        sum((byte & 127) << 7 * at for at, byte in enumerate(one)) for one in (start, size)
    )
    bits.add(start, start + size + 5)
    bits.add(footer, len(data) - 8)
    return bits


def of_a_pickle(data):
    """All of it."""
    bits = Bits()
    bits.add(0, len(data))
    return bits


def of_a_tar(data):
    """What is in the members; of a header the ends of fields that may be blank or zero."""
    bits = Bits()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            bits.add(member.offset_data, member.offset_data + member.size)
            for end in (156, 108, 116, 124, 136, 148, 337, 345):
                bits.add(member.offset + end - 2, member.offset + end)
    return bits


def of_safetensors(data):
    """The tensors' bytes and names, free text, and the sizes of a tensor without elements."""
    return _of_header(data, names=True)


def of_a_shard(data):
    """The same but the names: the index has them too."""
    return _of_header(data, names=False)


def _of_header(data, *, names):
    bits = Bits()
    end = 8 + int.from_bytes(data[:8], "little")
    bits.add(end, len(data))
    text = data[8:end]
    free = re.compile(rb'"__metadata__":\{(?:"(?:[^"\\]|\\.)*"[:,]?)*\}').search(text)
    for token in STRING.finditer(text):
        inside = free is not None and free.start() + 15 < token.start() < free.end()
        is_name = text[token.end() : token.end() + 2] == b":{" and token[0] != b'"__metadata__"'
        if inside or (is_name and names):
            bits.add(8 + token.start() + 1, 8 + token.end() - 1)
    for shape in re.compile(rb'"shape":\[([0-9,]*)\]').finditer(text):
        if b"0" in shape[1].split(b","):
            bits.add(8 + shape.start(1), 8 + shape.end(1))
    return bits


def of_an_index(data):
    """Free text: what is in `metadata` but the total, and whether that is what it is called."""
    bits = Bits()
    free = re.compile(rb'"metadata": *\{[^}]*\}').search(data)
    for token in STRING.finditer(data, free.start(), free.end()):
        bits.add(token.start() + 1, token.end() - 1)
    return bits


@dataclass(frozen=True)
class Sample:
    """A fixture, and what of its files nothing covers."""

    name: str
    uncovered: dict
    """By a pattern of file names."""
    opened: str = ""
    """What is given to ckptool, where it is not the fixture itself."""


def single(name, uncovered):
    return Sample(name, {".*": uncovered})


SHARDS = {r".*index.*": of_an_index, r".*\.bin": of_a_zip, r".*\.safetensors": of_a_shard}
SAMPLES = {
    "torch zip": single("archives/torch.pth", of_a_zip),
    "torch zip, DataParallel": single("torch-2.13.0/dp_full_cuda3.pth", of_a_zip),
    "torch zip, protocol 4": single("values/plain_protocol4.pth", of_a_zip),
    "torch zip of 1.6": single("torch-1.6.0/single.pth", of_a_zip),
    "torch zip, appended to": single("archives/appended.pth", of_a_zip),
    "torch zip, repacked": single("archives/unaligned_plain.pth", of_a_zip),
    "TorchScript": single("torchscript/scripted.pt", of_a_zip),
    "PT2": single("torchscript/exported.pt2", of_a_zip),
    "npz": single("numpy/jax.npz", of_a_zip),
    "legacy stream": single("torch-2.13.0/dp_legacy.pth", of_a_stream),
    "legacy stream, protocol 4": single("streams/protocol4.pth", of_a_stream),
    "legacy stream, protocol 5": single("streams/protocol5.pth", of_a_stream),
    "tar": single("streams/torch_0.1.tar", of_a_tar),
    "pickle": single("streams/arrays_protocol2.pkl", of_a_pickle),
    "safetensors": single("safetensors/ties.safetensors", of_safetensors),
    "shards, safetensors": Sample("shards/hub_safetensors", SHARDS),
    "shards, torch zip": Sample("shards/hub_bin", SHARDS),
    "TensorFlow": Sample(
        "tensorflow/types", {r".*\.index": of_a_table, r".*\.data-.*": lambda data: Bits()}
    ),
    "unzipped": Sample("archives/unzipped", {".*": of_a_pickle}),
}
"""By format: a file or a folder that is fine."""


class Damaged:
    """A copy of a sample in a folder, damaged and made whole again."""

    def __init__(self, kind, folder):
        sample = SAMPLES[kind]
        self.kind, self.sample, self.code = kind, sample, 0
        self.path = folder / sample.name.replace("/", "-")
        source = FIXTURES / sample.name
        if source.is_dir():
            shutil.copytree(source, self.path)
            self.files = sorted(path for path in self.path.rglob("*") if path.is_file())
        else:
            shutil.copyfile(source, self.path)
            self.files = [self.path]
        self.whole = {path: path.read_bytes() for path in self.files}
        self.bits = {path: self.uncovered(path) for path in self.files}

    def uncovered(self, path):
        for pattern, function in self.sample.uncovered.items():
            if re.fullmatch(pattern, path.name):
                return function(self.whole[path])
        raise AssertionError(path)

    def choose(self, chance):
        """One of the files, the larger the likelier."""
        return chance.choices(self.files, [len(data) for data in self.whole.values()])[0]

    def flip(self, chance):
        """Turn one bit over; a sentence about what went wrong, else None."""
        path = self.choose(chance)
        data = bytearray(self.whole[path])
        bit = chance.randrange(8 * len(data))
        data[bit >> 3] ^= 1 << (bit & 7)
        code, said = self.verified(path, data)
        where = f"{self.kind}, {path.name}: bit {bit & 7} of byte {bit >> 3:,}"
        if code not in (0, 1, 2) or "unexpected error" in said:
            return f"{where}: exit {code}, {said}"
        if code == 0 and bit not in self.bits[path]:
            return f"{where} is covered, and was not found"
        return None

    def cut(self, chance):
        """Cut a file short."""
        path = self.choose(chance)
        length = chance.randrange(len(self.whole[path]))
        where = f"{self.kind}, {path.name} cut to {length:,} bytes"
        return self.rewritten(path, self.whole[path][:length], where)

    def splice(self, chance, others):
        """Put a run of bytes of some file in, take one out, or have one there twice."""
        path = self.choose(chance)
        data = self.whole[path]
        start, place = chance.randrange(len(data) or 1), chance.randrange(len(data) + 1)
        length = chance.choice([1, 2, 3, 8, 16, 64, 256, 512, 1024, 4096])
        what = chance.choice(["put in", "taken out", "doubled"])
        if what == "put in":
            other = chance.choice(others)
            start = chance.randrange(len(other) or 1)
            spliced = data[:place] + other[start : start + length] + data[place:]
        elif what == "taken out":
            spliced = data[:start] + data[start + length :]
        else:
            spliced = data[: start + length] + data[start:]
        where = f"{self.kind}, {path.name}: {length:,} bytes {what} at {start:,}, {place:,}"
        return self.rewritten(path, spliced, where)

    def rewritten(self, path, data, where):
        """Whether what is said of other bytes than before is right."""
        code, said = self.verified(path, data, keep=True)
        try:
            if code not in (0, 1, 2) or "unexpected error" in said:
                return f"{where}: exit {code}, {said}"
            if code == 0 and data != self.whole[path]:
                try:
                    return None if self.reads_the_same() else f"{where}: fine, and other tensors"
                except Exception as error:
                    return f"{where}: fine, and not loaded ({type(error).__name__}: {error})"
            return None
        finally:
            path.write_bytes(self.whole[path])

    def verified(self, path, data, *, keep=False):
        """Exit code and messages of `verify` on the sample with other bytes in one file."""
        path.write_bytes(data)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = code = main(["verify", str(self.path)])
        if not keep:
            path.write_bytes(self.whole[path])
        return code, out.getvalue() + err.getvalue()

    def reads_the_same(self):
        """Whether the tensors are the same as before, to their own library where that is safe."""
        if "shards" in self.kind:
            return _contents(loaded(next(self.path.glob("*.index.json")))) == _contents(
                loaded(next((FIXTURES / self.sample.name).glob("*.index.json")))
            )
        if self.kind == "pickle":
            return True  # torch reads none; what still is a pickle is one
        if self.kind in ("unzipped", "PT2", "npz", "TensorFlow"):
            return listed(self.path) == listed(FIXTURES / self.sample.name)
        description = judge().describe(*judge().read(self.path))
        wanted = json.loads((FIXTURES / f"{self.sample.name}.oracle.json").read_text())
        return [_facts(row) for row in description["tensors"]] == [
            _facts(row) for row in wanted["tensors"]
        ]


def _facts(row):
    return {key: row.get(key) for key in ("path", "dtype", "shape", "sha256", "parts")}


def _contents(tensors):
    return {
        name: (tensor.dtype, tensor.shape, judge().sha256(tensor))
        for name, tensor in tensors.items()
    }


def listed(path):
    """Paths and hashes, as ckptool lists them."""
    from ckptool.formats import open_checkpoint
    from ckptool.inspection.listing import list_tensors

    with open_checkpoint(path) as checkpoint:
        return [(row.path, row.sha256) for row in list_tensors(checkpoint, hash=True).tensors]
