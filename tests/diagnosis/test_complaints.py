"""Complaints that no command mends, and what is no complaint."""

import zipfile
from collections import OrderedDict

import pytest
import torch

import ckptool
from ckptool.diagnosis import doctor
from ckptool.diagnosis.complaint import Subject
from ckptool.diagnosis.contents import check_devices
from tests.diagnosis.faults import Net, healthy, leftover, run, trained, training_run
from tests.trees import checkpoint, tensor


def without_counters():
    return {name: v for name, v in healthy().items() if "num_batches" not in name}


def test_lost_versions_mislead_where_a_counter_is_missing(complaint):
    net = Net()
    net.features[1].num_batches_tracked.fill_(7)
    net.load_state_dict(without_counters())  # no error, and the model keeps its own counter
    assert net.features[1].num_batches_tracked == 7
    found = complaint("metadata", without_counters())
    assert (found.severity, found.where) == ("misleads", ("features.1.running_mean",))


def test_lost_versions_are_a_note_where_all_is_there(complaint):
    assert complaint("metadata", dict(healthy())).severity == "note"
    assert complaint("metadata", healthy()) is None
    assert complaint("metadata", torch.nn.Linear(2, 2).state_dict().copy()) is None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_lost_versions_fail_in_quantized_layers(complaint):
    layer = torch.ao.nn.quantized.Linear(2, 2)
    state = layer.state_dict()
    assert complaint("metadata", state) is None
    with pytest.raises(KeyError, match="weight"):
        layer.load_state_dict(dict(state))
    found = complaint("metadata", dict(state))
    assert (found.severity, found.where) == ("fails", ("_packed_params._packed_params",))


def test_counters_that_were_cast_mislead(complaint):
    found = complaint("cast-buffers", {name: v.half() for name, v in healthy().items()})
    assert (found.severity, found.where) == ("misleads", ("features.1.num_batches_tracked",))
    assert "float16" in found.text


def test_an_adapter_is_for_peft(complaint):
    names = ("lora_A.default.weight", "lora_B.default.weight")
    root = OrderedDict((f"base_model.model.q.{name}", torch.ones(2, 2)) for name in names)
    found = complaint("adapter", root)
    assert (found.severity, found.commands) == ("note", ())
    assert "peft" in found.hint


def test_flat_parameters_of_fsdp_are_named(complaint):
    root = {"_fsdp_wrapped_module._flat_param": torch.ones(9), "other.weight": torch.ones(2)}
    assert complaint("flat-parameters", root).where == ("_fsdp_wrapped_module._flat_param",)


def test_wrappers_that_cannot_come_off_have_no_command(diagnosed):
    root = OrderedDict({"_orig_mod.a.w": torch.ones(2), "a.w": torch.ones(2)})
    (found,) = diagnosed(root).complaints
    assert (found.kind, found.commands) == ("wrappers", ())
    assert "would both become" in found.hint


def test_meta_tensors_fail(complaint):
    found = complaint("meta", {"a.w": torch.ones(2, 2, device="meta")})
    assert (found.severity, found.commands) == ("fails", ())


def test_lazy_parameters_fail(complaint):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 4))
    for root in (net.state_dict(), {"model": net.state_dict()}, {"net": net}):
        found = complaint("lazy", root)
        assert (found.severity, found.commands) == ("fails", ())
        assert found.text.endswith("2 lazy parameters without values: the model never ran")


def test_the_state_of_a_training_without_a_model_is_a_note(complaint):
    found = complaint("no-model", {"optimizer": training_run()["optimizer"], "epoch": 1})
    assert (found.severity, found.where) == (
        "note",
        ("the optimizer optimizer", "the values at the root"),
    )
    assert (found.commands, found.alternatives) == ((), ())


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (torch.ones(3), "one tensor"),
        ([torch.ones(3), torch.ones(2)], "a list of 2 entries with 2 tensors"),
        ((torch.ones(3),), "a tuple of 1 entry with 1 tensor"),
        ({"lr": [torch.ones(3)]}, "a dict of 1 entry with 1 tensor"),
        (17, "a value of type int"),
        ("text", "a value of type str"),
    ],
)
def test_what_no_model_takes_is_named(complaint, root, says):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        Net().load_state_dict(root)
    found = complaint("no-model", root)
    severity = "fails" if isinstance(root, dict) else "note"  # which loads as is
    assert (found.severity, found.commands) == (severity, ())
    assert found.text.endswith(f"model; it has {says}")
    assert str(caught.value).partition(",")[0] in found.why or isinstance(root, dict)


def test_an_empty_dict_is_the_state_of_a_model_without_parameters(diagnosed):
    torch.nn.ReLU().load_state_dict({})
    assert diagnosed({}).ok
    assert diagnosed(torch.nn.ReLU().state_dict()).ok


def test_a_long_list_of_places_is_cut(complaint):
    root = OrderedDict((f"module.{chr(97 + n)}.w", torch.ones(2)) for n in range(20))
    where = complaint("wrappers", root).where
    assert (len(where), where[-1]) == (9, "and 12 more")
    layers = OrderedDict((f"module.layers.{n}.w", torch.ones(2)) for n in range(20))
    assert complaint("wrappers", layers).where == ("module.layers.{0..19}.w",)
    assert complaint("wrappers", root | layers).where[-1] == "and 32 more"


def test_small_waste_is_none(complaint):
    assert complaint("bloat", {"a.w": torch.zeros(100)[:50]}) is None
    assert complaint("bloat", {"a.w": torch.zeros(10_000)[:9_990]}) is None
    assert complaint("bloat", {"a.w": torch.zeros(10_000)[:5_000]}) is not None


def test_objects_without_a_plain_form_that_carry_weights_have_no_command(fixtures):
    found = doctor(fixtures / "distributed" / "dtensor_0_of_2.pth", quick=True)
    (objects,) = [one for one in found.complaints if one.kind == "objects"]
    assert (objects.commands, found.commands) == ((), ())
    assert "gather" in objects.hint


def test_a_module_before_most_names_is_a_note(complaint):
    root = {"module.w": torch.ones(2), "module.b": torch.ones(2), "queue": torch.ones(3)}
    found = complaint("wrapped-in-part", root)
    assert (found.severity, found.where) == ("note", ("module.w", "module.b"))
    assert "--prefix module.=" in found.hint


def graph():
    return {"x": torch.ones(4, 3), "edge_index": torch.ones(2, 5, dtype=torch.long)}


def split():
    return {"images": torch.ones(3, 2), "labels": torch.ones(3)}


@pytest.mark.parametrize("make", [graph, split])
def test_dicts_of_arrays_are_no_state_dicts_to_choose_from(complaint, make):
    root = {"a": make(), "b": make()}
    assert complaint("several-models", root) is None
    assert complaint("no-model", root).text.endswith("a dict of 2 entries with 4 tensors")
    two = {"a": {"w": torch.ones(3)}, "ema": {"w": torch.ones(3)}}
    assert complaint("several-models", two) is not None


def test_what_a_pickled_optimizer_keeps_is_no_state_dict(diagnosed):
    net, optimizer = trained()
    found = diagnosed({"model": net.state_dict(), "optimizer": optimizer})
    assert {"level", "objects"} == {one.kind for one in found.complaints if one.commands}
    run(*found.commands)
    net.load_state_dict(torch.load(found.target), strict=True)


def test_a_list_is_no_state_dict(complaint):
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        Net().load_state_dict([healthy()])
    assert "Expected state_dict to be dict-like" in complaint("level", [healthy()]).why


def test_an_optimizer_alone_has_no_weights_to_go_on_with(complaint):
    found = complaint("optimizer-leftover", leftover()["optimizer"])
    assert not found.hint
    assert "load the weights without" in complaint("optimizer-leftover", leftover()).hint


def test_mps_has_no_float64(complaint):
    wide = {"a.weight": torch.ones(2, dtype=torch.float64)}
    found = complaint("device", wide, devices=["mps"])
    assert (found.severity, found.where) == ("note", ("a.weight",))
    assert complaint("device", wide) is None


def test_tensors_of_torchao_load_after_its_import(fixtures):
    path = fixtures / "quantised" / "torchao_state.pth"
    (found,) = [one for one in doctor(path, devices=["cpu"]).complaints if one.kind == "objects"]
    assert found.hint.startswith("import torchao first")
    assert found.commands == ()


def test_the_zip_of_stable_baselines_names_the_policy(tmp_path):
    net, optimizer = trained()
    parts = {"pytorch_variables": None, "policy": net.state_dict(), "policy.optimizer": optimizer}
    with zipfile.ZipFile(tmp_path / "ppo.zip", "w") as archive:
        for name, part in parts.items():
            with archive.open(f"{name}.pth", "w") as file:
                torch.save(part, file)
    (found,) = doctor(tmp_path / "ppo.zip").complaints
    assert (found.commands or (found.hint,))[0].endswith("/policy.pth")


@pytest.mark.parametrize(
    ("devices", "says"),
    [(["cuda:0"] * 2, "every tensor is"), (["cuda:0", "cpu"], "1 of 2 tensors are")],
)
def test_some_tensors_on_a_gpu_are_not_all(devices, says):
    root = {str(at): tensor(device=device) for at, device in enumerate(devices)}
    (found,) = check_devices(Subject(checkpoint(root), devices=("cpu", "cuda:0")))
    assert (found.kind, found.text) == ("one-gpu", f"{says} on cuda:0")


def test_keys_of_the_root_are_in_no_section(tmp_path):
    torch.save({"model._orig_mod.w": torch.ones(2)}, tmp_path / "m.pth")
    found = ckptool.doctor(tmp_path / "m.pth")
    assert [one.text for one in found.complaints if one.kind == "wrappers"] == [
        'keys have the wrapper prefix "_orig_mod."'
    ]
