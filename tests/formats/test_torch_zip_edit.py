"""Edits of a torch zip: what each plans, and what torch reads by every way that it has to load."""

import argparse
import re
import tempfile
import zipfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ckptool.core.model import Global, Opaque, Storage, TensorRef
from ckptool.core.tree import rebuild
from ckptool.errors import DeviceError, NotRepresentable
from ckptool.files import ByteRange, FileSource, MemorySource
from ckptool.files.computed import ComputedSource
from ckptool.files.editing import Patch
from ckptool.formats import EditableFormat, load_format, open_checkpoint
from ckptool.formats.archive import find_end, read_raw_entries
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.formats.zip_writer import literal_record, plan_zip
from ckptool.symbolic.encoder import encode
from ckptool.transforms import Strip, Untie, Wrap, make_remap
from tests.formats.edits import (
    CHANGES,
    apply,
    computed_offsets,
    described,
    edit,
    every_way,
    mapped,
    meta_offsets,
    names,
    paths,
    real_offsets,
)
from tests.formats.zips import (
    Entry,
    Holes,
    Sink,
    archive,
    build,
    records_of as all_records,
    saved,
    written,
)
from tests.test_fixtures import FIXTURES, ORACLES, judge
from tests.test_written import listing
from tests.trees import checkpoint as checkpoint_of


def raw_directory(path):
    """The entries of the directory, byte for byte."""
    content = path.read_bytes()
    data = ByteRange(MemorySource(content, "test"), 0, len(content))
    return read_raw_entries(data, find_end(data))


def test_only_the_pickles_entry_changes_while_storages_keep_their_order(file):
    path = file("torch-2.13.0/dp_full_cuda3.pth")
    old = raw_directory(path)
    assert names(path)[0] == "data.pkl"
    assert names(path)[-1] == ".data/serialization_id"
    edit(path, Strip())
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
    return [literal_record(name, data) for name, data in records.items() if data is not None]


def in_folder(records, folder="archive"):
    """A zip laid out as torch does it."""
    return written(plan_zip(folder, records, 64))


CONTENT = {"module.w": torch.arange(4.0), "module.v": torch.arange(3)}


@pytest.mark.parametrize("alignment", [b"0", b"much", b""])
def test_an_alignment_that_is_none_leaves(file, alignment):
    path = file(in_folder(records_of(CONTENT, **{".storage_alignment": alignment})))
    edit(path, Strip())
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
    edit(path, Strip())
    assert meta_offsets(path) == real_offsets(path)
    assert [found["tensors"][1]["path"] for _, found in every_way(path, safe=True)] == [["v"]] * 5


def test_records_are_found_without_regard_to_case_as_torch_finds_them(file):
    upper = [replace(record, name=record.name.upper()) for record in records_of(CONTENT)]
    path = file(in_folder(upper))
    edit(path, Strip())
    assert "DATA.PKL" in names(path)
    assert torch.load(path)["w"].tolist() == [0, 1, 2, 3]


def test_the_bytes_that_an_edit_leaves_behind_are_told(file):
    path = file("torch-2.13.0/dp_full_cuda3.pth")
    content = path.read_bytes()
    records = archive(content).records
    behind_pickle = sorted(record.header_offset for record in records.values())[1]
    edit(path, Strip())
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
        (TIED, Untie()),
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
    assert edit(file(content), Strip()) is None


def test_an_unzipped_file_is_written_anew():
    with open_checkpoint(FIXTURES / "archives/unzipped") as checkpoint:
        assert TORCH_ZIP.plan_edit(checkpoint) is None


def test_formats_that_can_be_edited():
    assert load_format("torch-zip") is TORCH_ZIP
    assert not isinstance(load_format("torch-legacy"), EditableFormat)


def test_what_cannot_be_pickled_is_an_error_as_in_a_new_file(file):
    with open_checkpoint(file(CONTENT)) as checkpoint:
        node = Opaque(Global("a", "B"))
        node.args = (node,)
        changed = checkpoint.with_root({"x": node})
        with pytest.raises(
            NotRepresentable, match=r"an object of class a\.B contains itself in its arguments"
        ) as planned:
            TORCH_ZIP.plan(changed)
        with pytest.raises(NotRepresentable, match=re.escape(str(planned.value))):
            TORCH_ZIP.plan_edit(changed)


def test_classes_that_block_weights_only_are_told(file):
    plan = edit(file({"a": argparse.Namespace(b=1)}), CHANGES["as it is"])
    assert plan.blockers == ("argparse.Namespace",)


def pickle_of(zipped):
    """Return the name of the record that holds the pickle."""
    return next(name for name in zipped.namelist() if name.endswith("/data.pkl"))


def is_torch_zip(name):
    """Whether it is what `torch.save` writes, by the names of its records."""
    if not zipfile.is_zipfile(FIXTURES / name):
        return False
    with zipfile.ZipFile(FIXTURES / name) as zipped:
        tops = {record.partition("/")[2] for record in zipped.namelist()}
    return "data.pkl" in tops and "constants.pkl" not in tops


ZIPS = [name for name in ORACLES if (FIXTURES / name).is_file() and is_torch_zip(name)]
NEW_FILE = {"archives/deflated.pth", "archives/hidden_version.pth"} | {
    name for name in ZIPS if name.startswith("torch-1.4.0/")
}
"""Compressed records, a version that torch 1.6 does not find, storages that torch 1.6 does not."""
LAYOUTS = [
    *(f"archives/{name}.pth" for name in (
        "aligned_256", "appended", "big_endian", "extra_record", "folder_entry", "folder_name",
        "folder_unicode", "from_buffer", "no_crc", "pickle_last", "trailing", "unaligned",
        "unaligned_plain", "zip64",
    )),
    "torch-1.5.0/zip_dp_full_cuda1.pth", "torch-1.6.0/dp_full_cuda3.pth", "torch-1.6.0/misc.pth",
    "torch-1.8.1/odd.pth", "torch-1.10.2/odd.pth", "torch-1.12.1/dp_full_cuda1.pth",
    "torch-1.13.1/misc.pth", "torch-2.0.1/odd.pth", "torch-2.2.2/dp_full_cuda1.pth",
    "torch-2.6.0/odd.pth", "torch-2.10.0/dp_full_cuda1.pth", "torch-2.13.0/dp_full_cuda3.pth",
    "torch-2.13.0/misc.pth", "ecosystem/dp_compiled.pth", "ecosystem/lightning.ckpt",
    "tensors/dtypes.pth", "tensors/quantized.pth", "tensors/sparse.pth", "tensors/storages.pth",
    "tensors/ties.pth", "tensors/views.pth", "training/everything.pth", "values/arrays.pth",
    "values/shared.pth",
]  # fmt: skip


@cache
def wanted(name):
    """What torch reads from a fixture, and whether it does so with `weights_only=True`."""
    try:
        described(FIXTURES / name, weights_only=True)
    except Exception:
        return described(FIXTURES / name, weights_only=False), False
    return described(FIXTURES / name, weights_only=False), True


def comparable(found, renamed, tags):
    """A description as it should be under other names and tags, whatever the order."""
    rows, sharing = {}, {}
    for row in found["tensors"]:
        path = renamed.get(tuple(row["path"]), tuple(row["path"]))
        rows[path] = {**row, "path": path}
        storage = rows[path].pop("storage", None)
        if storage is not None:
            sharing.setdefault(storage, set()).add(path)
            rows[path]["device"] = tags.get(path, row["device"])
    values = Counter((kind, repr(value)) for _, kind, value in found["values"])
    return {
        "tensors": rows,
        "sharing": sorted(map(sorted, sharing.values()), key=str),
        "values": values,
        "objects": Counter(kind for _, kind in found["objects"]),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_reads_the_edited_file_by_every_way(file, name):
    original, safe = wanted(name)
    for what, change in CHANGES.items():
        path = file(name)
        with open_checkpoint(path) as checkpoint:
            changed = change(checkpoint)
            refs = [ref for _, ref in changed.tensors()]
            tags = {tuple(path): ref.device for path, ref in zip(paths(changed), refs, strict=True)}
            new = (
                {}
                if what == "turned round"
                else zip(paths(checkpoint), paths(changed), strict=True)
            )
            renamed = dict(new)
        assert edit(path, change) is not None, what
        for way, found in every_way(path, safe=safe):
            assert comparable(found, {}, {}) == comparable(original, renamed, tags), (what, way)
        told = None if name.endswith("big_endian.pth") else meta_offsets(path)  # torch dies of it
        if told is not None:
            real = real_offsets(path)
            found = {path: offset for path, offset in told.items() if path in real}
            assert found == {path: real[path] for path in found}, what


FOLDERS = sorted({name.partition("/")[0] for name in ZIPS})


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_reads_as_what_was_to_be_written(file, folder):
    """Each of them after two of the changes, which take turns."""
    moves, changes = (CHANGES["to cpu"], CHANGES["to cuda:0"]), list(CHANGES.values())
    for number, name in enumerate(ZIPS):
        if not name.startswith(f"{folder}/"):
            continue
        path = file(name)
        before = path.read_bytes()
        for turn in (number, number + len(changes) // 2):
            change = changes[turn % len(changes)]
            path.write_bytes(before)
            with open_checkpoint(path) as checkpoint:
                try:
                    changed = change(checkpoint)
                except DeviceError:
                    continue  # tied to the devices of other processes
                told, plan = listing(changed), TORCH_ZIP.plan_edit(changed)
            from_pickle = name.startswith("foreign/xla_1") and change in moves
            assert (plan is None) == (name in NEW_FILE or from_pickle), name
            if plan is not None:
                apply(path, plan.patch)
                after = path.read_bytes()
                assert after[: len(before)] == before, name
                assert len(after) == plan.size, name
                with open_checkpoint(path) as again:
                    assert listing(again) == told, name
                    assert plan.tensors == sum(1 for _ in again.tensors()), name
                with zipfile.ZipFile(path) as judge:
                    assert judge.read(pickle_of(judge)).endswith(b"."), name


def test_one_edit_after_another(file):
    path = file("torch-2.13.0/dp_full_cuda3.pth")
    content = path.read_bytes()
    records = archive(content).records
    second = sorted(record.header_offset for record in records.values())[1]
    dead = second + len(content) - records[".data/serialization_id"].header_offset
    steps = [Strip(), Wrap(), CHANGES["turned round"], CHANGES["to cpu"], Strip()]
    for step in steps:
        before = path.read_bytes()
        edit(path, step)
        assert path.read_bytes()[: len(before)] == before
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.details.dead_bytes >= dead
            dead += path.stat().st_size - len(before)
    original, _ = wanted("torch-2.13.0/dp_full_cuda3.pth")
    hashes = Counter(row["sha256"] for row in original["tensors"])
    for _, found in every_way(path, safe=True):
        assert Counter(row["sha256"] for row in found["tensors"]) == hashes
        assert {row["device"] for row in found["tensors"]} == {"cpu"}
    assert meta_offsets(path).items() <= real_offsets(path).items()


def sparse_file(path, sizes):
    """A file of tensors of bytes that are holes; each begins and ends with its number."""
    tree = {}
    for size in sizes:
        data = ByteRange(ComputedSource("holes", size, None), 0, size)
        over = Storage("", data, size)
        tree[f"module.{size}"] = TensorRef("uint8", (size,), (1,), 0, over, "cpu")
    with open(path, "wb") as file:
        TORCH_ZIP.plan(checkpoint_of(tree)).files[0].write(Holes(file))
    for number, (at, size) in enumerate(zip(real_offsets(path).values(), sizes, strict=True)):
        for offset in {at, at + size - 1} if size else ():
            apply(path, Patch(offset, bytes([number])))


@pytest.mark.parametrize("change", ["strip", "turned round"])
def test_beyond_4_gib(tmp_path, change):
    path = tmp_path / "model.pth"
    sizes = [3, (4 << 30) + 8, 0, 5]
    sparse_file(path, sizes)
    edit(path, CHANGES[change])
    assert (".format_version" in names(path)) == (change == "strip")
    prefix = "" if change == "strip" else "module."
    for computed in (False, True):
        with computed_offsets() if computed else nullcontext():
            found = torch.load(path, mmap=True, weights_only=True)
        for number, size in enumerate(sizes):
            tensor = found[f"{prefix}{size}"]
            assert tensor.shape == (size,)
            assert [tensor[at].item() for at in (0, -1) if size] == [number] * 2 * bool(size)
        del found, tensor
    assert meta_offsets(path) == real_offsets(path)
    with zipfile.ZipFile(path) as judge:
        assert judge.getinfo(pickle_of(judge)).header_offset > 4 << 30
        assert judge.read(pickle_of(judge)).endswith(b".")
    path.unlink()


def test_a_tebibyte_is_edited_without_reading_it(tmp_path, monkeypatch):
    path = tmp_path / "model.pth"
    sparse_file(path, [1 << 40, 7])
    count = 0
    read = FileSource.read

    def counted(self, offset, length):
        nonlocal count
        count += length
        return read(self, offset, length)

    monkeypatch.setattr(FileSource, "read", counted)
    edit(path, Strip())
    assert count < 500_000
    assert meta_offsets(path) == real_offsets(path)
    path.unlink()


TENSORS = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.complex64, torch.bool]),
        st.integers(0, 70),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=40)
@given(TENSORS, st.randoms(), st.sampled_from([1, 64, 256]), st.sampled_from(["cpu", "cuda:1"]))
def test_any_order_and_names_of_any_tensors(described_tensors, random, alignment, device):
    tensors = {}
    for number, (dtype, size, view) in enumerate(described_tensors):
        earlier = random.choice(list(tensors.values())) if view and tensors else None
        made = torch.arange(size).to(dtype) if earlier is None else earlier[: size // 2]
        tensors[str(number)] = made
    new = [(name, f"x.{name}") for name in random.sample(list(tensors), len(tensors))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        with patch.object(torch.utils.serialization.config.save, "storage_alignment", alignment):
            torch.save(tensors, path)
        shuffled = lambda old: [(name, dict(old)[before]) for before, name in new]  # noqa: E731
        edit(path, lambda checkpoint: make_remap({"*": device})(mapped(checkpoint, shuffled)))
        for _, found in every_way(path, safe=True):
            rows = {row["path"][0]: row for row in found["tensors"]}
            assert list(rows) == [name for _, name in new]
            for before, name in new:
                assert rows[name]["sha256"] == judge().sha256(tensors[before])
                assert rows[name]["device"] in (device, "cpu")
        assert meta_offsets(path) == real_offsets(path)
