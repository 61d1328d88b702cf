"""Shards: an index or its folder is one checkpoint; every contradiction between them is told."""

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import (
    CorruptFile,
    FileBusy,
    FileMissing,
    LimitExceeded,
    NameCollision,
    NotACheckpoint,
    UnreadableFile,
    UnsupportedFormat,
    UsageError,
)
from ckptool.files.journal import Journal, write_journal
from ckptool.formats import open_checkpoint
from ckptool.formats.sharded import Sharded
from ckptool.limits import Limits
from tests.formats.contract import FormatContract
from tests.formats.shards import loaded, write_set


class TestContractOfSafetensors(FormatContract):
    name = "safetensors-sharded"
    sample = "shards/hub_safetensors"


class TestContractOfTorch(FormatContract):
    name = "torch-sharded"
    sample = "shards/hub_bin"
    is_covered = True


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BIN_ONE, BIN_TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def tensors(*names):
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


@pytest.fixture
def shards(tmp_path):
    """`a` and `b` in one shard, `c` in the other."""
    return write_set(tmp_path / "set", {ONE: tensors("a", "b"), TWO: tensors("c")})


def refused(path, kind, *words):
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert type(caught.value) is kind
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value)
    return caught.value


def edit(index, **changes):
    """Change the document of an index; a function changes the value in place."""
    document = json.loads(index.read_text())
    for key, change in changes.items():
        if callable(change):
            change(document[key])
        else:
            document[key] = change
    index.write_text(json.dumps(document))


# What is read


@pytest.mark.parametrize("as_folder", [False, True])
def test_an_index_or_its_folder_is_one_checkpoint(shards, as_folder):
    with open_checkpoint(shards.parent if as_folder else shards) as checkpoint:
        assert (checkpoint.format, checkpoint.path) == ("safetensors-sharded", str(shards))
        assert list(checkpoint.root) == ["a", "b", "c"]
        assert type(checkpoint.root).__name__ == "OrderedMap"
        files = [os.path.basename(source.path) for source in checkpoint.sources]
        assert files == [ONE, TWO, shards.name]
        details = checkpoint.details
        assert details.size == sum(path.stat().st_size for path in shards.parent.iterdir())
        assert (details.storage_bytes, details.notes, details.left_behind) == (24, (), ())
        assert details.writer == "safetensors, in 2 shards"
        found = {name: ref.torch() for (name,), ref in checkpoint.tensors()}
    assert all(found[name].equal(tensor) for name, tensor in loaded(shards).items())


@pytest.mark.parametrize("renamed", [True, False])
def test_a_set_that_is_replaced_while_it_is_opened_is_no_mixture(shards, monkeypatch, renamed):
    read = Sharded._read_shard

    def meanwhile(self, index, name, limits):
        if renamed:
            shutil.copyfile(index.path, f"{index.path}.new")
            os.replace(f"{index.path}.new", index.path)
        else:
            write_journal(index.path, Journal("set", {}))
        return read(self, index, name, limits)

    monkeypatch.setattr(Sharded, "_read_shard", meanwhile)
    refused(shards, FileBusy, "is being rewritten")


def test_the_order_is_that_of_the_index(shards):
    edit(shards, weight_map={"c": TWO, "b": ONE, "a": ONE})
    with open_checkpoint(shards) as checkpoint:
        assert list(checkpoint.root) == ["c", "b", "a"]


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_shards_keep_ties_devices_and_metadata(tmp_path, legacy):
    weight = torch.ones(2, 3)
    first = OrderedDict(a=weight, tied=weight.t())
    first._metadata = OrderedDict({"": {"version": 1}, "x": {"version": 2}})
    second = OrderedDict(b=torch.nn.Parameter(torch.zeros(2)), _extra_state={"steps": 3})
    second._metadata = OrderedDict({"": {"version": 9}, "y": {"version": 4}})
    for file, part in ((BIN_ONE, first), (BIN_TWO, second)):
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=not legacy)
    index = tmp_path / "pytorch_model.bin.index.json"
    names = {"a": BIN_ONE, "tied": BIN_ONE, "b": BIN_TWO}
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": names}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "torch-sharded"
        root = checkpoint.root
        assert list(root) == ["a", "tied", "b", "_extra_state"]
        assert root["a"].storage is root["tied"].storage
        assert root["b"].is_parameter
        assert root["_extra_state"] == {"steps": 3}
        modules = {"": {"version": 1}, "x": {"version": 2}, "y": {"version": 4}}
        assert list(root.metadata.items()) == list(modules.items())
        assert checkpoint.details.protocol == 2
        assert len(checkpoint.details.globals) == len(set(checkpoint.details.globals))
        assert "torch._utils._rebuild_parameter" in checkpoint.details.globals
        assert [section.kind for section in checkpoint.sections] == ["state_dict"]


def test_tied_names_come_back_from_the_header_of_a_shard_and_from_the_index(shards):
    save_file(tensors("a", "b"), shards.parent / ONE, metadata={"format": "pt", "a2": "a"})
    edit(shards, metadata={"total_size": 24, "c2": "c", "nothing": "of the kind"})
    with open_checkpoint(shards) as checkpoint:
        root = checkpoint.root
        assert list(root) == ["a", "b", "c", "a2", "c2"]
        assert (root["a2"], root["c2"]) == (root["a"], root["c"])
        assert checkpoint.details.left_behind == ("entries of the index: nothing",)
        assert checkpoint.details.header == {"format": "pt"}


def test_what_an_index_lists_as_tied_says_nothing_of_the_headers_of_the_shards(shards):
    save_file(tensors("a", "b"), shards.parent / ONE, metadata={"format": "pt", "a2": "a"})
    edit(shards, metadata={"ckptool.tied": '{"c2":1}', "c2": "c", "best": "a"})
    with open_checkpoint(shards) as checkpoint:
        assert list(checkpoint.root) == ["a", "c2", "b", "c", "a2"]
        assert checkpoint.details.left_behind == ("entries of the index: best",)


def test_a_tied_name_of_one_header_may_be_placed_by_the_index_or_be_a_tensor_elsewhere(shards):
    save_file(tensors("a", "b"), shards.parent / ONE, metadata={"c": "a"})
    with open_checkpoint(shards) as checkpoint:
        assert checkpoint.root["c"] is not checkpoint.root["a"]
        assert list(checkpoint.root) == ["a", "b", "c"]
    save_file(tensors("a", "b"), shards.parent / ONE, metadata={"a2": "a"})
    edit(shards, weight_map=lambda names: names.update(a2=ONE))
    with open_checkpoint(shards) as checkpoint:
        assert list(checkpoint.root) == ["a", "b", "c", "a2"]


def test_entries_of_the_headers_that_differ_are_named(shards):
    save_file(tensors("a", "b"), shards.parent / ONE, metadata={"run": "1", "by": "x"})
    save_file(tensors("c"), shards.parent / TWO, metadata={"run": "2", "by": "x"})
    with open_checkpoint(shards) as checkpoint:
        details = checkpoint.details
    assert details.header == {"by": "x"}
    assert "the header that differ between the shards: run" in details.left_behind[0]
    assert any(note.startswith(f"{TWO}: ") for note in details.notes)


def test_shards_may_be_links_as_in_the_cache_of_the_hub(shards, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(shards.parent.iterdir())):
        (tmp_path / f"blob{number}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(tmp_path / f"blob{number}")
    with open_checkpoint(snapshot) as checkpoint:
        assert list(checkpoint.root) == ["a", "b", "c"]


def test_a_relative_path_without_a_folder(shards, monkeypatch):
    monkeypatch.chdir(shards.parent)
    with open_checkpoint(shards.name) as checkpoint:
        assert list(checkpoint.root) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["checkpoint.json", "MODEL.INDEX.JSON"])
def test_an_index_is_told_by_its_content(shards, name):
    shards.rename(shards.parent / name)
    with open_checkpoint(shards.parent / name) as checkpoint:
        assert len(checkpoint.root) == 3


def test_an_index_of_a_variant_is_found_in_its_folder(shards):
    shards.rename(shards.parent / "model.safetensors.index.fp16.json")
    (shards.parent / "config.json").write_text('{"model_type": "gpt2"}')
    (shards.parent / "other.index.json").write_text('{"no": "index of shards"}')
    with open_checkpoint(shards.parent) as checkpoint:
        assert len(checkpoint.root) == 3


def test_an_index_of_nothing_is_an_empty_state_dict(tmp_path):
    for name, format in (
        ("model.safetensors.index.json", "safetensors-sharded"),
        ("pytorch_model.bin.index.json", "torch-sharded"),
    ):
        (tmp_path / name).write_text('{"weight_map": {}}')
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert (checkpoint.format, dict(checkpoint.root)) == (format, {})


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (24, None),
        (24.0, None),
        (None, None),
        (25, "25 bytes of tensors, but they have 24"),
        ("24", "'24'"),
    ],
)
def test_another_total_size_than_the_tensors_have_is_noted(shards, stated, said):
    edit(shards, metadata={"total_size": stated, "total_parameters": 6})
    with open_checkpoint(shards) as checkpoint:
        notes = checkpoint.details.notes
        assert checkpoint.details.left_behind == ()
    assert len(notes) == (said is not None)
    assert all(said in note for note in notes)


@pytest.mark.parametrize("size", [8, 16, 400], ids=["ties once", "every name", "storages"])
def test_the_ways_in_which_writers_count_are_all_right(tmp_path, size):
    tied = torch.arange(100.0)[:2]
    parts = {BIN_ONE: {"a": tied, "b": tied}}
    write_set(tmp_path, parts, index="x.index.json", metadata={"total_size": size})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.details.notes == ()


HUNDREDS = """
import resource, sys
import ckptool
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with ckptool.open(sys.argv[1]) as checkpoint:
    print(len(checkpoint.root), len(checkpoint.sources), checkpoint.root["t319"].read())
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_hundreds_of_shards(tmp_path):
    """More than the process could have open by its own soft limit."""
    count = 320
    parts = {f"m-{n:05d}-of-{count:05d}.safetensors": tensors(f"t{n}") for n in range(count)}
    command = [sys.executable, "-c", HUNDREDS, str(write_set(tmp_path, parts))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["320", "321", str(bytes(8))], done.stderr


def test_more_shards_than_the_system_lets_us_open(shards, monkeypatch):
    monkeypatch.setattr("ckptool.formats.sharded.allow_open_files", lambda count: None)
    monkeypatch.setattr(os, "open", too_many(os.open))
    error = refused(shards, UnreadableFile, TWO, "Too many open files")
    assert "ulimit -n" in error.hint


def too_many(real):
    """`os.open` of a process that may not open the second shard."""

    def fails(path, *rest, **more):
        if str(path).endswith(TWO):
            raise OSError(24, "Too many open files")
        return real(path, *rest, **more)

    return fails


@pytest.mark.parametrize("break_it", [None, lambda folder: (folder / TWO).unlink()])
def test_every_file_is_closed_again(shards, break_it):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    before = len(os.listdir("/proc/self/fd"))
    if break_it is None:
        open_checkpoint(shards.parent).close()
    else:
        break_it(shards.parent)
        with pytest.raises(FileMissing):
            open_checkpoint(shards.parent)
    assert len(os.listdir("/proc/self/fd")) == before


# Index and shards against each other


def test_a_missing_shard(shards):
    (shards.parent / TWO).unlink()
    error = refused(shards, FileMissing, str(shards), "1 of 2 shards is missing", TWO)
    assert isinstance(error, FileNotFoundError)
    (shards.parent / ONE).unlink()
    refused(shards.parent, FileMissing, "2 of 2 shards are missing", ONE, TWO)


def test_a_shard_that_leads_nowhere_or_to_another(shards):
    (shards.parent / TWO).unlink()
    (shards.parent / TWO).symlink_to("gone")
    refused(shards, FileMissing, TWO)
    (shards.parent / TWO).unlink()
    (shards.parent / TWO).symlink_to(ONE)
    edit(shards, weight_map={"a": ONE, "b": TWO})
    refused(shards, CorruptFile, "tensor 'a' is in two shards")


def test_a_tensor_in_two_shards(shards):
    save_file(tensors("b", "c"), shards.parent / TWO)
    refused(shards, CorruptFile, str(shards), "tensor 'b' is in two shards", ONE, TWO)


@pytest.mark.parametrize(("change", "words"), [
    (
        lambda names: names.update(d=TWO, e=TWO),
        [f"'d' is in no shard, but the index lists it in {TWO}"],
    ),
    (lambda names: names.update(b=TWO), [f"'b' is in {ONE}, but the index lists it in {TWO}"]),
    (lambda names: names.pop("b"), [f"'b' is in {ONE}, but the index lists it in none"]),
    (lambda names: names.pop("c"), ["does not list", TWO, "the same set"]),
], ids=["in no shard", "in another shard", "not named", "a shard not named"])  # fmt: skip
def test_an_index_that_says_other_than_the_shards_is_refused(shards, change, words):
    edit(shards, weight_map=change)
    refused(shards, CorruptFile, *words)


def test_shards_of_another_split_do_no_harm(shards):
    shutil.copy(shards.parent / TWO, shards.parent / "model-00003-of-00003.safetensors")
    shutil.copy(shards.parent / TWO, shards.parent / "model-00001-of-00002.fp16.safetensors")
    with open_checkpoint(shards) as checkpoint:
        assert len(checkpoint.root) == 3


def test_a_folder_that_cannot_be_listed(shards, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda path: os.scandir("/no/such/folder"))
    with open_checkpoint(shards) as checkpoint:
        assert len(checkpoint.root) == 3


# What a shard must be


def test_a_shard_that_is_no_flat_state_dict(tmp_path):
    index = write_set(tmp_path, {BIN_ONE: tensors("a")}, index="x.index.json")
    torch.save({"state_dict": tensors("a")}, tmp_path / BIN_ONE)
    refused(index, CorruptFile, BIN_ONE, "has none of the tensors", "'state_dict'")
    torch.save([torch.ones(1)], tmp_path / BIN_ONE)
    refused(index, CorruptFile, BIN_ONE, "but a list")
    torch.save(torch.ones(1), tmp_path / BIN_ONE)
    refused(index, CorruptFile, BIN_ONE)


def test_shards_of_two_kinds(shards):
    torch.save(tensors("c"), shards.parent / TWO)
    refused(shards, UnsupportedFormat, TWO, "is a torch-zip file", "a safetensors shard")
    torch.save(tensors("a", "b"), shards.parent / ONE)
    save_file(tensors("c"), shards.parent / TWO)
    refused(shards, UnsupportedFormat, TWO, "is a safetensors file", "torch-zip or torch-legacy")


def test_a_shard_of_a_format_that_is_none_of_shards(shards):
    shutil.copy("fixtures/streams/tensors_protocol2.pkl", shards.parent / ONE)
    refused(shards, UnsupportedFormat, ONE, "is a pickle file")
    (shards.parent / ONE).write_text("version https://git-lfs.github.com/spec/v1\nsize 123\n")
    refused(shards, NotACheckpoint, ONE, "a git-lfs pointer")


def test_a_damaged_shard_is_named(shards):
    whole = (shards.parent / TWO).read_bytes()
    (shards.parent / TWO).write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match=f"{TWO}.*1 bytes are missing"):
        open_checkpoint(shards)


@pytest.mark.parametrize("name", ["itself", "other"])
def test_an_index_among_the_shards(shards, name):
    other = shards.parent / "other.json"
    shutil.copy(shards, other)
    file = shards.name if name == "itself" else other.name
    edit(shards, weight_map={"a": file})
    edit(other, weight_map={"a": shards.name})
    refused(shards, NotACheckpoint, file, "an index of shards, not a shard")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "sub/x", "/etc/passwd", "..\\x", "C:x", "a\0b", "\ud800"],
)
def test_a_shard_that_is_no_name_of_a_file_beside_the_index(shards, name):
    edit(shards, weight_map={"a": name})
    with pytest.raises(CorruptFile, match="which is not a file name in its folder"):
        open_checkpoint(shards)


# What an index must be


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map": {', "the index is not JSON"),
        ('{"weight_map": []}', "weight_map is not an object of strings"),
        ('{"weight_map": {"a": 3}}', "weight_map is not an object of strings"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the index has the key 'a' twice"),
        (
            '{"weight_map": {"a": "x"}, "weight_map": {}}',
            "the index has the key 'weight_map' twice",
        ),
        ('{"weight_map": {}, "metadata": NaN}', r"the index is not JSON \(it contains NaN\)"),
        ('{"weight_map": {}, "x": ' + "[" * 100_000 + "}", "the index is nested too deeply"),
        ('{"weight_map": {"\xff": "x"}}', "the index is not UTF-8 at byte 17"),
    ],
)
def test_an_index_that_breaks_a_rule(tmp_path, text, words):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    for path in (index, tmp_path):
        with pytest.raises(CorruptFile, match=words) as caught:
            open_checkpoint(path)
        assert caught.value.file == str(index)


def test_an_index_cut_before_its_map_is_told_by_its_name(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size"')
    with pytest.raises(CorruptFile, match="the index is not JSON"):
        open_checkpoint(index)
    index.rename(tmp_path / "some.json")
    with pytest.raises(NotACheckpoint, match="begins like JSON but is not JSON"):
        open_checkpoint(tmp_path / "some.json")


def test_other_json_is_no_index(tmp_path):
    (tmp_path / "model.index.json").write_text('{"model_type": "gpt2"}')
    refused(tmp_path / "model.index.json", NotACheckpoint, "a model's configuration")


def test_an_index_that_is_too_long(shards):
    limits = Limits(max_json_bytes=100)
    for path in (shards, shards.parent):
        with pytest.raises(
            LimitExceeded, match="the index has 202 bytes, more than the limit of 100"
        ):
            open_checkpoint(path, limits=limits)
    shards.rename(shards.parent / "long.json")
    with pytest.raises(LimitExceeded):
        open_checkpoint(shards.parent / "long.json", limits=limits)
    (shards.parent / "long.json").write_text('{"x": "' + "y" * 1000 + '"}')
    with pytest.raises(NotACheckpoint):
        open_checkpoint(shards.parent / "long.json", limits=limits)


# Folders


def test_a_folder_with_two_indexes(shards):
    write_set(shards.parent, {BIN_ONE: tensors("a")}, index="pytorch_model.bin.index.json")
    error = refused(
        shards.parent, NotACheckpoint, "'model.safetensors.index.json'", "'pytorch_model.bin.index"
    )
    assert error.hint == f"give one: ckptool list {shards}"
    with open_checkpoint(shards) as checkpoint:
        assert len(checkpoint.root) == 3


def test_a_folder_of_shards_without_their_index(shards):
    shards.unlink()
    error = refused(shards.parent, UnsupportedFormat, "a sharded checkpoint without its index")
    assert f"ckptool list {shards.parent / ONE}" in error.hint


def test_an_index_that_leads_nowhere_is_none(shards):
    shards.unlink()
    shards.symlink_to("gone")
    refused(shards.parent, UnsupportedFormat, "a sharded checkpoint with a damaged index")


def test_a_folder_is_opened_though_the_write_of_its_index_was_cut_short(shards, monkeypatch):
    """The journal of a set is finished before the folder is looked at further."""
    finished = []

    def settle(path, journal):
        finished.append(journal.kind)
        shards.with_suffix(".new").rename(shards)
        os.unlink(shards.parent / f".{shards.name}.ckptool-journal")

    monkeypatch.setattr("ckptool.files.recovery.recover_set", settle)
    shards.rename(shards.with_suffix(".new"))
    write_journal(str(shards), Journal("set", {}))
    with pytest.warns(ckptool.CheckpointWarning), open_checkpoint(shards.parent) as checkpoint:
        assert len(checkpoint.root) == 3
    assert finished == ["set"]


# The rest of the library


def test_load_gives_what_the_shards_hold(shards):
    for mmap in (False, True):
        found = ckptool.load(shards.parent, mmap=mmap)
        assert all(found[name].equal(tensor) for name, tensor in loaded(shards).items())
    assert list(ckptool.load_state_dict(shards)) == ["a", "b", "c"]


def test_shards_that_change_meanwhile_are_noticed(shards, tmp_path):
    with open_checkpoint(shards) as checkpoint:
        os.utime(shards.parent / TWO, ns=(1, 1))
        with pytest.raises(UnreadableFile, match=f"{TWO}.*changed while it was read"):
            checkpoint.save(tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.fixture
def parts(tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for number, path in enumerate(paths):
        tensors = {f"l{number}.w": torch.full((3,), number), f"l{number}.b": torch.ones(2)}
        save_file(tensors, path, metadata={"format": "pt"})
    return paths


def test_files_are_joined_into_one_and_into_shards(parts, tmp_path):
    ckptool.convert(parts, tmp_path / "whole.safetensors")
    found = load_file(tmp_path / "whole.safetensors")
    assert set(found) == {f"l{i}.{n}" for i in range(3) for n in "wb"}
    assert all(torch.equal(found[f"l{i}.w"], torch.full((3,), i)) for i in range(3))
    ckptool.convert(parts, f"{tmp_path}/shards/", max_shard_size="100")
    assert ckptool.diff(tmp_path / "whole.safetensors", tmp_path / "shards").identical


def test_files_of_torch_and_of_safetensors_together(parts, tmp_path):
    torch.save({"head.w": torch.ones(2), "note": "text"}, tmp_path / "head.pth")
    ckptool.convert([tmp_path / "head.pth", *parts], tmp_path / "all.pth")
    found = torch.load(tmp_path / "all.pth")
    assert next(iter(found)) == "head.w"
    assert len(found) == 8
    assert found["note"] == "text"


def test_a_number_that_is_missing_and_a_name_in_two_files(parts, tmp_path):
    with pytest.raises(
        FileMissing, match=r"m-00002-of-00003\.safetensors: is one of a set of 3 files"
    ):
        ckptool.convert([parts[0], parts[2]], tmp_path / "whole.safetensors")
    ckptool.convert(parts, tmp_path / "whole.safetensors")
    with pytest.raises(NameCollision, match=r"tensor 'l0\.w' is also in"):
        ckptool.convert([tmp_path / "whole.safetensors", *parts], tmp_path / "new.safetensors")
    with pytest.raises(UsageError, match="twice"):
        ckptool.convert([*parts, parts[0]], tmp_path / "new.safetensors")


def test_what_is_no_flat_state_dict_is_refused(parts, tmp_path):
    torch.save({"state_dict": {"w": torch.ones(1)}}, tmp_path / "nested.pth")
    with pytest.raises(UsageError, match="no flat state dict"):
        ckptool.convert([tmp_path / "nested.pth", *parts], tmp_path / "new.pth")
    with pytest.raises(UsageError, match="no flat state dict"):
        ckptool.convert([*parts, tmp_path / "nested.pth"], tmp_path / "new.pth")
    scripted = torch.jit.script(torch.nn.Linear(1, 1))
    scripted.save(tmp_path / "s.pt")
    with pytest.raises(UnsupportedFormat):
        ckptool.convert([*parts, tmp_path / "s.pt"], tmp_path / "new.pth")
