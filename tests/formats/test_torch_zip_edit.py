"""Planning an edit of a torch zip: what goes into its directory, and what takes a new file."""

import argparse
import re
from dataclasses import replace

import pytest
import torch

from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, FileSource, MemorySource
from ckptool.formats import EditableFormat, format_of, open_checkpoint
from ckptool.formats.archive import find_end, raw_entries
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.formats.zip_writer import literal, plan_zip
from ckptool.model import Global, Opaque, Storage
from ckptool.symbolic.encoder import encode
from ckptool.transforms import strip_module, untie
from ckptool.tree import rebuild
from tests.formats.edits import (
    CHANGES,
    edit,
    every_way,
    meta_offsets,
    names,
    real_offsets,
)
from tests.formats.zips import Entry, Sink, archive, build, saved, written
from tests.formats.zips import records_of as all_records
from tests.test_fixtures import FIXTURES


def raw_directory(path):
    """The entries of the directory, byte for byte."""
    content = path.read_bytes()
    data = ByteRange(MemorySource(content, "test"), 0, len(content))
    return raw_entries(data, find_end(data))


def test_only_the_pickles_entry_changes_while_storages_keep_their_order(file):
    path = file("torch-2.13.0/dp_full_cuda3.pth")
    old = raw_directory(path)
    assert names(path)[0] == "data.pkl"
    assert names(path)[-1] == ".data/serialization_id"
    edit(path, strip_module)
    assert raw_directory(path)[1:] == old[1:-1]
    assert raw_directory(path)[0] != old[0]


@pytest.mark.parametrize(
    ("name", "change", "stay"),
    [
        ("torch-2.13.0/dp_full_cuda3.pth", "strip", True),
        ("torch-2.13.0/dp_full_cuda3.pth", "turned round", False),
        ("archives/aligned_256.pth", "strip", True),
        ("archives/unaligned.pth", "as it is", False),  # from it, torch takes the wrong bytes
    ],
)
def test_what_lets_torch_compute_offsets_stays_only_where_they_are_right(file, name, change, stay):
    path = file(name)
    computing = {".format_version", ".storage_alignment"}
    assert computing <= set(names(path))
    kept = [record for record in names(path) if record not in computing]
    edit(path, CHANGES[change])
    left = [*kept, *computing] if stay else kept
    assert sorted(names(path)) == sorted(set(left) - {".data/serialization_id"})


def records_of(content, **changes):
    """The records of what torch saves, some changed or (None) left out."""
    records = all_records(saved(content)) | changes
    return [literal(name, data) for name, data in records.items() if data is not None]


def in_folder(records, folder="archive"):
    """A zip laid out as torch does it."""
    return written(plan_zip(folder, records, 64))


CONTENT = {"module.w": torch.arange(4.0), "module.v": torch.arange(3)}


@pytest.mark.parametrize("alignment", [b"0", b"much", b""])
def test_an_alignment_that_is_none_leaves(file, alignment):
    path = file(in_folder(records_of(CONTENT, **{".storage_alignment": alignment})))
    edit(path, strip_module)
    assert not {".format_version", ".storage_alignment"} & set(names(path))
    assert torch.load(path)["v"].tolist() == [0, 1, 2]


def test_a_first_key_that_is_not_0_takes_torchs_sums_out_of_the_directory(file):
    path = file(CONTENT)
    with open_checkpoint(path) as checkpoint:
        pickle = encode(checkpoint.root, key_of=lambda storage: f"{int(storage.key) + 7}").data
    moved = records_of(CONTENT, **{"data.pkl": pickle})
    moved = [
        replace(record, name=f"data/{int(record.name[5:]) + 7}")
        if record.name.startswith("data/")
        else record
        for record in moved
    ]
    path = file(in_folder(moved))
    with pytest.raises(AssertionError, match="expected key '0'"):
        torch.load(path, map_location="meta")
    edit(path, strip_module)
    assert meta_offsets(path) == real_offsets(path)
    assert [found["tensors"][1]["path"] for _, found in every_way(path, safe=True)] == [["v"]] * 5


def test_records_are_found_without_regard_to_case_as_torch_finds_them(file):
    upper = [replace(record, name=record.name.upper()) for record in records_of(CONTENT)]
    path = file(in_folder(upper))
    edit(path, strip_module)
    assert "DATA.PKL" in names(path)
    assert torch.load(path)["w"].tolist() == [0, 1, 2, 3]


def test_the_bytes_that_an_edit_leaves_behind_are_told(file):
    path = file("torch-2.13.0/dp_full_cuda3.pth")
    content = path.read_bytes()
    records = archive(content).records
    behind_pickle = sorted(record.header_offset for record in records.values())[1]
    edit(path, strip_module)
    with open_checkpoint(path) as checkpoint:
        told = checkpoint.details.dead_bytes
    assert told == behind_pickle + len(content) - records[".data/serialization_id"].header_offset


def with_storage(change):
    """Another storage under the first tensor."""

    def changed(checkpoint):
        first = next(ref for _, ref in checkpoint.tensors())
        new = replace(first, storage=change(first.storage))
        return checkpoint.with_root(
            rebuild(checkpoint.root, leaf=lambda leaf: new if leaf is first else leaf)
        )

    return changed


def in_memory(storage):
    return replace(storage, data=ByteRange(MemorySource(bytes(storage.nbytes), "x"), 0, 16))


def of_another_file(storage):
    return replace(storage, data=replace(storage.data, source=FileSource(storage.data.source.path)))


def all_but_the_last_bytes(storage):
    return Storage(storage.key, storage.data.slice(0, 16), 16)


ONES = torch.ones(6)
TIED, VIEWS = {"a": ONES, "b": ONES}, {"a": ONES[:3], "b": ONES[3:]}


@pytest.mark.parametrize(
    ("content", "change"),
    [
        (TIED, untie),
        (VIEWS, with_storage(lambda storage: replace(storage, device="cuda:0"))),
        (CONTENT, with_storage(in_memory)),
        (CONTENT, with_storage(of_another_file)),
        (VIEWS, with_storage(all_but_the_last_bytes)),
        (CONTENT, with_storage(lambda storage: replace(storage, key="1"))),
        (CONTENT, with_storage(lambda storage: replace(storage, data=None))),
        (CONTENT, lambda checkpoint: replace(checkpoint, sources=checkpoint.sources * 2)),
        (CONTENT, lambda checkpoint: replace(checkpoint, format="torchscript")),
    ],
    ids=[
        "two storages over one record", "two devices for one record", "bytes in memory",
        "another file", "part of a record", "another key", "no bytes", "two files", "torchscript",
    ],
)  # fmt: skip
def test_a_tree_over_other_storages_takes_a_new_file(file, content, change):
    assert edit(file(content), change) is None


def folderless(records):
    return build([(record.name, contents_of(record)) for record in records])


def contents_of(record):
    sink = Sink()
    record.write(sink)
    return bytes(sink.data)


def with_a_stranger(records):
    whole = [(f"archive/{record.name}", contents_of(record)) for record in records]
    return build([*whole, ("__MACOSX/._data", b"mac")])


def in_latin_1(records):
    return in_folder(records, "archiv\u00e9").replace("\u00e9".encode(), b"\xe9s")


def deflated(records):
    return build(
        [Entry(f"archive/{record.name}", contents_of(record), method=8) for record in records]
    )


@pytest.mark.parametrize(
    "content",
    [
        in_folder(records_of(CONTENT, version=None)),
        in_folder(records_of(CONTENT, version=b"11")),
        in_folder(records_of(CONTENT, version=None, **{".data/version": b"3"})),
        in_folder(records_of(CONTENT, **{".data/version": b"99"})),
        folderless(records_of(CONTENT)),
        with_a_stranger(records_of(CONTENT)),
        in_latin_1(records_of(CONTENT)),
        deflated(records_of(CONTENT)),
    ],
    ids=[
        "no version", "a version too high", "a hidden version", "two versions", "no folder",
        "a record outside", "a folder not in UTF-8", "compressed",
    ],
)  # fmt: skip
def test_a_file_that_not_every_torch_would_take_is_written_anew(file, content):
    assert edit(file(content), strip_module) is None


def test_an_unzipped_file_is_written_anew():
    with open_checkpoint(FIXTURES / "archives/unzipped") as checkpoint:
        assert TORCH_ZIP.plan_edit(checkpoint) is None


def test_formats_that_can_be_edited():
    assert format_of("torch-zip") is TORCH_ZIP
    assert not isinstance(format_of("torch-legacy"), EditableFormat)


def test_what_cannot_be_pickled_is_an_error_as_in_a_new_file(file):
    with open_checkpoint(file(CONTENT)) as checkpoint:
        node = Opaque(Global("a", "B"))
        node.args = (node,)
        changed = checkpoint.with_root({"x": node})
        with pytest.raises(NotRepresentable, match=r"a\.B holds itself") as planned:
            TORCH_ZIP.plan(changed)
        with pytest.raises(NotRepresentable, match=re.escape(str(planned.value))):
            TORCH_ZIP.plan_edit(changed)


def test_classes_that_block_weights_only_are_told(file):
    plan = edit(file({"a": argparse.Namespace(b=1)}), CHANGES["as it is"])
    assert plan.blockers == ("argparse.Namespace",)
