"""MessagePack of Flax: read as its own reader does, and refused where it lies."""

import struct

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "flax"
    sample = "flax/variables.msgpack"


def packed(node):
    """MessagePack of dicts, lists, short texts, small numbers and ready-made bytes."""
    if isinstance(node, bytes):
        return node
    if isinstance(node, str):
        return bytes([0xD9, len(node)]) + node.encode()
    if isinstance(node, int):
        return struct.pack(">Bq", 0xD3, node)
    if isinstance(node, list):
        return struct.pack(">BH", 0xDC, len(node)) + b"".join(map(packed, node))
    pairs = b"".join(packed(key) + packed(one) for key, one in node.items())
    return bytes([0x80 + len(node)]) + pairs


def array(shape=(2,), dtype="float32", raw=bytes(8), code=1):
    inner = b"\x93" + packed(list(shape)) + packed(dtype) + bytes([0xC4, len(raw)]) + raw
    return struct.pack(">BIB", 0xC9, len(inner), code) + inner


@pytest.fixture
def made(tmp_path):
    def write(node, behind=b""):
        (tmp_path / "m.msgpack").write_bytes(packed(node) + behind)
        return tmp_path / "m.msgpack"

    return write


def test_variables_are_one_state_dict_of_dotted_names(fixtures, tmp_path):
    file = fixtures / "flax/variables.msgpack"
    state = ckptool.load_state_dict(file)
    assert state["params.Dense_0.kernel"].shape == (80, 3)
    assert main(["convert", str(file), str(tmp_path / "m.safetensors")]) == 0
    assert load_file(tmp_path / "m.safetensors").keys() == state.keys()
    assert ckptool.diff(file, tmp_path / "m.safetensors").identical


def test_of_a_train_state_the_variables_are_the_state_dict(fixtures, tmp_path, made):
    file = fixtures / "flax/training.msgpack"
    assert main(["convert", str(file), str(tmp_path / "m.pth"), "--model-only"]) == 0
    assert "params.Dense_0.kernel" in torch.load(tmp_path / "m.pth")
    tree = {"step": 1, "params": {"a": {"scale": array()}}, "opt_state": {"m": {"a": array()}}}
    state = ckptool.load_state_dict(made(tree | {"batch_stats": {"a": {"mean": array()}}}))
    assert state.keys() == {"params.a.scale", "batch_stats.a.mean"}
    with open_checkpoint(made(tree | {"state_dict": {"x": array()}})) as checkpoint:
        assert checkpoint.root.keys() == {"step", "params", "opt_state", "state_dict"}


def test_numbers_and_arrays_of_no_torch_type(made):
    tree = {"a": {"b": array()}, "n": 3, "date": array(dtype="datetime64[ns]"), "z": [1, array()]}
    with open_checkpoint(made(tree)) as checkpoint:
        assert checkpoint.root["a.b"].shape == (2,)
        assert checkpoint.root["n"] == 3
        assert checkpoint.root["z.1"].dtype == "float32"
        assert "datetime64[ns]" in checkpoint.details.left_behind[0]


def test_chunks_are_one_array(made):
    chunks = {"__msgpack_chunked_array__": b"\xc3", "shape": {"0": 2, "1": 2}}
    chunks["chunks"] = {"0": array(raw=struct.pack("<2f", 1, 2)), "1": array(raw=bytes(8))}
    with open_checkpoint(made({"w": chunks})) as checkpoint:
        assert checkpoint.root["w"].shape == (2, 2)
        assert struct.unpack("<4f", checkpoint.root["w"].data.read()) == (1, 2, 0, 0)


def nested(depth):
    node = {"x": 1}
    for _ in range(depth):
        node = b"\x81" + packed("a") + packed(node)
    return node


def test_a_file_that_lies(made):
    for node, behind, words in [
        (
            {"w": array(shape=(3,))},
            b"",
            r"storage '34': float32 and shape \[3\] needs 12 bytes, but there are 8",
        ),
        ({"w": array(shape=(-2,))}, b"", "no shape"),
        ({"w": array(shape=(1 << 40, 1 << 40))}, b"", "but there are 8"),
        ({"w": b"\xc7\x02\x01\x90\x90"}, b"", "not consist of a shape"),
        ({"w": b"\xc7\x02\x02\x90\x90"}, b"", "does not have two numbers|its stated length"),
        ({"w": b"\xc9\xff\xff\xff\xff\x01"}, b"", "ends within a value"),
        ({"w": b"\xdb\xff\xff\xff\xff"}, b"", "ends within a value"),
        ({"w": b"\xdf\xff\xff\xff\xff"}, b"", "ends within a value"),
        ({"w": b"\xc1"}, b"", "byte 0xc1 does not begin a value, at 5"),
        ({"w": 1}, b"\0", "1 bytes after its end"),
        (b"\x82" + packed("a") + packed(1) + packed("a") + packed(1), b"", "occurs twice"),
        ({"a": {"b": 1}, "a.b": 2}, b"", "two arrays have the name 'a.b'"),
        ({"w": {"__msgpack_chunked_array__": b"\xc3"}}, b"", "has no chunks"),
    ]:
        with pytest.raises(CorruptFile, match=words):
            open_checkpoint(made(node, behind))


def test_what_is_nested_too_deep_or_has_too_much(made):
    with pytest.raises(LimitExceeded):
        open_checkpoint(made(nested(300)))
    with pytest.raises(LimitExceeded):
        open_checkpoint(made({"a": [1] * 100}), limits=Limits(max_records=50))


def test_long_names_and_shapes_cost_little(made):
    node = {"k" * 200: array()}
    for _ in range(60):
        node = {"k" * 200: node}
    with pytest.raises(LimitExceeded, match="names of its arrays"):
        open_checkpoint(made(node), limits=Limits(max_header_bytes=100_000))
    with pytest.raises(LimitExceeded, match="65 dimensions, more than the limit of 64"):
        open_checkpoint(made({"a": array([1 << 62] * 65)}))
