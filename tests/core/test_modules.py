"""A pickled module reads as its `state_dict()`."""

from __future__ import annotations

import importlib

import pytest
import torch

import ckptool
from ckptool.core.model import Global, Opaque
from ckptool.core.modules import get_child_modules, get_own_tensors, is_module, to_module_state
from ckptool.errors import LimitExceeded, NameCollision
from ckptool.limits import Limits
from ckptool.transforms import Strip, extract_state_dict
from tests.conversions import convert_by_options
from tests.trees import checkpoint, module, opened, parallel, tensor


class Net(torch.nn.Module):
    """One of each: parameters, none, buffers of both kinds, children before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.register_parameter("absent", None)
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU())
        self.again = self.first
        self.instance = torch.nn.InstanceNorm1d(3)


def test_a_wrapper_that_is_shared_at_two_depths_gives_no_name_twice():
    inner = module(parameters={"w": tensor(), "x.w": tensor()})
    wrapper = module(children={"_orig_mod": inner})
    root = module(children={"a.x": wrapper, "a": module(children={"_orig_mod": wrapper})})
    with pytest.raises(NameCollision, match="two keys of a module would become the same key"):
        Strip(levels=1)(checkpoint(root))


@pytest.mark.parametrize("protocol", [1, 2, 4])
@pytest.mark.parametrize("wrap", [lambda net: net, torch.nn.DataParallel, torch.compile])
def test_names_order_and_shapes_are_those_of_state_dict(tmp_path, wrap, protocol):
    net = wrap(Net())
    torch.save(net, tmp_path / "net.pth", pickle_protocol=protocol)
    with opened(tmp_path / "net.pth") as checkpoint:
        found = to_module_state(checkpoint.root)
    expected = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert found is not None
    assert {name: ref.shape for name, ref in found.items()} == expected
    assert list(found) == list(expected)
    versions = net.state_dict()._metadata
    assert found.metadata == versions
    assert list(found.metadata) == list(versions)


def torch_classes():
    """Every module class that torch has loaded, those of quantization as well."""
    for name in ("qat", "quantized", "quantized.dynamic"):
        importlib.import_module(f"torch.ao.nn.intrinsic.{name}")
    todo, found = [torch.nn.Module], set()
    while todo:
        cls = todo.pop()
        if cls not in found and cls.__module__.startswith("torch."):
            found.add(cls)
        todo.extend(cls.__subclasses__())
    return sorted(found, key=str)


def test_versions_are_those_of_torchs_classes():
    """But for bases that are no modules themselves, and for norms, which their buffers tell."""
    seen = 0
    for cls in torch_classes():
        if cls.__name__.startswith("_") or cls.__name__.endswith("Base"):
            continue
        for home in (cls.__module__, cls.__module__.replace("torch.ao.", "torch.")):
            net = module(f"{home}.{cls.__qualname__}")
            if issubclass(cls, torch.nn.modules.batchnorm._NormBase):
                buffers = {"running_mean": None, "running_var": None, "num_batches_tracked": None}
                net = module(f"{home}.{cls.__qualname__}", buffers=buffers)
            assert to_module_state(net).metadata == {"": {"version": cls._version}}, cls
            seen += cls._version != 1
    assert seen > 30


def test_a_version_of_its_own_and_of_a_class_that_is_not_known():
    assert to_module_state(module(_version=7)).metadata == {"": {"version": 7}}
    assert to_module_state(module(_version="7")).metadata == {"": {"version": 1}}
    norm = module(buffers={"running_mean": tensor(), "num_batches_tracked": tensor()})
    assert to_module_state(norm).metadata == {"": {"version": 2}}
    frozen = module(buffers={"running_mean": tensor(), "running_var": tensor()})
    assert to_module_state(frozen).metadata == {"": {"version": 1}}


def test_metadata_follows_when_wrappers_go():
    net = parallel(module(children={"fc": module(parameters={"w": tensor()})}))
    made = Strip()(extract_state_dict(checkpoint(net)))
    assert list(made.root) == ["fc.w"]
    assert list(made.root.metadata) == ["", "fc"]


def test_anything_else_is_no_module():
    lacking = module()
    del lacking.steps[0][1]["_buffers"]
    for node in (None, {}, {"_parameters": {}, "_buffers": {}, "_modules": {}}, lacking, tensor()):
        assert to_module_state(node) is None
        assert not is_module(node)


def test_a_module_inside_itself_is_not_entered_again():
    inner = module(parameters={"weight": tensor()})
    outer = module(children={"inner": inner})
    inner.attributes["_modules"]["back"] = outer
    assert list(to_module_state(outer)) == ["inner.weight"]


def test_a_shared_module_gives_its_names_under_each_path():
    shared = module(parameters={"weight": tensor()})
    net = module(children={"a": shared, "b": shared, "none": None})
    assert list(to_module_state(net)) == ["a.weight", "b.weight"]
    assert list(get_child_modules(net)) == ["a", "b"]


def test_names_that_are_no_strings_are_no_names():
    net = module(parameters={1: tensor(), "w": tensor()}, children={2: module()})
    assert list(to_module_state(net)) == ["w"]
    assert get_child_modules(net) == {}


def test_modules_shared_exponentially_are_refused():
    net = module(parameters={"weight": tensor()})
    for _ in range(60):
        net = module(children={"a": net, "b": net})
    with pytest.raises(
        LimitExceeded, match="the same containers occur repeatedly, with more than 350,000 entries"
    ):
        to_module_state(net)


def test_modules_nested_too_deep_are_refused():
    net = module(parameters={"weight": tensor()})
    for _ in range(9):
        net = module(children={"a": net})
    assert to_module_state(net, Limits(max_depth=9)) is not None
    with pytest.raises(LimitExceeded, match="deeper than 8"):
        to_module_state(net, Limits(max_depth=8))


def test_non_persistent_buffers_are_left_out_however_the_set_is_spelled():
    called = Opaque(Global("builtins", "set"), (["passing"],))
    added = Opaque(Global("builtins", "set"), (), steps=[("add", ["passing"])])
    for names in (called, added):
        net = module(
            buffers={"kept": tensor(), "passing": tensor(), "none": None},
            _non_persistent_buffers_set=names,
        )
        assert list(get_own_tensors(net)) == ["kept"]


def test_a_compiled_module_is_the_call_that_pickles_it():
    inner = parallel(module(parameters={"weight": tensor()}))
    compiled = Opaque(Global("torch._dynamo.eval_frame", "OptimizedModule"), (inner, None))
    assert list(to_module_state(compiled)) == ["_orig_mod.module.weight"]
    assert not is_module(Opaque(compiled.func, ({},)))


class OwnState(torch.nn.Linear):
    """A layer that pickles itself in a way of its own, as torch's quantized ones do."""

    def __getstate__(self):
        return (self.in_features, self.out_features, dict(self.state_dict()))


def test_a_submodule_that_only_its_class_can_read_is_named_everywhere(tmp_path):
    whole = torch.nn.Sequential(OwnState(3, 4), torch.nn.Linear(4, 2))
    torch.save(whole, tmp_path / "whole.pth")
    with ckptool.open(tmp_path / "whole.pth") as checkpoint:
        listing = ckptool.list_tensors(checkpoint)
        assert [row.name for row in listing.tensors if "/" not in row.name] == [
            "1.weight",
            "1.bias",
        ]
        assert [(row.name, row.class_name.rpartition(".")[2]) for row in listing.objects] == [
            ("0", "OwnState")
        ]
        assert any("would lack the submodule 0" in note for note in ckptool.info(checkpoint).notes)
    with pytest.raises(ckptool.NotRepresentable, match="the submodule 0"):
        ckptool.convert(tmp_path / "whole.pth", tmp_path / "no.pth", ckptool.Take(model_only=True))
    asked = {"model_only": True, "drop_objects": True, "strict": True}
    receipt = convert_by_options(tmp_path / "whole.pth", tmp_path / "out.pth", **asked)
    assert any("the submodule 0" in text for text in receipt.left_out)
    with pytest.warns(
        ckptool.CheckpointWarning, match="left out of the state dict: the submodule 0"
    ):
        assert list(ckptool.load_state_dict(tmp_path / "whole.pth")) == ["1.weight", "1.bias"]
