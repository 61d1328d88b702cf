"""An optimizer of which some groups have names: those decide, and shapes whose the rest is."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import ckptool
from ckptool.errors import CheckpointWarning, MatchError
from tests.loading.bits import Untouched
from tests.loading.optimizing import assert_alike, content, loaded, refusal_of, three


def over(*parts):
    """An optimizer with a group for each, every parameter's state another."""
    optimizer = torch.optim.Adam([{"params": list(part.parameters())} for part in parts], lr=0.1)
    torch.manual_seed(8)
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def saved(optimizer, model, *groups):
    """What a script saves, with the model's names in these groups."""
    content_ = content(model, optimizer)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for number in groups:
        params = optimizer.param_groups[number]["params"]
        names = [known[id(parameter)] for parameter in params]
        content_["optimizer"]["param_groups"][number]["param_names"] = names
    return copy.deepcopy(content_)


def turned(optimizer, number):
    """The same with one group's parameters in the reverse order."""
    optimizer.param_groups[number]["params"].reverse()
    return optimizer


def states(optimizer, part):
    return [optimizer.state[parameter] for parameter in part.parameters()]


def odd():
    """Of shapes that nothing else has."""
    return torch.nn.Linear(5, 7)


def test_what_save_writes_of_a_model_and_its_loss_is_loaded_again(tmp_path):
    model, loss = three(), odd()
    optimizer = over(model, loss)
    with pytest.warns(CheckpointWarning, match="some of its parameters only"):
        ckptool.save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    other, other_loss = three(("c", "b", "a")), odd()
    fresh = torch.optim.Adam([{"params": list(one.parameters())} for one in (other, other_loss)])
    report = ckptool.load_into(other, tmp_path / "f.pth", optimizer=fresh)
    assert report.optimizer.matched == 8
    assert report.optimizer.notes == (
        "group 1 of the file has no names: shapes tell whose state it is",
    )
    for name in "abc":
        found, wanted = (
            states(opt, getattr(net, name)) for opt, net in ((fresh, other), (optimizer, model))
        )
        assert_alike(found, wanted)
    assert_alike(states(fresh, other_loss), states(optimizer, loss))


def test_names_decide_in_their_groups_and_shapes_in_the_rest():
    model = three()
    model.odd = odd()
    optimizer = over(model.a, model.odd)
    file = saved(optimizer, model, 0)
    fresh = turned(turned(over(model.a, model.odd), 0), 1)
    fresh.state.clear()
    assert loaded(model, fresh, file).by == "names"
    for part in (model.a, model.odd):
        assert_alike(states(fresh, part), states(optimizer, part))


def test_what_names_lead_to_is_no_candidate_for_the_rest():
    """One of the two of a shape has a name: the other state is the other's."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = over(*model)
    fresh = over(*model)
    fresh.state.clear()
    loaded(model, fresh, saved(optimizer, model, 0))
    assert_alike(states(fresh, model), states(optimizer, model))


def test_the_rest_is_refused_where_it_could_be_of_several():
    model = three()
    optimizer = over(model.a, model.b)
    problem, remedy = refusal_of(model, over(model.a, model.b), saved(optimizer, model, 0))
    assert "group 1 has 0 names for 2" in problem
    assert "2 of its 4 states could be of several" in problem
    assert "b.weight, c.weight" in problem
    assert "a.weight" not in problem
    assert "position" in remedy


def test_names_that_stand_in_another_group_are_refused():
    model = three()
    model.odd = torch.nn.Linear(3, 3)
    file = saved(over(model.a, model.b), model, 0)
    problem, _ = refusal_of(model, over(model.b, model.a), file)
    assert "a.weight is in group 0 of the file, and in group 1 of the optimizer" in problem


def test_names_that_the_optimizer_has_not_are_refused():
    model = three()
    problem, _ = refusal_of(model, over(model.b, model.c), saved(over(model.a, model.c), model, 0))
    assert "a.weight is in the file only" in problem


def test_groups_of_other_sizes_are_refused():
    model = three()
    file = saved(over(model.a, model.b), model, 0)
    problem, _ = refusal_of(model, over(model.a, torch.nn.ModuleList([model.b, model.c])), file)
    assert "the file has 4 parameters in 2 groups, the optimizer 6 in 2" in problem


def test_an_order_that_is_vouched_for_must_be_that_of_the_names():
    model = three()
    optimizer = over(model.a, model.b)
    file = saved(optimizer, model, 0)
    fresh = over(model.a, model.b)
    fresh.state.clear()
    assert loaded(model, fresh, file, order="position").by == "position"
    assert_alike(states(fresh, model.b), states(optimizer, model.b))
    problem, _ = refusal_of(model, turned(over(model.a, model.b), 0), file, order="position")
    assert "the file's names contradict the order: a.weight is parameter 0 there" in problem


@pytest.mark.parametrize("names", [["a.weight"], ["a.weight", "a.weight"], [1, 2], "ab"])
def test_names_that_are_none_are_no_witnesses(names):
    model = three()
    file = content(model, over(model.a, model.b))
    file["optimizer"]["param_groups"][0]["param_names"] = names
    problem, _ = refusal_of(model, over(model.a, model.b), file)
    assert "4 of its 4 states could be of several" in problem


def test_a_refusal_changes_nothing(tmp_path):
    model = three()
    torch.save(saved(over(model.a, model.b), model, 0), tmp_path / "f.pth")
    optimizer = over(model.a, model.b)
    before = Untouched(model, optimizer)
    with pytest.raises(MatchError):
        ckptool.load_into(model, tmp_path / "f.pth", optimizer=optimizer)
    before.check()


@given(
    some.lists(some.sampled_from([(2, 2), (2, 3), (3, 2)]), min_size=2, max_size=6),
    some.data(),
)
def test_no_parameter_gets_the_state_of_another(shapes, data):
    """Whatever is named and however the groups are turned: it is its own, or all is refused."""
    model = torch.nn.Sequential(*(torch.nn.Linear(*shape, bias=False) for shape in shapes))
    cut = data.draw(some.integers(1, len(shapes) - 1))
    groups = (model[:cut], model[cut:])
    optimizer = over(*groups)
    file = saved(optimizer, model, data.draw(some.integers(0, 1)))
    fresh = over(*groups)
    fresh.state.clear()
    for group in fresh.param_groups:
        group["params"][:] = data.draw(some.permutations(group["params"]))
    try:
        ckptool.load_into(model, file, optimizer=fresh)
    except MatchError:
        return
    assert_alike(states(fresh, model), states(optimizer, model))
