"""Names that torch takes from a part of the model: they count where it is sure which part."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import ckptool
from ckptool.errors import MatchError
from tests.loading.bits import Untouched
from tests.loading.optimizing import assert_alike, by_name, content, loaded, refusal_of, stepped
from tests.loading.optimizing import three as alike

POSITION = "`optimizer_order='position'` where the optimizer was built over its parameters in the "


def apart():
    """Parts that have no shape in common."""
    model = torch.nn.Module()
    model.head, model.body = torch.nn.Linear(3, 4), torch.nn.Linear(4, 5)
    return model


def nested():
    """The names that `head` gives to its parameters are others' in full."""
    model = torch.nn.Module()
    model.proj, model.head = torch.nn.Linear(3, 3), torch.nn.Module()
    model.head.proj = torch.nn.Linear(3, 3)
    return model


def of_part(model, *parts):
    """The optimizer of a script that has one group for each part."""
    groups = [{"params": list(model.get_submodule(part).named_parameters())} for part in parts]
    return stepped(model, parameters=groups)


def fresh(parameters):
    return torch.optim.Adam(parameters)


@pytest.mark.parametrize("named", [False, True])
def test_a_part_that_alone_has_such_names_and_shapes_is_meant(named):
    old, new = apart(), apart()
    used = of_part(old, "body")
    optimizer = fresh(new.body.named_parameters() if named else reversed([*new.body.parameters()]))
    assert loaded(new, optimizer, content(old, used)).by == "names"
    assert_alike(by_name(new, optimizer), by_name(old, used))


def test_the_part_may_be_inside_wrappers_on_either_side():
    old, new = apart(), apart()
    used = of_part(old, "body")
    given = content(torch.nn.DataParallel(old), used)
    optimizer = fresh(new.body.parameters())
    loaded(torch.compile(new), optimizer, given)
    assert_alike(by_name(new, optimizer), by_name(old, used))


def test_parameters_of_another_part_are_told_by_their_names_in_full():
    old, new = apart(), apart()
    given = content(old, of_part(old, "body"))
    problem, remedy = refusal_of(new, fresh(new.head.parameters()), given)
    assert problem == (
        "the file's optimizer is of other parameters or groups: body.weight is in the file only "
        "and head.weight is in the optimizer only"
    )
    assert remedy == "without optimizer= the model alone is loaded"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("part", ["a", "b"])
def test_of_two_parts_that_are_alike_neither_is_taken(part, named):
    """Also under the same names: they are the same in each part."""
    old, new = alike(), alike()
    target = new.get_submodule(part)
    optimizer = fresh(target.named_parameters() if named else target.parameters())
    given = content(old, of_part(old, "a"))
    problem, remedy = refusal_of(new, optimizer, given)
    assert problem == (
        "names of the file's optimizer are of a part of its model, and it is not sure which: "
        "weight could be a.weight or b.weight"
    )
    assert remedy.startswith(POSITION)


def test_the_order_may_be_vouched_for_then():
    old, new = alike(), alike()
    used, optimizer = of_part(old, "a"), fresh(new.a.named_parameters())
    assert loaded(new, optimizer, content(old, used), order="position").by == "position"
    assert_alike(by_name(new, optimizer), by_name(old, used))


def test_what_has_no_state_needs_no_names():
    old, new = alike(), alike()
    used = torch.optim.SGD(old.a.named_parameters(), lr=0.3)
    optimizer = torch.optim.SGD(new.a.parameters(), lr=0.1)
    loaded(new, optimizer, content(old, used))
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_names_that_are_others_in_full_are_not_guessed_between():
    old, new = nested(), nested()
    for part in ("head", "proj"):
        given = content(old, of_part(old, "head"))
        optimizer = fresh(new.get_submodule(part).parameters())
        problem, _ = refusal_of(new, optimizer, given)
        assert problem.endswith("proj.weight could be proj.weight or head.proj.weight")


def test_the_code_that_saved_them_loads_them():
    old, new = nested(), nested()
    used, optimizer = of_part(old, "head"), fresh(new.head.named_parameters())
    loaded(new, optimizer, content(old, used))
    assert_alike(by_name(new, optimizer), by_name(old, used))

    used = stepped(old, parameters=[("proj." + n, p) for n, p in old.proj.named_parameters()])
    optimizer = fresh([("proj." + n, p) for n, p in new.proj.named_parameters()])
    loaded(new, optimizer, content(old, used))
    assert_alike(by_name(new, optimizer), by_name(old, used))


@pytest.mark.parametrize("in_memory", [False, True])
def test_save_writes_names_in_full(tmp_path, in_memory):
    """Though a part has such names too, its state is never the part's."""
    old, new = nested(), nested()
    used = stepped(old, parameters=old.proj.parameters())
    ckptool.save(tmp_path / "f.pth", model=old, optimizer=used)
    source = torch.load(tmp_path / "f.pth") if in_memory else tmp_path / "f.pth"
    optimizer = fresh(new.proj.parameters())
    ckptool.load_into(new, source, optimizer=optimizer)
    assert_alike(by_name(new, optimizer), by_name(old, used))
    with pytest.raises(MatchError, match=r"and head\.proj\.weight is in the optimizer only"):
        ckptool.load_into(new, source, optimizer=fresh(new.head.parameters()))


def test_groups_may_be_of_different_parts():
    def model():
        made = apart()
        made.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
        return made

    old, new = model(), model()
    used = of_part(old, "head", "body")
    groups = [{"params": list(new.get_submodule(one).parameters())} for one in ("body", "head")]
    optimizer = fresh(groups)
    loaded(new, optimizer, content(old, used))
    assert_alike(by_name(new, optimizer), by_name(old, used))


def test_what_is_none_of_the_models_is_told_by_the_optimizers_own_names():
    old, new, scales = apart(), apart(), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    used = stepped(old, parameters=[*old.body.named_parameters(), ("scale", scales[0])])
    used.state[scales[0]] = copy.deepcopy(used.state[old.body.weight])
    optimizer = fresh([("scale", scales[1]), *new.body.named_parameters()])
    given = content(old, used)
    for held in given["optimizer"]["state"][2], used.state[scales[0]]:
        held.update(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(2))
    assert loaded(new, optimizer, given).matched == 3
    assert_alike(optimizer.state[scales[1]], used.state[scales[0]])


def test_an_optimizer_over_another_model_says_so():
    old, new = apart(), apart()
    given = content(old, stepped(old, parameters=old.named_parameters()))
    problem, remedy = refusal_of(new, fresh(apart().parameters()), given)
    assert problem == "the optimizer's parameters are not the model's: none of them is in it"
    assert remedy == "build the optimizer over the parameters of the model that is loaded"


PATHS = ["", "a", "b", "a.a", "b.a"]


def tree():
    """Parts in parts, some of one shape, some not."""
    model = torch.nn.Module()
    for path, size in (("a", 2), ("b", 2), ("a.a", 3), ("b.a", 2)):
        *outer, name = path.split(".")
        model.get_submodule(".".join(outer)).add_module(name, torch.nn.Module())
        model.get_submodule(path).w = torch.nn.Parameter(torch.zeros(size))
    return model


@settings(max_examples=300, deadline=None)
@given(some.data())
def test_no_parameter_gets_the_state_of_another(data):
    """Whatever the names are relative to, and whatever the optimizer is over."""
    old, new = tree(), tree()

    def drawn(model):
        path = data.draw(some.sampled_from(PATHS))
        part = model.get_submodule(path)
        whole = data.draw(some.booleans())
        every = [
            (f"{path}.{name}" if whole and path else name, p) for name, p in part.named_parameters()
        ]
        chosen = data.draw(some.lists(some.sampled_from(every), min_size=1, unique=True))
        return whole or not path, chosen

    whole, parameters = drawn(old)
    whole_here, here = drawn(new)
    used = stepped(old, parameters=parameters)
    named = data.draw(some.booleans())
    optimizer = fresh(here if named else [parameter for _, parameter in here])
    before = Untouched(new, optimizer)
    try:
        ckptool.load_into(new, content(old, used), optimizer=optimizer)
    except MatchError:
        before.check()
        assert not (
            whole and whole_here and named and {n for n, _ in parameters} == set(dict(here))
        )
        return
    if named and dict(parameters).keys() == dict(here).keys() and whole != whole_here:
        return  # the same names by other code: they are taken to be the same
    wanted, found = by_name(old, used), by_name(new, optimizer)
    for name, state in found.items():
        if state:
            assert_alike(state, wanted[name])
