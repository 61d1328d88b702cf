"""Reading safetensors: equal to the reference where it reads, one error for each broken rule."""

import json
import struct

import pytest
import safetensors
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file, save_model

from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.formats import open_checkpoint
from ckptool.formats.base import Probe
from ckptool.formats.safetensors import SAFETENSORS
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.contract import FormatContract
from tests.formats.safetensors_files import BY_TORCH, as_bytes, entry, raw_file


class TestContract(FormatContract):
    name = "safetensors"
    sample = "safetensors/ties.safetensors"


def refused(path, error=CorruptFile):
    """The message with which a file is refused; the reference refuses it too, or is laxer."""
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert type(caught.value) is error
    assert caught.value.file == str(path)
    return caught.value.message


def test_every_dtype_that_the_reference_writes(tmp_path):
    for name in BY_TORCH:
        content = torch.arange(96, dtype=torch.uint8) % 2
        tensor = content.view(getattr(torch, name)).reshape(2, 3, -1)
        save_file({"t": tensor, "empty": tensor[:, :0].clone()}, tmp_path / "x.safetensors")
        with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
            ref = checkpoint["t"]
            assert (ref.dtype, ref.shape, ref.stride) == (
                name,
                tuple(tensor.shape),
                tensor.stride(),
            )
            assert (ref.device, ref.requires_grad, ref.kind) == ("cpu", False, "strided")
            assert ref.read() == content.numpy().tobytes()
            assert checkpoint["empty"].shape == tuple(tensor[:, :0].shape)
            assert checkpoint["empty"].read() == b""


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.dictionaries(names, shapes, min_size=1, max_size=6), st.dictionaries(names, names))
def test_any_names_and_shapes(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    made = {name: torch.rand(shape) for name, shape in tensors.items()}
    save_file(made, path, metadata=metadata or None)
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.root) >= set(made)
        for name, tensor in made.items():
            assert checkpoint.root[name].shape == tuple(tensor.shape)
            assert checkpoint.root[name].read() == as_bytes(tensor)


def test_order_is_that_of_the_header(tmp_path):
    header = {"z": entry(offsets=(8, 16)), "a": entry()}
    with open_checkpoint(raw_file(tmp_path / "x", header, bytes(16))) as checkpoint:
        assert list(checkpoint.root) == ["z", "a"]
        assert checkpoint.format == "safetensors"
        assert checkpoint.details.storage_bytes == 16


@pytest.mark.parametrize("text", [b' \n{"a":%s}  ', b'{"a":%s,"__metadata__":null}'])
def test_what_the_reference_takes_is_taken(tmp_path, text):
    path = raw_file(tmp_path / "x", text % json.dumps(entry()).encode(), bytes(8))
    assert safetensors.deserialize(path.read_bytes())[0][0] == "a"
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["a"].read() == bytes(8)


def test_unaligned_and_empty_tensors_anywhere(tmp_path):
    header = {
        "e": entry((0,), (1, 1)),
        "b": entry((1,), (0, 1), "U8"),
        "f": {**entry((1,), (1, 5)), "more": [{}]},
        "last": entry((3, 0), (5, 5)),
    }
    path = raw_file(tmp_path / "x", header, bytes(range(5)))
    assert len(safetensors.deserialize(path.read_bytes())) == 4
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["f"].read() == bytes([1, 2, 3, 4])


def test_nothing_at_all(tmp_path):
    with open_checkpoint(raw_file(tmp_path / "x", {})) as checkpoint:
        assert checkpoint.root == {}


def test_float6_is_listed_and_its_bytes_are_at_hand(tmp_path):
    header = {"t": entry((2, 4), (0, 6), "F6_E2M3"), "u": entry((4,), (6, 9), "F6_E3M2")}
    path = raw_file(tmp_path / "x", header, bytes(range(9)))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["t"].dtype == "float6_e2m3fn"
        assert checkpoint["t"].nbytes == 6
        assert checkpoint["t"].read() == bytes(range(6))
        assert checkpoint["u"].read() == bytes([6, 7, 8])


@pytest.mark.parametrize("shape", [[3, 2, 1], []])
def test_float4_that_splits_a_pair(tmp_path, shape):
    offsets = [0, 3] if shape else [0, 0]
    path = raw_file(tmp_path / "x", {"t": entry(shape, offsets, "F4")}, bytes(offsets[1]))
    said = "is odd" if shape else "not a whole number of bytes"
    assert said in refused(path)


def test_other_metadata_is_told_and_kept(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"format": "pt", "made by": "me"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.details.notes == ("header: made by=me",)
        assert checkpoint.details.header == {"format": "pt", "made by": "me"}


def test_ties_of_save_model_are_restored(tmp_path):
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 3)
    model.head = torch.nn.Linear(3, 4, bias=False)
    model.head.weight = model.embed.weight
    save_model(model, str(tmp_path / "x.safetensors"))
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert set(checkpoint.root) == {"embed.weight", "head.weight"}
        assert checkpoint["head.weight"] is checkpoint["embed.weight"]


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ('{"t":0,"u":2}', ["t", "a", "u", "b"]),
        ('{"t":9,"u":0}', ["u", "a", "b", "t"]),
        ('{"t":1,"u":1}', ["a", "t", "b", "u"]),
        ('{"t":"0","u":-1,"x":0}', ["a", "b", "t", "u"]),
        ("[0]", ["a", "b", "t", "u"]),
        ("no JSON", ["a", "b", "t", "u"]),
        (None, ["a", "b", "t", "u"]),
    ],
)
def test_places_of_tied_names(tmp_path, places, order):
    metadata = {"t": "a", "u": "b", **({"ckptool.tied": places} if places else {})}
    header = {"__metadata__": metadata, "a": entry(), "b": entry(offsets=(8, 16))}
    with open_checkpoint(raw_file(tmp_path / "x", header, bytes(16))) as checkpoint:
        assert list(checkpoint.root) == order
        assert checkpoint.root["t"] is checkpoint.root["a"]
        assert checkpoint.root["u"] is checkpoint.root["b"]


@pytest.mark.parametrize(
    ("places", "tied", "free"),
    [
        (None, ["t", "u"], {}),
        ('{"t":1}', ["t"], {"u": "b"}),
        ("{}", [], {"t": "a", "u": "b"}),
    ],
)
def test_where_ties_are_listed_nothing_else_is_one(tmp_path, places, tied, free):
    metadata = {"t": "a", "u": "b", **({"ckptool.tied": places} if places else {})}
    header = {"__metadata__": metadata, "a": entry(), "b": entry(offsets=(8, 16))}
    with open_checkpoint(raw_file(tmp_path / "x", header, bytes(16))) as checkpoint:
        assert sorted(checkpoint.root) == sorted(["a", "b", *tied])
        assert checkpoint.details.header == free


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"a":1}', "[" * 100_000, '{"a":' + "9" * 99])
def test_metadata_that_only_looks_like_ours(tmp_path, text):
    header = {"__metadata__": {"_metadata": text, "format": "a"}, "a": entry()}
    with open_checkpoint(raw_file(tmp_path / "x", header, bytes(8))) as checkpoint:
        assert list(checkpoint.root) == ["a"]
        assert checkpoint.root.metadata is None
        assert checkpoint.details.header == {"_metadata": text, "format": "a"}


BROKEN = {
    "not UTF-8": (b'{"a\xff":1}', "not UTF-8 at byte 11"),
    "not JSON": (b'{"a":}', "not JSON"),
    "zero bytes behind": (b"{}\0", "not JSON"),
    "NaN": (b'{"a":NaN}', "the header is not JSON (it contains NaN)"),
    "a long number": (b'{"a":%s}' % (b"9" * 5000), "a number of 5,000 digits"),
    "nested": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "half a character": (b'{"\\ud800":1}', "not valid Unicode"),
    "a name twice": (b'{"a":1,"a":2}', "has the key 'a' twice"),
    "a field twice": (b'{"a":{"dtype":"F32","dtype":"F32"}}', "has the key 'dtype' twice"),
    "metadata a list": ({"__metadata__": []}, "not an object of strings"),
    "metadata of numbers": ({"__metadata__": {"k": 1}}, "__metadata__ is not an object of strings"),
    "no object": ({"a": 1}, "'a' does not have a dtype, a shape and two data_offsets"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, "does not have a dtype"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, "two data_offsets"),
    "unknown dtype": ({"a": entry(dtype="F3\x1b")}, r"the unknown dtype 'F3\x1b'"),
    "negative size": ({"a": entry((-2,))}, "has -2, expected a count"),
    "size a float": ({"a": entry((2.0,))}, "has 2.0, expected a count"),
    "size a bool": ({"a": entry((True,))}, "has True, expected a count"),
    "size beyond 64 bits": ({"a": entry((1 << 64,))}, ", expected a count"),
    "offset a text": ({"a": entry(offsets=("0", 8))}, ", expected a count"),
    "overflow": ({"a": entry((1 << 40, 1 << 40, 0), (0, 0))}, "more than 2**64 elements"),
    "backwards": ({"a": entry(offsets=(8, 0))}, "needs 8 bytes, but its data_offsets span -8"),
    "wrong size": ({"a": entry((3,))}, "needs 12 bytes, but its data_offsets span 8"),
    "bits left": ({"a": entry((3,), (0, 1), "F4")}, "which is not a whole number of bytes"),
    "a gap in front": ({"a": entry(offsets=(4, 12))}, "but the header ends at 0"),
    "a gap": (
        {"a": entry(), "b": entry(offsets=(9, 17))},
        "'b' begins at 9, but tensor 'a' ends at 8",
    ),
    "overlap": (
        {"a": entry(), "b": entry(offsets=(4, 12))},
        "'b' begins at 4, but tensor 'a' ends at 8",
    ),
    "bytes behind": ({"a": entry((1,), (0, 4))}, "4 bytes after tensor 'a'"),
}


def test_a_broken_rule(tmp_path):
    for case in BROKEN:
        header, text = BROKEN[case]
        path = raw_file(tmp_path / "x", header, bytes(8))
        if "twice" not in text:  # a name twice is the one rule that the reference does not keep
            with pytest.raises(safetensors.SafetensorError):
                safetensors.deserialize(path.read_bytes())
        assert text in refused(path)


def test_an_array_is_no_header():
    """Recognized by its beginning, so it is another error: not a checkpoint at all."""
    head = struct.pack("<Q", 2) + b"[]"
    assert not SAFETENSORS.recognize(_Head(head))


@pytest.mark.parametrize("kept", [-1, -8])
def test_a_tensor_cut_off(tmp_path, kept):
    path = raw_file(tmp_path / "x", {"a": entry()}, bytes(8)[:kept])
    assert f"{-kept} bytes are missing" in refused(path, TruncatedFile)


def test_a_header_cut_off(tmp_path):
    path = raw_file(tmp_path / "x", b'{"a":{"dtype"', length=1000)
    assert "987 bytes before its end" in refused(path, TruncatedFile)


def test_a_header_longer_than_allowed(tmp_path):
    path = raw_file(tmp_path / "x", {"a": entry()}, bytes(8), length=200_000_000)
    assert "the header has 200,000,000 bytes, more than the limit of 100,000,000" in refused(
        path, LimitExceeded
    )
    path = raw_file(tmp_path / "y", {"a": entry()}, bytes(8))
    with pytest.raises(LimitExceeded):
        open_checkpoint(path, limits=Limits(max_header_bytes=10))


def test_more_dimensions_than_allowed(tmp_path):
    path = raw_file(tmp_path / "x", {"a": entry((1,) * 65, (0, 4))}, bytes(4))
    assert "65 dimensions" in refused(path, LimitExceeded)


class _Head:
    """A probe that knows the beginning of a file."""

    source = None
    is_folder = False
    limits = DEFAULT_LIMITS

    def __init__(self, head):
        self.head = head


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"", False), (struct.pack("<Q", 2), False), (struct.pack("<Q", 2) + b"{}", True),
        (struct.pack("<Q", 9) + b' {\n "a"', True), (struct.pack("<Q", 9) + b"{{", False),
        (struct.pack("<Q", 2) + b"{a", False), (b"Contents{", False),
        (b'{"metadata": {"total', False), (b"PK\x03\x04", False),
    ],
)  # fmt: skip
def test_recognized_by_content(head, answer):
    assert SAFETENSORS.recognize(_Head(head)) is answer


def test_a_folder_is_not_recognized(tmp_path):
    assert not SAFETENSORS.recognize(Probe(tmp_path, DEFAULT_LIMITS))
