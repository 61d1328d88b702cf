"""State of an optimizer goes to the parameters that it is of, or nothing is touched at all."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CheckpointError, MatchError
from tests.loading.bits import Untouched
from tests.loading.wrappings import Lightning


def net(order=("a", "b", "c")):
    """Layers of one shape; in what order they are made says which state a position is of."""
    model = nn.Module()
    for name in order:
        model.add_module(name, nn.Linear(3, 3))
    return model


def stepped(model, kind=torch.optim.AdamW, parameters=None, **options):
    """An optimizer after two steps, with other moments for each parameter."""
    optimizer = kind(parameters or model.parameters(), **{"lr": 0.1, **options})
    for factor in (1, 2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, factor * (number + 1.0))
        optimizer.step()
    return optimizer


def content(model, optimizer):
    """What a script saves."""
    return {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def other_groups():
    model = net()
    groups = [{"params": [model.a.weight]}, {"params": list(model.parameters())[1:]}]
    return content(model, stepped(model, parameters=groups))


def fewer():
    model = net()
    return content(model, stepped(model, parameters=list(model.parameters())[:4]))


def without_names():
    model = net()
    return content(model, stepped(model))


def of_strangers():
    model = net()
    pairs = [(f"x{name}", p) for name, p in model.named_parameters()]
    return content(model, stepped(model, parameters=pairs))


def of_other_shapes():
    found = named()
    for entry in found["optimizer"]["state"].values():
        entry["exp_avg"] = torch.ones(5, 7)
    return found


def named(**options):
    model = net()
    return content(model, stepped(model, parameters=list(model.named_parameters()), **options))


def of_another_kind():
    return named(kind=torch.optim.SGD, momentum=0.9)


def two_of_them():
    return {**named(), "optimizer_d": named()["optimizer"]}


def of_a_model_that_does_not_fit():
    found = named()
    del found["model"]["b.bias"]
    return found


def without_one():
    return {"epoch": 1, "model": net().state_dict()}


def too_precise():
    found = named()
    for entry in found["optimizer"]["state"].values():
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 1e300, dtype=torch.float64)
    return found


REFUSED = [
    other_groups, fewer, without_names, of_strangers, of_other_shapes, of_another_kind,
    two_of_them, of_a_model_that_does_not_fit, without_one, too_precise,
]  # fmt: skip


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("make", REFUSED)
def test_an_optimizer_that_does_not_fit_is_refused(tmp_path, make, in_file, used):
    given = make()
    if in_file:
        torch.save(given, tmp_path / "f.pth")
        given = tmp_path / "f.pth"
    model = net()
    optimizer = stepped(model) if used else torch.optim.AdamW(model.parameters())
    untouched = Untouched(model, optimizer)
    with pytest.raises(CheckpointError):
        ckptool.load_into(model, given, optimizer=optimizer)
    untouched.check()


def test_what_is_ambiguous_says_what_would_decide_it():
    model = net()
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, without_names(), optimizer=torch.optim.AdamW(model.parameters()))
    assert "optimizer_order" in f"{caught.value} {caught.value.hint}"
    assert caught.value.report.optimizer.problems


def test_the_one_who_knows_the_order_may_say_so():
    given = without_names()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    report = ckptool.load_into(model, given, optimizer=optimizer, optimizer_order="position")
    assert report.optimizer.by == "position"
    for number, parameter in enumerate(model.parameters()):
        wanted = given["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], wanted)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, Lightning])
@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_parameters_made_in_another_order_get_their_own_state(tmp_path, order, wrap):
    given = named()
    torch.save(given, tmp_path / "f.pth")
    names = given["optimizer"]["param_groups"][0]["param_names"]
    wanted = dict(zip(names, given["optimizer"]["state"].values(), strict=True))
    model = wrap(net(order))
    optimizer = torch.optim.AdamW(model.parameters())
    report = ckptool.load_into(model, tmp_path / "f.pth", optimizer=optimizer)
    assert report.optimizer.by == "names"
    assert report.optimizer.matched == report.optimizer.parameters == 6
    for name, parameter in net(order).named_parameters():
        mine = dict(model.named_parameters())
        (full,) = [key for key in mine if key.endswith(name)]
        state = optimizer.state[mine[full]]
        assert set(state) == set(wanted[name])
        assert all(torch.equal(state[key], wanted[name][key]) for key in state), name
        assert parameter.shape == mine[full].shape


class Oops(Exception):
    """Raised by a hook."""


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("error", [Oops(), KeyboardInterrupt()], ids=repr)
def test_a_model_that_raises_leaves_the_optimizer_too_as_it_was(error, used):
    def hook(*_):
        raise error

    model = net()
    model.c.register_load_state_dict_post_hook(hook)
    optimizer = stepped(model) if used else torch.optim.AdamW(model.parameters())
    untouched = Untouched(model, optimizer)
    with pytest.raises(type(error)):
        ckptool.load_into(model, named(), optimizer=optimizer)
    untouched.check()


@pytest.mark.parametrize(
    "tensor",
    [
        lambda given: given["model"]["c.weight"],
        lambda given: given["optimizer"]["state"][4]["exp_avg"],
    ],
    ids=["a weight", "a moment"],
)
def test_a_flipped_bit_leaves_both_as_they_were(tmp_path, tensor):
    given = named()
    path = tmp_path / "f.pth"
    torch.save(given, path)
    data = bytearray(path.read_bytes())
    data[data.index(tensor(given).numpy().tobytes()) + 5] ^= 16
    path.write_bytes(data)
    model = net()
    optimizer = stepped(model)
    untouched = Untouched(model, optimizer)
    with pytest.raises(CheckpointError, match=r"f\.pth"):
        ckptool.load_into(model, path, optimizer=optimizer)
    untouched.check()


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

    old, used = made()
    step(old, used)
    new, fresh = made()
    ckptool.load_into(new, content(old, used), optimizer=fresh, optimizer_order="position")
    step(old, used)
    step(new, fresh)
    assert all(torch.equal(*pair) for pair in zip(old.parameters(), new.parameters(), strict=True))
