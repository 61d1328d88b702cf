"""One value, tensor, object or container."""

import json
import math

import pytest
import torch

from ckptool.errors import AmbiguousName, LimitExceeded, NotFound
from ckptool.formats import open_checkpoint
from ckptool.inspection.show import (
    ShownContainer,
    ShownObject,
    ShownTensor,
    ShownValue,
    show,
)
from ckptool.limits import Limits
from ckptool.model import DeviceValue, Global, Opaque, OrderedMap, Size
from tests.inspection.handmade import checkpoint, floats, storage, tensor


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


@pytest.mark.parametrize(
    ("value", "kind"), [(3, "int"), ("text", "str"), (None, "NoneType"), (math.inf, "float")]
)
def test_a_value(value, kind):
    shown = show(checkpoint({"x": value}), "x")
    assert isinstance(shown, ShownValue)
    assert (shown.type, shown.value) == (kind, value)


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


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        (OrderedMap({"a": 1}), "OrderedDict"),
        ({"a": 1}, "dict"),
        ([1], "list"),
        (Size((1,)), "torch.Size"),
    ],
)
def test_a_container_shows_what_it_holds(node, kind):
    shown = show(checkpoint({"x": node}), "x")
    assert isinstance(shown, ShownContainer)
    assert (shown.type, shown.entries) == (kind, (("a" if isinstance(node, dict) else "0", "1"),))


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
    with pytest.raises(NotFound, match="nothing named 'v'"):
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
