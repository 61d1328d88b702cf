"""Device tags rewritten wherever a file has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptool.core.model import DeviceValue, Global, Opaque, Storage, StorageRef, TensorRef, Wrapping
from ckptool.errors import DeviceError, UsageError
from ckptool.transforms import Remap, make_remap
from ckptool.transforms.devices import Rules, count_device_tags
from tests.trees import checkpoint, module, opened, storage, tensor


def moved(root, rules):
    return make_remap(rules)(checkpoint(root)).root


def test_storages_and_tensors_move_and_what_was_shared_stays_shared():
    over = storage(16, "cuda:3")
    root = {"a": tensor(over=over), "b": tensor(over=over), "c": tensor(device="cpu")}
    made = make_remap({"cuda:3": "cpu"})(checkpoint(root))
    a, b = made.root["a"], made.root["b"]
    assert a.device == a.storage.device == "cpu"
    assert a.storage is b.storage
    assert a.storage.data is over.data
    assert made.root["c"] is root["c"]
    assert over.device == "cuda:3"
    assert [(change.kind, change.text, change.count) for change in made.changes] == [
        ("remap", "moved 2 tensors from cuda:3 to cpu", 2)
    ]


def test_rules_apply_at_once_so_that_swaps_work():
    made = moved([tensor(device="cuda:0"), tensor(device="cuda:1")],
                 {"cuda:0": "cuda:1", "cuda:1": "cuda:0"})  # fmt: skip
    assert [ref.device for ref in made] == ["cuda:1", "cuda:0"]


def test_an_exact_tag_beats_a_kind_beats_everything():
    for rules, tag, expected in [
        ({"*": "cpu"}, "cuda:1", "cpu"),
        ({"*": "cpu"}, "mps", "cpu"),
        ({"*": "cuda:0"}, "cpu", "cuda:0"),
        ({"cuda:*": "cpu"}, "cuda:7", "cpu"),
        ({"cuda:*": "cpu"}, "cuda", "cpu"),
        ({"cuda:*": "cpu"}, "cudax:1", "cudax:1"),
        ({"cuda:*": "cpu", "cuda:1": "cuda:0"}, "cuda:1", "cuda:0"),
        ({"*": "cpu", "cuda:*": "mps"}, "cuda:2", "mps"),
        ({"cuda": "cpu"}, "cuda:0", "cuda:0"),
        ({"cuda:0": "cpu"}, "cuda", "cuda"),
        ({"*": "cpu"}, "meta", "meta"),
        ({"meta": "cpu"}, "meta", "meta"),
        ({"CPU": "cpu"}, "CPU", "cpu"),
        ({"npu:0": "privateuseone:1"}, "npu:0", "privateuseone:1"),
        ({"cuda:0": "hpu"}, "cuda:0", "hpu"),
    ]:
        assert Rules(rules)(tag) == expected, rules


def test_a_word_that_is_no_device_is_refused():
    for word in [
        "CPU",
        "cuda0",
        "cuda-1",
        "gpu",
        "gpu:1",
        "2",
        " cuda:0",
        "",
        "cuda:*",
        "cuda:-1",
        "cu da",
        3,
    ]:
        with pytest.raises(DeviceError, match="is not a device") as caught:
            Rules({"cuda:0": word})
        assert "cuda:0" in caught.value.hint, word


@pytest.mark.parametrize("pattern", ["cuda*", "*:0", "c*:*", "**"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(DeviceError, match="not a pattern"):
        Rules({pattern: "cpu"})


def test_nothing_is_moved_to_meta():
    with pytest.raises(DeviceError, match="drop"):
        Rules({"*": "meta"})


def test_a_rule_that_matches_nothing_is_reported_with_what_there_is():
    read = checkpoint([tensor(device="cuda:0")])
    made = make_remap({"cuda:1": "cpu"})(read)
    assert [(change.kind, change.text) for change in made.changes] == [
        ("warning", "no tensor is on cuda:1; the file uses cuda:0")
    ]
    assert make_remap({"*": "cuda:0"})(read) is read


def test_devices_hide_in_objects_parts_wrappings_and_values():
    scales = tensor(device="cuda:1")
    values, indices = tensor(device="cuda:1"), tensor(device="cuda:1")
    root = {
        "value": DeviceValue("cuda:1"),
        "args": Opaque(Global("argparse", "Namespace"), (), steps=[
            ("build", {"device": DeviceValue("cuda:1"), "mean": tensor(device="cuda:1")})]),
        "quantized": replace(tensor(device="cuda:1"), kind="quantized",
                             parts={"quantizer": (Global("torch", "x"), scales)}),
        "sparse": TensorRef("float32", (4,), (), 0, None, "cuda:1", kind="sparse_coo",
                            parts={"indices": indices, "values": values}),
        "parameter": replace(tensor(device="cuda:1"), wrapping=(
            Wrapping("parameter_state", state={"extra": tensor(device="cuda:1")}),)),
        "storage": StorageRef(storage(8, "cuda:1"), "float32"),
        "net": module(parameters={"w": tensor(device="cuda:1")}, hidden=tensor(device="cuda:1")),
        DeviceValue("cuda:1"): 1,
    }  # fmt: skip
    assert set(count_device_tags(root)) == {"cuda:1"}
    made = moved(root, {"cuda:1": "cpu"})
    assert set(count_device_tags(made)) == {"cpu"}
    assert made["sparse"].parts["values"].storage.device == "cpu"
    assert made["quantized"].parts["quantizer"][1].device == "cpu"
    assert set(count_device_tags(root)) == {"cuda:1"}


def test_arrays_and_meta_tensors_stay_what_they_are():
    array = tensor(kind="numpy")
    meta = TensorRef("float32", (2,), (1,), 0, None, "meta", kind="meta")
    empty = TensorRef("float32", (2,), (1,), 0, Storage("0", None, 8, "meta"), "meta")
    made = moved([array, meta, empty, tensor()], {"*": "cuda:0"})
    assert made[0] is array
    assert made[1] is meta
    assert made[2] is empty
    assert made[3].device == "cuda:0"


def carried(device="xla:0", carrier="cpu_tensor"):
    data = tensor()
    return replace(data, device=device, parts={"carrier": carrier, "data": data})


def test_a_tensor_of_a_tpu_becomes_an_ordinary_one():
    for carrier in ["cpu_tensor", "numpy", "xla_numpy"]:
        ref = carried(carrier=carrier)
        made = moved([ref], {"xla:0": "cuda:1"})[0]
        assert (made.device, made.storage.device, made.parts) == ("cuda:1", "cuda:1", None), carrier
        assert made.storage.data is ref.storage.data, carrier
        cpu = moved([ref], {"*": "cpu"})[0]
        assert (cpu.device, cpu.parts, cpu.storage) == ("cpu", None, ref.storage), carrier


def test_a_tensor_of_a_tpu_keeps_its_carrier_on_another_tpu():
    ref = carried()
    made = moved([ref], {"*": "xla:3"})[0]
    assert (made.device, made.parts, made.storage.device) == ("xla:3", ref.parts, "cpu")
    assert moved([ref], {"cpu": "cuda:0"}) == [ref]


def test_an_ordinary_tensor_is_carried_to_a_tpu_and_back():
    ref = replace(tensor(device="cuda:0"), requires_grad=True, wrapping=(Wrapping("parameter"),))
    there = moved([ref], {"cuda:0": "xla:0"})[0]
    data = there.parts["data"]
    assert (there.device, there.parts["carrier"], data.device) == ("xla:0", "cpu_tensor", "cpu")
    assert (data.storage.device, data.wrapping, data.requires_grad) == ("cpu", (), False)
    assert there.wrapping == ref.wrapping
    back = moved([there], {"xla:0": "cuda:0"})[0]
    assert (back.device, back.parts, back.storage.device) == ("cuda:0", None, "cuda:0")


@pytest.mark.parametrize(
    "leaf",
    [replace(tensor(), kind="quantized", parts={}), StorageRef(storage(), "float32")],
)
def test_what_a_tpu_cannot_carry_is_refused(leaf):
    with pytest.raises(DeviceError, match="cannot be pickled on xla:0"):
        moved([leaf], {"cpu": "xla:0"})


def placed(kind):
    holder = Opaque(Global("torch.distributed", kind), (), steps=[("build", {"rank": 0})])
    local = tensor(device="cuda:0")
    return TensorRef("float32", (4,), (1,), 0, None, "cuda:0", kind="subclass",
                     parts={"state": {"local": local, "place": holder}})  # fmt: skip


def test_what_is_tied_to_other_processes_is_named_and_refused():
    for kind in ["DeviceMesh", "ShardMetadata", "ProcessGroupState"]:
        root = {"model": {"w": placed(kind), "b": tensor(device="cpu")}}
        with pytest.raises(DeviceError) as caught:
            make_remap({"cuda:*": "cpu"})(checkpoint(root))
        assert "model/w cannot be moved" in str(caught.value), kind
        assert kind in str(caught.value), kind
        made = moved(root, {"cpu": "cuda:9"})
        assert made["model"]["b"].device == "cuda:9", kind
        assert made["model"]["w"].device == "cuda:0", kind


def test_what_is_tied_inside_an_object_is_found_too():
    hidden = module(parameters={"w": tensor()}, hidden=placed("DeviceMesh"))
    with pytest.raises(DeviceError, match="a part of an object cannot be moved"):
        make_remap({"*": "cpu"})(checkpoint([hidden]))


def test_visible_devices_renumbers_as_the_variable_does():
    root = [tensor(device=tag) for tag in ("cuda:0", "cuda:2", "cpu", "cuda:0")]
    made = Remap(visible_devices=[0, 2])(checkpoint(root))
    assert [ref.device for ref in made.root] == ["cuda:0", "cuda:1", "cpu", "cuda:0"]
    assert [change.text for change in made.changes] == ["moved 1 tensor from cuda:2 to cuda:1"]
    swapped = Remap(visible_devices=[2, 0])(checkpoint(root)).root
    assert [ref.device for ref in swapped] == ["cuda:1", "cuda:0", "cpu", "cuda:1"]
    same = checkpoint(root)
    assert Remap(visible_devices=[0, 1, 2])(same) is same


def test_a_device_that_is_not_visible_is_an_error_that_lists_the_tags():
    root = [tensor(device="cuda:0"), tensor(device="cuda:5")]
    with pytest.raises(
        DeviceError, match=r"tensors are on cuda:5, which is not a visible device; the file uses"
    ):
        Remap(visible_devices=[0, 2])(checkpoint(root))


@pytest.mark.parametrize("numbers", [[], [1, 1], [0, -1]])
def test_a_list_of_devices_that_makes_no_sense(numbers):
    with pytest.raises(UsageError, match="different numbers"):
        Remap(visible_devices=numbers)(checkpoint([tensor()]))


def test_real_files_end_up_on_the_cpu(fixtures):
    for file in ["dp_cuda3.pth", "dp_full_cuda0.pth", "odd.pth", "misc.pth"]:
        with opened(fixtures / "torch-2.13.0" / file) as read:
            assert set(count_device_tags(make_remap({"*": "cpu"})(read).root)) == {"cpu"}, file
