"""A part of a checkpoint, or one state dict of it, and all else named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st

from ckptool.core.model import Global, Opaque, OrderedMap, Wrapping
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.transforms import Take, extract_state_dict
from tests.trees import checkpoint, module, opened, parallel, state_dict, storage, tensor


def part(root, **options):
    return Take(**options)(checkpoint(root))


def told(made, kind):
    return [change.text for change in made.changes if change.kind == kind]


def optimizer(*keys):
    state = {key: {"exp_avg": tensor(), "exp_avg_sq": tensor()} for key in keys}
    return {"state": state, "param_groups": [{"params": list(keys)}]}


@pytest.fixture
def run():
    """A training run: weights, averaged weights, an optimizer, values."""
    return {
        "epoch": 3,
        "model": state_dict(["a.w", "a.v", "b.w"], metadata=["", "a", "b", "b.act"]),
        "ema": state_dict(["a.w", "b.w"]),
        "opt": optimizer(0, 1),
        "args": Opaque(Global("m", "Args"), (), steps=[("build", {"lr": 0.1})]),
        "best": {"score": 0.5},
    }


def test_a_section_becomes_the_root_and_the_rest_is_named(run):
    made = part(run, key="model")
    assert list(made.root) == ["a.w", "a.v", "b.w"]
    assert made.root is run["model"]
    assert told(made, "extract") == ["made model the root"]
    assert told(made, "left-out") == [
        "ema (state dict, 2 tensors)",
        "opt (optimizer, 4 tensors)",
        "epoch, best (values)",
        "args (object)",
    ]


def test_a_container_and_a_suffix_and_a_path(run):
    made = part({"run": run}, key="opt/state")
    assert list(made.root) == [0, 1]
    assert "the rest of run/opt (optimizer, 0 tensors)" in told(made, "left-out")
    assert part({"run": run}, key=("run", "opt")).root is run["opt"]
    assert part({"run": run}, key="args").root is run["args"]
    whole = part({"run": run}, key="run")
    assert whole.root is run
    assert told(whole, "left-out") == []


def test_a_lone_tensor_becomes_a_dict_of_one(run):
    made = part(run, key="a.v")
    assert made.root == {"a.v": run["model"]["a.v"]}
    assert told(made, "extract")[0] == "extracted the tensor model/a.v into a dict"
    assert told(made, "left-out")[0] == "the rest of model (state dict, 2 tensors)"
    assert list(part({"rng": [tensor(), tensor()]}, key="rng/1").root) == ["1"]


def test_a_key_that_is_nothing_or_several_or_a_value(run):
    with pytest.raises(NotFound, match="no entry is named 'modle'; the file has model"):
        part(run, key="modle")
    with pytest.raises(AmbiguousName, match=r"model/a\.w, ema/a\.w"):
        part(run, key="a.w")
    with pytest.raises(UsageError, match="'epoch' is a value") as caught:
        part(run, key="epoch")
    assert caught.value.hint == "ckptool show file.pth epoch"
    with pytest.raises(UsageError, match="'best/score' is a value"):
        part(run, key="score")
    values = {"names": {"model": "resnet"}, "run": {"model": state_dict(["w"])}}
    assert list(part(values, key="model").root) == ["w"]


def test_nothing_asked_or_nothing_to_leave_out_gives_the_same_checkpoint(run):
    read = checkpoint(run)
    assert Take()(read) is read
    assert Take(include=["*"])(read) is read
    alone = checkpoint(state_dict(["w"]))
    assert Take(model_only=True)(alone) is alone
    assert Take(include=["w"])(alone) is alone


def test_the_weights_alone(run):
    del run["ema"]
    made = part(run, model_only=True)
    assert list(made.root) == ["a.w", "a.v", "b.w"]
    assert told(made, "left-out") == [
        "opt (optimizer, 4 tensors)", "epoch, best (values)", "args (object)",
    ]  # fmt: skip


def test_values_among_the_weights_are_no_weights():
    root = OrderedMap(w=tensor(), epoch=3, args=Opaque(Global("a", "B")))
    root["m.dtype"] = "qint8"
    root.attributes["_metadata"] = OrderedMap({"m": {"version": 1}})
    made = part(root, model_only=True)
    assert list(made.root) == ["w", "m.dtype"]
    assert made.root.metadata == root.metadata
    assert told(made, "left-out") == ["epoch, args (values in the state dict)"]


def test_between_raw_and_averaged_weights_nobody_guesses(run):
    with pytest.raises(AmbiguousName, match=r"model \(3 tensors\), ema \(2 tensors\)") as caught:
        part(run, model_only=True)
    assert caught.value.hint == "choose one with `key='model'` or `key='ema'`"
    assert list(part(run, key="ema", model_only=True).root) == ["a.w", "b.w"]
    inner = {"run": {"net": state_dict(["w"]), "lr": 1}, "other": state_dict(["v"])}
    assert list(part(inner, key="run", model_only=True).root) == ["w"]


def test_globs_select_tensors_and_what_is_none_stays(run):
    made = part(run, include=["a.*"])
    assert list(made.root) == ["epoch", "model", "ema", "args", "best"]
    assert list(made.root["model"]) == ["a.w", "a.v"]
    assert made.root["model"]["a.w"] is run["model"]["a.w"]
    assert type(made.root["model"]) is OrderedMap
    assert list(made.root["ema"]) == ["a.w"]
    assert told(made, "left-out") == [
        "1 entry of model: b.w",
        "1 entry of ema: b.w",
        "opt (optimizer, 4 tensors)",
    ]
    assert list(run["model"]) == ["a.w", "a.v", "b.w"]


def test_a_glob_with_a_slash_is_held_against_the_whole_name_also_below_a_key(run):
    made = part(run, include=["model/*"])
    assert list(made.root) == ["epoch", "model", "args", "best"]
    assert told(made, "left-out")[0] == "ema (state dict, 2 tensors)"
    below = part({"run": run}, key="model", include=["run/model/a.*"], exclude=["run/*/*.v"])
    assert list(below.root) == ["a.w"]
    alone = part(run, key="ema", model_only=True, exclude=["ema/b.w"])
    assert list(alone.root) == ["a.w"]
    assert told(alone, "left-out")[-1] == "1 entry of ema: b.w"
    assert list(part(run, key="model/a.v", include=["model/*"]).root) == ["a.v"]


def test_include_and_exclude_together(run):
    made = part(run, include=["a.*", "b.*"], exclude=["*.w"])
    assert list(made.root["model"]) == ["a.v"]
    assert "ema" not in made.root


def test_metadata_and_attributes_stay_but_for_modules_that_are_gone(run):
    run["model"].attributes["note"] = 1
    made = part(run, exclude=["b.*"]).root["model"]
    assert list(made.metadata) == ["", "a"]
    assert made.attributes["note"] == 1
    assert list(run["model"].metadata) == ["", "a", "b", "b.act"]


def test_extra_states_and_companions_of_a_module_go_by_their_names():
    model = state_dict(["a.w", "b.w"], metadata=["", "a", "b"])
    model["a._extra_state"] = {"scale": tensor()}
    model["b._extra_state"] = Opaque(Global("io", "BytesIO"), (b"",))
    model["b.dtype"] = None
    model["epoch"] = 3
    assert list(part(model, exclude=["b.*"]).root) == ["a.w", "a._extra_state", "epoch"]
    made = part(model, include=["b.*"])
    assert list(made.root) == ["b.w", "b._extra_state", "b.dtype", "epoch"]
    assert told(made, "left-out") == ["2 entries of the root: a.w, a._extra_state"]


def test_an_optimizer_leaves_as_a_whole_with_the_first_of_its_tensors(run):
    made = part(run, exclude=["exp_avg_s?"])
    assert "opt" not in made.root
    assert told(made, "left-out") == ["opt (optimizer, 4 tensors), only partly selected"]
    with pytest.raises(NotFound, match="no tensor would remain") as caught:
        part(run, include=["opt/state/0/*"])
    assert "opt (optimizer, 4 tensors), only partly selected" in caught.value.hint


def test_an_optimizer_that_stays_beside_fewer_weights_is_told(run):
    made = part(run, exclude=["b.w*"])
    assert made.root["opt"] == run["opt"]
    assert told(made, "warning") == ["opt still has the state of removed parameters"]


def test_containers_that_have_become_empty_go_and_those_that_were_stay():
    root = {"deep": {"er": {"w": tensor()}}, "empty": {}, "model": state_dict(["a.b", "c.d"])}
    made = part(root, exclude=["w", "a.b"])
    assert list(made.root) == ["empty", "model"]
    assert told(made, "left-out") == [
        "deep (1 tensor)",
        "1 entry of model: a.b",
    ]


def test_a_list_goes_as_a_whole_or_not_at_all():
    root = {"rng": [1, (tensor(), None)], "model": state_dict(["a.b"])}
    made = part(root, include=["a.*"])
    assert list(made.root) == ["model"]
    assert told(made, "left-out") == ["rng (1 tensor)"]
    two = {"rng": [tensor(), tensor()], "model": state_dict(["a.b"])}
    assert part(two, include=["a.*", "rng/*"]).root == two
    with pytest.raises(
        UsageError, match=r"rng is a list, and dropping some entries would renumber the rest"
    ) as caught:
        part(two, exclude=["rng/0"])
    assert caught.value.file == "file.pth"
    models = {"models": [state_dict(["a.b"]), state_dict(["a.b", "c.d"])]}
    assert [list(one) for one in part(models, exclude=["c.*"]).root["models"]] == [["a.b"], ["a.b"]]
    with pytest.raises(UsageError, match="renumber the rest"):
        part(models, include=["models/1/*"])
    steps = {"optimizers": [optimizer(0), {"lr": 1}], "model": state_dict(["a.b"])}
    assert told(part(steps, include=["a.b"]), "left-out") == ["optimizers (2 tensors)"]


def test_an_object_goes_as_a_whole_or_not_at_all():
    net = module(parameters={"w": tensor(), "v": tensor()})
    thing = Opaque(Global("m", "T"), (tensor(),), steps=[("build", {"x": tensor(), "y": 1})])
    root = {"net": net, "thing": thing, "model": state_dict(["a.b"])}
    made = part(root, include=["a.b"])
    assert list(made.root) == ["model"]
    assert told(made, "left-out") == ["net (module, 2 tensors)", "thing (object, 2 tensors)"]
    with pytest.raises(UsageError, match=r"net is an object of class net\.Net") as caught:
        part(root, exclude=["w"])
    assert caught.value.hint == "add --model-only to convert it to a state dict"
    with pytest.raises(UsageError, match=r"thing is an object of class m\.T"):
        part(root, exclude=["x"])
    alone = part(root, key="net", model_only=True, exclude=["w"])
    assert list(alone.root) == ["v"]
    assert "the net.Net object around the state dict" in told(alone, "left-out")


def test_an_object_that_is_a_dict_loses_no_entries():
    entries = [("a.w", tensor()), ("b.w", tensor())]
    holder = Opaque(Global("m", "State"), (), steps=[("set", entries), ("build", {"note": 1})])
    root = {"model": holder, "other": state_dict(["c.w"])}
    assert part(root, exclude=["c.*"]).root["model"].steps == holder.steps
    assert list(part(root, include=["c.*"]).root) == ["other"]
    with pytest.raises(UsageError, match=r"model is an object of class m\.State"):
        part(root, exclude=["a.*"])


def test_one_dict_under_two_names():
    shared = state_dict(["a.w", "b.w"])
    root = {"x": shared, "y": shared}
    both = part(root, include=["a.*"]).root
    assert both["x"] is both["y"]
    assert list(part(root, include=["x/*"]).root) == ["x"]
    with pytest.raises(
        UsageError, match="x and y are the same object in this file, and would differ afterwards"
    ):
        part(root, exclude=["x/a.w"])


def test_a_dict_that_holds_itself():
    root = {"w": tensor(), "v": tensor()}
    root["self"] = root
    made = part(root, include=["w"]).root
    assert list(made) == ["w", "self"]
    assert made["self"] is made


def test_a_lone_tensor_at_the_root():
    read = checkpoint(tensor())
    assert Take(include=["*"])(read) is read
    with pytest.raises(NotFound, match="no tensor would remain"):
        part(tensor(), exclude=["*"])


def test_globs_that_match_nothing(run):
    with pytest.raises(NotFound, match=r"no tensor matches 'bb\.w'; did you mean b\.w?") as caught:
        part(run, include=["a.*", "bb.w"])
    assert caught.value.hint == "ckptool list file.pth"
    with pytest.raises(NotFound, match=r"no tensor matches 'c\.\*'; did you mean a\.w, a\.v?"):
        part(run, exclude=["c.*"])
    with pytest.raises(NotFound, match="no tensor matches 'ema/"):
        part(run, key="model", include=["ema/*"])
    with pytest.raises(NotFound, match="no tensor would remain"):
        part(run, key="model", exclude=["*"])
    with pytest.raises(UsageError, match=r"expected a list of globs, not 'a\.\*'"):
        part(run, include="a.*")


def test_many_places_are_folded():
    root = {f"m{at}": state_dict(["a.w", "b.w"]) for at in range(30)}
    left_out = [
        change for change in part(root, include=["a.w*"]).changes if change.kind == "left-out"
    ]
    assert len(left_out) == 21
    assert (left_out[-1].text, left_out[-1].count) == ("10 entries in 10 more places", 10)


def test_storages_that_lost_a_tensor_are_cut_down_and_others_stay():
    large, other = storage(1 << 20), storage(1 << 20)
    root = {"a": tensor(2, over=large), "b": tensor(4, over=large), "c": tensor(9, over=large)}
    root["view"] = tensor(2, over=other)
    made = part(root, include=["a", "b", "view"])
    assert told(made, "compact") == [
        "trimmed 1 storage from 1,048,576 to 16 bytes, dropping data that only removed tensors used"
    ]
    assert made.root["a"].storage is made.root["b"].storage is not large
    assert made.root["view"] is root["view"]
    untied = part({**root, "tie": replace(root["b"])}, exclude=["tie"]).root
    assert untied["a"].storage is large  # of which every byte is seen as before


def test_a_key_and_the_weights_alone_leave_bytes_behind_too():
    large = storage(1 << 20)
    root = {"model": {"a.w": tensor(2, over=large)}, "whole": tensor(1 << 18, over=large)}
    for options in ({"key": "model"}, {"key": "a.w"}, {"model_only": True}):
        made = part(root, **options)
        assert [one.storage.nbytes for _, one in made.tensors()] == [8]


def test_the_empty_name_is_no_address(run):
    for options in ({}, {"model_only": True}):
        with pytest.raises(UsageError, match="an entry with an empty key cannot be selected"):
            part(run, key="", **options)


def test_an_optimizer_without_a_state_says_nothing(run):
    run["opt"] = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    assert told(part(run, exclude=["b.w*"]), "warning") == []


def test_what_is_at_the_root_is_said_to_be_there():
    with pytest.raises(NotFound) as caught:
        part(state_dict(["a.b", "c.d"]), exclude=["*"])
    assert "left out would be: the root (state dict, 2 tensors)" in caught.value.hint


NAMES = st.lists(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), unique=True, min_size=1
)
GLOBS = st.sampled_from(["a*", "*b", "*.c", "[ab].?", "x/*", "y/a*", "*"])


def paths(made):
    return {path for path, _ in made.tensors()}


@given(NAMES, NAMES, GLOBS)
def test_include_and_exclude_part_the_tensors(left, right, glob):
    read = checkpoint({"x": state_dict(left), "y": {"z": state_dict(right)}})
    try:
        kept, rest = Take(include=[glob])(read), Take(exclude=[glob])(read)
    except NotFound:
        assume(False)
    assert paths(kept) | paths(rest) == paths(read)
    assert paths(kept).isdisjoint(paths(rest))
    order = [path for path, _ in read.tensors()]
    assert [path for path, _ in kept.tensors()] == [path for path in order if path in paths(kept)]
    tensors = dict(read.tensors())
    assert all(tensors[path] is leaf for made in (kept, rest) for path, leaf in made.tensors())


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_a_program_gives_its_tensors(fixtures, name):
    with opened(fixtures / name) as read:
        names = [path[-1] for path, _ in read.tensors()]
        made = Take(include=[names[0]])(read)
        assert [path[-1] for path, _ in made.tensors()] == names[:1]


def left_out(made):
    assert all(change.kind == "left-out" for change in made.changes)
    return [change.text for change in made.changes]


def test_the_rest_is_named():
    root = {
        "epoch": 3,
        "run": {"model": state_dict(["a.w"], metadata=["", "a"]), "lr": 0.1, "hist": [1, 2]},
        "ema": state_dict(["a.w"]),
        "opt": {"state": {0: {"m": tensor()}}, "param_groups": []},
        "rng": [tensor()],
        "args": Opaque(Global("m", "A"), ()),
    }
    made = extract_state_dict(checkpoint(root), "model")
    assert made.root == root["run"]["model"]
    assert made.root is not root["run"]["model"]
    assert made.root.metadata is root["run"]["model"].metadata
    assert left_out(made) == [
        "ema (state dict, 1 tensor)",
        "opt (optimizer, 1 tensor)",
        "rng (tensor)",
        "epoch, run/lr, run/hist (values)",
        "args (object)",
    ]
    assert [change.count for change in made.changes] == [1, 1, 1, 4, 1]


def test_a_file_that_is_one_state_dict_is_itself():
    read = checkpoint(state_dict(["w"]))
    assert extract_state_dict(read) is read
    plain = extract_state_dict(checkpoint({"w": tensor()}))
    assert type(plain.root) is OrderedMap
    assert plain.changes == ()


def test_a_module_becomes_its_state_dict_and_its_class_is_named():
    made = extract_state_dict(checkpoint({"model": parallel(module(parameters={"w": tensor()}))}))
    assert type(made.root) is OrderedMap
    assert list(made.root) == ["module.w"]
    assert left_out(made) == [
        "the torch.nn.parallel.data_parallel.DataParallel object around the state dict"
    ]


def test_a_part_of_a_section_leaves_out_its_rest():
    root = {"opt": {"state": {0: {"m": tensor()}, 1: {"m": tensor()}}, "param_groups": []}}
    made = extract_state_dict(checkpoint(root), "opt/state/0")
    assert left_out(made) == ["the rest of opt (optimizer, 1 tensor)"]


def test_several_need_a_key():
    with pytest.raises(AmbiguousName):
        extract_state_dict(checkpoint({"a": state_dict(["w"]), "b": state_dict(["w"])}))


def test_a_real_module(fixtures):
    with opened(fixtures / "torch-2.13.0/whole_single.pth") as read:
        made = extract_state_dict(read)
        assert next(iter(made.root)) == "conv1.weight"
        assert next(read.tensors())[1].is_parameter
        assert not made.root["conv1.weight"].is_parameter
        assert left_out(made) == ["the net.Net object around the state dict"]


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_a_program_gives_plain_tensors(fixtures, name):
    with opened(fixtures / name) as read:
        made = extract_state_dict(read)
        assert any(tensor.requires_grad for _, tensor in read.tensors())
        assert not any(tensor.requires_grad or tensor.wrapping for _, tensor in made.tensors())
        assert list(made.root) == list(read.root)
        assert made.changes == ()
        assert extract_state_dict(made) is made


def test_a_state_dict_keeps_the_parameters_that_it_was_saved_with():
    weight = tensor(requires_grad=True, wrapping=(Wrapping("parameter"),))
    read = checkpoint({"model": OrderedMap({"fc.w": weight}), "epoch": 1})
    assert extract_state_dict(read).root["fc.w"] is weight


def test_a_subclass_stays_one_without_being_a_parameter():
    kept = Wrapping("type", type=Global("m", "Labelled"), state={})
    weight = tensor(
        requires_grad=True, kind="subclass", hooks=1, wrapping=(kept, Wrapping("parameter"))
    )
    made = extract_state_dict(checkpoint(module(parameters={"w": weight}))).root["w"]
    assert [layer.type for layer in made.wrapping] == [kept.type]
    assert not made.requires_grad
    assert not made.is_parameter
    assert made.hooks is None
