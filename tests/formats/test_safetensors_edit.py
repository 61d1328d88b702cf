"""Safetensors files edited in place: the reference loads what was there, under the new names."""

import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file, save_model

from ckptool.core.model import OrderedMap
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, MemorySource
from ckptool.formats import open_checkpoint
from ckptool.formats.safetensors import SAFETENSORS
from ckptool.transforms import Strip, Untie, Wrap, make_remap
from tests.formats.edits import edit, mapped
from tests.formats.safetensors_files import entry, raw_file
from tests.test_written import listing

TENSORS = {
    "module.w": torch.rand(3, 4),
    "module.b": torch.rand(4).to(torch.bfloat16),
    "module.n": torch.tensor(7),
    "module.empty": torch.empty(0, 2),
}


def parts(path):
    """Length of the header, its text, and the bytes behind it."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return length, content[8 : 8 + length], content[8 + length :]


def stripped(tensors):
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.fixture
def path(tmp_path):
    """A file that the reference wrote."""
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt", "note": "a 'b' ü"})
    return tmp_path / "model.safetensors"


def test_the_reference_loads_the_edited_file(path):
    length, _, body = parts(path)
    size = path.stat().st_size
    plan = edit(path, Strip())
    assert plan.patch.offset == 0
    assert len(plan.patch.data) == 8 + length
    assert (plan.size, plan.tensors) == (size, 4)
    assert_equal(load_file(path), stripped(TENSORS))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "a 'b' ü"}
    assert parts(path)[0] == length
    assert parts(path)[2] == body


def test_a_header_that_said_nothing_of_itself_still_says_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    edit(path, Strip())
    with safe_open(path, "pt") as opened:
        assert opened.metadata() is None
    assert_equal(load_file(path), stripped(TENSORS))


def test_the_names_stand_in_the_order_of_the_state_dict(path):
    edit(path, lambda checkpoint: mapped(checkpoint, lambda items: sorted(items, reverse=True)))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.root) == sorted(TENSORS, reverse=True)
    assert_equal(load_file(path), TENSORS)


def test_what_was_taken_off_can_be_put_back(path):
    before = load_file(path)
    edit(path, Strip())
    edit(path, Wrap())
    assert_equal(load_file(path), before)


def padded(path, room):
    """The file with `room` spaces at the end of its header, no more."""
    _, text, body = parts(path)
    text = text.rstrip() + b" " * room
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(("room", "fits"), [(27, False), (28, True), (29, True), (500, True)])
def test_a_longer_header_takes_a_new_file_only_where_it_does_not_fit(path, room, fits):
    edit(path, Strip())
    padded(path, room)
    before = path.read_bytes()
    # `module.` goes before four names.
    assert (edit(path, Wrap()) is not None) == fits
    if fits:
        assert_equal(load_file(path), TENSORS)
        assert len(parts(path)[1].rstrip()) == parts(path)[0] - room + 28
    else:
        assert path.read_bytes() == before


def test_ties_of_the_reference_and_their_names(tmp_path):
    path = tmp_path / "model.safetensors"
    inner = torch.nn.Module()
    inner.a = torch.nn.Linear(2, 2, bias=False)
    inner.b = torch.nn.Linear(2, 2, bias=False)
    inner.b.weight = inner.a.weight
    save_model(torch.nn.DataParallel(inner, device_ids=[]), str(path))
    padded(path, 100)  # for the places of the tied names
    plan = edit(path, Strip())
    assert plan.tensors == 2
    assert plan.notes == (
        "wrote tied tensors once; __metadata__ lists the other keys: b.weight = a.weight",
    )
    with safe_open(path, "pt") as opened:
        assert opened.metadata()["b.weight"] == "a.weight"
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.root) == ["a.weight", "b.weight"]
        assert checkpoint.root["a.weight"] is checkpoint.root["b.weight"]


def test_metadata_of_a_state_dict_follows_its_names(tmp_path):
    torch.save(torch.nn.DataParallel(torch.nn.BatchNorm1d(3)).state_dict(), tmp_path / "model.pth")
    path = tmp_path / "model.safetensors"
    with open_checkpoint(tmp_path / "model.pth") as checkpoint:
        checkpoint.save(path)
        wanted = Strip()(checkpoint).root.metadata
    padded(path, 64)
    assert edit(path, Strip()) is not None
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.root.metadata == wanted
        assert list(wanted) == [""]


@pytest.mark.parametrize("name", ["dtypes", "names", "nothing", "parallel", "spaces", "ties"])
@pytest.mark.parametrize("change", [lambda checkpoint: checkpoint, Strip()])
def test_every_file_reads_as_what_was_to_be_written(fixtures, tmp_path, name, change):
    path = tmp_path / "model.safetensors"
    path.write_bytes((fixtures / "safetensors" / f"{name}.safetensors").read_bytes())
    padded(path, 200)
    tensors = load_file(path)
    with open_checkpoint(path) as checkpoint:
        told = listing(change(checkpoint))
    assert edit(path, change) is not None
    with open_checkpoint(path) as checkpoint:
        assert listing(checkpoint) == told
    found = load_file(path)
    assert sorted(map(bits, found.values())) == sorted(map(bits, tensors.values()))


def bits(tensor):
    return str(tensor.dtype), list(tensor.shape), tensor.untyped_storage().tolist()


def test_elements_of_less_than_a_byte_and_of_types_that_torch_has_not(tmp_path):
    header = {
        "module.a": entry((2, 4), (0, 4), "F4"),
        "module.b": entry((4,), (4, 7), "F6_E2M3"),
        "module.c": entry((1,), (7, 8), "F8_E8M0"),
    }
    path = raw_file(tmp_path / "model.safetensors", header, bytes(range(8)))
    edit(path, Strip())
    with open_checkpoint(path) as checkpoint:
        found = {name: (ref.dtype, ref.shape, ref.read()) for name, ref in checkpoint.root.items()}
    assert found == {
        "a": ("float4_e2m1fn_x2", (2, 2), bytes(range(4))),
        "b": ("float6_e2m3fn", (4,), bytes(range(4, 7))),
        "c": ("float8_e8m0fnu", (1,), b"\x07"),
    }


def with_tensor(change):
    """Another tensor under one name."""
    return with_root(lambda root: {**root, "module.w": change(root["module.w"])})


def with_root(change):
    return lambda checkpoint: checkpoint.with_root(OrderedMap(change(dict(checkpoint.root))))


def with_attribute(checkpoint):
    root = OrderedMap(checkpoint.root)
    root.attributes = {"_metadata": OrderedMap({"": {"version": {1}}})}
    return checkpoint.with_root(root)


def in_memory(tensor):
    data = ByteRange(MemorySource(bytes(tensor.nbytes), "memory"), 0, tensor.nbytes)
    return replace(tensor, storage=replace(tensor.storage, data=data))


@pytest.mark.parametrize(
    "change",
    [
        lambda checkpoint: make_remap({"*": "cuda:0"})(checkpoint),
        with_root(lambda root: {**root, "epoch": 3}),
        with_root(lambda root: {name: root[name] for name in list(root)[1:]}),
        with_root(lambda root: {**root, "copy": replace(root["module.w"], dtype="int32")}),
        with_tensor(lambda tensor: tensor[:2]),
        with_tensor(lambda tensor: replace(tensor, stride=(1, 3))),
        with_tensor(lambda tensor: replace(tensor, flags=("neg",))),
        with_tensor(lambda tensor: replace(tensor, requires_grad=True)),
        with_tensor(in_memory),
        with_attribute,
        lambda checkpoint: replace(checkpoint, sources=checkpoint.sources * 2),
        lambda checkpoint: replace(checkpoint, format="torch-zip"),
    ],
    ids=[
        "a device", "a value", "a tensor less", "bytes twice", "part of a tensor",
        "another order of elements", "a sign to flip", "requires_grad", "bytes in memory",
        "an attribute", "two files", "another format",
    ],
)  # fmt: skip
def test_what_a_new_header_cannot_say_takes_a_new_file(path, change):
    padded(path, 500)
    before = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        assert SAFETENSORS.plan_edit(change(checkpoint)) is None
        assert SAFETENSORS.plan_edit(checkpoint) is not None
    assert path.read_bytes() == before


def test_tied_names_that_are_to_have_bytes_of_their_own_take_a_new_file(fixtures, tmp_path):
    with open_checkpoint(fixtures / "safetensors" / "ties.safetensors") as checkpoint:
        assert SAFETENSORS.plan_edit(Untie()(checkpoint)) is None


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"state_dict": {"a": 1}}, "one flat state dict"),
        ({3: "w"}, "tensor '3' has a key of type int, which safetensors cannot store"),
        ({"__metadata__": "w"}, "the header's own entry"),
    ],
)
def test_what_safetensors_cannot_hold_is_an_error_as_in_a_new_file(path, root, message):
    with open_checkpoint(path) as checkpoint:
        tensor = next(iter(checkpoint.root.values()))
        root = {name: tensor if value == "w" else value for name, value in root.items()}
        changed = checkpoint.with_root(OrderedMap(root))
        with pytest.raises(NotRepresentable, match=message) as planned:
            SAFETENSORS.plan(changed)
        with pytest.raises(NotRepresentable) as edited:
            SAFETENSORS.plan_edit(changed)
    assert str(edited.value) == str(planned.value)


def test_an_edit_reads_the_header_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    size = 1 << 40
    raw_file(path, {"module.w": entry((size,), (0, size), "U8")})
    with open(path, "r+b") as file:
        file.truncate(parts(path)[0] + 8 + size)
    assert edit(path, Strip()).size == path.stat().st_size
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.root["w"].shape == (size,)
    path.unlink()


DTYPES = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.dictionaries(NAMES, st.tuples(DTYPES, st.lists(st.integers(0, 3), max_size=3)), max_size=6),
    st.randoms(),
)
def test_names_change_places_without_a_byte_more(kinds, random):
    kinds.pop("__metadata__", None)
    tensors = {
        name: torch.full(shape, position, dtype=dtype)
        for position, (name, (dtype, shape)) in enumerate(kinds.items())
    }
    swapped = dict(zip(tensors, random.sample(list(tensors), len(tensors)), strict=True))
    content = save(tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        edit(path, with_root(lambda root: {swapped[name]: ref for name, ref in root.items()}))
        assert len(path.read_bytes()) == len(content)
        assert_equal(
            load(path.read_bytes()), {swapped[name]: tensor for name, tensor in tensors.items()}
        )
