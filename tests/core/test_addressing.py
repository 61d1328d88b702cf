"""Which tensors, values and containers a name or a glob means."""

from __future__ import annotations

import pytest

import ckptool
from ckptool.core.addressing import NameIndex, find_nearest, resolve, select
from ckptool.core.tree import name_of
from ckptool.errors import AmbiguousName, NotFound
from tests.trees import checkpoint, state_dict, tensor

PLAIN = {"model": state_dict(["fc.weight", "layer1.0.se.fc.weight", "bn.bias"]), "epoch": 3}
PARALLEL = {
    "state_dict": state_dict(
        ["module.fc.weight", "module.layer1.0.se.fc.weight", "module._orig_mod.bn.bias"]
    ),
    "epoch": 3,
}
LAYER = {"net": state_dict(["module.fc.weight", "head.weight"])}  # module is a layer here
TWICE = {"model": state_dict(["module.a.weight"]), "ema": state_dict(["a.weight"])}
NESTED = {"params": {"fc": {"kernel": tensor()}, "head": {"kernel": tensor()}}}
OPTIMIZER = {"opt": {"state": {"module.a.weight": {"step": tensor(), "exp": tensor()},
                               "module.b.weight": {"step": tensor()}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("root", "name", "path"),
    [
        (PLAIN, "model/fc.weight", "model/fc.weight"),
        (PLAIN, "fc.weight", "model/fc.weight"),  # a key, although another key ends so
        (PLAIN, "se.fc.weight", "model/layer1.0.se.fc.weight"),
        (PLAIN, "0.se.fc.weight", "model/layer1.0.se.fc.weight"),
        (PLAIN, "bias", "model/bn.bias"),
        (PLAIN, "e.fc.weight", None),  # not after a dot
        (PLAIN, "module.bn.bias", "model/bn.bias"),
        (PLAIN, "model/_orig_mod.fc.weight", "model/fc.weight"),
        (PLAIN, "epoch", "epoch"),
        (PARALLEL, "fc.weight", "state_dict/module.fc.weight"),
        (PARALLEL, "module.fc.weight", "state_dict/module.fc.weight"),
        (PARALLEL, "state_dict/fc.weight", "state_dict/module.fc.weight"),
        (PARALLEL, "bn.bias", "state_dict/module._orig_mod.bn.bias"),
        (PARALLEL, "_orig_mod.bn.bias", "state_dict/module._orig_mod.bn.bias"),
        (PARALLEL, "se.fc.weight", "state_dict/module.layer1.0.se.fc.weight"),
        (PARALLEL, "state_dict", "state_dict"),
        (LAYER, "module.fc.weight", "net/module.fc.weight"),
        (LAYER, "net/fc.weight", None),
        (NESTED, "fc/kernel", "params/fc/kernel"),
        (OPTIMIZER, "a.weight/exp", "opt/state/module.a.weight/exp"),
        (OPTIMIZER, "a.weight", "opt/state/module.a.weight"),
    ],
)
def test_a_name_is_a_path_else_a_key_else_the_end_of_a_path(root, name, path):
    if path is None:
        with pytest.raises(NotFound, match="no entry is named"):
            resolve(checkpoint(root), name)
        return
    found, node = resolve(checkpoint(root), name)
    assert name_of(found) == path
    assert checkpoint(root)[name] is node


@pytest.mark.parametrize(
    ("root", "name", "candidates"),
    [
        (PLAIN, "weight", "model/fc.weight, model/layer1.0.se.fc.weight"),
        (TWICE, "a.weight", "model/module.a.weight, ema/a.weight"),  # of one stage, both keys
        (NESTED, "kernel", "params/fc/kernel, params/head/kernel"),
    ],
)
def test_several_answers_at_one_stage_are_an_error_with_all_of_them(root, name, candidates):
    with pytest.raises(AmbiguousName, match=f"is ambiguous: it could be {candidates}"):
        resolve(checkpoint(root), name)
    with pytest.raises(AmbiguousName, match=f"is ambiguous: it could be {candidates}"):
        checkpoint(root).tensors[name]


def chosen(root, include=(), exclude=(), *, endings=True):
    index = NameIndex(checkpoint(root).leaves)
    found = select(index, include, exclude, endings=endings)
    return [name_of(path) for path, _ in found.pick_from(index)], [
        one.pattern for one in found.unmatched
    ]


@pytest.mark.parametrize(
    ("root", "include", "exclude", "names"),
    [
        (PLAIN, ["fc.*"], [], ["model/fc.weight"]),
        (PLAIN, [], ["fc.*"], ["model/layer1.0.se.fc.weight", "model/bn.bias", "epoch"]),
        (PLAIN, ["model/*"], ["*.bias"], ["model/fc.weight", "model/layer1.0.se.fc.weight"]),
        (PLAIN, ["*.se.fc.*", "epoch"], [], ["model/layer1.0.se.fc.weight", "epoch"]),
        (PLAIN, ["FC.*"], [], []),
        (PLAIN, ["module.*"], [], []),
        (PARALLEL, ["fc.*"], [], ["state_dict/module.fc.weight"]),
        (PARALLEL, ["module.fc.*"], [], ["state_dict/module.fc.weight"]),
        (PARALLEL, ["state_dict/bn.*"], [], ["state_dict/module._orig_mod.bn.bias"]),
        (PARALLEL, ["fc.weight"], [], ["state_dict/module.fc.weight"]),
        (LAYER, ["fc.*"], [], []),
        (TWICE, ["a.*"], [], ["model/module.a.weight", "ema/a.weight"]),
        (NESTED, ["kernel*"], ["params/head/*"], ["params/fc/kernel"]),
        (OPTIMIZER, ["opt/state/a.weight/*"], [], ["opt/state/module.a.weight/step",
                                                   "opt/state/module.a.weight/exp"]),
        ({"list": [tensor(), tensor()]}, ["1"], [], ["list/1"]),
        (tensor(), ["*"], [], [""]),
    ],
)  # fmt: skip
def test_a_glob_is_compared_with_whole_keys_or_paths_without_wrapper_prefixes_too(
    root, include, exclude, names
):
    found, unmatched = chosen(root, include, exclude)
    assert found == names
    assert unmatched == ([] if names else include)


def test_a_verb_that_writes_takes_no_ends_of_paths():
    assert chosen(PLAIN, ["se.fc.weight"]) == (["model/layer1.0.se.fc.weight"], [])
    assert chosen(PLAIN, ["se.fc.weight"], endings=False) == ([], ["se.fc.weight"])
    with pytest.raises(NotFound, match=r"no tensor matches 'se\.fc\.weight'; did you mean layer1?"):
        checkpoint(PLAIN).then(ckptool.Take(exclude=["se.fc.weight"]))
    with pytest.raises(NotFound, match=r"no tensor matches 'norm\.\*'"):
        checkpoint(PLAIN).then(ckptool.Cast("float16", keep=["norm.*"]))
    with pytest.raises(AmbiguousName, match=r"model/module\.a\.weight, ema/a\.weight"):
        checkpoint(TWICE).then(ckptool.Take(exclude=["a.weight"]))
    made = checkpoint(PARALLEL).then(ckptool.Cast("float16", keep=["fc.weight"]))
    assert made["fc.weight"].dtype == "float32"
    assert made["se.fc.weight"].dtype == "float16"


def test_what_is_near_contains_the_word_else_is_alike_else_is_all_there_is():
    names = ["model/fc.weight", "model/bn.bias"]
    assert find_nearest("FC", names) == ["model/fc.weight"]
    assert find_nearest("*.fc.*", names) == ["model/fc.weight"]
    assert find_nearest("model/bm.bias", names) == ["model/bn.bias"]
    assert find_nearest("zzz", names, ["model"]) == ["model"]
