"""Against a reference: names, shapes and types."""

import re
import shlex
from collections import OrderedDict

import pytest
import torch

from ckptool.diagnosis import doctor
from ckptool.errors import UsageError
from tests.diagnosis.faults import Net, healthy, run


def mended(diagnosis):
    assert diagnosis.commands == (diagnosis.all_at_once,)
    run(diagnosis.all_at_once)
    return torch.load(diagnosis.target)


def test_a_file_that_fits_has_no_complaint(diagnosed):
    assert diagnosed(healthy(), like=healthy()).complaints == ()


def test_missing_names_are_listed(complaint):
    less = healthy()
    del less["head.weight"]
    found = complaint("missing", less, like=healthy())
    assert (found.severity, found.where, found.commands) == ("fails", ("head.weight",), ())
    assert "half loaded" in found.why
    with pytest.raises(RuntimeError, match=r'Missing key.* "head\.weight"'):
        Net().load_state_dict(less)


def test_averages_next_to_the_model_lead_to_the_ema_command(diagnosed):
    state = {f"ema_model.{name}": value for name, value in healthy().items()}
    state |= {f"online.{name}": value for name, value in healthy().items()}
    found = diagnosed(state, like=healthy())
    assert [one.kind for one in found.complaints][:1] == ["missing"]
    assert found.complaints[0].text.startswith("all ")
    assert " --ema writes the averaged weights" in found.complaints[0].hint
    command = found.complaints[0].hint.partition(" writes ")[0]
    target = f"{found.file}.averaged.pth"
    run(f"{command} -o {shlex.quote(target)}")
    Net().load_state_dict(torch.load(target))


def test_unexpected_names_are_left_out_by_a_glob_that_spares_the_rest(diagnosed, tmp_path):
    more = healthy()
    more.update({"aux.0.weight": torch.ones(1), "head.[x]": torch.ones(1)})
    found = diagnosed(more, like=healthy())
    assert [one.kind for one in found.complaints] == ["unexpected"]
    assert "--allow-unexpected" in found.commands[0]
    Net().load_state_dict(mended(found), strict=True)
    assert doctor(found.target, like=tmp_path / "reference.pth", quick=True).complaints == ()


def test_a_wrapper_comes_off_by_a_rule_that_can_be_read(diagnosed):
    more = OrderedDict((f"module.{name}", value) for name, value in healthy().items())
    more["module.head.weight"] = torch.ones(1)
    (command,) = diagnosed(more, like=healthy()).commands
    assert shlex.split(command)[-1] == r"^module\.=>"


def test_the_scales_of_quantized_weights_are_not_left_out(diagnosed):
    more = healthy()
    more["head.weight"] = more["head.weight"].to(torch.int8)
    more["head.SCB"] = torch.ones(1)
    assert diagnosed(more, like=healthy()).commands == ()


def test_wrapped_unexpected_names_go_too(diagnosed):
    more = OrderedDict((f"module.{name}", value) for name, value in healthy().items())
    more["module.aux"] = torch.ones(1)
    Net().load_state_dict(mended(diagnosed(more, like=healthy())), strict=True)


@pytest.mark.parametrize(
    ("rename", "option"),
    [
        (lambda name: f"model.net.{name}", "off"),
        (lambda name: name.removeprefix("backbone."), "on"),
    ],
    ids=["off", "on"],
)
def test_a_prefix_is_found_and_mended(diagnosed, tmp_path, rename, option):
    wanted = healthy()
    if option == "on":
        wanted = OrderedDict((f"backbone.{name}", value) for name, value in wanted.items())
    root = OrderedDict((rename(name), value) for name, value in wanted.items())
    found = diagnosed(root, like=wanted)
    assert [one.kind for one in found.complaints if one.severity == "fails"] == ["renamed"]
    assert mended(found).keys() == wanted.keys()
    assert doctor(found.target, like=tmp_path / "reference.pth", quick=True).ok


def test_a_prefix_comes_off_and_what_is_left_over_goes(diagnosed):
    root = OrderedDict((f"model.{name}", value) for name, value in healthy().items())
    root["loss.weight"] = torch.ones(3)
    found = diagnosed(root, like=healthy())
    assert {one.kind for one in found.complaints if one.commands} == {"renamed", "unexpected"}
    Net().load_state_dict(mended(found), strict=True)


def test_names_that_are_spelled_otherwise_are_left_to_the_rules_that_match_proposes(diagnosed):
    def layers(attention, head):
        return OrderedDict(
            {
                **{
                    f"module.layers.{at}.{attention}.{part}.weight": torch.randn(4, 4)
                    for at in range(3)
                    for part in ("query", "value")
                },
                **{
                    f"module.layers.{at}.mlp.{part}.weight": torch.randn(at + 5, 4)
                    for at in range(3)
                    for part in ("up", "down")
                },
                f"module.{head}.weight": torch.randn(10, 4),
            }
        )

    wanted = OrderedDict(
        (name.removeprefix("module."), value) for name, value in layers("self_attn", "head").items()
    )
    root = layers("attn", "fc")
    found = diagnosed(root, like=wanted)
    fails = [one.kind for one in found.complaints if one.severity == "fails"]
    assert fails == ["wrappers", "missing", "unexpected"]
    assert re.search(
        r"ckptool match \S+ --like \S+ shows the proposed rules", found.complaints[1].hint
    )


def test_names_that_could_be_either_are_missing_and_unexpected(diagnosed):
    root = OrderedDict({f"{name}.weight": torch.ones(4, 4) for name in ("fc1", "fc2")})
    wanted = OrderedDict({f"{name}.weight": torch.ones(4, 4) for name in ("up", "down")})
    found = diagnosed(root, like=wanted)
    assert {one.kind for one in found.complaints} >= {"missing", "unexpected"}
    assert "renamed" not in {one.kind for one in found.complaints}


def test_a_submodule_named_module_by_its_author_is_left_alone(complaint):
    def layers(name):
        return OrderedDict({f"{name}.weight": torch.ones(2, 2), "head.weight": torch.ones(2)})

    assert complaint("submodule-wrapper", layers("body.module.0")) is not None
    same = layers("body.module.0")
    assert complaint("submodule-wrapper", same, like=same) is None
    assert complaint("wrappers", same, like=layers("body.0")) is not None


def test_a_shape_that_differs_is_told_in_torchs_words(complaint):
    found = complaint("size-mismatch", healthy(), like=Net(classes=7).state_dict())
    with pytest.raises(RuntimeError) as raised:
        Net(classes=7).load_state_dict(healthy())
    assert found.quote.text in str(raised.value)


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


def test_a_model_in_memory_is_a_reference(tmp_path):
    torch.save(healthy(), tmp_path / "model.pth")
    for classes, expected in ((4, []), (7, ["size-mismatch"])):
        with torch.device("meta"):
            net = Net(classes)
        assert fails(doctor(tmp_path / "model.pth", like=net, quick=True)) == expected
    wrapped = torch.nn.ModuleDict({"net": Net()})
    (command,) = doctor(tmp_path / "model.pth", like=wrapped, quick=True).commands
    assert command.endswith("--like MODULE:FACTORY")
    parts = {
        "q.weight": torch.ones(4, 4),
        "k.weight": torch.ones(4, 4),
        "v.weight": torch.ones(4, 4),
    }
    torch.save(parts, tmp_path / "model.pth")
    whole = torch.nn.ModuleDict({"qkv": torch.nn.Linear(4, 12, bias=False)})
    found = doctor(tmp_path / "model.pth", like=whole, quick=True)
    assert "qkv.weight = torch.cat([q.weight, k.weight, v.weight])" in found.complaints[0].hint


@pytest.mark.parametrize("like", [{"a": 1}, {"model": healthy(), "ema": healthy()}])
def test_a_reference_has_one_state_dict(diagnosed, like):
    with pytest.raises(UsageError, match="the reference must have exactly one state dict"):
        diagnosed(healthy(), like=like)


def test_names_with_a_million_parts_cost_little(diagnosed):
    hostile = {
        "a." * 20_000 + "w": torch.ones(1),
        **{f"m{n}.w.x": torch.ones(1) for n in range(500)},
    }
    found = diagnosed(hostile, like=healthy())
    assert {"missing", "unexpected"} <= {one.kind for one in found.complaints}


def with_front(state, *wrappers):
    before = "".join(f"{word}." for word in wrappers)
    return OrderedDict((before + name, value) for name, value in state.items())


def fails(diagnosis):
    return [one.kind for one in diagnosis.complaints if one.severity == "fails"]


def test_names_as_the_reference_has_them_are_no_wrappers(diagnosed):
    layer = {"module.weight": torch.ones(2, 3), "module.bias": torch.ones(2)}
    assert fails(diagnosed(layer)) == ["wrappers"]
    assert diagnosed(layer, like=layer).complaints == ()
    adapted = OrderedDict((f"base_model.model.{name}", v) for name, v in healthy().items())
    assert fails(diagnosed(adapted, like=adapted)) == []


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ((), ("module",)),
        ((), ("module", "_orig_mod")),
        (("_orig_mod",), ("module",)),
        (("module",), ("module", "module")),
        (("module", "_orig_mod"), ()),
    ],
)
def test_wrappers_become_those_of_the_reference(diagnosed, tmp_path, own, wanted):
    wanted = with_front(healthy(), *wanted)
    found = diagnosed(with_front(healthy(), *own), like=wanted)
    assert set(fails(found)) <= {"wrappers", "wrapper-missing"}
    assert all(one.commands for one in found.complaints if one.severity == "fails")
    assert mended(found).keys() == wanted.keys()
    assert doctor(found.target, like=tmp_path / "reference.pth", quick=True).ok


def test_data_parallel_refuses_what_add_module_mends(diagnosed):
    parallel = torch.nn.DataParallel(Net())
    with pytest.raises(RuntimeError, match=r'Missing key.* "module\.features'):
        parallel.load_state_dict(healthy())
    found = diagnosed(healthy(), like=parallel.state_dict())
    parallel.load_state_dict(mended(found), strict=True)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (lambda n: f"net.module.{n}", lambda n: n),
        (lambda n: f"net.module.{n}", lambda n: f"net.{n}"),
        (lambda n: n, lambda n: n.replace("features.", "features.module.")),
        (lambda n: n.replace("features.", "features.module."), lambda n: n),
        (lambda n: n, lambda n: n.replace("features.", "features._orig_mod.")),
        (lambda n: n, lambda n: "module." + n.replace("features.", "features.module.")),
        (
            lambda n: n,
            lambda n: n.replace("features.", "features.module.").replace("head.", "head.module."),
        ),
    ],
)
def test_wrappers_inside_become_those_of_the_reference(diagnosed, tmp_path, own, wanted):
    state, like = ({new(n): v for n, v in healthy().items()} for new in (own, wanted))
    found = diagnosed(state, like=like)
    assert fails(found)
    assert all(one.commands for one in found.complaints if one.severity == "fails")
    assert mended(found).keys() == like.keys()
    assert doctor(found.target, like=tmp_path / "reference.pth").ok


def test_what_torch_accepts_of_old_files_is_no_complaint(diagnosed):
    older = OrderedDict(healthy())
    older["features.1.num_batches_tracked"] = torch.tensor([3])
    Net().load_state_dict(older, strict=True)
    assert fails(diagnosed(older, like=healthy())) == []
    uncounted = {name: v for name, v in healthy().items() if "num_batches" not in name}
    Net().load_state_dict(uncounted, strict=True)
    assert fails(diagnosed(uncounted, like=healthy())) == []
    wrapped = {f"model.{name}": value for name, value in uncounted.items()}
    assert fails(diagnosed(wrapped, like=healthy())) == ["renamed"]


def test_a_counter_is_missed_where_the_version_says_that_there_is_one(diagnosed):
    less = healthy()
    del less["features.1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        Net().load_state_dict(less)
    assert fails(diagnosed(less, like=healthy())) == ["missing"]


def normed(parametrised):
    utils = torch.nn.utils.parametrizations if parametrised else torch.nn.utils
    return torch.nn.Sequential(utils.weight_norm(torch.nn.Linear(3, 3)), torch.nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_loads_into_the_new_form_and_is_renamed_for_the_old(diagnosed):
    old, new = normed(parametrised=False), normed(parametrised=True)
    new.load_state_dict(old.state_dict(), strict=True)
    assert diagnosed(old.state_dict(), like=new.state_dict()).complaints == ()
    with pytest.raises(RuntimeError, match="Missing key"):
        old.load_state_dict(new.state_dict())
    found = diagnosed(new.state_dict(), like=old.state_dict())
    assert fails(found) == ["renamed"]
    old.load_state_dict(mended(found), strict=True)


def test_nothing_is_left_out_where_nothing_would_be_left(diagnosed):
    other = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}
    found = diagnosed(other, like={"b.scale": torch.ones(3)})
    assert set(fails(found)) == {"missing", "unexpected"}
    assert [one.alternatives for one in found.complaints] == [(), ()]
    wrong = diagnosed({"w.a": torch.ones(2)}, like={"w.a": torch.ones(3)}).complaints[0]
    assert (wrong.kind, wrong.alternatives) == ("size-mismatch", ())


def test_many_wrapped_parts_cost_little(diagnosed):
    tensor = torch.ones(1)
    names = [f"m{n}.{{}}w.x" for n in range(1000)]
    bare, wrapped = ({name.format(word): tensor for name in names} for word in ("", "module."))
    assert len(diagnosed(wrapped).commands) <= 80
    assert len(diagnosed(wrapped, like=bare).commands) <= 80
    assert diagnosed(bare, like=wrapped).commands
