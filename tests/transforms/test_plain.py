"""Objects turned into plain data or left out: torch and Python itself are the judges."""

import argparse
import base64
import collections
import datetime
import decimal
import enum
import functools
import ipaddress
import os
import pathlib
import pickle
import types
import uuid
import warnings
import zlib
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import ckptool
from ckptool.core.model import Global, Opaque, OrderedMap, Wrapping
from ckptool.core.placeholders import find_placeholders
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, MemorySource
from ckptool.symbolic import unpickle
from ckptool.symbolic.encoder import encode
from ckptool.transforms import Plain
from ckptool.transforms.plain import to_plain_data
from tests.conftest import FIXTURES
from tests.trees import checkpoint, module, opened, tensor

FOLDERS = (
    "values", "tensors", "foreign", "modules", "training", "streams", "distributed",
    "torch-1.0.1-python2", "torch-1.4.0", "torch-2.13.0",
)  # fmt: skip
"""Of fixtures with objects of every kind, and many without."""


def fixture_files(folder):
    kinds = (".pth", ".pt", ".ckpt", ".pkl", ".tar")
    return sorted(path for path in (FIXTURES / folder).iterdir() if path.suffix in kinds)


def loaded(result, folder):
    """What torch reads from a file of it."""
    result.save(folder / "out.pth", format="torch-zip", overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of quantized tensors
        return torch.load(folder / "out.pth", weights_only=True, map_location="cpu")


def read(tmp_path, content, **options):
    """A file of `content`, open."""
    torch.save(content, tmp_path / "in.pth", **options)
    return ckptool.open(tmp_path / "in.pth")


to_plain, drop_objects = Plain(), Plain(plain=False, drop_objects=True)


def saved(tmp_path, content, change=to_plain, **options):
    """A file of `content` changed: what torch reads from it, and the changes."""
    with read(tmp_path, content, **options) as source:
        result = change(source)
        return loaded(result, tmp_path), [(one.kind, one.text) for one in result.changes]


def without_rest(source):
    return source.then(ckptool.Plain(drop_objects=True))


_IN_PARTS = ("fsdp1_sharded_0_of_2", "fsdp1_sharded_1_of_2", "fsdp2", "sharded_tensor", "jagged")
_LOST = {without_rest: _IN_PARTS, drop_objects: (*_IN_PARTS, "whole_beside")}
"""Files of which no tensor of the model would stay."""


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("change", [without_rest, drop_objects])
def test_every_fixture_loads_afterwards(memory_path, folder, change):
    for path in fixture_files(folder):
        with opened(path) as source:
            blocked = bool(encode(source.root).blockers)
            why = refused_because(change, path, source)
            if why is not None:
                with pytest.raises(NotRepresentable, match=why):
                    change(source)
                continue
            result = change(source)
            assert (result is not source) == blocked, path
            assert encode(result.root).blockers == (), path
            loaded(result, memory_path)


def refused_because(change, path, source):
    """The error that is expected; None: the change is made."""
    if change is drop_objects and isinstance(source.root, Opaque):
        return "so nothing would remain"
    if path.stem.startswith(_LOST[change]):
        return "would lose"
    return "without values" if change is without_rest and find_placeholders(source) else None


def test_objects_become_what_python_has_for_them(tmp_path):
    with opened(FIXTURES / "values" / "objects.pth") as source:
        found = loaded(Plain(drop_objects=True)(source), tmp_path)
    assert list(found["args"]) == ["lr", "gpus", "weight"]
    assert found["args"]["weight"].tolist() == [3.0]
    assert found["frozenset"] == {"a"}
    assert found["defaultdict"] == {"a": 1}
    assert found["counter"] == collections.Counter("aab")
    assert found["deque"] == [1, 2]
    assert found["uuid"] == {"int": 7}
    assert found["path"] == "runs/best.pth"
    assert found["dataclass"]["weights"].tolist() == [4.0]
    assert found["slotted"]["scale"].tolist() == [5.0]
    assert found["meter"] is found["same_meter"]
    assert (found["bytes"], found["no_bytes"], found["set"]) == (b"\0\xff", b"", {1, 2})
    assert type(found["namedtuple"]) is tuple
    gone = {"slice", "partial", "function", "datetime", "timedelta", "range", "fraction"}
    gone |= {"decimal", "enum", "int_enum", "flag"}
    assert not gone & found.keys()


def test_arrays_become_tensors(tmp_path):
    for name in ["arrays.pth", "arrays_protocol1.pth", "arrays_protocol5.pth"]:
        path = FIXTURES / "values" / name
        with opened(path) as source:
            found = loaded(Plain(drop_objects=True)(source), tmp_path)
        grid = torch.arange(6, dtype=torch.float64).reshape(2, 3)
        assert torch.equal(found["array"], grid), name
        assert torch.equal(found["fortran"], grid), name
        assert torch.equal(found["transposed"], grid.T), name
        assert torch.equal(found["every_second"], grid[:, ::2]), name
        assert torch.equal(found["big_endian"], grid.float()), name
        assert found["zero_dim"].item() == 2.5, name
        assert found["empty"].shape == (0, 3), name
        assert found["uint16"].tolist() == [65535], name
        assert found["complex"].tolist() == [1 + 2j], name
        assert (found["float64"], found["float32"], found["int64"]) == (0.1, 0.5, -3), name
        assert found["bool_"] is True, name
        assert found["dtype"] == "<f4", name
        assert not {"strings", "objects", "records"} & found.keys(), name


def test_strides_of_an_array_are_kept(tmp_path):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found, changes = saved(tmp_path, {"a": array, "b": array})
    assert found["a"].stride() == (1, 2)
    assert found["a"] is found["b"]
    assert changes == [
        ("plain", "a: converted numpy.ndarray to a tensor"),
        ("plain", "b: converted numpy.ndarray to a tensor"),
    ]


def test_what_remains_is_an_error_that_names_each(tmp_path):
    content = {"args": argparse.Namespace(fn=os.path.join, lr=1.0), "steps": [slice(1, 2)]}
    with (
        read(tmp_path, content) as source,
        pytest.raises(
            NotRepresentable,
            match="2 objects cannot be converted to plain data without loss: args/fn",
        ) as caught,
    ):
        Plain()(source)
    assert "args/fn (posixpath.join), steps/0 (builtins.slice)" in str(caught.value)
    assert caught.value.hint == "add --drop-objects to leave them out"


def test_nothing_to_do_is_the_same_checkpoint(tmp_path):
    content = {"a": torch.ones(2), "n": 1, "s": {1}, "c": collections.Counter("ab"), "b": b"x"}
    with read(tmp_path, content) as source:
        assert Plain()(source) is source
        assert Plain(drop_objects=True)(source) is source
        assert source.then(ckptool.Plain(plain=False, drop_objects=True)) is source


def test_sharing_and_circles_are_kept(tmp_path):
    inner = argparse.Namespace(a=[1])
    outer = argparse.Namespace(inner=inner, again=inner)
    inner.outer = outer
    found, _ = saved(tmp_path, {"x": outer, "y": inner})
    assert found["x"]["inner"] is found["y"] is found["x"]["again"]
    assert found["y"]["outer"] is found["x"]


def test_numbers_of_numpy_as_keys(tmp_path):
    found, _ = saved(tmp_path, {np.int64(3): {np.float32(0.5): "a"}, (np.int64(1), 2): "b"})
    assert found == {3: {0.5: "a"}, (1, 2): "b"}
    assert [type(key) for key in found] == [int, tuple]


def test_an_object_as_a_key_remains():
    key = Opaque(Global("pathlib", "PurePosixPath"), ("1",))
    with pytest.raises(NotRepresentable, match=r"args/0/<pathlib.PurePosixPath> \(pathlib"):
        Plain()(checkpoint({"args": [{key: "a", "1": "b"}]}))
    assert drop_objects(checkpoint({"args": [{key: "a", "1": "b"}]})).root == {"args": [{"1": "b"}]}


def test_a_key_stays_one_that_can_be_hashed(tmp_path):
    content = {"by": {frozenset({1}): "a", (frozenset({2}),): "b", 3: "c"}, "s": {frozenset()}}
    found, changes = saved(tmp_path, content, without_rest)
    assert found == {"by": {3: "c"}, "s": set()}
    assert [kind for kind, _ in changes] == ["left-out"] * 3


@pytest.mark.parametrize("change", [without_rest, drop_objects])
def test_where_something_goes_the_rest_keeps_its_place(tmp_path, change):
    rest = OrderedMap(b=1)
    rest.attributes = {"_metadata": {"": 1}, "hook": Global("net", "hook")}
    fn, thing = Global("net", "fn"), Opaque(Global("net", "Thing"), (1, 2))
    root = {
        "list": [1, fn, thing, 2],
        "tuple": (fn, thing, 3),
        "dict": {"x": fn, "y": thing, "z": 4, thing: 5, fn: 6, (1, fn): 7},
        "set": Opaque(Global("builtins", "set"), ([1, fn, (2, thing)],)),
        "rest": rest,
        "types": [Global("torch", "float32"), Global("builtins", "int")],
    }
    result = change(checkpoint(root))
    found = loaded(result, tmp_path)
    assert found["list"] == [1, None, None, 2]
    assert found["tuple"] == (None, None, 3)
    assert found["dict"] == {"z": 4}
    assert found["set"] == {1}
    assert vars(found["rest"]) == {"_metadata": {"": 1}}
    assert found["types"] == [torch.float32, None]
    assert all(change.wanted for change in result.changes)  # the user asked for it: no loss
    texts = [change.text for change in result.changes]
    assert len(texts) == 13
    assert {"list/1 (net.fn)", "dict/y (net.Thing)", "rest/hook (net.hook)"} <= set(texts)


def test_a_tensor_keeps_what_is_plain_of_its_attributes(tmp_path):
    path = Opaque(Global("pathlib", "PurePosixPath"), ("a",))
    state = {"note": "x", "fn": Global("net", "fn"), "where": path}
    weight = tensor(4, wrapping=(Wrapping("parameter_state", True, state=state),))
    found = loaded(Plain(drop_objects=True)(checkpoint({"w": weight})), tmp_path)["w"]
    assert isinstance(found, torch.nn.Parameter)
    assert (found.note, found.where) == ("x", "a")
    assert not hasattr(found, "fn")


def test_hooks_leave(tmp_path):
    hooks = OrderedMap({1: Global("net", "hook")})
    found = drop_objects(checkpoint({"w": tensor(4, requires_grad=True, hooks=hooks)}))
    assert loaded(found, tmp_path)["w"].requires_grad
    assert [change.text for change in found.changes] == ["w/_backward_hooks/1 (net.hook)"]


def test_a_tensor_of_a_class_of_its_own(tmp_path):
    layer = Wrapping("type", type=Global("net", "Tagged"), state={"note": "x"})
    bare = Wrapping("type", type=Global("net", "Tagged"), state=None)
    root = {
        "noted": tensor(2, kind="subclass", wrapping=(layer,)),
        "bare": tensor(2, kind="subclass", wrapping=(bare,)),
    }
    result = Plain()(checkpoint(root))
    found = loaded(result, tmp_path)
    assert type(found["noted"]) is type(found["bare"]) is torch.Tensor
    assert found["noted"].note == "x"
    assert [change.text for change in result.changes] == [
        "noted: converted net.Tagged to a tensor", "bare: converted net.Tagged to a tensor",
    ]  # fmt: skip
    dropped = drop_objects(checkpoint(root))
    assert set(loaded(dropped, tmp_path)) == {"noted", "bare"}
    assert [change.text for change in dropped.changes] == [
        "noted/__class__ (net.Tagged)",
        "bare/__class__ (net.Tagged)",
    ]


def test_a_pickled_module_becomes_its_state_dict(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found, changes = saved(tmp_path, {"net": net, "epoch": 3})
    assert changes == [
        ("plain", "net: converted torch.nn.modules.container.Sequential to an OrderedDict"),
        (
            "left-out",
            "module attributes that are not in a state_dict: in_features, out_features, "
            "num_features, eps, momentum, affine, track_running_stats",
        ),
    ]
    expected = net.state_dict()
    assert list(found["net"]) == list(expected)
    assert all(torch.equal(found["net"][name], expected[name]) for name in expected)
    assert found["net"]._metadata == expected._metadata
    assert not found["net"]["0.weight"].requires_grad
    again = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    again.load_state_dict(found["net"])


def test_a_module_that_only_its_class_can_read_in_whole():
    strange = Opaque(Global("net", "Packed"), (), maker="newobj", steps=[("build", (b"", 1))])
    net = module(parameters={"w": tensor()}, children={"packed": strange})
    source = checkpoint({"net": net})
    with pytest.raises(
        NotRepresentable, match=r"1 object cannot be converted to plain data without loss: net"
    ):
        Plain()(source)
    result = Plain(drop_objects=True)(source)
    assert list(result.root["net"]) == ["w"]
    assert [(one.kind, one.text) for one in result.changes] == [
        ("plain", "net: converted net.Net to an OrderedDict"),
        ("left-out", "net: the submodule packed (only net.Packed can separate its weights)"),
    ]


class Other(torch.nn.Module):
    """A module with all that a state dict has not."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.LSTM(2, 3)
        self.inner.register_buffer("mask", torch.ones(3), persistent=False)
        self.scale = torch.full((4,), 7.0)
        self.weights = [self.inner.weight_ih_l0]
        self.cfg = {"hidden": 5}
        self.sizes, self.empty, self.note = (1, 2), {}, "x"
        self.register_forward_hook(torch.relu)


def test_tensors_beside_a_state_dict_are_a_loss(tmp_path):
    beside = ["scale (1 tensor)", "inner.mask (1 tensor)"]
    with read(tmp_path, {"net": Other()}) as source:
        with pytest.raises(
            NotRepresentable, match="1 object cannot be converted to plain data without loss: net"
        ) as caught:
            Plain()(source)
        assert all(text in str(caught.value) for text in beside)
        assert not any(name in str(caught.value) for name in ("weights", "cfg", "_hooks", "_flat"))
        assert caught.value.hint == "add --drop-objects to leave them out"
        result = Plain(drop_objects=True)(source)
        assert list(result.root["net"]) == list(Other().state_dict())
    left_out = [one for one in result.changes if one.kind == "left-out"]
    assert {f"net: {text}" for text in beside} < {one.text for one in left_out}
    named = left_out[-1].text.removeprefix("module attributes that are not in a state_dict: ")
    assert named.startswith(("_forward_hooks, cfg, sizes, note", "cfg, sizes, note")), named
    assert "empty" not in named
    assert all(one.wanted for one in left_out)


MODULES = [
    torch.nn.LSTM(2, 3, bidirectional=True), torch.nn.Conv2d(1, 1, 3, padding=1),
    torch.nn.TransformerEncoderLayer(4, 2, activation="gelu"), torch.nn.LayerNorm((2, 3)),
    torch.nn.ParameterDict({"a": torch.ones(2)}), torch.nn.ParameterList([torch.ones(2)]),
    torch.nn.Embedding(3, 3, padding_idx=0), torch.nn.CrossEntropyLoss(weight=torch.ones(2)),
    torch.nn.GRUCell(2, 2), torch.nn.PReLU(),
]  # fmt: skip


def test_what_modules_of_torch_have_is_no_loss(tmp_path):
    for net in MODULES:
        found, _ = saved(tmp_path, {"net": net})
        assert list(found["net"]) == list(net.state_dict()), net


def test_a_list_of_a_module_that_holds_itself():
    sizes = [1]
    sizes.append(sizes)
    result = Plain()(checkpoint({"net": module(parameters={"w": tensor()}, sizes=sizes)}))
    assert list(result.root["net"]) == ["w"]


Point = collections.namedtuple("Point", "x y")


class Row(tuple):
    """A class derived from tuple."""

    __slots__ = ()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_the_items_of_a_namedtuple_stay(tmp_path, protocol):
    content = {"at": Point(torch.ones(2), {"n": 1}), "row": Row((1, 2)), Point(1, 2): "key"}
    with read(tmp_path, content, pickle_protocol=protocol) as source:
        with pytest.raises(NotRepresentable, match="at "):
            Plain()(source)
        for change in (without_rest, drop_objects):
            found = loaded(change(source), tmp_path)
            assert torch.equal(found["at"][0], torch.ones(2))
            assert found["at"][1:] == ({"n": 1},)
            assert (found["row"], found[1, 2]) == ((1, 2), "key")
            texts = [one.text for one in change(source).changes]
            assert any(text.endswith(".Point to a tuple") for text in texts)


@pytest.mark.parametrize("name", ["xla_1.6", "xla_1.12"])
def test_tensors_of_a_tpu_stay_when_objects_leave(tmp_path, name):
    with opened(FIXTURES / "foreign" / f"{name}.pth") as source:
        result = drop_objects(source)
        assert [path for path, _ in result.tensors()] == [path for path, _ in source.tensors()]
        assert not any(one.kind == "left-out" for one in result.changes)
        loaded(result, tmp_path)


def test_arrays_stay_as_tensors_when_objects_leave(tmp_path):
    content = {"w": np.arange(3.0), "fn": os.path.join}
    found, changes = saved(tmp_path, content, drop_objects)
    assert found["w"].tolist() == [0.0, 1.0, 2.0]
    assert changes == [
        ("plain", "w: converted numpy.ndarray to a tensor"), ("left-out", "fn (posixpath.join)"),
    ]  # fmt: skip


def test_the_last_model_does_not_leave(tmp_path):
    net = {"net": torch.nn.Linear(2, 2), "epoch": 1}
    with read(tmp_path, net) as source:
        with pytest.raises(
            NotRepresentable, match="the module net would lose 2 tensors, which are in objects"
        ) as caught:
            drop_objects(source)
        assert caught.value.hint == "add --plain to convert objects to plain data"
    found, _ = saved(tmp_path, {**net, "sd": torch.nn.Linear(2, 2).state_dict()}, drop_objects)
    assert list(found) == ["epoch", "sd"]


def test_objects_with_tensors_say_so_when_they_leave(tmp_path):
    content = {"args": argparse.Namespace(w=torch.ones(2)), "n": torch.tensor(1)}
    found, changes = saved(tmp_path, content, drop_objects)
    assert found == {"n": 1}
    assert changes == [("left-out", "args (argparse.Namespace, with 1 tensor)")]


class Vocabulary(torch.nn.Module):
    """A module without tensors, as of torchtext."""

    words = ("a", "b")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"args": argparse.Namespace(w=torch.ones(2)), "n": 1}, "every tensor of the file is in"),
        ({"en": Vocabulary(), "none": [None]}, "all content is in objects"),
        ({"losses": [torch.nn.CrossEntropyLoss()]}, "torch.nn.modules.loss.CrossEntropyLoss"),
    ],
)
def test_nothing_is_dropped_that_is_all(tmp_path, content, says):
    torch.save(content, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as source:
        with pytest.raises(NotRepresentable, match=says):
            drop_objects(source)
        if "args" not in content:
            with pytest.raises(
                NotRepresentable,
                match="without loss",
            ):
                Plain()(source)
            with pytest.raises(NotRepresentable, match=says):
                Plain(drop_objects=True)(source)
    assert ckptool.info(tmp_path / "in.pth").commands == {} or "args" in content
    found = ckptool.doctor(tmp_path / "in.pth")
    assert found.commands == () or "args" in content


def test_old_pickles_too(tmp_path):
    content = {"path": pathlib.PurePosixPath("a/b"), "lr": np.float64(0.1), "s": {1, 2}}
    for protocol in range(6):
        found, _ = saved(tmp_path, content, pickle_protocol=protocol)
        assert found == {"path": "a/b", "lr": 0.1, "s": {1, 2}}


def test_a_bare_pickle_of_arrays(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({"w": np.arange(4.0), "n": np.int64(2)}))
    with ckptool.open(tmp_path / "in.pkl") as source:
        found = loaded(Plain()(source), tmp_path)
    assert torch.equal(found["w"], torch.arange(4.0, dtype=torch.float64))
    assert found["n"] == 2


OMEGACONF = """
eNplk3lT01AUxbuAQFgUVARxl6W4gLjvFUFRC1XjFhcMSfraF0iTnjRFO86b0T+cgY+g38Rv531Jg8mY6Uzue8n9nfNO
br/nBDIFbV8mk7E8t2rXkLW8OqsZcjVXsa0g2laWqVyKSuRmfyAv0FXQ+qhPr7PAqBiBge5Eq2k0mUINgWG7zF/rvKJg
H/X2CPQWtF7q9VlVD9oNhj6LbrZbUxbdtgJF66eHnrnJrCB63m/putmyncB2dV2RvhQMhAivEdieazgY3NHytN5ibQyV
tW4qq45Ra2K/wAFNiZe673kBhne1oVC+6TnbzNctw+IMI5blOQ5pErCpVFjVaDlBpHWQD/zEIRWHQ03SiGyNckUboA3m
sDpzO16PcKVlaj0ymobh0zbGymGbTskEcj0ucLSg5WjL8TGRSM31KqwpMyhToeAYhXVc4ESB/xftv0RP0kunBE4XeB9X
eH+ZD+7wIT7B6dxn+PAuH+Gh+bMqJlsmH+N5rUt62abIplaKf37J6zcZlonVSdbBNJdfeEagQMJcfrFZgXMdPh+IBKal
wPmEwAUVFzkFwsPzSyFO55yLhssx2sxvYj5xDMduxsO1SmU8XJdIbkHgcix9ReBqRzo1A7JdwbXIzLw0cz1h5oaKm3w0
3eDReOHWnr0ZPr6O2wUuQ74jcFcKyizvCdxPZVnKSHoxQX+gYjFkLPCpUpYqyXgosBQzlgUepRlZyXicYKyoeLLHyHUY
TwWexYySwGqakZOMtQSjrOJ5zNCyFPNXvOiQXgqoMemVwOs0KS9JbxKktyrexaRyy2Q0D/LPZFgBtJD3XuBDzPso8Ck9
bZrkrSd4n1XonZQlLxyuL3Yl4NgIcYaAGeMsgUoatyFxLIGrqqjFuJA1+c3xBTiR5TC7Rp3BDsGbAlsx2BGop8G2BLsJ
sKeisQeWJy4Wi0DLbIW/UIo1PIvDL+Vbc38BtSKZuw==
"""
"""A pickle by omegaconf 2.4.0, packed: {"config": OmegaConf.create(SETTINGS), "epoch": 3}."""
SETTINGS = {
    "lr": 0.1,
    "model": {"layers": [1, 2, "x", None], "act": None, "width": "${lr}", "name": "???"},
}


def test_a_configuration_of_omegaconf_becomes_its_content(tmp_path):
    (tmp_path / "a.pkl").write_bytes(zlib.decompress(base64.b64decode(OMEGACONF)))
    with ckptool.open(tmp_path / "a.pkl") as source:
        assert loaded(Plain()(source), tmp_path) == {"config": SETTINGS, "epoch": 3}


protocols = st.integers(0, 5)


def unpickled(value, protocol=2):
    """What ckptool makes of a pickled object."""
    data = pickle.dumps(value, protocol)
    return unpickle(ByteRange(MemorySource(data, "in.pkl"), 0, len(data))).root


def form(value, protocol=2):
    node = unpickled(value, protocol)
    return to_plain_data(node) if isinstance(node, Opaque) else node


def remains(value, protocol=2):
    node = unpickled(value, protocol)
    return to_plain_data(node) is node


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 3


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [2]


class Both:
    """Attributes in a dict and in slots."""

    __slots__ = ("__dict__", "a")

    def __init__(self):
        self.a, self.b = 1, 2


class Empty:
    pass


class Attributes(dict):
    """As easydict and its like: the items are the attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Noted(collections.OrderedDict):
    """Attributes beside the items."""


class Items(list):
    pass


class Pair(tuple):
    pass


class Odd:
    """A state that is no dict."""

    def __getstate__(self):
        return [1, 2]

    def __setstate__(self, state):
        pass


class Called:
    """Arguments whose meaning only it knows."""

    def __reduce__(self):
        return Called, (1, 2)


Point = collections.namedtuple("Point", "x y")


@given(st.lists(st.text("ab./\\", min_size=1)), protocols, st.booleans())
def test_paths_become_their_text(parts, protocol, windows):
    path = (pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(*parts)
    assert form(path, protocol) == str(pickle.loads(pickle.dumps(path)))


def test_what_an_object_holds():
    for protocol, (value, expected) in product(
        range(6),
        [
            (argparse.Namespace(lr=0.1, gpus=[0, 1]), {"lr": 0.1, "gpus": [0, 1]}),
            (argparse.Namespace(), {}),
            (types.SimpleNamespace(a=1), {"a": 1}),
            (Empty(), {}),
            (Items([1, 2]), [1, 2]),
            (collections.deque([1, 2], maxlen=3), [1, 2]),
            (collections.deque(), []),
            (collections.defaultdict(list, a=1), {"a": 1}),
            (collections.defaultdict(int), {}),
            (Noted(a=1), {"a": 1}),
        ],
    ):
        found = form(value, protocol)
        assert found == expected, (protocol, value)
        assert type(found) is type(expected), (protocol, value)


def test_slots_are_attributes():
    for protocol in range(2, 6):
        assert form(Slotted(), protocol) == {"a": 1, "b": [2]}, protocol
        assert form(Both(), protocol) == {"a": 1, "b": 2}, protocol


def test_attributes_that_are_the_items_are_told_once():
    for protocol in range(2, 6):
        found = form(Attributes(a=1, b=2), protocol)
        assert type(found) is dict, protocol
        assert found == {"a": 1, "b": 2}, protocol


def test_attributes_of_a_dict_stay_attributes():
    for protocol in range(6):
        value = Noted(a=1)
        value.note = "x"
        found = form(value, protocol)
        assert isinstance(found, OrderedMap), protocol
        assert found == {"a": 1}, protocol
        assert found.attributes == {"note": "x"}, protocol


def test_a_frozen_set_becomes_a_set():
    for protocol, items in product(range(6), [(), ("a",), (1, 2, 3)]):
        found = form(frozenset(items), protocol)
        assert found.class_name == "builtins.set", (protocol, items)
        assert set(found.args[0]) == set(items), (protocol, items)


def test_what_would_lose_something_remains():
    for value in [
        Point(1, 2), Pair([1, 2]), Odd(), Called(), functools.partial(int, base=8), slice(1, 2),
        range(3), Color.RED, Level.LOW, decimal.Decimal("1.50"), ipaddress.ip_address("10.0.0.1"),
        uuid.SafeUUID.safe, datetime.datetime(2024, 1, 1), datetime.timedelta(1),
        np.array(["ab"]), np.array([1, None], dtype=object), np.dtype([("a", "i4")]),
        np.dtype("M8[ns]"), np.datetime64("2024-01-01"), np.longdouble(1),
    ]:  # fmt: skip
        assert remains(value), value
        assert remains(value, 4), value


def test_a_call_of_a_function_is_no_value():
    for func in (Global("operator", "itemgetter"), Global("net", "make_thing")):
        node = Opaque(func, (1,))
        assert to_plain_data(node) is node
    made = Opaque(Global("net", "get_backend"), ())
    assert to_plain_data(made) is made


def test_what_is_accepted_stays():
    for value in ({1, 2}, collections.Counter("aab"), bytearray(b"ab")):
        assert remains(value)


def test_numbers_of_numpy():
    numbers = (
        np.float32(0.1), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
        np.complex64(1 + 2j), np.float16(0.25), np.dtype(">f8").type(1.5),
    )  # fmt: skip
    for protocol, value in product(range(6), numbers):
        found = form(value, protocol)
        assert type(found) in (int, float, bool, complex), (protocol, value)
        assert found == value.item() or value != value, (protocol, value)


def test_text_of_numpy():
    for protocol, text in product(range(6), ["", "abc", "é中😀", "a\0b"]):
        assert form(np.str_(text), protocol) == text, (protocol, text)
        assert form(np.bytes_(text.encode()), protocol) == text.encode(), (protocol, text)


def test_types_of_numpy_become_the_text_that_makes_them():
    for code in ["<f4", ">f4", "i1", "?", "<U5", "S3", "<c16", "O"]:
        for protocol in range(6):
            assert np.dtype(form(np.dtype(code), protocol)) == np.dtype(code), code
