"""One value, tensor, object or container."""

import json
import math

import pytest
import torch

from ckptool.core.model import DeviceValue, Global, Opaque, OrderedMap, Size
from ckptool.errors import AmbiguousName, LimitExceeded, NotFound
from ckptool.formats import open_checkpoint
from ckptool.inspection.show import (
    ShownContainer,
    ShownObject,
    ShownTensor,
    ShownValue,
    compute_statistics,
    decode,
    show,
)
from ckptool.limits import Limits
from tests.formats.safetensors_files import entry, raw_file
from tests.inspection.handmade import checkpoint, floats, storage, tensor
from tests.tensors.refs import tensor as over


@pytest.fixture
def saved(tmp_path):
    def show_saved(root, name, **options):
        torch.save(root, tmp_path / "model.pth")
        with open_checkpoint(tmp_path / "model.pth") as opened:
            return show(opened, name, **options)

    return show_saved


def test_a_tensors_head_and_span_are_torchs(saved):
    made = torch.randn(30, 40).t()
    shown = saved({"model": {"w": made}}, "w", count=5)
    assert isinstance(shown, ShownTensor)
    assert shown.name == "model/w"
    assert list(shown.head) == made.reshape(-1)[:5].tolist()
    assert (shown.statistics.minimum, shown.statistics.maximum) == (made.min(), made.max())
    assert shown.statistics.mean == pytest.approx(made.double().mean().item())


def test_booleans_stay_booleans(saved):
    shown = saved({"mask": torch.tensor([True, False, True])}, "mask")
    assert shown.head == (True, False, True)
    assert shown.statistics.mean == pytest.approx(2 / 3)


def test_an_empty_tensor_and_a_lone_element(saved):
    assert saved({"x": torch.zeros(0, 3)}, "x").head == ()
    assert saved({"x": torch.tensor(2.5)}, "x").head == (2.5,)


def test_elements_that_share_bytes_are_not_shown_as_numbers(tmp_path):
    header = {"w": entry((8,), (0, 6), "F6_E2M3")}
    path = raw_file(tmp_path / "model.safetensors", header, bytes([1, 2, 3, 4, 5, 6]))
    with open_checkpoint(path) as opened:
        shown = show(opened, "w")
    assert (shown.head, shown.statistics, shown.row.shape) == ((), None, (8,))


def test_no_head_is_asked_for(saved):
    assert saved({"x": torch.ones(3)}, "x", count=0).head == ()


def test_what_a_stride_of_zero_repeats_is_read_once_and_counted_often():
    endless = tensor(floats(math.nan, 2.0), [1 << 40, 2], stride=[0, 1])
    shown = show(checkpoint({"x": endless}), "x", count=4)
    assert [number == 2.0 for number in shown.head] == [False, True, False, True]
    assert (shown.statistics.maximum, shown.statistics.nan) == (2.0, 1 << 40)


def test_overlapping_strides_cannot_make_it_read_for_ever():
    windows = tensor(storage(b"\0" * 4000), [500, 500], stride=[1, 1])
    with pytest.raises(LimitExceeded, match="repeated bytes"):
        show(checkpoint({"x": windows}), "x", limits=Limits(max_repeated_bytes=1000))


def test_a_sparse_tensor_shows_its_parts(saved):
    shown = saved({"s": torch.eye(3).to_sparse()}, "s")
    assert shown.statistics is None
    assert any("int64 [2, 3]" in text for _, text in shown.parts)
    assert shown.to_dict()["min"] is None


def test_a_value():
    for value, kind in [(3, "int"), ("text", "str"), (None, "NoneType"), (math.inf, "float")]:
        shown = show(checkpoint({"x": value}), "x")
        assert isinstance(shown, ShownValue), value
        assert (shown.type, shown.value) == (kind, value), value


def test_a_numpy_scalar_is_a_value():
    scalar = Opaque(Global("numpy", "scalar"), plain=("float64", 0.93))
    assert show(checkpoint({"best": scalar}), "best").to_dict()["value"] == 0.93


def test_an_object_shows_class_arguments_attributes_and_items():
    made = Opaque(
        Global("net", "Thing"),
        args=(1, "two"),
        steps=[
            ("build", {"lr": 0.1, "path": Opaque(Global("pathlib", "PosixPath"), args=("out",))}),
            ("set", [("key", [1, 2])]),
            ("append", ["item"]),
        ],
    )
    shown = show(checkpoint({"args": made}), "args")
    assert isinstance(shown, ShownObject)
    assert shown.class_name == "net.Thing"
    assert shown.arguments == ("1", "'two'")
    assert shown.attributes == (("lr", "0.1"), ("path", "pathlib.PosixPath('out')"))
    assert shown.items == (("key", "[1, 2]"), ("0", "'item'"))


def test_a_state_that_is_no_dict_is_shown_whole():
    made = Opaque(Global("net", "Thing"), steps=[("build", (1, 2))])
    assert show(checkpoint({"x": made}), "x").attributes == (("state", "(1, 2)"),)


def test_a_device_is_an_object():
    shown = show(checkpoint({"d": DeviceValue("cuda:1")}), "d")
    assert (shown.class_name, shown.arguments) == ("torch.device", ("cuda:1",))


def test_a_pickled_module_shows_its_tensors(saved):
    shown = saved({"model": torch.nn.Linear(2, 3)}, "model")
    assert shown.class_name == "torch.nn.modules.linear.Linear"
    assert [name for name, _ in shown.items] == ["weight", "bias"]


def test_a_container_shows_what_it_holds():
    for node, kind in [
        (OrderedMap({"a": 1}), "OrderedDict"),
        ({"a": 1}, "dict"),
        ([1], "list"),
        (Size((1,)), "torch.Size"),
    ]:
        shown = show(checkpoint({"x": node}), "x")
        assert isinstance(shown, ShownContainer), node
        assert (shown.type, shown.entries) == (
            kind,
            (("a" if isinstance(node, dict) else "0", "1"),),
        ), node


def test_every_document_is_json(saved):
    root = {"t": torch.tensor([math.nan, 1.0]), "v": math.nan, "o": {1, 2}, "c": {"k": b"bytes"}}
    for name, what in {"t": "tensor", "v": "value", "o": "object", "c": "container"}.items():
        document = saved(root, name).to_dict()
        assert document["schema"] == "ckptool.show/1"
        assert document["what"] == what
        assert json.loads(json.dumps(document, allow_nan=False))["name"] == name


def test_long_texts_are_shortened_in_summaries():
    shown = show(checkpoint({"x": {"k": "a" * 10_000, "n": list(range(1000))}}), "x")
    assert max(len(text) for _, text in shown.entries) <= 60


def test_an_unknown_and_an_ambiguous_name():
    made = checkpoint({"a": {"w": 1}, "b": {"w": 2}})
    with pytest.raises(NotFound, match="no entry is named 'v'; the file has a, b"):
        show(made, "v")
    with pytest.raises(AmbiguousName, match="a/w, b/w"):
        show(made, "w")


def test_progress_tells_bytes():
    seen = []
    made = checkpoint({"x": tensor(floats(1.0, 2.0), [2])})
    show(made, "x", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 8)]


@pytest.mark.parametrize("inside", [True, False])
def test_an_attribute_of_a_pickled_module_has_an_address(saved, inside):
    net = torch.nn.Linear(2, 2)
    net.names, net.stride = {0: "person", 1: "car"}, torch.tensor([8.0, 16.0])
    root, prefix = ({"model": net}, "model/") if inside else (net, "")
    shown = saved(root, f"{prefix}names")
    assert isinstance(shown, ShownContainer)
    assert shown.name == f"{prefix}names"
    assert shown.entries == (("0", "'person'"), ("1", "'car'"))
    assert saved(root, f"{prefix}stride").head == (8.0, 16.0)
    assert saved(root, f"{prefix}in_features").value == 2
    assert isinstance(saved(root, f"{prefix}weight"), ShownTensor)
    with pytest.raises(NotFound):
        saved(root, f"{prefix}nothing")


REAL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def measured(tensor, **more):
    return compute_statistics(over(raw(tensor), name(tensor.dtype), list(tensor.shape), **more))


def same(ours, theirs):
    return ours == theirs or (ours != ours and theirs != theirs)


def test_plain_numbers_are_torchs():
    for dtype in REAL:
        tensor = (torch.rand(50) * 200).to(dtype)
        assert list(map(float, decode(name(dtype), raw(tensor)))) == tensor.double().tolist(), dtype


def test_all_256_patterns_of_a_small_float_are_torchs():
    patterns = torch.arange(256, dtype=torch.uint8)
    for dtype in FLOAT8:
        theirs = patterns.view(dtype).float().tolist()
        ours = decode(name(dtype), raw(patterns))
        assert all(map(same, ours, theirs)), dtype


def test_all_65536_patterns_of_bfloat16_are_torchs():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    theirs = patterns.view(torch.bfloat16).float().tolist()
    assert all(map(same, decode("bfloat16", raw(patterns)), theirs))


def test_a_byte_of_float4_is_two_numbers_the_lower_half_first():
    assert list(decode("float4_e2m1fn_x2", bytes([0x10, 0x32, 0x54, 0x76, 0xF9]))) == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_complex_numbers_are_torchs():
    for dtype in COMPLEX:
        tensor = torch.randn(5, dtype=torch.complex64).to(dtype)
        assert list(decode(name(dtype), raw(tensor))) == tensor.to(torch.complex128).tolist(), dtype


def test_minimum_maximum_and_mean_are_torchs():
    for dtype in REAL[:-1]:
        tensor = (torch.rand(1000) * 100).to(dtype)
        found = measured(tensor)
        exact = tensor.double()
        assert (found.minimum, found.maximum) == (exact.min().item(), exact.max().item()), dtype
        assert found.mean == pytest.approx(exact.mean().item(), rel=1e-12), dtype
        assert (found.nan, found.infinite) == (0, 0), dtype


def test_blocks_are_put_together():
    found = measured(torch.arange(2e6))
    assert (found.minimum, found.maximum, found.mean) == (0, 1_999_999, 999_999.5)


def test_nan_and_infinities_are_counted_and_left_out():
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, math.nan])
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.mean) == (1, 3, 2)
    assert (found.nan, found.infinite) == (2, 2)


def test_nothing_finite_has_no_minimum():
    found = measured(torch.tensor([math.nan, math.inf]))
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert (found.nan, found.infinite) == (1, 1)


def test_no_elements_have_no_minimum():
    found = measured(torch.zeros(0, dtype=torch.int64))
    assert (found.minimum, found.maximum, found.mean, found.nan) == (None, None, None, 0)


def test_integers_are_exact():
    tensor = torch.tensor([2**62 + 1, 2**62 + 1, 2**62 + 4])
    found = measured(tensor)
    assert found.maximum == 2**62 + 4
    assert found.mean == (3 * 2**62 + 6) / 3


def test_a_sum_beyond_the_largest_float_is_no_nan():
    tensor = torch.full((4,), 1.7e308, dtype=torch.float64)
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.nan, found.infinite) == (1.7e308, 1.7e308, 0, 0)


def test_of_complex_numbers_only_the_odd_ones_are_counted():
    tensor = torch.tensor([1 + 1j, complex(math.nan, 0), complex(0, math.inf)])
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert (found.nan, found.infinite) == (1, 1)
