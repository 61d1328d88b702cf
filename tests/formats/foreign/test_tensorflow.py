"""Checkpoints of TensorFlow: an index and data files. Oracles say what TensorFlow read."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import (
    CorruptFile,
    FileMissing,
    LimitExceeded,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.files.checksums import crc32c
from ckptool.formats import open_checkpoint
from ckptool.formats.foreign import leveldb
from ckptool.formats.foreign.leveldb import MAGIC, _decompress_snappy, mask_crc, unmask_crc
from ckptool.formats.foreign.tensorflow import _encode_ordered
from ckptool.limits import Limits
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "tensorflow"
    sample = "tensorflow/run"
    is_covered = True


@pytest.fixture
def tensorflow(fixtures, tmp_path):
    """The checkpoints, in a place where they may be damaged."""
    return Path(shutil.copytree(fixtures / "tensorflow", tmp_path / "tensorflow"))


# Tables as TensorFlow writes them


def varint(number):
    low = number & 0x7F
    return bytes((low | 0x80,)) + varint(number >> 7) if number > 0x7F else bytes((low,))


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry_of(dtype=1, shape=(2,), offset=0, size=8, more=b"", shard=0):
    sizes = b"".join(field(2, field(1, one)) for one in shape)
    numbers = ((1, dtype), (2, sizes), (3, shard), (4, offset), (5, size))
    return b"".join(field(*one) for one in numbers) + more


def block_of(entries):
    rows = (
        varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in entries
    )
    return b"".join(rows) + bytes(4) + b"\1\0\0\0"


def stored(block, kind=0):
    block += bytes((kind,))
    return block + mask_crc(crc32c(block)).to_bytes(4, "little")


def table_of(blocks, handles=()):
    """A table of blocks, which lie where they do, or where `handles` say."""
    raw, places = b"", []
    for block in blocks:
        places.append(varint(len(raw)) + varint(len(block) - 5))
        raw += block
    places = list(handles) or places
    last = stored(block_of([(b"%d" % at, place) for at, place in enumerate(places)]))
    footer = varint(0) + varint(0) + varint(len(raw)) + varint(len(last) - 5)
    return raw + last + footer.ljust(40, b"\0") + MAGIC


HEADER = field(1, 1)


@pytest.fixture
def written(tmp_path):
    """Write a checkpoint of entries (or a whole table) over eight bytes, and return its prefix."""

    def write(entries, data=b"12345678", header=HEADER):
        if not isinstance(entries, bytes):
            rows = [(b"", header), *sorted(entries.items())]
            entries = table_of([stored(block_of(rows))])
        (tmp_path / "a.index").write_bytes(entries)
        (tmp_path / "a.data-00000-of-00001").write_bytes(data)
        return tmp_path / "a"

    return write


# What is given


def names_of(path):
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "tensorflow"
        return checkpoint.path, [".".join(name) for name, _ in checkpoint.tensors()]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("run", "run/ckpt-2.index"),
        ("run/ckpt-1", "run/ckpt-1.index"),
        ("run/ckpt-1.index", "run/ckpt-1.index"),
        ("run/ckpt-1.data-00000-of-00001", "run/ckpt-1.index"),
        ("saved_model", "saved_model/variables/variables.index"),
        ("saved_model/variables", "saved_model/variables/variables.index"),
    ],
)
def test_what_stands_for_a_checkpoint(tensorflow, given, read):
    path, names = names_of(tensorflow / given)
    assert path == str(tensorflow / read)
    assert ("scale" if "saved" in given else "state_dict.layer_with_weights-0/kernel") in names


def test_a_note_with_the_path_of_another_machine(tensorflow):
    note = 'model_checkpoint_path: "/home/other/run/ckpt-1"\n'
    (tensorflow / "run/checkpoint").write_text(note)
    assert names_of(tensorflow / "run")[0].endswith("run/ckpt-1.index")
    (tensorflow / "run/checkpoint").write_text(note.replace("ckpt-1", "ckpt-9"))
    with pytest.raises(
        FileMissing, match=r"run: lacks ckpt-9\.index, the latest checkpoint in its file"
    ) as info:
        open_checkpoint(tensorflow / "run")
    assert info.value.hint == "copy it as well, or give another checkpoint"


def test_several_checkpoints_without_a_note(tensorflow):
    (tensorflow / "run/faiss.index").write_bytes(b"IxF2" * 9)
    (tensorflow / "run/checkpoint").write_text("of no use\n")
    words = r"several checkpoints: ckpt-1.index, ckpt-2.index\n"
    with pytest.raises(UnsupportedFormat, match=words):
        open_checkpoint(tensorflow / "run")
    (tensorflow / "run/checkpoint").unlink()
    with pytest.raises(UnsupportedFormat, match=words):
        open_checkpoint(tensorflow / "run")
    (tensorflow / "run/ckpt-1.index").unlink()
    assert names_of(tensorflow / "run")[0].endswith("ckpt-2.index")


# Names and values


def test_a_strategy_leaves_no_trace(fixtures):
    alone = ckptool.list_tensors(fixtures / "tensorflow/run").tensors
    mirrored = ckptool.list_tensors(fixtures / "tensorflow/mirrored").tensors
    rows = [[(one.path, one.dtype, one.shape) for one in many] for many in (alone, mirrored)]
    assert rows[0] == rows[1]


def test_the_weights_go_to_torch_and_safetensors(fixtures, tmp_path, capfd):
    run = str(fixtures / "tensorflow/run")
    assert main(["convert", run, str(tmp_path / "a.safetensors")]) == 0
    assert main(["convert", run, str(tmp_path / "a.pth")]) == 0
    assert "left out: optimizer (optimizer, 17 tensors)" in capfd.readouterr().err
    weights = load_file(tmp_path / "a.safetensors")
    whole = torch.load(tmp_path / "a.pth")
    assert list(weights) == list(whole["state_dict"])
    assert weights["layer_with_weights-2/kernel"].equal(
        whole["state_dict"]["layer_with_weights-2/kernel"]
    )
    assert whole["optimizer"]["layer_with_weights-2/kernel/optimizer/m"].shape == (18, 5)
    assert whole["optimizer"]["iter"] == 4
    assert ckptool.load_state_dict(run).keys() == weights.keys()


def test_whose_layout_it_is(fixtures, capfd):
    assert main(["info", str(fixtures / "tensorflow/run")]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "kernels have the layout of TensorFlow: Dense [in, out]" in out
    assert "records of TensorFlow itself: _CHECKPOINTABLE_OBJECT_GRAPH, save_counter" in out


def test_texts_are_values(fixtures, tmp_path):
    with open_checkpoint(fixtures / "tensorflow/types/types.ckpt") as checkpoint:
        root = checkpoint.with_late_values().root
    assert root["text"] == "Grüße"
    assert root["texts"] == [["a", ""], ["b" * 300, b"\xff"]]
    with open_checkpoint(fixtures / "tensorflow/saved_model") as checkpoint:
        assert sorted(checkpoint.with_late_values().root["words/table-keys"]) == ["one", "zwei"]


def test_a_name_that_is_no_text(written, tmp_path, capfd):
    prefix = str(written({b"\xff": entry_of(), b"a": entry_of()}))
    for verb in (["list"], ["verify"], ["convert", "a.pth"], ["convert", "a.safetensors"]):
        target = [str(tmp_path / one) for one in verb[1:]]
        assert main([verb[0], prefix, *target]) in (0, 1, 2)
        assert "unexpected" not in capfd.readouterr().err


def test_averages_are_weights_and_what_else_is_below_a_variable_is_not(written):
    names = (b"w", b"w/Momentum", b"w/ExponentialMovingAverage", b"opt/iter")
    prefix = written(dict.fromkeys(names, entry_of()))
    with open_checkpoint(prefix) as checkpoint:
        assert list(checkpoint["state_dict"]) == ["w", "w/ExponentialMovingAverage"]
        assert list(checkpoint["optimizer"]) == ["opt/iter", "w/Momentum"]


def test_a_type_that_torch_has_not(written):
    with open_checkpoint(written({b"a": entry_of(), b"v": entry_of(21)})) as checkpoint:
        assert list(checkpoint) == ["a"]
        (left,) = checkpoint.details.left_behind
    assert left.startswith("'v' of TensorFlow type 21 is not a tensor")


def test_big_endian_elements(written):
    prefix = written({b"a": entry_of(3)}, b"\0\0\0\1\0\0\1\0", field(1, 1) + field(2, 1))
    assert ckptool.load_state_dict(prefix)["a"].tolist() == [1, 256]


def test_numbers_in_keys():
    """As `OrderedCode::WriteSignedNumIncreasing` writes them."""
    known = {-1: "7f", 0: "80", 63: "bf", 64: "c040", 65: "c041", 8191: "dfff", 8192: "e02000"}
    assert {number: _encode_ordered(number).hex() for number in known} == known
    with pytest.raises(CorruptFile):
        _encode_ordered(1 << 55)


# Damage


def test_checksums(tensorflow, capfd):
    data = tensorflow / "v1/model.ckpt-1.data-00000-of-00002"
    assert main(["verify", str(tensorflow / "v1")]) == 0
    raw = bytearray(data.read_bytes())
    raw[5] ^= 1
    data.write_bytes(raw)
    capfd.readouterr()
    assert main(["verify", str(tensorflow / "v1")]) == 1
    out = capfd.readouterr().out
    assert "'embedding' (a part): checksum mismatch: CRC-32C" in out


def test_a_text_with_another_checksum(tensorflow):
    data = tensorflow / "types/types.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes().replace(b"Gr\xc3", b"gr\xc3"))
    with (
        open_checkpoint(tensorflow / "types/types.ckpt") as checkpoint,
        pytest.raises(CorruptFile, match=r"variable 'text' is damaged \(checksum mismatch\)"),
    ):
        checkpoint.with_late_values()


def test_data_that_is_not_there(tensorflow):
    data = tensorflow / "v1/model.ckpt-1.data-00001-of-00002"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(
        TruncatedFile, match=r"cannot read 8 bytes at offset 80: the file ends at 87, 1 bytes too"
    ):
        open_checkpoint(tensorflow / "v1")
    data.unlink()
    with pytest.raises(
        FileMissing, match=r"the data file model\.ckpt-1\.data-00001-of-00002 is missing"
    ):
        open_checkpoint(tensorflow / "v1")


@pytest.mark.parametrize("name", ["types/types.ckpt", "snappy/model.ckpt-1"])
def test_every_bit_of_an_index_counts(tensorflow, name):
    path = tensorflow / f"{name}.index"
    whole = path.read_bytes()
    start, at = leveldb.read_varint(whole[-48:], 0)
    size, _ = leveldb.read_varint(whole[-48:], at)
    footer = range(len(whole) - 48, len(whole) - 8)
    for at in {*range(len(whole))} - {*range(start, start + size + 5)} - {*footer}:
        raw = bytearray(whole)
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)
        with pytest.raises(ckptool.CheckpointError):
            open_checkpoint(path).close()


def test_a_cut_index(written):
    prefix = written({b"a": entry_of()})
    whole = prefix.with_suffix(".index").read_bytes()
    for kept in (8, 40, 47):
        written(whole[-kept:])
        with pytest.raises(CorruptFile, match="the end of the index is missing"):
            open_checkpoint(prefix)


ENDLESS = b"\xff" * 11
WRONG = {
    "a number in the index does not end": entry_of(more=b"\x38" + ENDLESS),
    "a message in the index ends within a field": entry_of(more=b"\x3a\x7f"),
    "a field of wire type 3": entry_of(more=b"\x3b"),
    "field 5 of a message in the index is not a number": entry_of(more=field(5, b"8")),
    "field 7 of a message in the index is not a message": entry_of(more=field(7, 1)),
    "needs 8 bytes, but there are 4": entry_of(size=4),
    "1 bytes too early": entry_of(offset=1),
    "variable 'a' has a negative size or position": entry_of(offset=-1),
    "the index needs data file 7 of 1": entry_of(shard=7),
    "variable 'a' and its parts have different numbers of dimensions": entry_of(more=field(7, b"")),
    "the part of shape .2. at offset .0. is missing": entry_of(more=field(7, field(1, b""))),
}


def test_an_entry_that_lies(written):
    for words in WRONG:
        with pytest.raises(CorruptFile, match=words) as info:
            open_checkpoint(written({b"a": WRONG[words]}))
        assert info.value.file


def test_more_fields_than_an_index_needs(written):
    for more in (b"\x3a\0" * 65_537, b"".join(field(number, 1) for number in range(99, 65_700))):
        with pytest.raises(
            LimitExceeded, match="a message in the index has 65,537 fields, more than the limit of"
        ):
            open_checkpoint(written({b"a": entry_of(more=more)}))


def test_no_texts_of_a_huge_shape(written):
    with open_checkpoint(written({b"a": entry_of(7, (1 << 60, 0), size=4)}, bytes(4))) as one:
        assert one["a"].find  # its CRC-32C is not that of nothing
        with pytest.raises(CorruptFile, match=r"variable 'a' is damaged \(checksum mismatch\)"):
            one.with_late_values()


def test_more_dimensions_than_torch_has(written):
    with pytest.raises(
        LimitExceeded, match="variable 'a' has 65 dimensions, more than the limit of 64"
    ):
        open_checkpoint(written({b"a": entry_of(shape=(1,) * 65, size=4)}))


def sliced(*extents):
    """The entries of a variable `a` of two elements in parts of one."""
    place = [field(7, field(1, field(1, at) + field(2, 1))) for at in extents]
    keys = (b"\0a\0\1\1\1" + bytes((0x80 + at, 0x81)) for at in extents)
    parts = dict.fromkeys(keys, entry_of(shape=(1,), size=4))
    return {b"a": entry_of(size=0, more=b"".join(place)), **parts}


def test_parts_that_do_not_cover_a_variable(written):
    with open_checkpoint(written(sliced(0, 1))) as checkpoint:
        assert checkpoint["a"].read() == b"12341234"
    with pytest.raises(CorruptFile, match=r"variable 'a': 1 of 2 elements are in no chunk"):
        open_checkpoint(written(sliced(0)))
    with pytest.raises(CorruptFile, match=r"variable 'a': .* is outside shape"):
        open_checkpoint(written(sliced(0, 2)))
    other = {**sliced(0, 1), b"\0a\0\1\1\1\x80\x81": entry_of(3, (1,), size=4)}
    with pytest.raises(CorruptFile, match="has another shape or type"):
        open_checkpoint(written(other))


def test_texts_that_lie(written):
    for shape, raw in (((1 << 60,), b"12345678"), ((2,), b"\1\x099876ab"), ((2,), ENDLESS[:8])):
        with open_checkpoint(written({b"a": entry_of(7, shape)}, raw)) as checkpoint:
            with pytest.raises(
                CorruptFile, match=r"strings that do not match their lengths|does not end"
            ):
                checkpoint.with_late_values()
            assert main(["verify", checkpoint.path]) == 1


# Blocks


def refused(written, table, words, error=CorruptFile, limits=None):
    with pytest.raises(error, match=words):
        open_checkpoint(written(table), **({"limits": limits} if limits else {}))


def test_blocks_that_lie(written):
    fine = stored(block_of([(b"", field(1, 1)), (b"a", entry_of())]))
    refused(written, table_of([fine], [varint(0) + varint(1 << 40)]), "is outside the index")
    refused(written, table_of([fine], [varint(1 << 62) + varint(1)]), "is outside the index")
    place = varint(0) + varint(len(fine) - 5)
    refused(written, table_of([fine], [place, place]), "is outside the index")
    refused(written, table_of([fine], [ENDLESS]), "a number in the index does not end")
    refused(written, table_of([fine, fine]), "the keys of the index are out of order")
    refused(
        written,
        table_of([fine[:-1] + b"!"]),
        r"the block at 0 of the index is damaged \(checksum mismatch\)",
    )
    refused(
        written, table_of([stored(b"", 2)]), "the block at 0 of the index has unknown compression 2"
    )
    refused(written, table_of([stored(b"")]), "no restart list")
    refused(written, table_of([stored(b"\xff" * 8)]), "no restart list")
    for row in (b"\1\1\0a", b"\0\x7f\0a", b"\0\1\x7fa"):
        refused(written, table_of([stored(row + bytes(4))]), "reaches past its block")


def test_an_index_beyond_the_limits(written):
    table = table_of([stored(block_of([(b"", field(1, 1)), (b"a" * 400, entry_of())]))])
    refused(written, table, "the index has", LimitExceeded, Limits(max_header_bytes=400))
    rows = b"".join(b"%b\1\0%c" % (varint(at), 97) for at in range(300))  # keys of what came before
    table = table_of([stored(rows + bytes(4))])
    refused(written, table, "more memory", LimitExceeded, Limits(max_header_bytes=4 * len(table)))


def test_snappy():
    assert _decompress_snappy(b"\x0b\x08abc\x11\x03", 99) == b"abcabcabcab"
    assert _decompress_snappy(b"\x07\x08abc\x0e\x03\0", 99) == b"abcabca"
    assert _decompress_snappy(b"\x04\xf0\x03abcd", 99) == b"abcd"


@pytest.mark.parametrize(
    "stream",
    [
        b"\x04\x08abc",  # shorter than it says
        b"\x02\x08abc",  # longer
        b"\x08\x08abc\x01\x00",  # a copy from nowhere
        b"\x08\x08abc\x01\x04",  # from before the beginning
        b"\x08\x08abc\x01",  # cut
        b"\x08\xfc\xff\xff\xff\xffabc",  # four gigabytes, and three bytes are there
        b"\x08\xf4abc",
    ],
)
def test_snappy_that_lies(stream, written):
    refused(written, table_of([stored(stream, 1)]), "is not a snappy stream")


def test_a_bomb(written):
    bomb = varint(1 << 31) + b"\0a" + b"\xfe\1\0" * 1000
    refused(
        written,
        table_of([stored(bomb, 1)]),
        "a block .* inflates to 2,147,483,648 bytes",
        LimitExceeded,
    )


def test_masks():
    assert mask_crc(crc32c(b"foo")) != crc32c(b"foo")
    assert all(unmask_crc(mask_crc(crc)) == crc for crc in (0, 1, 0xE3069283, 0xFFFFFFFF))


def test_the_package_that_checksums_need_is_named(tensorflow, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(UnsupportedFormat, match="google-crc32c is not installed") as caught:
        open_checkpoint(tensorflow / "run")
    assert caught.value.hint == "pip install google-crc32c"
