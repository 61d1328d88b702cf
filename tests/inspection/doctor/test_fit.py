"""Against a reference: names, shapes and types."""

import shlex
from collections import OrderedDict

import pytest
import torch

from ckptool.cli import main
from ckptool.errors import UsageError
from ckptool.inspection.doctor import diagnose
from tests.inspection.doctor.faults import Net, healthy


def mended(diagnosis):
    for command in diagnosis.commands:
        assert main(shlex.split(command)[1:]) == 0
    return torch.load(diagnosis.target)


def test_a_file_that_fits_has_no_complaint(diagnosed):
    assert diagnosed(healthy(), like=healthy()).complaints == ()


def test_wrappers_of_the_reference_do_not_matter(diagnosed):
    wrapped = torch.nn.DataParallel(Net()).state_dict()
    assert diagnosed(healthy(), like=wrapped).complaints == ()


def test_missing_names_are_listed(complaint):
    less = healthy()
    del less["head.weight"]
    found = complaint("missing", less, like=healthy())
    assert (found.severity, found.where, found.commands) == ("fails", ("head.weight",), ())
    assert "half loaded" in found.why
    with pytest.raises(RuntimeError, match=r'Missing key.* "head\.weight"'):
        Net().load_state_dict(less)


def test_unexpected_names_are_left_out_by_a_glob_that_spares_the_rest(diagnosed, tmp_path):
    more = healthy()
    more.update({"aux.0.weight": torch.ones(1), "aux.1.weight": torch.ones(1)})
    more["head.[x]"] = torch.ones(1)
    found = diagnosed(more, like=healthy())
    assert [one.kind for one in found.complaints] == ["unexpected"]
    assert "--exclude 'aux.*' --exclude 'head.[[]x]'" in found.commands[0]
    Net().load_state_dict(mended(found), strict=True)
    assert diagnose(found.target, like=tmp_path / "reference.pth", quick=True).complaints == ()


def test_wrapped_unexpected_names_go_too(diagnosed):
    more = OrderedDict((f"module.{name}", value) for name, value in healthy().items())
    more["module.aux"] = torch.ones(1)
    Net().load_state_dict(mended(diagnosed(more, like=healthy())), strict=True)


def test_more_names_than_a_command_should_have_are_not_excluded(complaint):
    more = healthy()
    more.update({f"x{number}": torch.ones(1) for number in range(60)})
    found = complaint("unexpected", more, like=healthy())
    assert (found.commands, bool(found.remedy)) == ((), True)


@pytest.mark.parametrize(
    ("rename", "option"),
    [
        (lambda name: f"model.net.{name}", "model.net.="),
        (lambda name: name.removeprefix("backbone."), "=backbone."),
    ],
    ids=["off", "on"],
)
def test_a_prefix_is_found_and_mended(diagnosed, tmp_path, rename, option):
    wanted = healthy()
    if option.startswith("="):
        wanted = OrderedDict((f"backbone.{name}", value) for name, value in wanted.items())
    root = OrderedDict((rename(name), value) for name, value in wanted.items())
    found = diagnosed(root, like=wanted)
    assert [one.kind for one in found.complaints if one.severity == "fails"] == ["prefix"]
    assert option in shlex.split(found.commands[0])
    assert mended(found).keys() == wanted.keys()
    assert diagnose(found.target, like=tmp_path / "reference.pth", quick=True).ok


def test_a_prefix_comes_off_and_what_is_left_over_goes(diagnosed):
    root = OrderedDict((f"model.{name}", value) for name, value in healthy().items())
    root["loss.weight"] = torch.ones(3)
    found = diagnosed(root, like=healthy())
    assert {one.kind for one in found.complaints if one.commands} == {"prefix", "unexpected"}
    Net().load_state_dict(mended(found), strict=True)


def test_a_submodule_named_module_by_its_author_is_left_alone(complaint):
    def layers(name):
        return OrderedDict({f"{name}.weight": torch.ones(2, 2), "head.weight": torch.ones(2)})

    assert complaint("submodule-wrapper", layers("body.module.0")) is not None
    same = layers("body.module.0")
    assert complaint("submodule-wrapper", same, like=same) is None
    assert complaint("submodule-wrapper", same, like=layers("body.0")) is not None


def test_a_shape_that_differs_is_told_in_torchs_words(complaint):
    found = complaint("size-mismatch", healthy(), like=Net(classes=7).state_dict())
    with pytest.raises(RuntimeError) as raised:
        Net(classes=7).load_state_dict(healthy())
    said = found.why.partition("says: ")[2].partition(";")[0]
    assert said in str(raised.value)


def test_types_that_lose_something_mislead_and_others_are_a_note(diagnosed):
    root = healthy()
    root["features.1.num_batches_tracked"] = torch.tensor(2.87)
    root["head.bias"] = root["head.bias"].half()
    found = {one.kind: one for one in diagnosed(root, like=healthy()).complaints}
    assert found["cast-to-integer"].severity == "misleads"
    assert found["cast-to-integer"].where == ("features.1.num_batches_tracked",)
    assert (found["dtype"].severity, found["dtype"].where) == ("note", ("head.bias",))
    net = Net()
    net.load_state_dict(root)
    assert net.features[1].num_batches_tracked == 2


@pytest.mark.parametrize("like", [{"a": 1}, {"model": healthy(), "ema": healthy()}])
def test_a_reference_has_one_state_dict(diagnosed, like):
    with pytest.raises(UsageError, match="the reference is to hold one state dict"):
        diagnosed(healthy(), like=like)


def test_names_with_a_million_parts_cost_little(diagnosed):
    hostile = {
        "a." * 20_000 + "w": torch.ones(1),
        **{f"m{n}.w.x": torch.ones(1) for n in range(500)},
    }
    found = diagnosed(hostile, like=healthy())
    assert {"missing", "unexpected"} <= {one.kind for one in found.complaints}
