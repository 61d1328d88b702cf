"""State of an optimizer goes to the parameters that it is of, or nothing is touched at all."""

import copy
import itertools

import pytest
import torch
from hypothesis import given as drawing, settings, strategies as st
from torch import nn

import ckptool
from ckptool.errors import CheckpointError, MatchError, UsageError
from ckptool.loading.snapshot import Snapshot
from tests.loading.bits import Untouched, raising, saved, untouched_by
from tests.loading.optimizing import (
    Around,
    Thin,
    adam,
    assert_alike,
    by_name,
    content,
    given_by,
    groups,
    lbfgs,
    loaded,
    model_of,
    plan_for,
    refusal_of,
    report_of,
    shapely,
    stepped,
    three,
)
from tests.loading.wrappings import WRAPPINGS

KINDS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {}, "Adam amsgrad": {"amsgrad": True}, "AdamW": {},
    "Adafactor": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "RMSprop centered": {"centered": True, "momentum": 0.9}, "Rprop": {}, "SGD": {},
    "SGD momentum": {"momentum": 0.9}, "SGD nesterov": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


def kind_of(word):
    return getattr(torch.optim, word.partition(" ")[0])


@pytest.mark.parametrize("word", KINDS)
def test_one_more_step_is_that_of_a_training_that_was_not_interrupted(tmp_path, word):
    for order, in_file in (("abc", True), ("cab", True), ("bca", False)):
        kind, options = kind_of(word), KINDS[word]
        old, new = three(), three(order)
        used, fresh = stepped(old, kind, **options), kind(new.parameters(), **options)
        given = copy.deepcopy(content(old, used))
        check_continued(
            old, used, new, fresh, saved(tmp_path / "f.pth", given) if in_file else given
        )


def check_continued(old, used, new, fresh, given):
    report = ckptool.load_into(new, given, optimizer=fresh).optimizer
    assert (report.by, report.parameters) == ("names", 6)
    assert report.matched == sum(map(bool, fresh.state.values()))
    for parameter in (*old.parameters(), *new.parameters()):
        parameter.grad = torch.linspace(-1, 2, parameter.numel()).view_as(parameter)
    for _ in range(2):
        assert_alike(by_name(new, fresh), by_name(old, used))
        assert_alike({**new.state_dict()}, {**old.state_dict()})
        for mine, its in zip(fresh.param_groups, used.param_groups, strict=True):
            assert {*mine["param_names"]} == {*its["param_names"]}
            for key in its.keys() - {"params", "param_names"}:
                assert_alike(mine[key], its[key])
        fresh.step()
        used.step()


def test_the_caller_may_vouch_for_the_order_and_shapes_are_checked():
    old, new = three(), three("bac")
    used, optimizer = stepped(old, parameters=list(old.parameters())), adam(new)
    given = content(old, used)
    assert loaded(new, optimizer, given, order="position").by == "position"
    assert_alike(optimizer.state[new.b.weight], used.state[old.a.weight])
    turned = torch.optim.Adam(reversed(list(new.parameters())))
    assert refusal_of(new, turned, given, order="position")[0] == (
        "the state of c.bias has shape [3, 3], but the parameter has shape [3]"
    )
    assert loaded(new, optimizer, given_by(old), order="position").by == "names"
    assert_alike(optimizer.state[new.a.weight], stepped(old).state[old.a.weight])


def test_numbers_that_dcp_made_text_of_are_numbers(tmp_path):
    old = three()
    used = stepped(old)
    content = {"state_dict": old.state_dict(), "optimizer": used.state_dict()}
    numbered = content["optimizer"]["state"]
    content["optimizer"]["state"] = {str(number): one for number, one in numbered.items()}
    for given in (content, saved(tmp_path / "f.pth", content)):
        new = three()
        fresh = adam(new)
        report = ckptool.load_into(new, given, optimizer=fresh, optimizer_order="position")
        assert report.optimizer.matched == 6
        assert_alike(by_name(new, fresh), by_name(old, used))


def test_something_else_than_an_optimizer_is_wrong_usage():
    model = three()
    with pytest.raises(UsageError, match="optimizer is a Linear, expected an optimizer"):
        report_of(model, model.a, given_by(model))


WRAPPERS = ["plain", "DP", "compile", "compile of DP", "Lightning"]


@pytest.mark.parametrize("source", WRAPPERS)
def test_wrappers_come_and_go_on_either_side(source):
    bare = three()
    old = WRAPPINGS[source](bare)
    for named in (bare, old):  # the names that the optimizer has
        used = stepped(bare, parameters=list(named.named_parameters()))
        for target in WRAPPERS:
            fresh = three(("b", "c", "a"))
            new = WRAPPINGS[target](fresh)
            optimizer = adam(new)
            loaded(new, optimizer, content(old, used))
            for name, state in by_name(fresh, optimizer).items():
                assert_alike(state, by_name(bare, used)[name])


def test_a_real_child_called_module_is_no_wrapper():
    names = {"w": torch.zeros(2), "module.w": torch.zeros(2)}
    old, new = model_of(names), model_of(names)
    parallel = torch.nn.DataParallel(old)
    for named in (old, parallel):
        used = stepped(old, parameters=list(named.named_parameters()))
        optimizer = torch.optim.Adam([new.module.w, new.w])
        loaded(new, optimizer, content(parallel, used))
        assert_alike(optimizer.state[new.w], used.state[old.w])
        assert_alike(optimizer.state[new.module.w], used.state[old.module.w])


def test_tied_parameters_are_one_whatever_name_the_file_has():
    def tied(*names):
        model = model_of({f"{name}.weight": torch.ones(3, 3) for name in (*names, "other")})
        model.head.weight = model.embed.weight
        return model

    old, new = tied("head", "embed"), tied("embed", "head")
    used = stepped(old)
    optimizer = torch.optim.Adam(reversed(list(new.parameters())))
    assert loaded(new, optimizer, content(old, used)).matched == 2
    assert_alike(optimizer.state[new.embed.weight], used.state[old.embed.weight])


def test_groups_are_the_same_parts_in_whatever_order():
    old = three()
    used = stepped(old, parameters=groups(old, "weight$", lr=0.3))
    new = three(("b", "c", "a"))
    optimizer = torch.optim.Adam(groups(new, "bias$"))
    report = loaded(new, optimizer, content(old, used))
    assert report.matched == 6
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.5]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.3]
    assert optimizer.param_groups[0]["param_names"] == ["b.bias", "c.bias", "a.bias"]
    assert_alike(optimizer.state[new.c.bias], used.state[old.c.bias])


def test_lbfgs_keeps_one_state_of_all_in_their_order():
    model = three()
    for options in ({}, {"parameters": list(model.parameters())}):
        used, fresh = stepped(model, torch.optim.LBFGS, **options), lbfgs(model)
        loaded(model, fresh, content(model, used), order="position" if options else None)
        assert_alike(fresh.state_dict()["state"], used.state_dict()["state"])


def test_options_come_from_the_file_and_what_it_has_not_stays():
    model = shapely()
    used = stepped(model)
    given = content(model, used)
    (group,) = given["optimizer"]["param_groups"]
    for newer in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del group[newer]
    group |= {"lr": 0.7, "initial_lr": 0.9, "betas": (0.5, 0.6)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, maximize=True)
    loaded(model, optimizer, given)
    (mine,) = optimizer.param_groups
    assert (mine["lr"], mine["initial_lr"], mine["betas"]) == (0.7, 0.9, (0.5, 0.6))
    assert mine["maximize"] is True
    assert mine["capturable"] is False
    assert all(a is b for a, b in zip(mine["params"], model.parameters(), strict=True))


def test_files_of_old_versions_have_plain_steps():
    model = shapely()
    given = given_by(model)
    for state in given["optimizer"]["state"].values():
        state["step"] = 2
    optimizer = adam(model)
    loaded(model, optimizer, given)
    assert all(torch.equal(state["step"], torch.tensor(2.0)) for state in optimizer.state.values())


ODD = [
    {"param_groups": [{}]},
    {"param_groups": [{"params": None}, {"params": 3}]},
    {"param_groups": [{"params": [[], {}, ()]}]},
    {"param_groups": [{"params": [0, 0, 0, 0]}], "state": {0: {"exp_avg": "no"}}},
    {"param_groups": [{"params": [0, 1, 2, 3], "param_names": [1, 2, 3, 4]}]},
    {"param_groups": [{"params": [0, 1, 2, 3], "param_names": ["a", "a", "a", "a"]}]},
    {"param_groups": [{"params": [0, 1, 2, 3], "betas": 0}], "param_names": {0: ([],), 1: 2}},
    {"param_groups": [], "state": {"0": 1}},
    {"state": {0: None, 1: [torch.ones(3)], 2: torch.ones(2), 3: {"exp_avg": {"exp_avg": 1}}}},
    {"state": {0: {"row_var": torch.ones(()), "col_var": torch.ones(())}}},
]


@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_refused_or_loaded_whole(odd):
    for order in (None, "position"):
        check_odd(odd, order)


def check_odd(odd, order):
    model = shapely()
    given = given_by(model)
    given["optimizer"] |= odd
    optimizer = adam(model)
    untouched = Untouched(model, optimizer)
    with plan_for(model, optimizer, given, order=order) as plan:
        if plan.report.problems:
            untouched.check()
            return
        undo = Snapshot(model, optimizer, copied=lambda _: True, with_state=True)
        try:
            plan.apply()
        except (TypeError, KeyError, AttributeError):  # of torch, which looks into it
            undo.restore()
            untouched.check()


def test_state_that_is_none_is_no_state():
    model = three()
    given = content(model, stepped(model, torch.optim.SGD))
    given["optimizer"]["state"] = {n: {"momentum_buffer": None} for n in range(6)}
    assert loaded(model, torch.optim.SGD(model.parameters(), lr=0.1), given).matched == 0


def test_state_of_nobody_is_left_out_and_that_of_all_is_kept():
    model = shapely()
    given = given_by(model)
    given["optimizer"]["state"] |= {17: {"exp_avg": torch.ones(3)}, "rng": torch.get_rng_state()}
    optimizer = adam(model)
    loaded(model, optimizer, given)
    assert 17 not in optimizer.state
    assert optimizer.state["rng"].dtype is torch.uint8


def test_a_learning_rate_that_is_a_tensor_stays_one():
    model = shapely()
    used = stepped(model, lr=torch.tensor(0.25))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    loaded(model, optimizer, content(model, used))
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25))


def test_state_gets_the_type_of_its_parameter_and_losses_are_refused(tmp_path):
    model = shapely()
    file = saved(tmp_path / "f.pth", given_by(model))
    model.bfloat16()
    optimizer = adam(model)
    report = report_of(model, optimizer, file)
    assert {(one.before, one.after, one.lossy) for one in report.cast} == {
        ("float32", "bfloat16", True)
    }
    assert report.cast[0].name == "0.weight/exp_avg"
    assert report.cast[0].own == "optimizer/state/0/exp_avg"
    (problem,) = report.problems
    assert "float32 -> bfloat16" in problem
    assert str(report.remedy) == "allow_lossy_cast=['*/exp_avg', '*/exp_avg_sq']"
    assert not report_of(model, optimizer, file, **dict(report.remedy.arguments)).problems
    assert report_of(model, optimizer, file, allow_lossy_cast=["0.*"]).problems
    assert not report_of(model, optimizer, file, allow_lossy_cast=["0.*", "1.*"]).problems
    loaded(model, optimizer, file, allow_lossy_cast=True)
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype is torch.bfloat16
    assert state["step"].dtype is torch.float32


def test_a_cast_that_loses_nothing_is_listed(tmp_path):
    model = shapely()
    used = stepped(model.bfloat16())
    model.float()
    optimizer = adam(model)
    given = content(model, used)
    for state in given["optimizer"]["state"].values():
        state.update({k: v.bfloat16() for k, v in state.items() if k != "step"})
    report = loaded(model, optimizer, saved(tmp_path / "f.pth", given))
    assert len(report.cast) == 8
    assert not any(one.lossy for one in report.cast)


def test_nothing_is_shared_with_a_dict_in_memory():
    model = shapely()
    given = given_by(model)
    optimizer = adam(model)
    loaded(model, optimizer, given)
    given["optimizer"]["state"][0]["exp_avg"].fill_(7.0)
    assert not (optimizer.state[model[0].weight]["exp_avg"] == 7.0).any()


def test_two_optimizers_are_chosen_between_by_their_models_name():
    g, d = three(), three()
    given = {
        "netG": g.state_dict(), "netD": d.state_dict(),
        "optG": stepped(g).state_dict(),
        "optD": stepped(d, lr=0.5).state_dict(),
    }  # fmt: skip
    optimizer = adam(d)
    loaded(d, optimizer, given, state_key="netD")
    assert optimizer.param_groups[0]["lr"] == 0.5
    loaded(d, optimizer, given, state_key="netD", key="optG")
    assert optimizer.param_groups[0]["lr"] == 0.1
    del given["optD"]
    assert refusal_of(d, optimizer, given, state_key="netD") == (
        "the only optimizer, optG, belongs to netG, which is not the chosen model",
        "leave out optimizer= to load only the model; or `optimizer_key='optG'`",
    )


def test_the_only_optimizer_is_the_models_where_it_fits_no_other():
    model = shapely()
    given = {"netG": torch.nn.Linear(2, 2).state_dict(), "netD": model.state_dict()}
    given["optimizer"] = stepped(model, lr=0.5).state_dict()
    optimizer = adam(model)
    loaded(model, optimizer, given, state_key="netD")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_of_the_optimizer_run():
    model = shapely()
    optimizer = adam(model)
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    loaded(model, optimizer, given_by(model))
    assert called == ["before", "after"]


def test_an_object_of_a_class_is_never_made(tmp_path):
    model = shapely()
    given = given_by(model)
    given["optimizer"]["state"][0]["odd"] = Thin(None)
    problem, _ = refusal_of(model, adam(model), saved(tmp_path / "f.pth", given))
    assert problem.startswith("optimizer/state/0/odd is an object of ")
    assert problem.endswith(", which cannot be loaded from a file")


def test_an_optimizer_without_names_gets_those_of_the_file_in_its_own_order():
    old, new = three(), three(("c", "a", "b"))
    used = stepped(old, parameters=list(torch.nn.DataParallel(old).named_parameters()))
    optimizer = torch.optim.Adam(torch.compile(new).parameters())
    loaded(torch.compile(new), optimizer, content(old, used))
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in new.named_parameters()]
    again = adam(old)
    loaded(old, again, content(new, optimizer))
    assert_alike(by_name(old, again), by_name(old, used))


def test_a_wrapper_that_is_no_optimizer_is_filled():
    model = shapely()
    assert loaded(model, Thin(adam(model)), given_by(model)).matched == 4


def test_a_wrapped_optimizer_is_filled_and_put_back():
    old, new = three(), three(("c", "a", "b"))
    used = stepped(old)
    optimizer = stepped(new, lr=0.3)
    untouched = Untouched(new, optimizer)
    with plan_for(new, Around(optimizer), content(old, used)) as plan:
        undo = Snapshot(new, Around(optimizer), copied=lambda _: True, with_state=True)
        plan.apply()
        assert_alike(by_name(new, optimizer)["a.weight"], by_name(old, used)["a.weight"])
        undo.restore()
    untouched.check()


@settings(max_examples=60, deadline=None)
@drawing(st.data())
def test_whatever_the_order_and_the_groups_every_parameter_gets_its_own(drawn):
    count = drawn.draw(st.integers(1, 7))
    kinds = [drawn.draw(st.sampled_from([(2,), (3,), (2, 2), ()])) for _ in range(count)]
    group_of = [drawn.draw(st.integers(0, 2)) for _ in range(count)]

    def groups_in(made, order, used):
        every = list(made.named_parameters())
        held = {g: [every[n] for n in order if group_of[n] == g] for g in used}
        return [{"params": pairs, "lr": 1.0 + g} for g, pairs in held.items()]

    numbers = st.permutations(range(count))
    used_groups = sorted(set(group_of))
    shapes = {f"p{number}": torch.zeros(shape) for number, shape in enumerate(kinds)}
    old, new = model_of(shapes), model_of(shapes)
    for parameter in old.parameters():
        parameter.requires_grad_(drawn.draw(st.booleans()))
    before = stepped(old, parameters=groups_in(old, drawn.draw(numbers), used_groups))
    given = content(old, before)
    shuffled = drawn.draw(st.permutations(used_groups))
    after = torch.optim.Adam(groups_in(new, drawn.draw(numbers), shuffled))
    loaded(new, after, given)
    found = {name: state for name, state in by_name(new, after).items() if state}
    assert_alike(found, {name: state for name, state in by_name(old, before).items() if state})
    for group in after.param_groups:
        for parameter in group["params"]:
            (name,) = (n for n, p in new.named_parameters() if p is parameter)
            assert group["lr"] == 1.0 + group_of[int(name[1:])]


def test_save_writes_names_in_full_which_are_no_parts(tmp_path):
    names = {"proj.weight": torch.zeros(3, 3), "head.proj.weight": torch.zeros(3, 3)}
    old, new = model_of(names), model_of(names)
    used = stepped(old, parameters=list(old.proj.parameters()))
    ckptool.save(tmp_path / "f.pth", model=old, optimizer=used)
    optimizer = adam(new.proj)
    ckptool.load_into(new, tmp_path / "f.pth", optimizer=optimizer)
    assert_alike(by_name(new, optimizer), by_name(old, used))
    problem, _ = refusal_of(new, adam(new.head), tmp_path / "f.pth")
    assert problem.endswith("only the optimizer has head.proj.weight")


@pytest.mark.parametrize("wanted", ["RAdam", "AdamW", "SparseAdam"])
def test_kinds_that_keep_the_same_are_not_told_apart(wanted):
    model = three()
    given = copy.deepcopy(content(model, stepped(model, parameters=model.parameters())))
    mine, theirs = (kind_of(wanted)(model.parameters(), lr=0.1) for _ in range(2))
    theirs.load_state_dict(given["optimizer"])
    assert loaded(model, mine, given, order="position").matched == 6
    assert_alike(mine.state_dict()["state"], theirs.state_dict()["state"])


def changed(change):
    """What a script saves, with other moments."""

    def made(model):
        found = given_by(model)
        for entry in found["optimizer"]["state"].values():
            entry["exp_avg"] = change(entry["exp_avg"])
        return found

    return made


def flattened(model):
    flat = torch.nn.Parameter(torch.zeros(36))
    flat._is_flat_param = True
    return torch.optim.Adam([flat])


def of_kind(name, wrap=lambda one: one):
    return lambda model: wrap(getattr(torch.optim, name)(model.parameters(), lr=0.1))


def unnamed(model):
    return list(model.parameters())


PARTIAL = (
    "`optimizer_partial=True` loads the state of the parameters that both have, by name; or leave "
    "out optimizer= to load only the model"
)
ALONE = "leave out optimizer= to load only the model"
VOUCH = (
    "`optimizer_order='position'` if the optimizer has its parameters in the order "
    "of the file; or save it again with ckptool.save, which stores the names"
)
NAMELESS = (
    "the optimizer in the file has no parameter names, and shapes and order do not prove "
    "which state belongs to which parameter: {}; "
    'optimizer_order="position" loads it in the order of the file'
)
SHAPED = NAMELESS.format("the state of parameter 0 does not have the shape of that parameter")
COUNTS = "the optimizer in the file has 6 parameters in groups of 3, 3, but the live one has"
LACKS = "the file has no optimizer state"
OWN_FILE = (
    "if it is in a separate file, use load_into(model, {'model': ..., 'optimizer': "
    "ckptool.load(FILE)}, optimizer=...)"
)
KIND = "the optimizer in the file is not"
SPLIT = {"parameters": lambda model: groups(model, "weight$")}
REFUSED = [
    ({"parameters": lambda model: unnamed(model)[::-1]}, adam, SHAPED, VOUCH),
    ({"parameters": unnamed, "kind": torch.optim.LBFGS}, lbfgs, SHAPED, VOUCH),
    ({"parameters": lambda model: unnamed(model)[:2]}, adam,
     NAMELESS.format("the optimizer in the file has 2 parameters in groups of 2, "
                      "but the live one has 6 in 6"),
     ALONE),
    ({}, lambda model: adam(three()),
     "the model has none of the optimizer's parameters",
     "build the optimizer from the parameters of this model"),
    ({}, flattened, "the optimizer's parameter 0 is sharded by FSDP: each rank has one part",
     "load it by name with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
     "full_state_dict=True"),
    (SPLIT, lambda model: torch.optim.Adam(groups(model, "^a")),
     "a.bias is in group 1 of the file, but other parameters of group 0 of the "
     "optimizer are in group 0",
     PARTIAL),
    (SPLIT, lambda model: torch.optim.Adam([model.a.weight, model.b.weight]),
     f"{COUNTS} 2 in 2; first difference: only the file has c.weight", PARTIAL),
    (SPLIT, lambda model: torch.optim.Adam([*unnamed(model), torch.nn.Parameter(torch.ones(3))]),
     f"{COUNTS} 7 in 7; first difference: only the optimizer has parameter 6", PARTIAL),
    ({"parameters": lambda model: list(model.a.named_parameters(prefix="a"))},
     lambda model: torch.optim.Adam(model.b.parameters()),
     "the optimizer in the file has other parameters: only the file has a.weight and only the "
     "optimizer has b.weight", VOUCH),
    ({"kind": torch.optim.LBFGS}, lambda model: torch.optim.LBFGS(unnamed(model)[::-1]),
     "the optimizer has one state for all parameters, and their order differs", ALONE),
    ({}, of_kind("SGD"), f"{KIND} SGD: it has betas and does not have "
     "dampening, momentum, nesterov", ALONE),
    ({"parameters": lambda model: [(f"x{n}", p) for n, p in model.named_parameters()]}, stepped,
     "the optimizer in the file has other parameters: only the file has xa.weight and only the "
     "optimizer has a.weight", VOUCH),
    (changed(lambda _: torch.ones(5, 7)), stepped,
     "the state of a.weight has shape [5, 7], but the parameter has shape [3, 3]", ALONE),
    (changed(lambda held: held.double() + 1e300), stepped,
     "casting float64 -> float32 would change the optimizer state a.weight/exp_avg, and 5 more "
     "tensors", "allow_lossy_cast=['*/exp_avg']"),
    (lambda model: {**given_by(model), "optimizer_d": stepped(model).state_dict()}, stepped,
     "the file has 2 optimizers: optimizer, optimizer_d",
     "`optimizer_key='optimizer'` or `optimizer_key='optimizer_d'`"),
    (lambda model: {"epoch": 1, "model": model.state_dict()}, stepped, LACKS, OWN_FILE),
    ({"kind": torch.optim.SGD}, of_kind("Adam"),
     f"{KIND} Adam: it has dampening, momentum, nesterov and does not have betas", ALONE),
    ({"kind": torch.optim.SGD}, of_kind("Adam", Around),
     f"{KIND} Adam: it has dampening, momentum, nesterov and does not have betas", ALONE),
    ({"kind": torch.optim.RMSprop}, of_kind("Adagrad", Thin),
     f"{KIND} Adagrad: it has alpha, momentum and does not have lr_decay", ALONE),
    ({"kind": torch.optim.Adadelta}, of_kind("Adafactor"), f"{KIND} Adafactor: it has rho", ALONE),
    ({}, of_kind("NAdam"), f"{KIND} NAdam: it does not have momentum_decay", ALONE),
    ({"kind": torch.optim.NAdam}, of_kind("AdamW"), f"{KIND} AdamW: it has momentum_decay", ALONE),
]  # fmt: skip


@pytest.mark.parametrize(("before", "wanted", "problem", "remedy"), REFUSED)
def test_an_optimizer_that_does_not_fit_is_refused(tmp_path, before, wanted, problem, remedy):
    model = three()
    if callable(before):
        given = before(model)
    else:
        named = before.get("parameters", lambda model: list(model.named_parameters()))
        given = given_by(model, **{**before, "parameters": named(model)})
    optimizer = wanted(model)
    for source in (given, saved(tmp_path / "f.pth", given)):
        with untouched_by(MatchError, model, optimizer) as caught:
            ckptool.load_into(model, source, optimizer=optimizer)
        assert caught.value.report.optimizer.problems == (problem,)
        assert caught.value.hint == remedy
        if remedy == ALONE:
            ckptool.load_into(model, source)


def test_a_model_that_does_not_fit_leaves_the_optimizer_too_as_it_was():
    model = three()
    optimizer = stepped(model)
    with untouched_by(MatchError, model, optimizer, match=r"c\.weight"):
        ckptool.load_into(
            model, {**given_by(three()), "model": three("ab").state_dict()}, optimizer=optimizer
        )


@pytest.mark.parametrize("order", ["rank", 5, ["position"]])
def test_an_order_that_is_none_is_refused_without_an_optimizer_too(order):
    model = three()
    with untouched_by(UsageError, model, match="is not 'position' or None"):
        ckptool.load_into(model, three().state_dict(), optimizer_order=order)


class Oops(Exception):
    """Raised by a hook."""


@pytest.mark.parametrize("error", [Oops(), KeyboardInterrupt()], ids=repr)
def test_a_hook_that_raises_leaves_both_as_they_were(error):
    for whose, make in itertools.product(("model", "optimizer"), (adam, stepped)):
        model = three()
        optimizer = make(model)
        hooked = model.c if whose == "model" else optimizer
        hooked.register_load_state_dict_post_hook(raising(error))
        with untouched_by(type(error), model, optimizer):
            ckptool.load_into(model, given_by(three()), optimizer=optimizer)


@pytest.mark.parametrize("place", ["model/c.weight", "optimizer/state/4/exp_avg"])
def test_a_flipped_bit_leaves_both_as_they_were(tmp_path, place):
    found = given_by(three())
    path = saved(tmp_path / "f.pth", found)
    data = bytearray(path.read_bytes())
    tensor = found
    for key in place.split("/"):
        tensor = tensor[int(key) if key.isdigit() else key]
    data[data.index(tensor.numpy().tobytes()) + 5] ^= 16
    path.write_bytes(data)
    model = three()
    optimizer = stepped(model)
    with untouched_by(
        CheckpointError, model, optimizer, match=rf"f\.pth.*{place.rpartition('model/')[2]}"
    ):
        ckptool.load_into(model, path, optimizer=optimizer)


def test_a_complex_parameter_counts_twice_in_what_lbfgs_keeps_of_all():
    def made():
        model = nn.Module()
        model.a = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        model.b = nn.Parameter(torch.ones(2))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = sum((p.abs() ** 2).sum() for p in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)

    (old, used), (new, fresh) = made(), made()
    step(old, used)
    ckptool.load_into(new, content(old, used), optimizer=fresh, optimizer_order="position")
    step(old, used)
    step(new, fresh)
    assert all(map(torch.equal, old.parameters(), new.parameters()))
