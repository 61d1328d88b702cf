"""Shards planned: which tensor goes where, what the files are called, and that nothing is lost."""

import json
import re
from collections import OrderedDict
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap, Storage, TensorRef
from ckptool.errors import NotRepresentable, UsageError
from ckptool.formats import NewFile, WritePlan, open_checkpoint
from ckptool.inspection.listing import list_tensors
from ckptool.writing import choose_format
from ckptool.writing.sharding import DEFAULT_SIZE, parse_size, plan_shards
from tests.conftest import FIXTURES
from tests.formats.shards import loaded, write_plan
from tests.formats.zips import Sink

FORMATS = ("safetensors-sharded", "torch-sharded")
INDEX = {
    "safetensors-sharded": "model.safetensors.index.json",
    "torch-sharded": "pytorch_model.bin.index.json",
}
both_formats = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def opened(tmp_path):
    """A function that opens a state dict as torch saves it."""
    made = []

    def save_and_open(state_dict):
        torch.save(state_dict, tmp_path / "source.pth")
        made.append(open_checkpoint(tmp_path / "source.pth"))
        return made[-1]

    yield save_and_open
    for checkpoint in made:
        checkpoint.close()


def plan(checkpoint, size=None, path=None, format="safetensors-sharded"):
    return plan_shards(checkpoint, path or INDEX[format], format=format, max_shard_size=size)


def shards(found):
    return [file for file in found.files if file.checkpoint is not None]


def index_of(found):
    """The index that a plan writes."""
    sink = Sink()
    found.files[-1].write(sink)
    assert len(sink.data) == found.files[-1].size
    return json.loads(sink.data)


def total_size(found):
    return index_of(found)["metadata"]["total_size"]


def parts(found):
    """The names in each shard."""
    weight_map = index_of(found)["weight_map"]
    files = [shard.path for shard in shards(found)]
    return [[name for name, file in weight_map.items() if file == part] for part in files]


def sized(**sizes):
    """A state dict of tensors of so many bytes."""
    return {name: torch.full((size,), 1, dtype=torch.uint8) for name, size in sizes.items()}


# Which tensor goes where


@both_formats
def test_a_shard_ends_where_the_next_tensor_would_exceed_it(opened, format):
    for sizes, limit, expected in [
        ({"a": 6, "b": 4, "c": 5}, 10, [["a", "b"], ["c"]]),
        ({"a": 6, "b": 5, "c": 5}, 10, [["a"], ["b", "c"]]),
        (
            {"a": 6, "b": 6, "c": 2, "d": 6, "e": 2, "f": 2},
            10,
            [["a"], ["b", "c"], ["d", "e", "f"]],
        ),
        ({"a": 1, "b": 30, "c": 1, "d": 1}, 10, [["a"], ["b"], ["c", "d"]]),
        ({"b": 30, "c": 1}, 10, [["b"], ["c"]]),
        ({"b": 30, "empty": 0}, 10, [["b"], ["empty"]]),
        ({"a": 10, "empty": 0, "b": 1}, 10, [["a", "empty"], ["b"]]),
        ({"a": 1, "b": 1}, 1, [["a"], ["b"]]),
        ({"a": 6, "b": 4}, None, [["a", "b"]]),
    ]:
        found = plan(opened(sized(**sizes)), limit, format=format)
        assert parts(found) == expected
        assert total_size(found) == sum(sizes.values())
        assert found.tensors == len(sizes)


@both_formats
def test_tied_tensors_go_to_the_place_of_the_first(opened, format):
    tensors = sized(a=6, b=6, c=6)
    tensors["again"] = tensors["a"]
    found = plan(opened(tensors), 12, format=format)
    assert total_size(found) == 18
    expected = [["a", "b"], ["c"]] if format == FORMATS[0] else [["a", "b", "again"], ["c"]]
    assert parts(found) == expected
    held = [list(shard.checkpoint.root) for shard in shards(found)]
    assert held == [["a", "b", "again"], ["c"]]


@both_formats
def test_views_that_share_bytes_go_together_where_they_go_on_sharing(opened, format):
    whole = torch.arange(8.0)
    tensors = {
        "whole": whole,
        "x": torch.ones(8),
        "turned": whole.reshape(2, 4).t(),
        "y": whole[7:],
    }
    found = plan(opened(tensors), 36, format=format)
    assert [list(shard.checkpoint.root) for shard in shards(found)] == {
        FORMATS[0]: [["whole"], ["x"], ["turned", "y"]],
        FORMATS[1]: [["whole", "turned", "y"], ["x"]],
    }[format]
    # Safetensors holds each view with bytes of its own, a zip the one storage.
    assert total_size(found) == {FORMATS[0]: 100, FORMATS[1]: 64}[format]


def test_views_of_one_flat_buffer_are_apart_where_each_gets_its_own_bytes(opened):
    flat = torch.arange(30.0)
    tensors = {"a": flat[:10], "b": flat[10:20], "c": flat[20:]}
    assert parts(plan(opened(tensors), 40)) == [["a"], ["b"], ["c"]]
    assert parts(plan(opened(tensors), 40, format="torch-sharded")) == [["a", "b", "c"]]


def test_chains_of_what_is_shared_hold_together(opened):
    left, right = torch.ones(4), torch.zeros(4)
    tensors = {"a": left, "b": right, "c": torch.ones(1), "_extra_state": [left, right]}
    found = plan(opened(tensors), 1, format="torch-sharded")
    assert parts(found) == [["a", "b", "_extra_state"], ["c"]]
    shared = {"steps": [1]}
    found = plan(opened({"a": shared, "b": torch.ones(1), "c": [shared]}), 1, format=FORMATS[1])
    assert parts(found) == [["a", "c"], ["b"]]


def test_a_storage_counts_with_all_that_the_file_will_hold_of_it(opened):
    tensors = {"a": torch.arange(100.0)[:2], "b": torch.ones(2)}
    assert parts(plan(opened(tensors), 100, format="torch-sharded")) == [["a"], ["b"]]
    assert parts(plan(opened(tensors), 100)) == [["a", "b"]]


# What the files are called, and what is in the index


def test_the_files_are_called_as_hugging_face_calls_them(opened):
    source = opened(sized(a=6, b=6))
    for path, format, index, first in [
        (
            "d/model.safetensors",
            0,
            "d/model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
        ),
        ("m.safetensors.index.json", 0, "m.safetensors.index.json", "m-00001-of-00002.safetensors"),
        (
            "pytorch_model.bin",
            1,
            "pytorch_model.bin.index.json",
            "pytorch_model-00001-of-00002.bin",
        ),
        ("p.bin.index.json", 1, "p.bin.index.json", "p-00001-of-00002.bin"),
        ("net.pth", 1, "net.pth.index.json", "net-00001-of-00002.pth"),
        ("net.pth.tar", 1, "net.pth.tar.index.json", "net-00001-of-00002.pth.tar"),
        ("net.tar", 1, "net.tar.bin.index.json", "net.tar-00001-of-00002.bin"),
        ("llama-2.7b", 1, "llama-2.7b.bin.index.json", "llama-2.7b-00001-of-00002.bin"),
        ("llama-2.7b.index.json", 1, "llama-2.7b.index.json", "llama-2.7b-00001-of-00002.bin"),
        ("M.SafeTensors", 0, "M.SafeTensors.index.json", "M-00001-of-00002.SafeTensors"),
        ("M.Index.JSON", 0, "M.Index.JSON", "M-00001-of-00002.safetensors"),
    ]:
        found = plan(source, 10, path, FORMATS[format])
        assert found.index == index
        folder = "d/" if path.startswith("d/") else ""
        assert shards(found)[0].path == folder + first
        assert shards(found)[1].path == folder + first.replace("00001", "00002", 1)
        assert next(iter(index_of(found)["weight_map"].values())) == first


def test_the_index_is_written_as_hugging_face_writes_it(opened):
    found = plan(opened(sized(b=6, a=6)), 10)
    sink = Sink()
    found.files[-1].write(sink)
    assert sink.data.decode() == (
        '{\n  "metadata": {\n    "total_size": 12\n  },\n  "weight_map": {\n'
        '    "b": "model-00001-of-00002.safetensors",\n'
        '    "a": "model-00002-of-00002.safetensors"\n  }\n}\n'
    )
    assert found.size == len(sink.data) + sum(shard.size for shard in shards(found))


def test_ties_that_safetensors_cannot_hold_are_in_the_index_as_the_hub_has_them(opened):
    tensors = sized(a=6, b=6)
    found = plan(opened({"first": tensors["b"], **tensors}), 6)
    metadata = index_of(found)["metadata"]
    assert metadata.pop("total_size") == 12
    assert metadata == {"b": "first", "ckptool.tied": '{"b":2}'}
    assert any("wrote tied tensors once" in note for note in found.notes)


def test_a_tied_name_that_means_the_size_does_not_hide_it(opened, tmp_path):
    tensors = sized(a=6, b=6)
    source = opened({**tensors, "total_size": tensors["a"]})
    found = plan(source, 6, tmp_path / INDEX[FORMATS[0]])
    assert index_of(found)["metadata"]["total_size"] == 12
    write_plan(found)
    with open_checkpoint(found.index) as again:
        assert again.root["total_size"] is again.root["a"]


@both_formats
def test_what_fits_in_one_file_is_one_file_without_an_index(opened, tmp_path, format):
    name = "model.safetensors" if format == FORMATS[0] else "model.pth"
    source = opened({**sized(a=6, b=6), "epoch": 3})
    for limit in (None, 12):
        found = plan(source, limit, tmp_path / name, format)
        assert (found.index, len(found.files)) == ("", 1), limit
        assert found.size == found.files[0].size
    write_plan(found, tmp_path / name)
    with open_checkpoint(tmp_path / name) as again:
        assert (
            again.format == found.format == format.replace("-sharded", "-zip" * ("torch" in format))
        )
        assert list(again.root) == ["a", "b", "epoch"][: None if "torch" in format else 2]


@both_formats
def test_an_index_that_was_named_is_written_for_one_shard_too(opened, tmp_path, format):
    found = plan(opened(sized(a=6)), None, tmp_path / INDEX[format], format)
    assert len(shards(found)) == 1
    assert re.search(r"-00001-of-00001\.\w+$", shards(found)[0].path)
    write_plan(found)
    assert loaded(tmp_path / INDEX[format]).keys() == {"a"}


@both_formats
def test_an_empty_state_dict(tmp_path, format):
    found = plan(Checkpoint(OrderedMap(), "memory", ""), None, tmp_path / INDEX[format], format)
    write_plan(found)
    with open_checkpoint(tmp_path) as again:
        assert (again.format, dict(again.root)) == (format, {})


# What is left out, what is refused


def test_what_safetensors_cannot_hold_is_named_once(opened):
    tensors = OrderedDict(sized(a=6, b=6))
    tensors["c"] = torch.nn.Parameter(torch.ones(2))
    tensors["_extra_state"] = {"steps": 3}
    found = plan(opened(tensors), 6)
    assert found.left_out == (
        "_extra_state (value)",
        "the Parameter type of 1 tensor",
        "requires_grad of 1 tensor",
    )
    assert plan(opened(tensors), 6, format="torch-sharded").left_out == ()


def test_a_tensor_that_the_shards_cannot_hold_is_refused(opened):
    with pytest.raises(NotRepresentable, match="'s' is a sparse_coo tensor"):
        plan(opened({"a": torch.ones(1), "s": torch.eye(2).to_sparse()}), 1)


@both_formats
def test_a_root_that_is_no_state_dict_is_refused(opened, format):
    for root in ([1], {3: torch.ones(1)}, {"x": {"a": torch.ones(1)}, 1: 2}):
        with pytest.raises(NotRepresentable, match=r"this is not one|a key of type int"):
            plan(opened(root), 1, format=format)


def test_objects_in_a_shard_are_named(opened):
    import argparse

    found = plan(opened({"a": torch.ones(1), "b": argparse.Namespace()}), 1, format=FORMATS[1])
    assert found.blockers == ("argparse.Namespace",)


def test_a_shard_of_nothing_is_refused(opened):
    for size in (0, -1):
        with pytest.raises(UsageError, match="a shard cannot have"):
            plan(opened(sized(a=1)), size)


def test_a_size_in_words():
    sizes = {
        "5GB": DEFAULT_SIZE,
        "500MB": 500_000_000,
        " 2 kb ": 2000,
        "1.5GB": 1_500_000_000,
        "0.1TB": 100_000_000_000,
        "5GiB": 5 * 2**30,
        "0.5kib": 512,
        "123": 123,
        "7B": 7,
    }
    assert {text: parse_size(text) for text in sizes} == sizes


def test_words_that_are_no_size():
    for text in [
        *("", "GB", "5 apples", "-5GB", "0", "0.4B", "1e9", "5GBB", "5iB", "nan", "5PB"),
        *("\u0665GB", "9" * 30),
    ]:
        with pytest.raises(UsageError, match="is not a shard size") as caught:
            parse_size(text)
        assert "5GB" in caught.value.hint


# Which format a target asks for


def test_the_target_says_which_shards(opened):
    source = opened(sized(a=1))
    for name, format, expected in [
        ("model.safetensors.index.json", None, "safetensors-sharded"),
        ("Model.SafeTensors.Index.JSON", None, "safetensors-sharded"),
        ("pytorch_model.bin.index.json", None, "torch-sharded"),
        ("model.pth.index.json", None, "torch-sharded"),
        ("model.index.json", None, "torch-sharded"),
        ("model.index.json", "safetensors", "safetensors-sharded"),
        ("model.safetensors.index.json", "torch-zip", "torch-sharded"),
        ("model.index.json", "safetensors-sharded", "safetensors-sharded"),
        ("model.pth", "torch-sharded", "torch-sharded"),
    ]:
        assert choose_format(source, name, format) == expected, (name, format)


def test_shards_of_streams_are_not_written(opened):
    with pytest.raises(UsageError, match="safetensors or torch-zip, not of torch-legacy"):
        choose_format(opened(sized(a=1)), "model.bin.index.json", "torch-legacy")


# Nothing is lost


def listing(checkpoint):
    """What a checkpoint lists, storages numbered by use."""
    document = list_tensors(checkpoint, hash=True).to_dict()
    groups = {}
    for row in document["tensors"]:
        row["storage"] = groups.setdefault(row["storage"], len(groups))
    return {part: document[part] for part in ("tensors", "values", "objects")}


def alike(first, second, *, exactly):
    """Whether two state dicts list the same, but for what safetensors cannot hold."""
    kept = ("name", "dtype", "shape", "sha256", "storage")
    rows = [listing(one) for one in (first, second)]
    if not exactly:
        rows = [[{field: row[field] for field in kept} for row in one["tensors"]] for one in rows]
    assert rows[0] == rows[1]
    assert list(first.root) == list(second.root)
    assert list((first.root.metadata or {}).items()) == list((second.root.metadata or {}).items())


@st.composite
def state_dicts(draw):
    """State dicts of whole tensors, ties among them, with `_metadata`, in any order."""
    names = draw(st.lists(st.sampled_from("abcdefghij"), min_size=1, unique=True))
    state_dict = OrderedDict()
    for number, name in enumerate(names):
        before = list(state_dict.values())
        full = f"layer{draw(st.integers(0, 2))}.{name}"
        if before and draw(st.integers(0, 3)) == 0:
            state_dict[full] = draw(st.sampled_from(before))
        else:
            size = draw(st.integers(0, 20))
            state_dict[full] = torch.full((size,), number, dtype=torch.uint8)
    if draw(st.booleans()):
        modules = draw(st.permutations(["", "layer0", "layer1", "layer2", "elsewhere"]))
        state_dict._metadata = OrderedDict((name, {"version": n}) for n, name in enumerate(modules))
    return state_dict


@both_formats
@settings(max_examples=40)
@given(state_dict=state_dicts(), limit=st.integers(1, 60))
def test_read_back_it_is_what_it_was(tmp_path_factory, format, state_dict, limit):
    folder = tmp_path_factory.mktemp("set")
    torch.save(state_dict, folder / "source.pth")
    with open_checkpoint(folder / "source.pth") as source:
        found = plan(source, limit, folder / "set" / INDEX[format], format)
        write_plan(found)
        with open_checkpoint(folder / "set") as again:
            assert again.format == format
            assert again.details.notes == again.details.left_behind == ()
            assert found.size == again.details.size
            alike(source, again, exactly=format == FORMATS[1])
        names = [set(shard.checkpoint.root) for shard in shards(found)]
        order = {name: number for number, name in enumerate(state_dict)}
        starts = [min(map(order.get, part)) for part in names]
        assert starts == sorted(starts)
        for shard in shards(found):
            refs = shard.checkpoint.root.values()
            stored = sum({id(ref.storage): ref.storage.nbytes for ref in refs}.values())
            groups = {id(ref.storage) for ref in refs if ref.nbytes}
            assert stored <= limit or len(groups) == 1
    index = folder / "set" / INDEX[format]
    from_hub = loaded(index)
    assert from_hub.keys() <= state_dict.keys()
    assert all(from_hub[name].equal(state_dict[name]) for name in from_hub)
    missing = {
        name: json.loads(index.read_text())["metadata"][name]
        for name in state_dict.keys() - from_hub
    }
    assert all(from_hub[kept].equal(state_dict[name]) for name, kept in missing.items())


TORCH_ALONE = {
    *("modules/state_extra.pth", "modules/state_timm.pth"),
    *("tensors/quantized.pth", "tensors/dtypes.pth"),
}
"""Those that safetensors cannot hold."""


@pytest.mark.parametrize(
    "name",
    [
        "modules/state_tower.pth",
        "modules/state_extra.pth",
        "modules/state_timm.pth",
        "tensors/quantized.pth",
        "tensors/views.pth",
        "tensors/dtypes.pth",
        "torch-2.13.0/dp_cuda3.pth",
        "torch-1.0.1-python2/odd.pth",
        "ecosystem/hf_sharded",
        "shards/hub_safetensors",
        "shards/hub_bin",
        "shards/hub_parallel",
        "shards/legacy_bin",
    ],
)
def test_a_fixture_in_shards_is_what_it_was(tmp_path, name):
    for format, limit in product(FORMATS, (1, 100)):
        folder = tmp_path / f"{format}-{limit}"
        folder.mkdir()
        with open_checkpoint(FIXTURES / name) as source:
            try:
                found = plan(source, limit, folder / INDEX[format], format)
            except NotRepresentable:
                assert format == FORMATS[0]
                assert name in TORCH_ALONE
                continue
            write_plan(found)
            with open_checkpoint(folder) as again:
                if format == FORMATS[1]:
                    assert listing(again) == listing(source), limit
                assert again.root.metadata == getattr(source.root, "metadata", None)
                assert list(again.root) == [
                    key
                    for key, value in source.root.items()
                    if format == FORMATS[1] or isinstance(value, TensorRef)
                ]


def test_metadata_is_whole_in_the_first_shard_and_that_of_its_modules_in_the_others(
    opened, tmp_path
):
    state_dict = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.BatchNorm1d(2)), torch.nn.ReLU()
    ).state_dict()
    found = plan(opened(state_dict), 16, tmp_path / INDEX[FORMATS[1]], FORMATS[1])
    write_plan(found)
    first, *rest = (torch.load(shard.path, weights_only=True) for shard in shards(found))
    assert first._metadata == state_dict._metadata
    for shard in rest:
        modules = {name.rpartition(".")[0] for name in shard}
        assert modules | {""} <= set(shard._metadata) < set(state_dict._metadata)


def test_a_model_loads_shard_by_shard(opened, tmp_path):
    """As the hub's loader does it: each shard into the model, not strictly."""
    net, other = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in "ab")
    net[1].num_batches_tracked += 7
    found = plan(opened(net.state_dict()), 20, tmp_path / INDEX[FORMATS[1]], FORMATS[1])
    write_plan(found)
    assert len(shards(found)) > 2
    for shard in shards(found):
        other.load_state_dict(torch.load(shard.path, weights_only=True), strict=False)
    into = other.state_dict()
    assert all(into[name].equal(tensor) for name, tensor in net.state_dict().items())


def test_time_grows_with_the_tensors_alone(monkeypatch):
    """A hundred thousand names in a hundred shards: each is looked at a few times."""
    storages = [Storage(str(n), None, 8) for n in range(20_000)]
    root = OrderedMap(
        (f"layers.{n}.weight", TensorRef("int64", (1,), (1,), 0, storage, "cpu"))
        for n, storage in enumerate(storages)
    )
    planned = []

    class Writer:
        def plan(self, checkpoint):
            planned.append(list(checkpoint.root))
            return WritePlan("torch-zip", (NewFile(0, print, checkpoint),))

    monkeypatch.setattr("ckptool.writing.sharding.load_writable_format", lambda name: Writer())
    found = plan(Checkpoint(root, "memory", ""), 1600, format="torch-sharded")
    assert [len(names) for names in planned] == [200] * 100
    assert [name for names in planned for name in names] == list(root)
    assert len(index_of(found)["weight_map"]) == 20_000
