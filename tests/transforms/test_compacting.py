"""Storages cut down to what tensors see: the same values, the same sharing, never larger."""

import tempfile
import zipfile
from collections import OrderedDict
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import ckptool
from ckptool.conversion import make_steps
from ckptool.core.model import StorageRef
from ckptool.transforms import Compact, Untie
from tests.trees import checkpoint, storage, tensor

BIG = 1000 * 1000


def compacted(path, **options):
    """The file compacted beside itself: both as torch reads them, the changes, both sizes."""
    target = path.with_suffix(".compact.pth")
    with ckptool.open(path) as source:
        result = source.then(ckptool.Compact())
        result.save(target, **options)
    before, after = (torch.load(file, weights_only=True) for file in (path, target))
    return before, after, result.changes, (path.stat().st_size, target.stat().st_size)


def saved(tmp_path, content, **options):
    torch.save(content, tmp_path / "in.pth", **options)
    return tmp_path / "in.pth"


def shares(a, b):
    """Whether two tensors have an element in common."""
    return one_storage(a, b) and bool(set(elements(a)) & set(elements(b)))


def one_storage(a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def elements(tensor):
    """Their positions in the storage."""
    positions = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    view = positions.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view.flatten().tolist()


def test_the_first_rows_of_a_large_tensor_take_what_they_are(tmp_path):
    big = torch.randn(1000, 1000)
    path = saved(tmp_path, {"head": big[:2], "other": torch.ones(3)})
    before, after, changes, sizes = compacted(path)
    assert torch.equal(after["head"], before["head"])
    assert after["head"].untyped_storage().nbytes() == 8000
    assert sizes[0] > 4_000_000
    assert sizes[1] < 12_000
    assert changes[0].text == "trimmed the storage of head from 4,000,000 to 8,000 bytes"
    assert changes[-1].text == "saved 3,992,000 of 4,000,012 bytes of tensor data"


def test_views_that_overlap_share_their_bytes_as_before(tmp_path):
    big = torch.arange(float(BIG))
    content = {"a": big[10:20], "b": big[15:30], "of_a": big[12:14], "far": big[BIG - 5 :]}
    before, after, _, _ = compacted(saved(tmp_path, content))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["a"].untyped_storage().nbytes() == 25 * 4
    assert len({value.untyped_storage()._cdata for value in after.values()}) == 1
    after["a"][2] = -1.0
    assert after["of_a"][0] == -1.0


def test_a_column_keeps_its_span_and_its_tie_stays(tmp_path):
    big = torch.randn(1000, 500)
    before, after, _, _ = compacted(saved(tmp_path, {"a": big[:, 3], "tie": big[:, 3]}))
    assert torch.equal(after["a"], before["a"])
    assert after["a"].stride() == (500,)
    assert after["a"].untyped_storage().nbytes() == (999 * 500 + 1) * 4
    assert after["tie"].data_ptr() == after["a"].data_ptr()


def test_views_whose_spans_overlap_keep_their_span(tmp_path):
    big = torch.randn(100, 100)
    content = {"a": big[:, 0], "b": big[:, 7:9], "far": big[99, 50:]}
    before, after, _, _ = compacted(saved(tmp_path, content))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["a"].untyped_storage().nbytes() == (9909 + 50) * 4
    assert len({value.untyped_storage()._cdata for value in after.values()}) == 1


def test_a_row_and_a_column_that_cross_stay_crossed(tmp_path):
    big = torch.randn(100, 100)
    before, after, _, _ = compacted(saved(tmp_path, {"row": big[50], "column": big[:, 7]}))
    assert all(torch.equal(after[name], before[name]) for name in before)
    after["row"][7] = 5.0
    assert after["column"][50] == 5.0


def test_the_strides_stay(tmp_path):
    images = torch.randn(2, 8, 10, 10).to(memory_format=torch.channels_last)[:, :, :3]
    before, after, _, _ = compacted(saved(tmp_path, {"images": images}))
    assert torch.equal(after["images"], before["images"])
    assert after["images"].stride() == images.stride()


def test_an_expanded_tensor_stays_expanded(tmp_path):
    content = {
        "ones": torch.randn(1000)[4].expand(50, 50),
        "rows": torch.randn(9, 9)[:, 2:3].expand(9, 40),
    }
    before, after, _, _ = compacted(saved(tmp_path, content))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["ones"].stride() == (0, 0)
    assert after["ones"].untyped_storage().nbytes() == 4
    assert after["rows"].stride() == (9, 0)
    assert after["rows"].untyped_storage().nbytes() == (8 * 9 + 1) * 4


def test_a_tensor_without_elements_keeps_nothing(tmp_path):
    path = saved(tmp_path, {"none": torch.randn(BIG)[5:5], "some": torch.randn(7)[2:]})
    before, after, _, sizes = compacted(path)
    assert after["none"].shape == (0,)
    assert torch.equal(after["some"], before["some"])
    assert sizes[1] < 4000


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_in_every_format_that_is_written(tmp_path, options):
    big = torch.randn(300, 300)
    path = saved(tmp_path, OrderedDict(a=big[3], b=big[20:23, 5], c=big[8:10]), **options)
    before, after, _, sizes = compacted(path)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert sizes[1] < sizes[0] / 40


def test_deflated_and_big_endian_records(tmp_path):
    big = torch.randn(300, 300)
    path = saved(tmp_path, {"a": big[3], "b": big[20:, 5], "c": big[8:10]})
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            swapped = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if "data/" in name and ".data" not in name:
                content = bytes(swapped.reshape(-1, 4).flip(1).flatten().tolist())
            if not name.endswith(("format_version", "storage_alignment")):
                packed.writestr(name, b"big" if name.endswith("byteorder") else content)
    before, after, _, _ = compacted(path)
    assert torch.equal(before["a"], big[3])
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_tensors_of_every_kind(tmp_path):
    """What a tensor is made of is trimmed with it: indices, scales, parameters, lazy bits."""
    long = torch.arange(1000)
    floats = torch.randn(1000)
    content = {
        "sparse": torch.sparse_coo_tensor(
            long[2:5].reshape(1, 3), floats[7:10], (10,), check_invariants=True
        ),
        "parameter": torch.nn.Parameter(floats[20:24]),
        "conj": torch.randn(100, dtype=torch.complex64)[3:5].conj(),
        "byte": torch.ones(1000, dtype=torch.float8_e4m3fn)[3:6],
        "optimizer": {"state": {0: {"exp_avg": floats[40:44]}}, "param_groups": [{"params": [0]}]},
    }
    before, after, _, sizes = compacted(saved(tmp_path, content))
    assert torch.equal(after["sparse"].to_dense(), before["sparse"].to_dense())
    assert torch.equal(after["parameter"], before["parameter"])
    assert isinstance(after["parameter"], torch.nn.Parameter)
    assert torch.equal(after["conj"], before["conj"])
    assert torch.equal(after["byte"].view(torch.uint8), before["byte"].view(torch.uint8))
    state = [tree["optimizer"]["state"][0]["exp_avg"] for tree in (before, after)]
    assert torch.equal(*state)
    assert after["parameter"].untyped_storage().nbytes() == (3 + 4 + 4) * 4
    assert sizes[1] < sizes[0] - 11_000


def test_every_fixture_is_read_alike_afterwards(tmp_path, fixtures):
    """Values, and which tensors share a storage."""
    for path in sorted((fixtures / "tensors").glob("*.pth")):
        with ckptool.open(path) as source:
            result = Compact()(source)
            if result is source or any(leaf.storage is None for _, leaf in source.tensors()):
                continue
            result.save(tmp_path / path.name)
            with ckptool.open(tmp_path / path.name) as found:
                pairs = [
                    (ours, theirs)
                    for (_, ours), (_, theirs) in zip(
                        source.tensors(), found.tensors(), strict=True
                    )
                    if ours.has_content
                ]
                assert [ours.read() for ours, _ in pairs] == [theirs.read() for _, theirs in pairs]
                groups = [[id(ref.storage) for ref in side] for side in zip(*pairs, strict=True)]
                first = [[ids.index(one) for one in ids] for ids in groups]
                assert first[0] == first[1]


def test_a_storage_that_is_a_value_stays_whole():
    over = storage(100)
    source = checkpoint({"a": tensor(2, over=over), "storage": StorageRef(over, "float32")})
    assert Compact()(source) is source


def test_arrays_that_lie_in_the_pickle_stay_what_they_are():
    array = tensor(2, over=storage(100), kind="numpy", parts={"array": None})
    source = checkpoint({"a": array})
    assert Compact()(source) is source


def test_a_tensor_of_a_tpu_is_trimmed_with_what_carries_it():
    over = storage(100)
    data = tensor(2, over=over)
    carried = replace(data, device="xla:0", parts={"carrier": "cpu_tensor", "data": data})
    found = Compact()(checkpoint({"a": carried})).root["a"]
    assert found.storage.nbytes == 8
    assert found.parts["data"].storage is found.storage


def test_elements_that_share_bytes_stay():
    packed = tensor(2, dtype="quint4x2", over=storage(100), kind="strided")
    source = checkpoint({"a": packed})
    assert Compact()(source) is source


def test_nothing_to_trim_is_the_same_checkpoint(tmp_path):
    path = saved(tmp_path, {"a": torch.randn(4), "b": torch.randn(3, 3).t()})
    with ckptool.open(path) as source:
        assert Compact()(source) is source


def test_a_second_time_finds_nothing(tmp_path):
    big = torch.randn(100, 100)
    path = saved(tmp_path, {"a": big[:, 0], "b": big[:, 7:9], "cross": big[3]})
    compacted(path)
    with ckptool.open(path.with_suffix(".compact.pth")) as source:
        assert Compact()(source) is source


def test_of_many_storages_the_largest_are_told(tmp_path):
    content = {f"w{at}": torch.randn(100 + at)[:1] for at in range(30)}
    _, _, changes, _ = compacted(saved(tmp_path, content))
    assert len(changes) == 22
    assert changes[0].text == "trimmed the storage of w29 from 516 to 4 bytes"
    assert changes[20].text.startswith("trimmed 10 more storages of w9")
    assert sum(change.count for change in changes[:-1]) == 30


def test_dead_bytes_are_counted_and_left_behind(tmp_path):
    path = saved(tmp_path, {"a": torch.randn(1000)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("in/data/99", b"x" * 5000)
    with ckptool.open(path) as source:
        result = Compact()(source)
        assert result is not source
        result.save(tmp_path / "out.pth")
    assert any("that nothing refers to" in change.text for change in result.changes)
    assert (tmp_path / "out.pth").stat().st_size <= path.stat().st_size - 5000


def storage_bytes(tree):
    """Bytes of the storages of listed tensors."""
    return sum(one.nbytes for one in {ref.storage for _, ref in tree.tensors()})


@pytest.mark.parametrize("name", ["extra_record", "big_endian", "deflated"])
def test_what_is_saved_is_told_of_storages_for_the_file_may_grow(fixtures, name):
    (path,) = fixtures.glob(f"*/{name}.pth")
    with ckptool.open(path) as source:
        before, result = storage_bytes(source), Compact()(source)
        dead, after = source.details.dead_bytes, storage_bytes(result)
    texts = [change.text for change in result.changes]
    assert f"saved {before - after} of {before} bytes of tensor data" in texts
    assert (f"dropped {dead:,} bytes that nothing refers to" in texts) == bool(dead)


@st.composite
def storages(draw):
    """A storage and views of it, as any program may have left them."""
    size = draw(st.integers(1, 200))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
    base = torch.arange(size).to(dtype)
    views = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        stride = [draw(st.integers(0, 40)) for _ in shape]
        reach = sum((count - 1) * step for count, step in zip(shape, stride, strict=True) if count)
        if 0 in shape:
            reach = 0
        if reach < size:
            views.append(base.as_strided(shape, stride, draw(st.integers(0, size - 1 - reach))))
    return views or [base[:1]]


@settings(max_examples=50)
@example([[torch.empty(0)]])
@given(st.lists(storages(), min_size=1, max_size=3))
def test_any_views_have_the_same_values_and_share_what_they_shared(groups):
    before = {
        f"{at}.{index}": view for at, views in enumerate(groups) for index, view in enumerate(views)
    }
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder, "in.pth"), Path(folder, "out.pth")
        torch.save(before, path)
        with ckptool.open(path) as source:
            Compact()(source).save(target)
        after = torch.load(target, weights_only=True)
        sizes = [target.stat().st_size, path.stat().st_size]
    assert sizes[0] <= sizes[1]
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, other in product(before, repeat=2):
        pair, found = ((tree[name], tree[other]) for tree in (before, after))
        assert shares(*pair) == shares(*found)
        if all(one.untyped_storage().nbytes() for one in found):  # else torch makes several
            assert one_storage(*pair) == one_storage(*found)


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy"])
def test_tied_names_get_bytes_of_their_own(tmp_path, format):
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": weight, "b": weight, "c": weight[:], "view": weight[0]}, tmp_path / "in.pth")
    receipt = ckptool.convert(
        tmp_path / "in.pth", tmp_path / "out.pth", ckptool.Untie(), format=format
    )
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert receipt.tensors == 4
    assert len({found[name].data_ptr() for name in "abc"}) == 3
    assert all(torch.equal(found[name], weight) for name in "abc")
    assert found["view"].data_ptr() == found["a"].data_ptr()


def test_without_ties_nothing_changes(tmp_path):
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        assert Untie()(checkpoint) is checkpoint


def test_another_word_is_refused():
    with pytest.raises(ckptool.UsageError, match="'keep' or 'copy'"):
        make_steps({"ties": "no"})
