"""Writing safetensors: what the reference loads equals the source, and what is lost is named."""

import io
import json
import os
import struct
import zipfile
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

from ckptool.conversion import convert
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, FileSource
from ckptool.formats import open_checkpoint
from ckptool.formats.safetensors import SAFETENSORS
from ckptool.transforms import Untie
from ckptool.writing import save
from tests.formats.safetensors_files import BY_TORCH, as_bytes, entry, raw_file


def equal(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert as_bytes(found) == as_bytes(expected)


def written(folder, content, **options):
    """The file for what torch saved, and the receipt."""
    torch.save(content, folder / "in.pth")
    with open_checkpoint(folder / "in.pth") as checkpoint:
        receipt = save(checkpoint, folder / "out.safetensors", overwrite=True, **options)
    assert receipt.size == os.path.getsize(folder / "out.safetensors")
    return folder / "out.safetensors", receipt


def header_of(path):
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    assert length % 8 == 0
    return json.loads(content[8 : 8 + length])


def refused(folder, content, **options):
    with pytest.raises(NotRepresentable) as caught:
        written(folder, content, **options)
    assert not (folder / "out.safetensors").exists()
    return caught.value.message


def test_every_dtype(tmp_path):
    for name in BY_TORCH:
        content = torch.arange(96, dtype=torch.uint8) % 2
        tensor = content.view(getattr(torch, name)).reshape(2, 3, -1)
        tensors = {"t": tensor, "part": tensor[1:], "empty": tensor[:, :0].clone()}
        path, receipt = written(tmp_path, tensors)
        found = load_file(path)
        assert found["t"].dtype == tensor.dtype
        assert found["t"].shape == tensor.shape
        assert found["t"].contiguous().view(torch.uint8).flatten().equal(content)
        assert found["part"].view(torch.uint8).flatten().equal(content[48:])
        assert found["empty"].shape == tensor[:, :0].shape
        assert receipt.tensors == 3


def test_the_reference_lists_and_slices_it(tmp_path):
    tensors = {"w": torch.rand(4, 3), "b": torch.rand(3)}
    path, _ = written(tmp_path, tensors)
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == {"w", "b"}
        equal(opened.get_slice("w")[1:3], tensors["w"][1:3])


def test_keys_stay_in_order_and_bytes_are_aligned(tmp_path):
    tensors = {
        "byte": torch.ones(3, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.float16),
        "double": torch.ones(3, dtype=torch.float64),
        "float": torch.ones(3),
        "bool": torch.ones(1, dtype=torch.bool),
    }
    path, _ = written(tmp_path, tensors)
    header = header_of(path)
    header.pop("__metadata__")
    assert list(header) == list(tensors)
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    by_place = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert by_place == ["double", "float", "half", "byte", "bool"]


def test_views_are_made_contiguous(tmp_path):
    base = torch.arange(240, dtype=torch.float32)
    conv = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {
        "transposed": base.view(12, 20).t(), "step": base[::7], "expanded": base[:3].expand(4, 3),
        "scalar": base[5], "conv": conv, "conj": torch.rand(3, dtype=torch.complex64).conj(),
        "neg": torch.rand(3, dtype=torch.complex64).conj().imag,
    }  # fmt: skip
    path, receipt = written(tmp_path, tensors)
    found = load_file(path)
    for name, tensor in tensors.items():
        equal(found[name], tensor)
    notes = "\n".join(receipt.notes)
    assert "made 5 tensors contiguous: transposed, step, expanded, conv, neg" in notes
    assert "their own bytes: transposed, step, expanded, scalar" in notes
    assert receipt.left_out == ()


def test_disjoint_parts_of_a_storage_are_nothing_to_tell(tmp_path):
    base = torch.arange(10.0)
    path, receipt = written(tmp_path, {"a": base[:5], "b": base[5:], "e": base[3:3]})
    assert receipt.notes == ()
    equal(load_file(path)["b"], base[5:])


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 4)
        self.head.weight = self.embed.weight


def test_ties_and_versions_come_back(tmp_path):
    state = Tied().state_dict()
    path, receipt = written(tmp_path, state)
    assert header_of(path)["__metadata__"] == {
        "format": "pt",
        "_metadata": json.dumps(state._metadata, separators=(",", ":")),
        "head.weight": "embed.weight",
        "ckptool.tied": '{"head.weight":6}',
    }
    assert receipt.notes == (
        "wrote tied tensors once; __metadata__ lists the other keys: head.weight = embed.weight",
    )
    assert receipt.tensors == len(state)
    with open_checkpoint(path) as checkpoint:
        save(checkpoint, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert isinstance(back, OrderedDict)
    assert list(back) == list(state)
    assert back._metadata == state._metadata
    assert back["head.weight"].data_ptr() == back["embed.weight"].data_ptr()
    for name, tensor in state.items():
        equal(back[name], tensor)


def test_the_reference_loads_a_tied_model(tmp_path):
    model, other = Tied(), Tied()
    path, _ = written(tmp_path, model.state_dict())
    assert load_model(other, path) == (set(), [])
    for name, tensor in model.state_dict().items():
        equal(other.state_dict()[name], tensor)


def test_ties_can_be_written_out(tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "in.pth")
    path = tmp_path / "out.safetensors"
    convert(tmp_path / "in.pth", path, Untie())
    found = load_file(path)
    equal(found["head.weight"], found["embed.weight"])
    assert "head.weight" not in header_of(path)["__metadata__"]


@pytest.mark.parametrize("name", ["format", "_metadata", "ckptool.tied"])
def test_a_tied_name_that_the_header_needs_itself(tmp_path, name):
    shared = torch.rand(3)
    path, _ = written(tmp_path, {"first": shared, name: shared})
    equal(load_file(path)[name], shared)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.root) == ["first", name]


def test_what_only_shares_a_storage_is_no_tie(tmp_path):
    base = torch.rand(4, 4)
    tensors = {"a": base, "b": base.t(), "c": base.view(16), "d": base[:2]}
    path, _ = written(tmp_path, tensors)
    found = load_file(path)
    for name, tensor in tensors.items():
        equal(found[name], tensor)


def reopened(path, way, *steps):
    """The names and the entries of the header after each step, written in the way given."""
    for number, step in enumerate(steps):
        with open_checkpoint(path) as checkpoint:
            yield list(checkpoint.root), checkpoint.details.header
            after = path if way == "in place" else path.with_name(f"{number}.safetensors")
            save(step(checkpoint), after, in_place=way == "in place", verify=True)
        path = after
    with open_checkpoint(path) as checkpoint:
        yield list(checkpoint.root), checkpoint.details.header


@pytest.mark.parametrize("way", ["in place", "anew"])
def test_a_text_that_becomes_the_name_of_a_tensor_stays_a_text(tmp_path, way):
    """And is never read back as a second name of that tensor, whatever the tensors are called."""
    path = tmp_path / "in.safetensors"
    free = {"format": "pt", "watched": "w", "ckptool": "module.w"}
    save_file({"module.w": torch.rand(3)}, path, metadata={**free, "ckptool.tied": "{}"})
    assert list(reopened(path, way, Checkpoint.strip_module, Checkpoint.add_module)) == [
        (["module.w"], free),
        (["w"], free),
        (["module.w"], free),
    ]


def test_a_text_beside_true_ties_stays_a_text(tmp_path):
    path = tmp_path / "again.safetensors"
    state = Tied().state_dict()
    with open_checkpoint(written(tmp_path, state)[0]) as checkpoint:
        details = replace(checkpoint.details, header={"watched": "norm.weight"})
        save(replace(checkpoint, details=details), path)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.root) == list(state)
        assert checkpoint.root["head.weight"] is checkpoint.root["embed.weight"]
        assert checkpoint.details.header == {"format": "pt", "watched": "norm.weight"}


def test_ties_are_listed_only_where_something_could_be_taken_for_one(tmp_path):
    path = tmp_path / "in.safetensors"
    free = {"format": "pt", "watched": "nothing", "w": "w"}
    save_file({"w": torch.rand(3)}, path, metadata=free)
    with open_checkpoint(path) as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert header_of(tmp_path / "out.safetensors")["__metadata__"] == free


@given(st.permutations(["a", "b", "c", "d", "e"]), st.sets(st.sampled_from("abcde")))
def test_any_tied_order_comes_back(tmp_path_factory, order, tied):
    shared = torch.rand(2)
    state = OrderedDict((name, shared if name in tied else torch.rand(2)) for name in order)
    path, _ = written(tmp_path_factory.mktemp("ties"), state)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.root) == order
        assert len({id(checkpoint.root[name]) for name in tied}) == bool(tied)


def test_what_is_left_out_is_named(tmp_path):
    state = OrderedDict(
        weight=torch.nn.Parameter(torch.rand(3)),
        bias=torch.rand(3, requires_grad=True),
        epoch=3,
        best=0.5,
        size=torch.Size([1, 2]),
        extra={"inner": [2]},
        dtype=torch.float32,
        name=torch.device("cuda:1"),
        path=slice(1),
    )
    state._metadata = OrderedDict([("", {"version": 1}), ("x", {"version": (1, 2)})])
    state.note = "mine"
    _, receipt = written(tmp_path, state)
    assert receipt.left_out == (
        "epoch, best, size, extra, dtype, name, path (builtins.slice) (values)",
        "the Parameter type of 1 tensor",
        "requires_grad of 2 tensors",
        "attributes: note, _metadata of 'x'",
    )
    with open_checkpoint(tmp_path / "out.safetensors") as checkpoint:
        assert checkpoint.root.metadata == {"": {"version": 1}}
    (tmp_path / "out.safetensors").unlink()
    assert "left out would be: epoch, best" in refused(tmp_path, state, strict=True)
    state.update(extra={"inner": torch.rand(2)}, note=torch.nn.Parameter(torch.rand(1)))
    state["note"].scale = torch.rand(3)
    said = "not objects with tensors inside: extra (1 tensor inside), note (1 tensor inside)"
    assert said in refused(tmp_path, state)


def test_device_tags_are_left_out(fixtures, tmp_path):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp_cuda3.pth") as checkpoint:
        receipt = save(checkpoint, tmp_path / "out.safetensors")
        count = len(checkpoint.root)
    assert receipt.left_out == (f"saved devices (cuda:3 on {count} tensors)",)


@pytest.mark.filterwarnings("ignore:.*(deprecated|prototype|beta)")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            lambda: {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)},
            "'b' has the dtype",
        ),
        (lambda: {"a": torch.ones(2).view(torch.bits16)}, "'a' has the dtype bits16"),
        (lambda: {"a": torch.eye(2).to_sparse()}, "'a' is a sparse_coo tensor"),
        (
            lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)},
            "a quantized tensor",
        ),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2)])}, "'a' is a nested tensor"),
        (lambda: {"a": torch.ones(2, device="meta")}, "1 of 1 tensor without values"),
        (
            lambda: {"__metadata__": torch.ones(2)},
            "tensor '__metadata__' has the key of the header's own entry, which safetensors "
            "cannot store",
        ),
        (
            lambda: {3: torch.ones(2)},
            "tensor '3' has a key of type int, which safetensors cannot store",
        ),
        (lambda: {"epoch": 3}, "this is not one"),
        (lambda: [torch.ones(2)], "this is not one"),
        (lambda: torch.ones(2), "this is not one"),
    ],
)
def test_what_cannot_be_held_is_refused(tmp_path, content, text):
    assert text in refused(tmp_path, content())


@pytest.mark.filterwarnings("ignore:.*(deprecated|prototype|beta)")
@pytest.mark.parametrize(
    ("content", "helps"),
    [
        (lambda: torch.eye(2).to_sparse(), ".to_dense()"),
        (lambda: torch.eye(2).to_sparse_csr(), ".to_dense()"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), ".dequantize()"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "to_padded_tensor"),
    ],
)
def test_the_hint_says_how_torch_makes_it_plain(tmp_path, content, helps):
    torch.save({"a": content()}, tmp_path / "f.pt")
    raised = pytest.raises(NotRepresentable)
    with open_checkpoint(tmp_path / "f.pt") as checkpoint, raised as caught:
        save(checkpoint, tmp_path / "out.safetensors")
    assert helps in caught.value.hint


def test_a_distributed_tensor_is_refused(fixtures, tmp_path):
    source = fixtures / "distributed" / "dtensor_0_of_2.pth"
    part = pytest.raises(
        NotRepresentable,
        match="tensor 'sharded' is a distributed tensor, with only a part of it in",
    )
    with open_checkpoint(source) as checkpoint, part:
        save(checkpoint, tmp_path / "out.safetensors")


def test_an_empty_state_dict(tmp_path):
    path, receipt = written(tmp_path, OrderedDict())
    assert load_file(path) == {}
    assert receipt.tensors == 0


def test_numpy_arrays_become_tensors(tmp_path):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype=">f4").reshape(2, 3)
    path, receipt = written(tmp_path, {"a": array, "t": torch.ones(1)})
    assert load_file(path)["a"].tolist() == array.tolist()
    assert "converted numpy arrays to tensors: a" in receipt.notes


def big_endian(tensors):
    """A zip as a big-endian machine writes it."""
    plain = io.BytesIO()
    torch.save(tensors, plain)
    turned = io.BytesIO()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(turned, "w") as target:
        for record in source.infolist():
            data = source.read(record)
            if record.filename.endswith("byteorder"):
                data = b"big"
            if "/data/" in record.filename:
                data = data[::-1]
            target.writestr(record.filename, data)
    return turned.getvalue()


def test_big_endian_sources_are_turned(tmp_path):
    (tmp_path / "in.pth").write_bytes(big_endian({"a": torch.arange(5, dtype=torch.int32)}))
    with open_checkpoint(tmp_path / "in.pth") as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["a"].tolist() == [4, 3, 2, 1, 0]


def test_from_safetensors_entries_of_others_are_kept(tmp_path):
    source = tmp_path / "in.safetensors"
    save_file({"a": torch.ones(2)}, source, metadata={"format": "mlx", "by": "me", "x": "1"})
    with open_checkpoint(source) as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert header_of(tmp_path / "out.safetensors")["__metadata__"] == {
        "format": "mlx", "by": "me", "x": "1",
    }  # fmt: skip


def test_from_safetensors_without_a_format(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert header_of(tmp_path / "out.safetensors")["__metadata__"] == {"format": "pt"}


def test_ties_of_save_model_stay(tmp_path):
    model, other = Tied(), Tied()
    save_model(model, str(tmp_path / "in.safetensors"))
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert load_model(other, tmp_path / "out.safetensors") == (set(), [])
    equal(other.head.weight, model.head.weight)


def test_float6_stays_what_it_is(tmp_path):
    header = {"a": entry((4,), (0, 3), "F6_E2M3"), "b": entry((2,), (3, 7), "F16")}
    path = raw_file(tmp_path / "in.safetensors", header, bytes(range(7)))
    with open_checkpoint(path) as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    assert header_of(tmp_path / "out.safetensors")["b"]["data_offsets"] == [0, 4]
    with open_checkpoint(tmp_path / "out.safetensors") as checkpoint:
        assert checkpoint["a"].read() == bytes(range(3))
        assert checkpoint["a"].shape == (4,)


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy"])
def test_torch_has_no_float6(tmp_path, format):
    path = raw_file(tmp_path / "in.safetensors", {"a": entry((4,), (0, 3), "F6_E3M2")}, bytes(3))
    no_type = pytest.raises(
        NotRepresentable,
        match="torch has no dtype float6_e3m2fn, so no pickle can contain a tensor",
    )
    with open_checkpoint(path) as checkpoint, no_type:
        save(checkpoint, tmp_path / "out.pth", format=format)


class Recorder:
    """An output that only counts."""

    def __init__(self):
        self.calls = []

    def write(self, data):
        self.calls.append(("write", len(data)))

    def copy(self, data):
        self.calls.append(("copy", data.length))

    def stream(self, blocks):
        self.calls.append(("stream", sum(map(len, blocks))))


def test_neighbors_are_one_copy(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(10)}
    save_file(tensors, tmp_path / "in.safetensors")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        recorder = Recorder()
        plan = SAFETENSORS.plan(checkpoint)
        plan.files[0].write(recorder)
    assert [call for call in recorder.calls if call[0] == "copy"] == [("copy", 160)]
    assert sum(size for _, size in recorder.calls) == plan.size


def test_a_header_that_readers_would_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptool.formats.safetensors_header.MAX_BYTES", 100)
    assert "the header would have 144 bytes, more than the 100 that safetensors allows" in refused(
        tmp_path, {"a" * 60: torch.ones(1)}
    )


@pytest.mark.parametrize("folder", ["torch-2.13.0", "torch-1.13.1", "torch-1.6.0", "torch-1.4.0"])
@pytest.mark.parametrize("name", ["single.pth", "dp_cuda0.pth"])
def test_real_files(fixtures, tmp_path, folder, name):
    source = fixtures / folder / name
    with open_checkpoint(source) as checkpoint:
        save(checkpoint, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    expected = torch.load(source, map_location="cpu", weights_only=True)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        equal(found[key], tensor)


def test_the_source_is_read_where_it_says(tmp_path):
    """A range of a file is what the kernel copies, not a rereading of the header."""
    save_file({"a": torch.arange(4.0)}, tmp_path / "in.safetensors")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        data = checkpoint["a"].data
        assert isinstance(data, ByteRange)
        assert isinstance(data.source, FileSource)
        assert data.read() == as_bytes(torch.arange(4.0))
