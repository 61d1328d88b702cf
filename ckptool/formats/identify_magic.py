"""Binary files told by their first bytes: a table, and a few that need more than a comparison."""

from __future__ import annotations

import os
import re
import zlib
from typing import NamedTuple

from ckptool.errors import CheckpointError, NotACheckpoint, UnsupportedFormat
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import Finding, shell, untar, unused
from ckptool.formats.tar_members import BLOCK, is_tar

__all__ = ["MAGICS", "Magic", "find"]


class Magic(NamedTuple):
    """Bytes at an offset, what has them, and the step that helps.

    In the step `{file}` stands for the file, `{unpacked}` for one that is not there yet.
    """

    offset: int
    magic: bytes
    what: str
    hint: str
    kind: type[CheckpointError] = NotACheckpoint


def _packed(offset: int, magic: bytes, what: str, tool: str) -> Magic:
    hint = f"{tool} {{file}} > {{unpacked}} && ckptool list {{unpacked}}"
    return Magic(offset, magic, f"compressed with {what}", hint)


def _other(offset: int, magic: bytes, what: str) -> Magic:
    return Magic(offset, magic, what, "give the checkpoint itself")


_INFLATE = (
    'python -c "import sys, zlib; '
    'sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))"'
)
_PACKED = 1 << 20
"""Bytes that are unpacked to see what begins there; a block of bzip2 is 900 kB."""
_MOST_MEMORY = 64 << 20
_PACKED_TAR = re.compile(r"(?<!\.pth)\.(tar\.\w+|tzst|tlz4)$", re.IGNORECASE)
"""`.pth.tar` is how many call a file of torch."""
_KERAS = "h5py reads the weights, Keras the whole model: keras.models.load_model"
_GGUF = "the gguf package reads it (gguf-dump {file}), and llama.cpp"
_GGML = "llama.cpp and whisper.cpp of its time read it"
_TFLITE = "TensorFlow reads it: tf.lite.Interpreter"

MAGICS: tuple[Magic, ...] = (
    _packed(0, b"\x1f\x8b", "gzip", "gzip -dc"),
    _packed(4, b"1AY&SY", "bzip2", "bzip2 -dc"),
    _packed(0, b"\xfd7zXZ\0", "xz", "xz -dc"),
    _packed(0, b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    _packed(0, b"\x04\x22\x4d\x18", "lz4", "lz4 -dc"),
    _packed(0, b"\x78\x9c", "zlib (joblib does so)", f"{_INFLATE} <"),
    _packed(0, b"\x78\xda", "zlib (joblib does so)", f"{_INFLATE} <"),
    Magic(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: 7z x {file}"),
    Magic(0, b"Rar!\x1a\x07", "a RAR archive", "unpack it: unrar x {file}"),
    Magic(
        0,
        b"PYTORCH1",
        "a container of the preview release of torch 1.0, which no later torch reads",
        "load it with that release and save it again",
        UnsupportedFormat,
    ),
    Magic(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, or .h5)", _KERAS, UnsupportedFormat),
    Magic(0, b"GGUF", "a GGUF model", _GGUF, UnsupportedFormat),
    Magic(0, b"lmgg", "a GGML model", _GGML, UnsupportedFormat),
    Magic(0, b"fmgg", "a GGML model (ggmf)", _GGML, UnsupportedFormat),
    Magic(0, b"tjgg", "a GGML model (ggjt)", _GGML, UnsupportedFormat),
    Magic(0, b"\x93NUMPY", "a NumPy array (.npy)", "numpy.load reads it", UnsupportedFormat),
    Magic(
        0,
        b"\x12\x01" + bytes(14),
        "an MXNet parameter file",
        "mxnet.nd.load reads it",
        UnsupportedFormat,
    ),
    Magic(4, b"TFL3", "a TensorFlow Lite model", _TFLITE, UnsupportedFormat),
    Magic(4, b"ET12", "an ExecuTorch program", "executorch.runtime reads it", UnsupportedFormat),
    Magic(0, b"ftrt", "a TensorRT engine", "tensorrt.Runtime reads it", UnsupportedFormat),
    Magic(0, b"ptrt", "a TensorRT engine", "tensorrt.Runtime reads it", UnsupportedFormat),
    _other(0, b"MATLAB ", "a MATLAB file"),
    _other(0, b"PAR1", "a Parquet table"),
    _other(0, b"ARROW1", "an Arrow table"),
    _other(0, b"SQLite format 3\0", "an SQLite database"),
    _other(0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    _other(0, b"\xff\xd8\xff", "a JPEG image"),
    _other(0, b"GIF8", "a GIF image"),
    _other(8, b"WEBP", "a WebP image"),
    _other(8, b"WAVE", "a WAV recording"),
    _other(4, b"ftyp", "an MP4 video"),
    _other(0, b"%PDF-", "a PDF document"),
    _other(0, b"\x7fELF", "an ELF program or library"),
    _other(0, b"\xcf\xfa\xed\xfe", "a macOS program or library"),
    _other(0, b"MZ\x90", "a Windows program or library"),
)


def find(probe: Probe) -> Finding | None:
    """What the first bytes, or the last, say that it is; None if they say nothing."""
    for row in MAGICS:
        if probe.head.startswith(row.magic, row.offset):
            return Finding(row.what, _hint(row, probe), row.kind)
    head = probe.head
    return _tfrecord(head) or _tensorflow(probe) or _protobuf(head) or _msgpack(head)


def _hint(row: Magic, probe: Probe) -> str:
    """The step that helps; a packed tar is unpacked in one."""
    unpacked = unused(f"{probe.path}.unpacked")
    if "{unpacked}" in row.hint and _holds_tar(row.magic, probe):
        return f"unpack it: {untar(probe.path, unpacked)}"
    return row.hint.format(file=shell(probe.path), unpacked=shell(unpacked))


def _holds_tar(magic: bytes, probe: Probe) -> bool:
    """Whether what is packed begins as a tar does; of what is not looked into, its name says so."""
    if probe.source is None:
        return False
    packed = probe.source.read(0, min(probe.source.size, _PACKED))
    try:
        if magic == b"\x1f\x8b":
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, BLOCK)
        elif magic == b"1AY&SY":
            from bz2 import BZ2Decompressor

            head = BZ2Decompressor().decompress(packed, BLOCK)
        elif magic == b"\xfd7zXZ\0":
            from lzma import LZMADecompressor

            head = LZMADecompressor(memlimit=_MOST_MEMORY).decompress(packed, BLOCK)
        else:
            return _PACKED_TAR.search(probe.path) is not None
    except Exception:  # each of them has errors of its own, and may not be built in
        return False
    return is_tar(head)


def _tfrecord(head: bytes) -> Finding | None:
    """A record's length (8 bytes) with its masked CRC-32C: TensorFlow's tfrecord and event logs."""
    crc = _crc32c(head[:8])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    if len(head) < 16 or masked.to_bytes(4, "little") != head[8:12]:
        return None
    return Finding(
        "a TFRecord file: training data, or a TensorBoard log",
        "tf.data.TFRecordDataset reads it; the checkpoint is another file",
    )


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit: only ever for eight bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


_LEVELDB_FOOTER = bytes.fromhex("57fb808b247547db")
_DATA_SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")


def _tensorflow(probe: Probe) -> Finding | None:
    """A TensorFlow checkpoint: the table that is its index, or the data beside such a table."""
    source, path = probe.source, probe.path
    if source is None:
        return None
    shard = _DATA_SHARD.fullmatch(path)
    if shard and os.path.exists(f"{shard[1]}.index"):
        prefix = shard[1]
    elif source.size > 48 and source.read(source.size - 8, 8) == _LEVELDB_FOOTER:
        prefix = path.removesuffix(".index")
    else:
        return None
    return Finding(
        "a part of a TensorFlow checkpoint",
        f"TensorFlow reads it: tf.train.load_checkpoint({prefix!r})",
        UnsupportedFormat,
    )


_VERSIONED = re.compile(rb"\x08[\x01-\x20](?=[\x12\x1a\x22\x28\x32\x3a\x42])")
_PRODUCER = re.compile(rb"\x12[\x01-\x3f][!-~]{4}")


def _protobuf(head: bytes) -> Finding | None:
    """A protocol buffer whose field 1 is a small version: ONNX, Core ML, TensorFlow SavedModel.

    Field 2 of an ONNX model is the producer's name; of the others a message.
    """
    found = _VERSIONED.match(head)
    if found is None:
        return None
    second = head[found.end() : found.end() + 1]
    if second != b"\x12" or _PRODUCER.match(head, found.end()):
        return Finding("an ONNX model", "onnx.load reads it", UnsupportedFormat)
    return Finding(
        "a Core ML model, or a TensorFlow SavedModel's graph",
        "coremltools reads the one, TensorFlow (tf.saved_model.load) the other",
        UnsupportedFormat,
    )


_MSGPACK_MAP = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)([\w./-]+)", re.DOTALL
)


def _msgpack(head: bytes) -> Finding | None:
    """A MessagePack map that begins with a text key, as Flax writes its parameters."""
    if not _MSGPACK_MAP.match(head):
        return None
    return Finding(
        "a MessagePack file, as Flax writes (flax_model.msgpack)",
        "flax.serialization.msgpack_restore reads it",
        UnsupportedFormat,
    )
