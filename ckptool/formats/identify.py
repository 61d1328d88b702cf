"""Identify a file that has no known format: one sentence, and the step that helps."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from typing import Any, NamedTuple

from ckptool.errors import CheckpointError, NotACheckpoint, TruncatedFile, UnsupportedFormat
from ckptool.files import FileSource
from ckptool.formats.base import Probe
from ckptool.words import counted, few, quoted, shell

_MAX_TEXT_HEAD = 64 << 10
_MAX_JSON_BYTES = 32 << 20
_MAX_NAME_BYTES = 240
"""Bytes of a file name; 255 are allowed, and a number may be added."""
_KEPT_NAME_END = 60
"""Characters that are kept at the end of a name that is too long, with its extensions."""
_DOWNLOAD_AGAIN = "download it again from the direct link of the file, and check its size"
_GIVE_CHECKPOINT = "give the checkpoint itself"
_UNPACK_TAR = "mkdir {unpacked} && tar -xf {file} -C {unpacked}"
"""Unpack into a new folder: elsewhere tar would overwrite files without asking."""
_TORCHFILE = (
    "read it with torchfile.load (pip install torchfile) and save its arrays with torch.save"
)
_INTO_UNPACKED = "> {unpacked}"
"""The end of each command that inflates a file."""
JOBLIB_HINT = (
    "if you trust its author, read it with joblib.load and save its arrays with numpy.savez"
)


class Identification(NamedTuple):
    """What a file is, to complete "FILE is ...", and the step that helps."""

    what: str
    hint: str | None
    kind: type[CheckpointError] = NotACheckpoint

    def to_error(self, path: str) -> CheckpointError:
        """Return the error to raise for `path`."""
        return self.kind(f"{path} is {self.what}", file=path, hint=self.hint)


class Magic(NamedTuple):
    """A signature at an offset (negative: from the end), what has it, and the step that helps.

    `_fill_braces` fills the braces of the step.
    """

    offset: int
    magic: bytes
    what: str
    hint: str
    kind: type[CheckpointError] = UnsupportedFormat
    is_pattern: bool = False


class NameKind(NamedTuple):
    """The names in one kind of archive or folder, what it is, and the step that helps."""

    names: tuple[str, ...]
    """Patterns; each must match the whole of some name."""
    what: str
    hint: str
    kind: type[CheckpointError] = UnsupportedFormat

    def find_first_matches(self, names: Iterable[str]) -> list[str] | None:
        """Return the first name that each pattern matches; None if one matches no name."""
        matches = [
            next((name for name in names if re.fullmatch(pattern, name)), None)
            for pattern in self.names
        ]
        return None if None in matches else [name for name in matches if name is not None]


def _compressed_magic(offset: int, magic: bytes, product: str, command: str) -> Magic:
    """Return the row of a compressed file, with the command that unpacks it."""
    hint = f"{command} {{file}} {_INTO_UNPACKED} && ckptool list {{unpacked}}"
    return Magic(offset, magic, f"compressed with {product}", hint, NotACheckpoint)


def _other_magic(
    offset: int, magic: bytes, description: str, hint: str = _GIVE_CHECKPOINT
) -> Magic:
    """Return the row of a file that is not a checkpoint."""
    return Magic(offset, magic, description, hint, NotACheckpoint)


_INFLATE = (
    'python -c "import sys, zlib; '
    'sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))" <'
)
_GGML = "read it with a version of llama.cpp or whisper.cpp from its time"

MAGICS: tuple[Magic, ...] = (
    _compressed_magic(0, b"\x1f\x8b", "gzip", "gzip -dc"),
    _compressed_magic(4, b"1AY&SY", "bzip2", "bzip2 -dc"),
    _compressed_magic(0, b"\xfd7zXZ\0", "xz", "xz -dc"),
    _compressed_magic(0, b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    _compressed_magic(0, b"\x04\x22\x4d\x18", "lz4", "lz4 -dc"),
    _compressed_magic(0, b"\x5d\0\0", "lzma", "xz --format=lzma -dc"),
    *(
        _compressed_magic(0, magic, "zlib (as joblib does)", _INFLATE)
        for magic in (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
    ),
    _other_magic(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: 7z x {file}"),
    _other_magic(0, b"Rar!\x1a\x07", "a RAR archive", "unpack it: unrar x {file}"),
    _other_magic(
        0,
        b"Salted__",
        "encrypted by openssl",
        "decrypt it with its cipher and password, for example: openssl enc -d -aes-256-cbc "
        "-pbkdf2 -in {file} -out {unpacked}",
    ),
    Magic(0, b"lmgg", "a GGML model", _GGML),
    Magic(0, b"tjgg", "a GGML model (ggjt)", _GGML),
    Magic(0, b"\x93NUMPY", "a NumPy array (.npy)", "read it with numpy.load"),
    Magic(4, b"TFL3", "a TensorFlow Lite model", "read it with tf.lite.Interpreter of TensorFlow"),
    Magic(4, b"ET12", "an ExecuTorch program", "read it with executorch.runtime"),
    Magic(0, b"ftrt", "a TensorRT engine", "read it with tensorrt.Runtime"),
    # The end of a LevelDB table, which TensorFlow writes as its index.
    Magic(
        -8,
        bytes.fromhex("57fb808b247547db"),
        "a TensorFlow version 1 checkpoint in a single file, or an index with another name",
        "rename an index like its data files, with the extension .index, for example "
        "model.ckpt-1.index; restore version 1 with TensorFlow, whose Saver writes version 2",
    ),
    Magic(
        0,
        rb".{12,40}brain\.Event:\d",
        "a TensorBoard log",
        "open it with TensorBoard, and give the checkpoint, which is another file",
        NotACheckpoint,
        is_pattern=True,
    ),
    # A type (object 4, table 3), the index 1, and the version of the class or the first key.
    Magic(
        0,
        rb"\x04\0{3}\x01\0{3}.\0{3}V \d|\x03\0{3}\x01\0{3}..\0\0[\x01\x02]\0{3}"
        rb"|4\n1\n\d\nV \d\n|3\n1\n\d+\n[12]\n",
        "a Torch7 (Lua) file",
        _TORCHFILE,
        is_pattern=True,
    ),
    _other_magic(0, b"MATLAB ", "a MATLAB file"),
    _other_magic(0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    _other_magic(0, b"\xff\xd8\xff", "a JPEG image"),
    _other_magic(0, b"%PDF-", "a PDF document"),
    # Protocol buffers whose field 1 is a small version; field 2 of an ONNX model is the producer's
    # name, of the others a message.
    Magic(
        0,
        rb"\x08[\x01-\x20](?:[\x1a\x22\x28\x32\x3a\x42]|\x12[\x01-\x3f][!-~]{4})",
        "an ONNX model",
        "read it with onnx.load, convert graph.initializer with onnx.numpy_helper.to_array, "
        "and save the arrays with numpy.savez",
        is_pattern=True,
    ),
    Magic(
        0,
        rb"\x08[\x01-\x20]\x12",
        "a Core ML model, or the graph of a TensorFlow SavedModel",
        "read a Core ML model with coremltools; for a SavedModel give the folder: ckptool "
        "list {folder}",
        is_pattern=True,
    ),
)
PRODUCT_BY_EXTENSION = {
    ".npy": "NumPy",
    ".onnx": "ONNX",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
}
"""By extension that no supported format has: the product that writes it."""
_FORMAT_SIGNATURES = (
    b"PK\x03\x04",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    b"\x89HDF\r\n\x1a\n",
    b"GGUF",
)
"""Signatures, for files that end within them."""

ZIP_KINDS: tuple[NameKind, ...] = (
    NameKind(
        (r"config\.json", r"model\.weights\.npz"),
        "a Keras model (.keras)",
        "load it with keras.models.load_model",
    ),
    NameKind(
        (r"(?:[^/]*/)?\.data/extern_modules",),
        "a torch.package archive",
        "load it with torch.package.PackageImporter, which runs the code in the archive",
    ),
    NameKind(
        (r"[^/]+/version", r"[^/]+/(?:byteorder|\.data/serialization_id)"),
        "what a failed torch.save left behind: it has no data.pkl",
        "save it again; the error of torch.save shows the cause",
        TruncatedFile,
    ),
)
_COMPRESSED_TAR_EXTENSION = r"(?<!\.pth)\.(?:tar\.\w+|t[gbx]z|tzst|tlz4)\Z"
"""Not `.pth.tar.gz`: there `.tar` is part of a usual extension of checkpoints."""
_PICKLE_EXTENSION = r"\.(?:joblib|pkl|pickle|sav)(?:\.\w+)?\Z"
"""The usual extensions of joblib files."""
_CHECKPOINT_NAME = r".*\.(?:pth|pt|ckpt|bin|safetensors|th|pth\.tar)|.*/data\.pkl"

_TEXT_KINDS: tuple[tuple[str, Identification], ...] = (
    (r"\Z", Identification("a text file with only white space", _DOWNLOAD_AGAIN)),
    (
        r"(?:#.*\n)*(?:outs|md5):.*\n(?s:.*)path:",
        Identification("a DVC pointer, not the file itself", "dvc pull {file}"),
    ),
    (
        r"model_checkpoint_path: ",
        Identification(
            "the file with the latest step of a TensorFlow checkpoint",
            "give the folder: ckptool list {folder}",
            UnsupportedFormat,
        ),
    ),
    (
        r"(?:global_step|iter_)?\d+\s*\Z",
        Identification(
            "the file with the latest step ({first}) of a DeepSpeed or Megatron checkpoint",
            "give the folder: ckptool list {folder}",
            UnsupportedFormat,
        ),
    ),
    (
        r"(?:#!.*python|\"\"\"|(?:import|from) \w+)",
        Identification("a Python script", "run it, and give the checkpoint that it writes"),
    ),
    (
        r"[-+]?\.?\d[-+\d.eE]*(?:[\s,;]+[-+]?(?:\.?\d[-+\d.eE]*|nan|inf))+\s*\n",
        Identification(
            "a text file with numbers, beginning with {first}", "read it with numpy.loadtxt"
        ),
    ),
    (r"", Identification("a text file that begins with {first}", _GIVE_CHECKPOINT)),
)


def unrecognized_error(probe: Probe) -> CheckpointError:
    """Return the error for a file or folder of no known format, with its identification."""
    if probe.is_folder:
        return _identify_folder(probe).to_error(probe.path)
    identification = (
        _identify_empty(probe)
        or _identify_zip(probe)
        or _identify_tar(probe)
        or _identify_signature(probe)
        or _identify_text(probe)
        or _identify_by_name(probe)
        or Identification(
            f"a file of unknown format; its first bytes are {probe.head[:8].hex(' ')}",
            f"file {shell(probe.path)}",
        )
    )
    return identification.to_error(probe.path)


def _identify_by_name(probe: Probe) -> Identification | None:
    """Identify a part of a TensorFlow checkpoint by its name, if its content shows nothing."""
    stem, ending = os.path.splitext(probe.path)
    if ending == ".meta" and os.path.isfile(f"{stem}.index"):
        hint = f"give its index: ckptool list {shell(f'{stem}.index')}"
        return Identification("the graph of a TensorFlow checkpoint", hint, UnsupportedFormat)
    name = os.path.basename(probe.path)
    data_file = re.fullmatch(r"(?s)(.*)\.data-\d{5}-of-\d{5}", name)
    if data_file is None:
        return None
    # With an intact index, the checkpoint would have been opened.
    description = "the data of a TensorFlow checkpoint with a missing or truncated index"
    index_name = f"{data_file[1]}.index"
    return Identification(description, f"copy {shell(index_name)} as well", UnsupportedFormat)


def _read_head(probe: Probe, count: int) -> bytes:
    return probe.require_source().read(0, min(probe.require_source().size, count))


def _fill_braces(text: str, probe: Probe, **more: str) -> str:
    """Fill the braces of a hint with quoted paths."""
    return text.format(
        file=shell(probe.path),
        folder=shell(os.path.dirname(probe.path) or "."),
        unpacked=shell(find_unused_path(f"{probe.path}.unpacked")),
        **more,
    )


def _identify_empty(probe: Probe) -> Identification | None:
    """Identify a file that is empty, very short, or filled with zeros."""
    head = probe.head
    if not head:
        hint = "the save or download probably failed; repeat it"
        return Identification("empty (0 bytes)", hint, TruncatedFile)
    if any(magic != head and magic.startswith(head) for magic in _FORMAT_SIGNATURES):
        description = (
            f"truncated after {counted(len(head), 'byte')}, within the signature of its format"
        )
        return Identification(description, TruncatedFile.usual_hint, TruncatedFile)
    if head.strip(b"\0"):
        return None
    return Identification(
        "a file that begins with zeros: its space was reserved, but the content was not written",
        "the download, the copy or the disk probably failed; download or copy it again",
    )


def _identify_zip(probe: Probe) -> Identification | None:
    """Identify a zip by its names: a known kind, or one with a checkpoint or other files inside.

    None if it is not a zip.
    """
    if not probe.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    from ckptool.files import ByteRange
    from ckptool.formats.archive import find_end, read_directory

    data = ByteRange(probe.require_source(), 0, probe.require_source().size)
    end = find_end(data)
    names = [entry.name for entry in read_directory(data, end, probe.limits)] if end else []
    for row in ZIP_KINDS:
        if row.find_first_matches(names):
            return Identification(row.what, row.hint, row.kind)
    weights = [name for name in names if re.fullmatch(_CHECKPOINT_NAME, name)]
    # stable-baselines3 has other torch files before its policy.
    inside = "policy.pth" if "policy.pth" in weights else next(iter(weights), None)
    if inside is None:
        description = f"a zip archive with other files: {few(names)}"
        return Identification(description, _fill_braces("unzip -l {file}", probe))
    # With `data.pkl` inside, the unpacked folder is the checkpoint.
    target = os.path.join(
        find_unused_path(f"{probe.path}.unpacked"), inside.removesuffix("/data.pkl")
    )
    return Identification(
        f"a zip archive with a checkpoint inside: {few(names)}",
        _fill_braces(
            "unzip {file} -d {unpacked} && ckptool list {inside}", probe, inside=shell(target)
        ),
    )


def _identify_tar(probe: Probe) -> Identification | None:
    """Identify a tar, perhaps of a NeMo model; None for other files.

    The tar of torch 0.1 is a format, so it does not come here.
    """
    from ckptool.formats.torch_tar import is_tar, read_members

    if not is_tar(probe.head):
        return None
    names = list(read_members(probe.require_source(), probe.limits))
    if any(name.endswith("model_config.yaml") for name in names):
        checkpoint_name = next(
            (name for name in names if name.endswith(".ckpt")), "model_weights.ckpt"
        )
        unpacked = find_unused_path(f"{probe.path}.unpacked")
        target = shell(os.path.join(unpacked, checkpoint_name))
        unpack_command = _fill_braces(_UNPACK_TAR, probe)
        return Identification(
            "a NeMo model (a tar archive with a checkpoint and its settings)",
            f"{unpack_command} {shell(checkpoint_name)} && ckptool list {target}",
            UnsupportedFormat,
        )
    return Identification(
        f"a tar archive with {few(names)}", _fill_braces(f"unpack it: {_UNPACK_TAR}", probe)
    )


def _identify_signature(probe: Probe) -> Identification | None:
    """Identify a file by its first or last bytes, or return None.

    The hint for a compressed tar or pickle shows how to read its content.
    """
    source = probe.require_source()
    last_bytes = source.read(max(0, source.size - 8), min(8, source.size))
    for row in MAGICS:
        compared = last_bytes if row.offset < 0 else probe.head[row.offset :]
        if re.match(row.magic if row.is_pattern else re.escape(row.magic), compared, re.DOTALL):
            hint = row.hint
            is_compressed = _INTO_UNPACKED in hint
            if is_compressed and re.search(_COMPRESSED_TAR_EXTENSION, probe.path):
                hint = f"unpack it: {_UNPACK_TAR}"
            elif is_compressed and re.search(_PICKLE_EXTENSION, probe.path):
                hint = JOBLIB_HINT
            return Identification(row.what, _fill_braces(hint, probe), row.kind)
    return None


def _identify_text(probe: Probe) -> Identification | None:
    """Identify a text: a pointer, a page, an error message, an index, a note.

    None for binary bytes, unless they are a protocol buffer.
    """
    raw = _read_head(probe, _MAX_TEXT_HEAD)
    is_utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = raw.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")
    binary_count = sum(
        char == "\ufffd" or (char < " " and char not in "\t\n\r\f\b\x1b") for char in text
    )
    if binary_count and _is_protocol_buffer(raw, probe.require_source().size):
        hint = "give the checkpoint itself"
        if os.path.isfile(os.path.join(os.path.dirname(probe.path), "saved_model.pb")):
            hint = _fill_braces(
                "it belongs to a TensorFlow SavedModel: ckptool list {folder}", probe
            )
        return Identification("a protocol buffer, not a checkpoint", hint)
    text = text.lstrip()
    is_mostly_text = binary_count <= len(text) / 20
    if not is_mostly_text and not re.match(r"<[!?\w]", text):  # a page in any encoding
        return None
    if re.match(r"version https?://(?:git-lfs\.github|hawser\.github)\.com/spec/", text):
        return _identify_git_lfs(probe.path, text)
    if text.startswith("<"):
        return _identify_page(text)
    if text.startswith(("[", "{")):
        return _identify_json(probe)
    line = next(iter(text.splitlines()), "").strip()
    first = quoted(line)
    if probe.path.endswith(".symlink") and line and line.isprintable():
        description = f"a link file of Composer, which points to the checkpoint {first}"
        return Identification(
            description, f"open that file: ckptool list {shell(line)}", UnsupportedFormat
        )
    identification = next(  # the last pattern matches any text
        identified for pattern, identified in _TEXT_KINDS if re.match(pattern, text)
    )
    hint = _fill_braces(identification.hint or "", probe)
    return identification._replace(what=identification.what.format(first=first), hint=hint)


def _is_protocol_buffer(raw: bytes, size: int) -> bool:
    """Return True if the bytes of a file of this `size` are fields of a protocol buffer.

    A field begins with its number and its kind: 0 is a varint, 1 has 8 bytes, 5 has 4 bytes, and 2
    has its own length. `raw` may be only the start of the file.
    """
    at = count = 0
    while at < len(raw):
        key, at = _read_varint(raw, at)
        kind, number = key & 7, key >> 3
        if kind not in (0, 1, 2, 5) or not 0 < number < 1 << 10:  # fields have small numbers
            return False
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind in (0, 2):
            value, at = _read_varint(raw, at)
            length = value if kind == 2 else 0
        at, count = at + length, count + 1
        if at > size:
            return False
    return count > 0 and (at == size or len(raw) < size)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number with 7 bits per byte, and the offset after it.

    The highest bit of a byte means that another one follows, 10 at most.
    """
    value = shift = 0
    for byte in raw[at : at + 10]:
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            break
    return value, at


def _identify_git_lfs(path: str, text: str) -> Identification:
    """Identify a git-lfs pointer, with the size of the real file and the command to get it."""
    size = re.search(r"^size (\d{1,18})$", text, re.MULTILINE)
    real = f" (the real file is {int(size[1]) / 2**20:,.1f} MiB)" if size else ""
    folder, name = os.path.split(path)
    option = f"-C {shell(folder)} " if folder else ""
    pattern = "**/" + re.sub(r"[*\[\]\\,]", "?", name)  # --include takes a list of patterns
    return Identification(
        f"a git-lfs pointer, not the file itself{real}",
        f"git lfs install && git {option}lfs pull --include {shell(pattern)}",
    )


def _identify_page(text: str) -> Identification:
    """Identify a page: a server's error message, an XML document, or HTML with its title."""
    from html import unescape

    answer = re.search(r"<(?:Code|Message)>([^<]*)</", text)
    if not re.search(r"<(?:!doctype html|html|head|body|title)\b", text[:2000], re.IGNORECASE):
        if answer:
            return Identification(
                f"an error message of a server: {quoted(answer[1])}", _DOWNLOAD_AGAIN
            )
        return Identification("an XML document", _GIVE_CHECKPOINT)
    match = re.search(r"<title[^>]{0,100}>(.{0,400}?)</title", text, re.IGNORECASE | re.DOTALL)
    title = " ".join(unescape(match[1]).split()) if match else ""
    title_text = f" ({quoted(title)})" if title else ""
    hint = _DOWNLOAD_AGAIN
    if "drive.google.com" in text or "Google Drive" in text:
        hint = (
            "download it with gdown, or in a browser with `Download anyway`; if it was "
            "downloaded too often, copy the file to your own Drive and download the copy"
        )
    return Identification(f"an HTML page{title_text}, not the file itself", hint)


def _identify_json(probe: Probe) -> Identification:
    """Identify JSON: broken, an index, a server's error message, a configuration, or other."""
    import json

    document: Any = None
    try:
        document = json.loads(_read_head(probe, _MAX_JSON_BYTES))
    except (ValueError, RecursionError):
        hint = _fill_braces("look at it: head {file}", probe)
        return Identification("a text file that begins like JSON but is not JSON", hint)
    if not isinstance(document, dict):
        return Identification("a JSON document", _GIVE_CHECKPOINT)
    if "weight_map" in document:  # a valid index would have been read
        return Identification("an index of shards, not a shard", "give the index itself")
    for key in ("error", "message", "detail"):
        if isinstance(document.get(key), (str, dict)):
            answer = document[key] if isinstance(document[key], str) else json.dumps(document[key])
            return Identification(
                f"an error message of a server: {quoted(answer, 200)}", _DOWNLOAD_AGAIN
            )
    if document.keys() & {"architectures", "model_type", "hidden_size", "_class_name"}:
        return Identification(
            "a model's configuration (JSON), not its weights",
            "give the file with the weights, for example model.safetensors or pytorch_model.bin",
        )
    return Identification(f"a JSON document with the keys {few(list(document))}", _GIVE_CHECKPOINT)


def find_unused_path(path: str, taken: Collection[str] = ()) -> str:
    """Return the path, or one with a number before its extension, that does not exist.

    A name that is too long for file systems is shortened in the middle.
    """
    folder, name = os.path.split(path)
    while len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = name[: -_KEPT_NAME_END - 1] + name[-_KEPT_NAME_END:]  # one character less
    first_choice = os.path.join(folder, name)
    stem, suffix = os.path.splitext(first_choice)
    number, candidate = 1, first_choice
    while os.path.lexists(candidate) or candidate in taken:
        number += 1
        candidate = f"{stem}-{number}{suffix}"
    return candidate


def looks_like_checkpoint(head: bytes) -> bool:
    """Return whether 16 bytes may begin a zip, a pickle, a legacy stream or safetensors."""
    # A zip, or the number that begins a legacy stream, in protocol 0 of pickle.
    if head.startswith((b"PK\x03\x04", b"L119547037146038")):
        return True
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    # safetensors: the length of the header (at most 100 MB, by the format), then JSON
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000


_MAX_OPENED_FILES = 64

_ORBAX = (
    "restore it with orbax.checkpoint.StandardCheckpointer().restore, and save the result "
    "with flax.serialization.to_bytes for ckptool"
)
_STEP = "give the folder of one step: ckptool list {entry}"
_MEGATRON = "convert it with Megatron-LM's tools/checkpoint/convert.py"
_RANK = "open one rank with ckptool list {entry}/model_optim_rng.pt; to join ranks, " + _MEGATRON
_ITERATION = "give the folder of one iteration: ckptool list {folder}/iter_*"
_PART = "open one file with ckptool list {entry}"
_SAVED_MODEL = "copy its folder `variables` as well, with variables.index and the data files"
_TENSORFLOW_DATA = (
    "copy the index as well: it has the name of {entry} up to .data-, and the extension .index"
)
_SHARDS = (
    "copy the index as well (model.safetensors.index.json, pytorch_model.bin.index.json), or "
    "open one shard: ckptool list {entry}"
)

FOLDER_KINDS: tuple[NameKind, ...] = (
    NameKind(
        (r".*\.distcp",),
        "a distributed checkpoint (DCP) whose save was interrupted: it has no index `.metadata`",
        "if it was copied, copy `.metadata` as well; the first rank writes it last",
    ),
    NameKind((r"zero_to_fp32\.py|latest", r"global_step\d+"), "a DeepSpeed checkpoint", _STEP),
    NameKind(
        (r"zero_to_fp32\.py",),
        "a DeepSpeed checkpoint without the folder of its step",
        "copy the folder that its file `latest` gives, for example global_step10",
    ),
    NameKind(
        (r".*optim_states\.pt",),
        "a step of a DeepSpeed checkpoint without the model file",
        "copy mp_rank_00_model_states.pt as well, or open the file of one rank: ckptool list "
        "{entry}",
    ),
    NameKind((r"latest_checkpointed_iteration\.txt",), "a Megatron-LM checkpoint", _ITERATION),
    NameKind((r"iter_\d{7}",), "a Megatron-LM checkpoint", "ckptool list {entry}"),
    NameKind(
        (r"mp_rank_\d\d(?:_\d{3})*",),
        "a step of a Megatron-LM checkpoint with pipeline or expert parallelism, which "
        "ckptool does not join",
        _RANK,
    ),
    NameKind(
        (r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt",), "an Orbax checkpoint (JAX)", _ORBAX
    ),
    NameKind(
        (r"saved_model\.pb(?:txt)?",), "a TensorFlow SavedModel without variables", _SAVED_MODEL
    ),
    NameKind(
        (r".*\.data-\d{5}-of-\d{5}",),
        "a folder with the data of a TensorFlow checkpoint with a missing or truncated index",
        _TENSORFLOW_DATA,
    ),
    NameKind(
        (r"tensor_0\.pt",),
        "the tensors of a torch_xla checkpoint, with its structure in the file next to this folder",
        "give that file, which has the name of the folder without .tensors",
    ),
    NameKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)", r".*\.index\.json"),
        "a sharded checkpoint with a damaged index",
        "see what is wrong with it: ckptool list {entry}",
    ),
    NameKind(
        (r".*-\d{5}-of-\d{5}\.(?:safetensors|bin|pth?)",),
        "a sharded checkpoint without its index, which lists the tensors of each shard",
        _SHARDS,
    ),
    NameKind(
        (r"pytorch_model_fsdp_\d+",),
        "a checkpoint of FSDP in accelerate, with the model in a distributed checkpoint (DCP)",
        "ckptool list {entry}",
    ),
    NameKind(
        (r"sharded",),
        "a folder of the Hugging Face writer in torch with parts that are not joined: the save "
        "was interrupted or failed",
        "join them with ckptool convert {entry} FOLDER/",
    ),
    NameKind(
        (r"checkpoint_\d+\.pt", r"metadata\.pkl"),
        "a checkpoint of torch_checkpointing with parts, which ckptool does not join",
        "load it with torch_checkpointing, or open the file of one rank: ckptool list FILE",
    ),
    NameKind(
        (r".*-model_part-\d+-shard\d+\.pt",),
        "a checkpoint of fairscale's FSDP with the flat parameters of each rank, which "
        "ckptool does not join",
        "join them with fairscale's consolidate_shard_weights, or " + _PART,
    ),
    NameKind(
        (r"rank\d+\.pt",),
        "the rank files of OLMo with flat parameters of FSDP, which ckptool does not join",
        "join them with OLMo's scripts/unshard.py, or " + _PART,
    ),
)


_MODEL_FILE = r"\.(?:safetensors|bin|pth?|ckpt)(?:\.index\.json)?\Z"
_TRAINER_STATE_NAME = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict|scaler|rng_state|random_states|training_args)"
    r"(_\d+)*\.(pt|pth|bin|pkl)"
)
"""The files that the trainers of transformers and accelerate save next to a model."""


def _identify_folder(probe: Probe) -> Identification:
    """Identify a folder by the names in it."""
    names = sorted(probe.entries)
    for row in FOLDER_KINDS:
        matches = row.find_first_matches(names)
        if matches is not None:
            entry = os.path.join(probe.path, matches[-1])  # the name for the last pattern
            hint = row.hint.format(folder=shell(probe.path), entry=shell(entry))
            return Identification(f"{row.what} (it contains {few(names)})", hint, row.kind)
    if "model_index.json" in names:
        return _identify_pipeline(probe.path, names)
    return _identify_other_folder(probe.path, names)


def _identify_pipeline(path: str, names: list[str]) -> Identification:
    """Identify a diffusers pipeline: a model in each of some folders."""
    model_folders = [
        name
        for name in names
        if os.path.isdir(os.path.join(path, name))
        and any(re.search(_MODEL_FILE, file) for file in os.listdir(os.path.join(path, name)))
    ]
    description = f"a diffusers pipeline with weights in {few(model_folders, 12)}"
    first = os.path.join(path, model_folders[0]) if model_folders else path
    return Identification(
        description, f"give one of them: ckptool list {shell(first)}", UnsupportedFormat
    )


def _identify_other_folder(path: str, names: list[str]) -> Identification:
    """Identify a folder of unknown kind: the user may mean a file in it.

    It may be empty, an unfinished write, the folder of a run, or have one or more checkpoints.
    """
    if not names:
        return Identification("an empty folder", None)
    if all(".ckptool-" in name for name in names):
        description = "a folder that ckptool did not finish writing"
        return Identification(description, "write it again; the next run removes these files")
    from ckptool.formats.run_folder import find_run

    if run := find_run(path, names):
        chosen = os.path.join(path, run.best or run.last)
        return Identification(run.text, f"give one of them: ckptool list {shell(chosen)}")
    description = f"a folder that is not a checkpoint (it contains {few(names)})"
    checkpoint_files = [
        name for name in names[:_MAX_OPENED_FILES] if _may_be_checkpoint(os.path.join(path, name))
    ]
    if not checkpoint_files:
        return Identification(description, "give the checkpoint itself")
    command = f"ckptool list {shell(os.path.join(path, checkpoint_files[0]))}"
    if len(checkpoint_files) == 1:
        return Identification(
            f"a folder with the checkpoint {quoted(checkpoint_files[0])} inside", command
        )
    if all(map(_TRAINER_STATE_NAME.fullmatch, checkpoint_files)):
        description = (
            f"the folder of a trainer without the model (it contains {few(checkpoint_files)})"
        )
        return Identification(
            description,
            f"add the model's file to the folder, or give one of these files: {command}",
        )
    return Identification(
        f"a folder with several checkpoints: {few(checkpoint_files)}", f"give one: {command}"
    )


def _may_be_checkpoint(path: str) -> bool:
    """Return whether a path is a readable file that begins like a checkpoint."""
    if not os.path.isfile(path):
        return False
    with suppress(CheckpointError, OSError), closing(FileSource(path)) as source:
        return looks_like_checkpoint(source.read(0, min(16, source.size)))
    return False
