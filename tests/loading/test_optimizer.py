"""The state of an optimizer goes to the parameters that it is of."""

import copy

import pytest
import torch
from hypothesis import given as drawing
from hypothesis import settings
from hypothesis import strategies as st

import ckptool
from ckptool.errors import CorruptFile, MatchError, NotFound, UsageError
from ckptool.loading.snapshot import Snapshot
from tests.loading.bits import Untouched
from tests.loading.optimizing import (
    assert_alike,
    by_name,
    content,
    loaded,
    plan_for,
    problem_of,
    refusal_of,
    report_of,
    shapely,
    stepped,
    three,
)

KINDS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {}, "Adam amsgrad": {"amsgrad": True}, "AdamW": {},
    "Adafactor": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "RMSprop centered": {"centered": True, "momentum": 0.9}, "Rprop": {}, "SGD": {},
    "SGD momentum": {"momentum": 0.9}, "SGD nesterov": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


def kind_of(word):
    return getattr(torch.optim, word.partition(" ")[0])


def saved(tmp_path, tree):
    torch.save(tree, tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.mark.parametrize("in_file", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize("word", KINDS)
def test_every_kind_is_loaded_as_torch_loads_it(tmp_path, word, in_file):
    kind, options = kind_of(word), KINDS[word]
    model = shapely()
    given = copy.deepcopy(content(model, stepped(model, kind, **options)))
    mine, theirs = kind(model.parameters(), **options), kind(model.parameters(), **options)
    theirs.load_state_dict(given["optimizer"])
    report = loaded(model, mine, saved(tmp_path, given) if in_file else given)
    assert report.matched == sum(bool(state) for state in theirs.state.values())
    assert report.parameters == 4
    assert_alike(mine.state_dict(), theirs.state_dict())
    for optimizer in (mine, theirs):
        model.load_state_dict(given["model"])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert_alike(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("word", KINDS)
def test_parameters_in_another_order_get_their_own_state(tmp_path, word):
    kind, options = kind_of(word), KINDS[word]
    old = three()
    used = stepped(old, kind, parameters=list(old.named_parameters()), **options)
    new = three(("c", "a", "b"))
    optimizer = kind(new.parameters(), **options)
    assert loaded(new, optimizer, saved(tmp_path, content(old, used))).by == "names"
    assert_alike({k: by_name(new, optimizer)[k] for k in sorted(by_name(old, used))},
                 dict(sorted(by_name(old, used).items())))  # fmt: skip


def test_without_names_parameters_of_one_shape_are_not_guessed_between():
    model = three()
    refusal = refusal_of(
        model,
        torch.optim.Adam(model.parameters()),
        content(model, stepped(model, parameters=model.parameters())),
    )
    assert refusal == (
        "the file does not name the parameters of its optimizer, and shapes and order are no "
        "proof of whose state is whose",
        "`optimizer_order='position'` where the optimizer was built over its parameters in the "
        "order of the file; or save it again with ckptool.save, which writes the names",
    )


def test_the_caller_may_vouch_for_the_order_and_shapes_are_checked():
    old, new = three(), three()
    used = stepped(old, parameters=old.parameters())
    optimizer = torch.optim.Adam(new.parameters())
    given = content(old, used)
    assert loaded(new, optimizer, given, order="position").by == "position"
    assert_alike(by_name(new, optimizer), by_name(old, used))
    turned = torch.optim.Adam(reversed(list(new.parameters())))
    assert problem_of(new, turned, given, order="position") == (
        "the state of c.bias has the shape [3, 3], and the parameter [3]"
    )


def test_names_count_more_than_an_order_vouched_for():
    old = three()
    used = stepped(old, parameters=list(old.named_parameters()))
    new = three(("b", "a", "c"))
    optimizer = torch.optim.Adam(new.parameters())
    assert loaded(new, optimizer, content(old, used), order="position").by == "names"
    assert_alike(optimizer.state[new.a.weight], used.state[old.a.weight])


def test_another_word_for_the_order_is_wrong_usage():
    model = three()
    optimizer = stepped(model)
    with pytest.raises(UsageError, match="optimizer_order='rank' is neither"):
        ckptool.load_into(
            model, content(model, optimizer), optimizer=optimizer, optimizer_order="rank"
        )


def test_something_else_than_an_optimizer_is_wrong_usage():
    model = three()
    with pytest.raises(UsageError, match="optimizer= takes an optimizer, not a Linear"):
        report_of(model, model.a, content(model, stepped(model)))


WRAPPERS = {
    "plain": lambda model: model,
    "parallel": torch.nn.DataParallel,
    "compiled": torch.compile,
    "both": lambda model: torch.compile(torch.nn.DataParallel(model)),
}


@pytest.mark.parametrize("inner", [True, False], ids=["names of the inner", "names of the outer"])
@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize("source", WRAPPERS)
def test_wrappers_come_and_go_on_either_side(source, target, inner):
    bare = three()
    old = WRAPPERS[source](bare)
    named = (bare if inner else old).named_parameters()
    used = stepped(bare, parameters=list(named))
    fresh = three(("b", "c", "a"))
    new = WRAPPERS[target](fresh)
    optimizer = torch.optim.Adam(new.parameters())
    loaded(new, optimizer, content(old, used))
    for name, state in by_name(fresh, optimizer).items():
        assert_alike(state, by_name(bare, used)[name])


class Outer(torch.nn.Module):
    """A real child called `module`."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.module = torch.nn.Module()
        self.module.w = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("inner", [True, False])
def test_a_real_child_called_module_is_no_wrapper(inner):
    old = Outer()
    parallel = torch.nn.DataParallel(old)
    used = stepped(old, parameters=list((old if inner else parallel).named_parameters()))
    new = Outer()
    optimizer = torch.optim.Adam([new.module.w, new.w])
    loaded(new, optimizer, content(parallel, used))
    assert_alike(optimizer.state[new.w], used.state[old.w])
    assert_alike(optimizer.state[new.module.w], used.state[old.module.w])


def test_names_follow_the_renaming_of_the_model():
    old = three()
    used = stepped(old, parameters=list(old.named_parameters()))
    new = torch.nn.Module()
    new.encoder = three(("c", "b", "a"))
    optimizer = torch.optim.Adam(new.parameters())
    loaded(new, optimizer, content(old, used))
    assert_alike(by_name(new.encoder, optimizer)["a.bias"], by_name(old, used)["a.bias"])


def test_tied_parameters_are_one_whatever_name_the_file_has():
    def tied(first, second):
        model = torch.nn.Module()
        model.add_module(first, torch.nn.Linear(3, 3, bias=False))
        model.add_module(second, torch.nn.Linear(3, 3, bias=False))
        model.get_submodule(second).weight = model.get_submodule(first).weight
        model.other = torch.nn.Linear(3, 3, bias=False)
        return model

    old, new = tied("head", "embed"), tied("embed", "head")
    used = stepped(old, parameters=list(old.named_parameters()))
    optimizer = torch.optim.Adam(reversed(list(new.parameters())))
    assert loaded(new, optimizer, content(old, used)).matched == 2
    assert_alike(optimizer.state[new.embed.weight], used.state[old.embed.weight])


def test_state_kept_by_name_as_fsdp_gathers_it():
    old = three()
    used = stepped(old)
    names = [name for name, _ in old.named_parameters()]
    given = content(old, used)
    held = given["optimizer"]
    held["state"] = {names[number]: state for number, state in held["state"].items()}
    held["param_groups"][0]["params"] = names
    new = three(("b", "c", "a"))
    optimizer = torch.optim.Adam(new.parameters())
    assert loaded(new, optimizer, given).by == "names"
    assert_alike(optimizer.state[new.c.weight], used.state[old.c.weight])


def groups(model, split, **options):
    """Parameters by name in two groups."""
    every = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in every if split(n)], "weight_decay": 0.5, **options},
        {"params": [(n, p) for n, p in every if not split(n)], "weight_decay": 0.0},
    ]


def is_bias(name):
    return name.endswith("bias")


def is_weight(name):
    return name.endswith("weight")


def test_groups_are_the_same_parts_in_whatever_order():
    old = three()
    used = stepped(old, parameters=groups(old, is_weight, lr=0.3))
    new = three(("b", "c", "a"))
    optimizer = torch.optim.Adam(groups(new, is_bias))
    report = loaded(new, optimizer, content(old, used))
    assert report.matched == 6
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.5]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.3]
    assert optimizer.param_groups[0]["param_names"] == ["b.bias", "c.bias", "a.bias"]
    assert_alike(optimizer.state[new.c.bias], used.state[old.c.bias])


def test_parameters_in_other_groups_are_refused():
    old = three()
    used = stepped(old, parameters=groups(old, is_weight))
    optimizer = torch.optim.Adam(groups(old, lambda name: name.startswith("a")))
    assert problem_of(old, optimizer, content(old, used)) == (
        "a.bias is in group 1 of the file, and others of group 0 of the optimizer are in group 0"
    )


def test_counts_and_the_first_difference_are_told():
    old = three()
    used = stepped(old, parameters=groups(old, is_weight))
    few = torch.optim.Adam([old.a.weight, old.b.weight])
    assert problem_of(old, few, content(old, used)) == (
        "the file's optimizer has 6 parameters in groups of 3, 3, the optimizer 2 in 2; first "
        "difference: c.weight is in the file only"
    )
    many = torch.optim.Adam([*old.parameters(), torch.nn.Parameter(torch.ones(3))])
    assert problem_of(old, many, content(old, used)) == (
        "the file's optimizer has 6 parameters in groups of 3, 3, the optimizer 7 in 7; first "
        "difference: parameter 6 is in the optimizer only"
    )


def test_state_of_another_shape_is_refused():
    old, new = three(), three()
    used = stepped(old, parameters=list(old.named_parameters()))
    given = content(old, used)
    for number in (0, 2):
        given["optimizer"]["state"][number]["exp_avg"] = torch.ones(5, 7)
    assert problem_of(new, torch.optim.Adam(new.parameters()), given) == (
        "the state of a.weight has the shape [5, 7], and the parameter [3, 3]"
    )


OTHERS = [
    ("Adam", "SGD", "it has betas and lacks dampening, momentum, nesterov"),
    ("SGD", "Adam", "it has dampening, momentum, nesterov and lacks betas"),
    ("RMSprop", "Adagrad", "it has alpha, momentum and lacks lr_decay"),
    ("Adadelta", "Adafactor", "it has rho"),
]


@pytest.mark.parametrize(("old_kind", "new_kind", "told"), OTHERS)
def test_another_kind_of_optimizer_is_refused(old_kind, new_kind, told):
    model = shapely()
    used = stepped(model, kind_of(old_kind))
    problem = problem_of(model, kind_of(new_kind)(model.parameters(), lr=0.1), content(model, used))
    assert f"of another kind than {new_kind}: " in problem
    assert told in problem


def test_lbfgs_keeps_one_state_of_all_in_their_order():
    model = three()
    named = list(model.named_parameters())
    used = stepped(model, torch.optim.LBFGS, parameters=named)
    fresh = torch.optim.LBFGS(model.parameters())
    loaded(model, fresh, content(model, used))
    assert_alike(fresh.state_dict()["state"], used.state_dict()["state"])
    turned = torch.optim.LBFGS(reversed(list(model.parameters())))
    assert problem_of(model, turned, content(model, used)) == (
        "the optimizer keeps one state of all parameters, in another order"
    )


def test_lbfgs_without_names_needs_a_word_on_the_order():
    model = three()
    given = content(model, stepped(model, torch.optim.LBFGS, parameters=model.parameters()))
    fresh = torch.optim.LBFGS(model.parameters())
    assert "optimizer_order='position'" in refusal_of(model, fresh, given)[1]
    loaded(model, fresh, given, order="position")


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
    given = content(model, stepped(model))
    for state in given["optimizer"]["state"].values():
        state["step"] = 2
    optimizer = torch.optim.Adam(model.parameters())
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


@pytest.mark.parametrize("order", [None, "position"])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_refused_or_loaded_whole(odd, order):
    model = shapely()
    given = content(model, stepped(model))
    given["optimizer"] |= odd
    optimizer = torch.optim.Adam(model.parameters())
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
    given = content(model, stepped(model))
    given["optimizer"]["state"] |= {17: {"exp_avg": torch.ones(3)}, "rng": torch.get_rng_state()}
    optimizer = torch.optim.Adam(model.parameters())
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
    file = saved(tmp_path, content(model, stepped(model)))
    model.bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
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
    optimizer = torch.optim.Adam(model.parameters())
    given = content(model, used)
    for state in given["optimizer"]["state"].values():
        state.update({k: v.bfloat16() for k, v in state.items() if k != "step"})
    report = loaded(model, optimizer, saved(tmp_path, given))
    assert len(report.cast) == 8
    assert not any(one.lossy for one in report.cast)


def test_nothing_is_shared_with_a_dict_in_memory():
    model = shapely()
    given = content(model, stepped(model))
    optimizer = torch.optim.Adam(model.parameters())
    loaded(model, optimizer, given)
    given["optimizer"]["state"][0]["exp_avg"].fill_(7.0)
    assert not (optimizer.state[model[0].weight]["exp_avg"] == 7.0).any()


def test_two_optimizers_are_chosen_between_by_their_models_name():
    g, d = three(), three()
    given = {
        "netG": g.state_dict(), "netD": d.state_dict(),
        "optG": stepped(g, parameters=list(g.named_parameters())).state_dict(),
        "optD": stepped(d, parameters=list(d.named_parameters()), lr=0.5).state_dict(),
    }  # fmt: skip
    optimizer = torch.optim.Adam(d.parameters())
    loaded(d, optimizer, given, state_key="netD")
    assert optimizer.param_groups[0]["lr"] == 0.5
    loaded(d, optimizer, given, state_key="netD", key="optG")
    assert optimizer.param_groups[0]["lr"] == 0.1
    del given["optD"]
    assert refusal_of(d, optimizer, given, state_key="netD") == (
        "the only optimizer, optG, is that of netG, which is not the model chosen",
        "without optimizer= the model alone is loaded; or `optimizer_key='optG'`",
    )


def test_the_only_optimizer_is_the_models_where_it_fits_no_other():
    model = shapely()
    given = {"netG": torch.nn.Linear(2, 2).state_dict(), "netD": model.state_dict()}
    given["optimizer"] = stepped(model, lr=0.5).state_dict()
    optimizer = torch.optim.Adam(model.parameters())
    loaded(model, optimizer, given, state_key="netD")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_several_optimizers_are_listed():
    model = three()
    given = {"model": model.state_dict(), "optimizers": [stepped(model).state_dict()] * 1}
    given["optimizers"].append(stepped(model).state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    assert refusal_of(model, optimizer, given) == (
        "there are 2 optimizers: optimizers/0, optimizers/1",
        "`optimizer_key='optimizers/0'`; or `optimizer_key='optimizers/1'`",
    )
    with pytest.raises(NotFound):
        report_of(model, optimizer, given, key="optimizers/5")


def test_a_file_without_an_optimizer_says_so():
    model = three()
    assert refusal_of(model, torch.optim.Adam(model.parameters()), model.state_dict()) == (
        "the state of an optimizer is wanted, and there is none in the file",
        "load_into(model, {'model': ..., 'optimizer': ckptool.load(FILE)}, optimizer=...) where "
        "it is in a file of its own",
    )


class Oops(Exception):
    """Raised by a hook."""


def test_hooks_of_the_optimizer_run():
    model = shapely()
    optimizer = torch.optim.Adam(model.parameters())
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    loaded(model, optimizer, content(model, stepped(model)))
    assert called == ["before", "after"]


def test_a_plan_with_problems_is_not_applied():
    model = three()
    optimizer = torch.optim.Adam(model.parameters())
    untouched = Untouched(model, optimizer)
    with (
        plan_for(model, optimizer, model.state_dict()) as plan,
        pytest.raises(MatchError, match="there is none"),
    ):
        plan.apply()
    untouched.check()


def test_damaged_bytes_of_a_state_are_found(tmp_path):
    model = shapely()
    given = content(model, stepped(model))
    file = saved(tmp_path, given)
    data = bytearray(file.read_bytes())
    data[data.index(given["optimizer"]["state"][0]["exp_avg"].numpy().tobytes()) + 5] ^= 16
    file.write_bytes(data)
    optimizer = torch.optim.Adam(model.parameters())
    untouched = Untouched(model, optimizer)
    with (
        plan_for(model, optimizer, file) as plan,
        pytest.raises(CorruptFile, match="optimizer/state/0/exp_avg"),
    ):
        plan.apply()
    untouched.check()


def test_an_object_of_a_class_is_never_made(tmp_path):
    model = shapely()
    given = content(model, stepped(model))
    given["optimizer"]["state"][0]["odd"] = Oops()
    problem = problem_of(model, torch.optim.Adam(model.parameters()), saved(tmp_path, given))
    assert problem.startswith("optimizer/state/0/odd is an object of ")
    assert problem.endswith(", which is not made from a file")


def test_an_optimizer_without_names_gets_those_of_the_file_in_its_own_order():
    old, new = three(), three(("c", "a", "b"))
    used = stepped(old, parameters=list(torch.nn.DataParallel(old).named_parameters()))
    optimizer = torch.optim.Adam(torch.compile(new).parameters())
    loaded(torch.compile(new), optimizer, content(old, used))
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in new.named_parameters()]
    again = torch.optim.Adam(old.parameters())
    loaded(old, again, content(new, optimizer))
    assert_alike(by_name(old, again), by_name(old, used))


class Around(torch.optim.Optimizer):
    """A wrapper, as accelerate puts one around an optimizer."""

    def __init__(self, inner):
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


def test_a_wrapped_optimizer_is_filled_and_put_back():
    old, new = three(), three(("c", "a", "b"))
    used = stepped(old, parameters=list(old.named_parameters()))
    optimizer = stepped(new, lr=0.3)
    untouched = Untouched(new, optimizer)
    with plan_for(new, Around(optimizer), content(old, used)) as plan:
        undo = Snapshot(new, Around(optimizer), copied=lambda _: True, with_state=True)
        plan.apply()
        assert_alike(by_name(new, optimizer)["a.weight"], by_name(old, used)["a.weight"])
        undo.restore()
    untouched.check()


def test_another_kind_is_told_of_the_optimizer_inside_a_wrapper():
    class Thin:
        """A wrapper that is no `Optimizer`."""

        def __init__(self, inner):
            self.optimizer = inner

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

        def load_state_dict(self, state_dict):
            self.optimizer.load_state_dict(state_dict)

    model = shapely()
    given = content(model, stepped(model, torch.optim.SGD, momentum=0.9))
    for wrap in (Thin, Around):
        wrapped = wrap(torch.optim.Adam(model.parameters()))
        assert "of another kind than Adam: " in problem_of(model, wrapped, given)
    loaded(model, Thin(torch.optim.Adam(model.parameters())), content(model, stepped(model)))


@settings(max_examples=60, deadline=None)
@drawing(st.data())
def test_whatever_the_order_and_the_groups_every_parameter_gets_its_own(drawn):
    count = drawn.draw(st.integers(1, 7))
    kinds = [drawn.draw(st.sampled_from([(2,), (3,), (2, 2), ()])) for _ in range(count)]
    group_of = [drawn.draw(st.integers(0, 2)) for _ in range(count)]

    def model():
        made = torch.nn.Module()
        for number, shape in enumerate(kinds):
            made.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(shape)))
        return made

    def groups_in(made, order, used):
        every = list(made.named_parameters())
        held = {g: [every[n] for n in order if group_of[n] == g] for g in used}
        return [{"params": pairs, "lr": 1.0 + g} for g, pairs in held.items()]

    numbers = st.permutations(range(count))
    used_groups = sorted(set(group_of))
    old, new = model(), model()
    for parameter in old.parameters():
        parameter.requires_grad_(drawn.draw(st.booleans()))
    before = stepped(old, parameters=groups_in(old, drawn.draw(numbers), used_groups))
    given = content(old, before)
    named = drawn.draw(st.booleans())
    shuffled = drawn.draw(st.permutations(used_groups)) if named else used_groups
    wanted = groups_in(new, drawn.draw(numbers), shuffled)
    if not named:
        for group in (*wanted, *given["optimizer"]["param_groups"]):
            group.pop("param_names", None)
        wanted = [{**g, "params": [p for _, p in g["params"]]} for g in wanted]
    after = torch.optim.Adam(wanted)
    report = report_of(new, after, given)
    assert not (named and report.problems)
    if not report.problems:
        loaded(new, after, given)
        found = {name: state for name, state in by_name(new, after).items() if state}
        assert_alike(found, {name: state for name, state in by_name(old, before).items() if state})
        for group in after.param_groups:
            for parameter in group["params"]:
                (name,) = (n for n, p in new.named_parameters() if p is parameter)
                assert group["lr"] == 1.0 + group_of[int(name[1:])]


def test_what_fsdp_has_made_flat_is_told_with_what_loads_it():
    old = three()
    given = content(old, stepped(old, parameters=list(old.named_parameters())))
    flat = torch.nn.Module()
    flat.flat = torch.nn.Parameter(torch.zeros(36))
    flat.flat._is_flat_param = True
    problem, remedy = refusal_of(old, torch.optim.Adam(flat.named_parameters()), given)
    assert problem == "the optimizer's parameter 0 is of FSDP, of which every rank has a part"
    assert "set_optimizer_state_dict" in remedy


@pytest.mark.parametrize("what", ["fewer", "other groups", "another kind", "another shape"])
def test_every_refusal_says_what_helps(what):
    old, new = three(), three()
    used = stepped(old, parameters=list(old.named_parameters()))
    given, optimizer = content(old, used), torch.optim.Adam(new.parameters())
    if what == "fewer":
        optimizer = torch.optim.Adam(new.a.parameters())
    if what == "other groups":
        optimizer.param_groups[0]["params"] = list(new.parameters())[:2]
        optimizer.add_param_group({"params": list(new.parameters())[2:]})
    if what == "another kind":
        optimizer = torch.optim.SGD(new.parameters(), momentum=0.9)
    if what == "another shape":
        given["optimizer"]["state"][0]["exp_avg"] = torch.ones(5)
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(new, given, optimizer=optimizer)
    assert caught.value.hint == "without optimizer= the model alone is loaded"
    ckptool.load_into(new, given)


def nested():
    """The names that `head` gives to its parameters are others' in full."""
    model = torch.nn.Module()
    model.proj, model.head = torch.nn.Linear(3, 3), torch.nn.Module()
    model.head.proj = torch.nn.Linear(3, 3)
    return model


def test_a_name_of_the_file_is_never_that_of_a_part():
    old, new = nested(), nested()
    given = content(old, stepped(old, parameters=list(old.head.named_parameters())))
    optimizer = torch.optim.Adam(new.head.parameters())
    assert problem_of(new, optimizer, given) == (
        "the file's optimizer is over other parameters: proj.weight is in the file only and "
        "head.proj.weight is in the optimizer only"
    )


def test_save_writes_names_in_full_which_are_no_parts(tmp_path):
    old, new = nested(), nested()
    used = stepped(old, parameters=list(old.proj.parameters()))
    ckptool.save(tmp_path / "f.pth", model=old, optimizer=used)
    optimizer = torch.optim.Adam(new.proj.parameters())
    ckptool.load_into(new, tmp_path / "f.pth", optimizer=optimizer)
    assert_alike(by_name(new, optimizer), by_name(old, used))
    with pytest.raises(MatchError, match=r"head\.proj\.weight is in the optimizer only"):
        ckptool.load_into(
            new, tmp_path / "f.pth", optimizer=torch.optim.Adam(new.head.parameters())
        )


def test_position_is_not_proposed_for_another_number_of_parameters():
    model = shapely()
    given = content(model, stepped(model, parameters=list(model[0].parameters())))
    optimizer = torch.optim.Adam(model.parameters())
    assert "optimizer_order" not in refusal_of(model, optimizer, given)[1]


@pytest.mark.parametrize(
    ("saved_by", "wanted"),
    [
        ("Adam", "NAdam"),
        ("NAdam", "AdamW"),
        ("Adam", "SGD"),
    ],
)
def test_state_of_another_kind_is_refused(saved_by, wanted):
    model = three()
    given = content(model, stepped(model, kind_of(saved_by)))
    optimizer = kind_of(wanted)(model.parameters(), lr=0.1)
    assert f"is of another kind than {wanted}" in problem_of(model, optimizer, given)


@pytest.mark.parametrize("wanted", ["RAdam", "AdamW", "SparseAdam"])
def test_kinds_that_keep_the_same_are_not_told_apart(wanted):
    model = three()
    given = copy.deepcopy(content(model, stepped(model, parameters=model.parameters())))
    mine, theirs = (kind_of(wanted)(model.parameters(), lr=0.1) for _ in range(2))
    theirs.load_state_dict(given["optimizer"])
    assert loaded(model, mine, given, order="position").matched == 6
    assert_alike(mine.state_dict()["state"], theirs.state_dict()["state"])
