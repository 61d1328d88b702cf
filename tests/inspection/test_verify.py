"""What `verify` finds in files of every format, and what it leaves alone."""

import hashlib
import json
import math
import os
import pickle
import shutil
import struct
import zipfile
from itertools import product

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.serialization import config

import ckptool
from ckptool.errors import (
    FileDenied,
    FileMissing,
    UnreadableFile,
    UnsupportedFormat,
    UsageError,
)
from ckptool.formats import open_checkpoint
from ckptool.inspection.verify import Verifier, verify
from ckptool.limits import Limits
from tests.formats.legacy_streams import Called, Pid, dumps, floats, stream, tensor
from tests.formats.safetensors_files import entry, raw_file
from tests.formats.shards import write_set
from tests.test_fixtures import FIXTURES, ORACLES

ODD = {
    "archives/big_endian.pth": "offsets",  # of unaligned records, written by another tool
    "archives/unaligned.pth": "offsets",
    "archives/deflated.pth": "compressed",
    "archives/trailing.pth": "trailing",
    "safetensors/spaces.safetensors": "header",
}
"""Fixtures that read well and break a rule."""


def kinds(path, **options):
    return [problem.kind for problem in verify(path, **options).problems]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"w": torch.arange(6.0), "b": torch.ones(2)}, path)
    return path


def test_fixtures_are_fine_but_for_those_made_to_be_odd():
    found = {}
    for name in ORACLES:
        verdict = verify(FIXTURES / name)
        assert verdict.format, name
        if not verdict.ok:
            found[name] = verdict.problems[0].kind
    assert found == ODD


def test_of_a_zip_every_record_is_summed_up(model):
    verdict = verify(model)
    with zipfile.ZipFile(model) as archive:
        infos = archive.infolist()
    assert verdict.ok
    assert (verdict.records, verdict.summed) == (len(infos), len(infos))
    assert verdict.checked == sum(info.file_size for info in infos)
    assert verdict.size == model.stat().st_size


def test_a_changed_byte_is_told_with_the_tensors_that_lie_there(model):
    data = bytearray(model.read_bytes())
    data[data.index(struct.pack("<f", 5.0))] ^= 1
    model.write_bytes(data)
    assert torch.load(model)["w"][5] != 5.0  # torch says nothing
    (found,) = verify(model).problems
    assert (found.kind, found.place) == ("checksum", "model/data/0")
    assert found.text.endswith("affects w")


def test_a_damaged_pickle_is_told_by_its_checksum_and_by_its_reader(model):
    data = bytearray(model.read_bytes())
    data[data.index(b"collections")] ^= 0x80
    model.write_bytes(data)
    assert kinds(model) == ["checksum", "corrupt"]


def test_checksums_that_were_not_computed_are_a_note(tmp_path):
    verdict = verify(FIXTURES / "archives/no_crc.pth")
    assert (verdict.ok, verdict.checked) == (True, 0)
    assert "no CRC-32 for 12 records" in verdict.notes[0]


def test_dead_bytes_are_a_note(model):
    with open_checkpoint(model) as checkpoint:
        renamed = checkpoint.rename(["w=>weight"])
        renamed.save(model, in_place=True, overwrite=True)
    verdict = verify(model)
    assert verdict.ok
    assert "bytes between the records are unused" in verdict.notes[0]


def test_a_record_that_the_pickle_does_not_mention_is_a_note():
    verdict = verify(FIXTURES / "archives/extra_record.pth")
    assert verdict.ok
    assert verdict.notes == (
        "record 'data/99' is not used by the pickle",
        "record 'notes.txt' is not part of a checkpoint",
    )


def repacked(path, target, **changes):
    """The records again, by Python's zipfile."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            own = name.partition("/")[2]
            if changes.get(own, "") is not None:
                new.writestr(
                    changes.get("folder", "model/") + own, changes.get(own) or old.read(name)
                )
        for name, data in changes.get("more", {}).items():
            new.writestr(name, data)
    return target


def test_what_a_repacked_zip_may_be_wrong_in(model, tmp_path):
    for changes, kind, word in [
        ({}, "offsets", "2 of 2 storages are elsewhere"),
        ({".format_version": b"0"}, None, ""),
        ({".storage_alignment": b"none"}, "offsets", "a number, the alignment"),
        ({".format_version": None, "version": None}, "version", "no record 'version'"),
        ({".format_version": None, "version": b"11"}, "version", "'11', expected 1 to 10"),
        ({".format_version": None, "more": {"__MACOSX/x": b""}}, "foreign", "outside the folder"),
        ({".format_version": None, "folder": ""}, "folder", "are not in a folder"),
        ({".format_version": None, "byteorder": b"middle"}, "corrupt", "byte order"),
        ({".format_version": None, "data/0": b"1234"}, "corrupt", "needs 24 bytes"),
        ({".format_version": None, "data/0": None}, "corrupt", "storage '0' is missing"),
    ]:
        if changes == {}:  # the first is looked up, the second added up
            word = "1 of 2 storages are elsewhere"
        found = verify(repacked(model, tmp_path / "repacked.pth", **changes)).problems
        assert [problem.kind for problem in found] == ([kind] if kind else []), changes
        assert all(word in problem.text for problem in found), changes


def test_computed_offsets_are_those_that_torch_computes(model, tmp_path):
    path = repacked(model, tmp_path / "repacked.pth")
    meta = torch.load(path, map_location="meta")["b"].untyped_storage()._checkpoint_offset
    with open_checkpoint(path) as checkpoint:
        assert meta != checkpoint["b"].storage.data.offset
    config.save.storage_alignment = 4096
    try:
        torch.save({"w": torch.arange(6.0), "b": torch.ones(2)}, model)
    finally:
        config.save.storage_alignment = 64
    assert verify(model).ok


def test_a_storage_whose_first_key_is_not_0(model, tmp_path):
    data = model.read_bytes()
    first = repacked(model, tmp_path / "first.pth").read_bytes()
    swapped = first.replace(b"data/0", b"data/x").replace(b"X\1\0\0\0" + b"0", b"X\1\0\0\0" + b"x")
    (tmp_path / "first.pth").write_bytes(swapped)
    assert "offsets" in kinds(tmp_path / "first.pth")
    with pytest.raises(AssertionError, match="expected key '0'"):
        torch.load(tmp_path / "first.pth", map_location="meta", weights_only=False)
    assert data == model.read_bytes()


def test_two_records_of_one_name_and_overlaps_are_told(model, tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(model, "a") as archive:
        archive.writestr("model/data.pkl", b"N.")
    assert kinds(model) == ["corrupt"]


def test_a_compressed_record_without_its_end_mark(tmp_path):
    path = tmp_path / "scripted.pt"
    data = bytearray((FIXTURES / "torchscript/scripted.pt").read_bytes())
    with zipfile.ZipFile(FIXTURES / "torchscript/scripted.pt") as archive:
        packed = next(info for info in archive.infolist() if info.compress_type)
    name, extra = struct.unpack_from("<26x2H", data, packed.header_offset)
    data[packed.header_offset + 30 + name + extra] ^= 1  # the bit that says: the last block
    path.write_bytes(data)
    (found,) = verify(path).problems
    assert (found.place, found.kind) == (packed.filename, "corrupt")
    assert "no end mark" in found.text
    data[packed.header_offset + 30 + name + extra] ^= 0b111
    path.write_bytes(data)
    assert "checksum" in kinds(path)


def test_a_legacy_stream(tmp_path, model):
    path = tmp_path / "legacy.pth"
    torch.save({"w": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    assert verify(path).ok
    path.write_bytes(whole + whole)
    verdict = verify(path)
    assert verdict.ok
    assert verdict.notes == ("1 more torch.save stream after the first; only the first is read",)
    for rest in (b"\0", whole[:-1], model.read_bytes()):
        path.write_bytes(whole + rest)
        (found,) = verify(path).problems
        assert found.kind == "trailing"
        assert f"at offset {len(whole):,}" in found.text
    path.write_bytes(whole[:-1])
    assert kinds(path) == ["truncated"]
    path.write_bytes(whole.replace(b"little_endian", b"mittle_endian"))
    assert kinds(path) == ["header"]


def pid(numel=2):
    return Pid("storage", torch.FloatStorage, "0", "cpu", numel, None)


def test_a_pickle_without_a_checksum_must_be_one_that_torch_writes(tmp_path):
    for root, word in [
        ({"w": tensor(pid(), (2,))}, None),
        ({"w": tensor(pid(), (2,)), "x": Called(os.path.join, "a")}, None),
        ([tensor(pid(), (2,)), Called(torch._utils._rebuild_tensor_v2, pid())], "corrupt"),
        ([tensor(pid(), (2,)), Called(torch._utils.ExceptionWrapper, "x")], "no such function"),
        ([tensor(pid(), (2,)), Called(os.path.join, pid())], "on an unknown storage"),
    ]:
        (tmp_path / "made.pth").write_bytes(stream(root, ["0"], [floats(1.0, 2.0)]))
        found = verify(tmp_path / "made.pth").problems
        assert [
            word in (problem.text, problem.kind) or word in problem.text for problem in found
        ] == ([True] * (word is not None)), root


def test_a_record_beside_those_of_a_checkpoint_is_a_note(model):
    with zipfile.ZipFile(model, "a") as archive:
        archive.writestr("model/code/x.py", b"print()")
    verdict = verify(model)
    assert verdict.ok
    assert verdict.notes == ("record 'code/x.py' is not part of a checkpoint",)


def test_bytes_behind_the_pickle_of_a_zip(model, tmp_path):
    with zipfile.ZipFile(model) as archive:
        longer = archive.read("model/data.pkl") + b"N."
    path = repacked(model, tmp_path / "r.pth", **{".format_version": None, "data.pkl": longer})
    (found,) = verify(path).problems
    assert (found.kind, found.place) == ("trailing", "model/data.pkl")
    assert found.text.startswith("2 bytes after the end of the pickle")


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_frame_that_lies_about_its_length(tmp_path, protocol, zipped):
    path = tmp_path / "model.pth"
    torch.save(
        {"w": torch.ones(2)},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zipped,
    )
    assert verify(path).ok
    if zipped:
        with zipfile.ZipFile(path) as archive:
            data = bytearray(archive.read("model/data.pkl"))
        data[7] ^= 1
        path = repacked(path, tmp_path / "r.pth", **{".format_version": None, "data.pkl": data})
        (found,) = verify(path).problems
        assert found.kind == "pickle"
        return
    whole, begin = path.read_bytes(), bytes((0x80, protocol, 0x95))
    starts = [place for place in range(len(whole)) if whole.startswith(begin, place)]
    assert len(starts) == 5
    for bit, start in product(range(64), starts):
        data = bytearray(whole)
        data[start + 3 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert kinds(path) == ["pickle"]


def test_what_no_pickler_leaves(tmp_path):
    path = tmp_path / "made.pkl"
    plain = pickle.dumps({"a": [1, 2], "b": "text"}, 2)
    for data, fine in (
        (plain, True),
        (plain.replace(b"q\x02", b"q\x07"), False),  # a gap in the memo
        (plain.replace(b"}q\0", b"]}q\0", 1), False),  # something left on the stack
        (plain.replace(b"}q\0", b"(}q\0", 1), False),  # a mark left
    ):
        path.write_bytes(data)
        assert verify(path).ok is fine
    path.write_bytes(plain + plain)
    assert verify(path).notes == ("1 more pickle after the first; only the first is read",)
    path.write_bytes(plain + b"junk")
    assert kinds(path) == ["trailing"]


def test_a_tar(tmp_path):
    path = tmp_path / "old.tar"
    whole = (FIXTURES / "streams/torch_0.1.tar").read_bytes()
    used = len(whole.rstrip(b"\0"))
    path.write_bytes(whole[:-1] + b"x")
    assert kinds(path) == ["trailing"]
    path.write_bytes(whole[:used] + b"x" + whole[used + 1 :])
    assert kinds(path) == ["padding"]
    path.write_bytes(whole[: used + 10])
    assert kinds(path) == ["truncated"]
    with open_checkpoint(FIXTURES / "streams/torch_0.1.tar") as checkpoint:
        assert checkpoint.details.dead_bytes == 0


def test_a_member_of_a_tar_with_more_than_is_read(tmp_path):
    import io
    import tarfile

    path = tmp_path / "old.tar"
    with (
        tarfile.open(FIXTURES / "streams/torch_0.1.tar") as old,
        tarfile.open(path, "w") as new,
    ):
        for member in old:
            data = old.extractfile(member).read() + b"more" * (member.name == "tensors")
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    (found,) = verify(path).problems
    assert (found.kind, found.text) == ("trailing", "4 bytes in its members are not read")


def test_safetensors(tmp_path):
    text = json.dumps({"a": entry()}).encode()
    for header, body, kind in (
        ({"a": entry()}, bytes(8), None),
        ({"a": entry()}, bytes(9), "corrupt"),
        ({"a": entry()}, bytes(7), "truncated"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "corrupt"),
        ({"a": entry(), "b": entry(offsets=(9, 17))}, bytes(17), "corrupt"),
        (text + b"\n", bytes(8), "padding"),
        (b" " + text, bytes(8), "header"),
    ):
        found = kinds(raw_file(tmp_path / "a.safetensors", header, body))
        assert found == ([kind] if kind else []), (header, len(body))
    odd = text + b" " * (-len(text) % 8 + 1)
    verdict = verify(raw_file(tmp_path / "a.safetensors", odd, bytes(8)))
    assert verdict.ok
    assert "not a multiple of 8" in verdict.notes[0]


@pytest.fixture
def index(tmp_path):
    one, two = {"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.arange(4.0)}
    shards = {"model-00001-of-00002.safetensors": one, "model-00002-of-00002.safetensors": two}
    return write_set(tmp_path / "set", shards)


def changed(index, **changes):
    index.write_text(json.dumps({**json.loads(index.read_text()), **changes}))


def test_shards_and_their_index(index):
    for path in (index, index.parent):
        verdict = verify(path)
        assert (verdict.ok, verdict.file, verdict.shards) == (True, str(index), 2)
        assert verdict.format == "safetensors-sharded"


def test_the_total_of_an_index(index):
    changed(index, metadata={"total_size": 1})
    (found,) = verify(index).problems
    assert (found.kind, "they have 36" in found.text) == ("total-size", True)
    changed(index, metadata={})
    assert verify(index).ok


def test_an_index_and_its_shards_contradict_each_other(index):
    names = json.loads(index.read_text())["weight_map"]
    changed(index, weight_map={**names, "c": "model-00001-of-00002.safetensors"})
    assert kinds(index) == ["corrupt"]
    changed(index, weight_map={**names, "d": "model-00002-of-00002.safetensors"})
    assert kinds(index) == ["corrupt"]
    changed(index, weight_map={**names, "c": "model-00003-of-00002.safetensors"})
    assert kinds(index) == ["missing-shard"]
    (index.parent / "model-00003-of-00002.safetensors").write_bytes(
        b"\x89HDF\r\n\x1a\n" + bytes(100)
    )
    assert kinds(index) == ["corrupt"]


def test_a_damaged_shard_is_told_once_with_its_name(index, tmp_path):
    shard = index.parent / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (found,) = verify(index).problems
    assert (found.kind, found.place) == ("truncated", shard.name)
    torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, index.parent / "one.bin")
    torch.save({"c": torch.arange(4.0)}, index.parent / "two.bin")
    weight_map = {"a": "one.bin", "b": "one.bin", "c": "two.bin"}
    bins = index.parent / "pytorch_model.bin.index.json"
    bins.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    data = bytearray((index.parent / "two.bin").read_bytes())
    data[data.index(struct.pack("<f", 3.0))] ^= 1
    (index.parent / "two.bin").write_bytes(data)
    verdict = verify(bins)
    (found,) = verdict.problems
    assert (found.kind, found.place) == ("checksum", "two.bin: two/data/0")
    assert verdict.records == verdict.summed > 10


def test_an_index_that_names_itself_is_no_loop(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": path.name}}))
    assert kinds(path) == ["not-a-checkpoint"]


def test_nan_and_infinities_are_looked_for_when_asked(tmp_path):
    path = tmp_path / "model.pth"
    broken = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    sparse = torch.tensor([[0.0, math.nan]]).to_sparse()
    torch.save({"fine": torch.ones(3), "broken": broken, "tied": broken, "sparse": sparse}, path)
    assert verify(path).ok
    found = verify(path, values=True).problems
    assert [(one.kind, one.place, one.text) for one in found] == [
        ("nan", "broken", "1 of 4 elements is NaN"),
        ("inf", "broken", "2 of 4 elements are infinite"),
        ("nan", "sparse", "1 of 1 element is NaN"),
    ]


def test_strides_that_repeat_a_few_bytes_cost_nothing(tmp_path):
    torch.save(torch.ones(1).expand(1 << 40), tmp_path / "wide.pth")
    assert verify(tmp_path / "wide.pth", values=True).ok


def test_what_keeps_a_file_from_opening_is_a_problem(tmp_path, model):
    for name, data, kind in (
        ("empty.pth", b"", "truncated"),
        ("page.pth", b"<!DOCTYPE html><html>", "not-a-checkpoint"),
        ("cut.pth", model.read_bytes()[:-100], "truncated"),
        ("odd.pth", b"\x80\x02}q\x00.", None),
    ):
        (tmp_path / name).write_bytes(data)
        assert kinds(tmp_path / name) == ([kind] if kind else [])
    (found,) = verify(tmp_path / "page.pth").problems
    assert found.text.startswith("it is ")
    assert found.hint
    assert kinds(model, limits=Limits(max_records=3)) == ["limit"]


def test_what_keeps_a_file_from_being_looked_at_is_an_error(tmp_path, model):
    with pytest.raises(FileMissing):
        verify(tmp_path / "nothing.pth")
    (tmp_path / "model.pte").write_bytes(bytes(4) + b"ET12" + bytes(100))
    with pytest.raises(UnsupportedFormat):
        verify(tmp_path / "model.pte")
    with pytest.raises(UnreadableFile, match="changed while it was read"):
        verify(model, progress=lambda done, total: os.utime(model, ns=(done, done)))


def test_a_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(FileDenied):
        verify(tmp_path)


def test_a_flag_of_encryption_that_only_the_directory_has_is_damage(model):
    data = bytearray(model.read_bytes())
    data[data.rindex(b"PK\1\2", 0, data.rindex(b"model/data/0")) + 8] |= 1
    model.write_bytes(data)
    assert kinds(model) == ["header", "corrupt"]


def test_the_journal_of_an_edit_of_another_file_is_a_problem(model):
    (model.parent / ".model.pth.ckptool-journal").write_bytes(b"no journal")
    assert kinds(model) == ["corrupt"]


def test_the_public_function(model):
    verdict = ckptool.verify(str(model), values=True)
    assert isinstance(verdict, ckptool.Verdict)
    assert verdict.values
    assert verdict.to_dict()["ok"] is True


def test_progress_is_told_of_each_part(model):
    told = []
    verify(model, values=True, progress=lambda done, total: told.append((done, total)))
    assert all(done <= total for done, total in told)
    assert sum(done == total for done, total in told) >= 2


class TestManifest:
    def test_it_is_written_then_held_against_the_file(self, model, tmp_path):
        sums = tmp_path / "sums.json"
        assert verify(model, manifest=sums).manifest is False
        document = json.loads(sums.read_text())
        assert document["schema"] == "ckptool.manifest/1"
        rows = {row.name: row.sha256 for row in ckptool.list_tensors(model, hash=True).tensors}
        (file,) = document["files"]
        assert (file["file"], {one["name"]: one["sha256"] for one in file["tensors"]}) == (
            "model.pth",
            rows,
        )
        verdict = verify(model, manifest=sums)
        assert (verdict.ok, verdict.manifest) == (True, True)

    def test_what_differs_is_named(self, model, tmp_path):
        verify(model, manifest=tmp_path / "sums.json")
        torch.save({"w": torch.arange(6.0) + 1, "b": torch.ones(3), "new": torch.ones(1)}, model)
        found = verify(model, manifest=tmp_path / "sums.json").problems
        assert {(one.kind, one.place) for one in found} == {
            ("content", "w"), ("shape", "b"), ("extra", "new"),
        }  # fmt: skip
        torch.save({"w": torch.arange(6.0).double()}, model)
        found = verify(model, manifest=tmp_path / "sums.json").problems
        assert {(one.kind, one.place) for one in found} == {("dtype", "w"), ("missing", "b")}

    def test_it_checks_a_copy_in_another_format_and_under_other_names(self, tmp_path):
        net = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2)))
        full = {"epoch": 1, "state_dict": net.state_dict(), "optim": {"state": {0: torch.ones(1)}}}
        torch.save(full, tmp_path / "model.pth")
        verify(tmp_path / "model.pth", manifest=tmp_path / "sums.json")
        ckptool.convert(
            tmp_path / "model.pth", tmp_path / "copy.safetensors", ckptool.Take(model_only=True)
        )
        verdict = verify(tmp_path / "copy.safetensors", manifest=tmp_path / "sums.json")
        assert verdict.ok
        assert verdict.checked
        told, elsewhere = verdict.notes
        assert "state_dict/module.0.weight in the manifest is 0.weight in this file" in told
        assert elsewhere == "1 tensor of optim is not in this file"
        verify(tmp_path / "copy.safetensors", manifest=tmp_path / "flat.json")
        assert verify(tmp_path / "model.pth", manifest=tmp_path / "flat.json").ok
        save_file(
            {"0.weight": torch.zeros(2, 3), "0.bias": torch.ones(2)}, tmp_path / "copy.safetensors"
        )
        found = verify(tmp_path / "copy.safetensors", manifest=tmp_path / "sums.json").problems
        assert {(one.kind, one.place) for one in found} == {
            ("content", "0.weight"), ("content", "0.bias"),
        }  # fmt: skip

    def test_of_two_state_dicts_that_is_meant_whose_content_it_is(self, tmp_path):
        raw, mean = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
        torch.save({"model": raw, "ema": mean}, tmp_path / "both.pth")
        verify(tmp_path / "both.pth", manifest=tmp_path / "sums.json")
        save_file(mean, tmp_path / "ema.safetensors")
        assert verify(tmp_path / "ema.safetensors", manifest=tmp_path / "sums.json").ok
        raw, mean = {"w": torch.ones(2), "n": raw["w"]}, {"w": torch.zeros(2), "n": raw["w"]}
        torch.save({"ema": mean, "model": raw}, tmp_path / "both.pth")
        save_file(raw, tmp_path / "raw.safetensors")
        verify(tmp_path / "raw.safetensors", manifest=tmp_path / "flat.json")
        verdict = verify(tmp_path / "both.pth", manifest=tmp_path / "flat.json")
        assert verdict.ok
        assert "2 tensors of ema are not in the manifest" in verdict.notes

    def test_tensors_without_a_content_hash_are_counted(self, tmp_path):
        torch.save({"s": torch.eye(2).to_sparse()}, tmp_path / "s.pth")
        verify(tmp_path / "s.pth", manifest=tmp_path / "sums.json")
        verdict = verify(tmp_path / "s.pth", manifest=tmp_path / "sums.json")
        assert verdict.ok
        assert "1 tensor without a hash" in verdict.notes[0]

    def test_nothing_else_is_written_over(self, model, tmp_path):
        schema = b'{"schema": "ckptool.manifest/1", "files": [%s]}'
        nothing = (b"", b"notes", b"{}", b'{"schema": "x"}', b"{", b"\xff{", model.read_bytes())
        for data in (*nothing, schema % b"1", schema % b'{"file": "a", "tensors": [1]}'):
            (tmp_path / "sums.json").write_bytes(data)
            with pytest.raises(UsageError, match="not a ckptool manifest"):
                verify(model, manifest=tmp_path / "sums.json")
            assert (tmp_path / "sums.json").read_bytes() == data

    def test_a_manifest_of_what_is_damaged_is_not_written(self, model, tmp_path):
        data = bytearray(model.read_bytes())
        data[data.index(struct.pack("<f", 5.0))] ^= 1
        model.write_bytes(data)
        assert not verify(model, manifest=tmp_path / "sums.json").ok
        assert not (tmp_path / "sums.json").exists()

    def test_several_files_by_name(self, model, tmp_path):
        (tmp_path / "below").mkdir()
        shutil.copy(model, tmp_path / "below" / "other.pth")
        sums = tmp_path / "sums.json"
        writer = Verifier(manifest=sums)
        assert [one.ok for one in writer.verify_all([model, tmp_path / "below"])] == [True, True]
        assert writer.finish().to_dict() == {
            "file": str(sums), "action": "written", "files": 2, "tensors": 4, "problems": [],
            "unhashed": 0, "reason": None,
        }  # fmt: skip
        names = [file["file"] for file in json.loads(sums.read_text())["files"]]
        assert names == ["model.pth", "below/other.pth"]
        (tmp_path / "below" / "other.pth").rename(tmp_path / "below" / "moved.pth")
        reader = Verifier(manifest=sums)
        first, second = reader.verify_all([model, tmp_path / "below"])
        assert first.ok
        assert [one.kind for one in second.problems] == ["manifest"]
        (gone,) = reader.finish().problems
        assert (gone.kind, gone.place) == ("missing", "below/other.pth")


class TestFolders:
    def test_every_checkpoint_in_them_and_nothing_else(self, model, index, tmp_path):
        (tmp_path / "notes.txt").write_text("hello")
        (tmp_path / "data.npz").write_bytes(b"PK\5\6" + bytes(18))
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / ".hidden").mkdir()
        shutil.copy(model, tmp_path / ".hidden" / "model.pth")
        shutil.copytree(FIXTURES / "archives/unzipped", tmp_path / "deep" / "unzipped")
        shutil.copy(FIXTURES / "streams/arrays_protocol4.pkl", tmp_path / "deep" / "arrays")
        (tmp_path / "deep" / "loop").symlink_to(tmp_path)
        (tmp_path / "deep" / "again.pth").symlink_to(model)
        (tmp_path / "page.ckpt").write_text("<html>")
        (tmp_path / "gone.pt").symlink_to(tmp_path / "nowhere")
        found = list(Verifier().verify_all([tmp_path]))
        told = {os.path.relpath(one.file, tmp_path): getattr(one, "ok", None) for one in found}
        assert told.pop("model.pth", told.pop("deep/again.pth", None)) is True
        assert told == {
            "deep/arrays": True,
            "deep/unzipped": True,
            "gone.pt": None,
            "page.ckpt": False,
            "set/model.safetensors.index.json": True,
        }

    def test_a_file_of_several_names_is_told_under_its_own(self, model, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "z").mkdir()
        (tmp_path / "a" / "link.pth").symlink_to(model)
        (tmp_path / "z" / "link.pth").symlink_to(model)
        real, blob = tmp_path / "m" / "real", tmp_path / "blob"
        real.mkdir(parents=True)
        torch.save({"w": torch.ones(1)}, real / "one.pth")
        torch.save({"w": torch.ones(2)}, blob)  # as in a cache of downloads
        (tmp_path / "z" / "named.bin").symlink_to(blob)
        (tmp_path / "z" / "model.pth").symlink_to(blob)
        for folder in ("a", "z"):
            (tmp_path / folder / "folder").symlink_to(real)
        found = [os.path.relpath(one.file, tmp_path) for one in Verifier().verify_all([tmp_path])]
        assert found == ["m/real/one.pth", "model.pth", "z/model.pth"]

    def test_remains_of_a_download_are_told_whatever_their_name(self, model, tmp_path):
        folder = tmp_path / "hub"
        folder.mkdir()
        shutil.copy(model, folder / "model.pth")
        (folder / "pytorch_model.bin").write_bytes(b"")
        (folder / "vectors.bin").write_bytes(b"<!DOCTYPE html><html>")
        (folder / "best-model.pkl").write_bytes(bytes(100))
        (folder / "tokenizer_model.bin").write_bytes(bytes(100))
        told = {os.path.basename(one.file): one.ok for one in Verifier().verify_all([folder])}
        assert told == {
            "model.pth": True, "pytorch_model.bin": False, "vectors.bin": False,
            "best-model.pkl": False,
        }  # fmt: skip

    def test_a_broken_index_and_its_shards_are_told_each(self, index):
        index.write_text("{")
        names = [os.path.basename(one.file) for one in Verifier().verify_all([index.parent])]
        assert names == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]

    def test_a_folder_without_any_is_a_problem_or_a_kind_that_is_not_read(self, tmp_path):
        (verdict,) = Verifier().verify_all([tmp_path])
        assert [one.kind for one in verdict.problems] == ["not-a-checkpoint"]
        (tmp_path / "__0_0.distcp").write_bytes(b"")
        (tmp_path / ".metadata").write_bytes(b"")
        (verdict,) = Verifier().verify_all([tmp_path])
        assert [one.kind for one in verdict.problems] == ["truncated"]

    def test_what_is_not_read_is_not_called_fine(self, tmp_path):
        torch.save({}, tmp_path / "ranks.pth")
        for name in ("__0_0.distcp", "__1_0.distcp"):
            (tmp_path / name).write_bytes(b"")
        *empty, fine = Verifier().verify_all([tmp_path])
        assert fine.ok
        assert [os.path.basename(one.file) for one in empty] == ["__0_0.distcp", "__1_0.distcp"]
        assert [problem.kind for one in empty for problem in one.problems] == ["truncated"] * 2


class TestNamesWithAHash:
    @pytest.mark.parametrize("suffix", [".pth", ".pt"])
    def test_the_name_that_torch_hub_checks_is_held_against_the_content(self, tmp_path, suffix):
        torch.save(torch.ones(2), tmp_path / "made")
        digest = hashlib.sha256((tmp_path / "made").read_bytes()).hexdigest()
        right, wrong = digest[:8], digest[1:9]
        if wrong.isdigit() or wrong.isalpha():
            wrong = "5c106cde"
        for name in (f"net-{right}", f"net-{digest}", "net-20240131", "net-defaced", "net"):
            shutil.copy(tmp_path / "made", tmp_path / f"{name}{suffix}")
            assert verify(tmp_path / f"{name}{suffix}").ok
        shutil.copy(tmp_path / "made", tmp_path / f"net-{wrong}{suffix}")
        (problem,) = verify(tmp_path / f"net-{wrong}{suffix}").problems
        assert problem.kind == "name"
        assert f"starts with {right}, expected {wrong}" in problem.text


def test_a_hostile_pickle_is_not_run(tmp_path):
    marker = tmp_path / "run"
    (tmp_path / "evil.pkl").write_bytes(dumps(Called(os.mkdir, str(marker))))
    verify(tmp_path / "evil.pkl", values=True)
    assert not marker.exists()
