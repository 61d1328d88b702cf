"""State of an optimizer goes to the parameters that it is of, or nothing is touched at all."""

import itertools

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CheckpointError, MatchError, UsageError
from tests.loading.bits import raising, saved, untouched_by
from tests.loading.optimizing import (
    Around,
    Thin,
    adam,
    content,
    given_by,
    groups,
    lbfgs,
    stepped,
    three,
)


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
    "`optimizer_partial=True` takes the state of what both have, by names; or without optimizer= "
    "the model alone is loaded"
)
ALONE = "without optimizer= the model alone is loaded"
VOUCH = (
    "`optimizer_order='position'` where the optimizer was built over its parameters in the order "
    "of the file; or save it again with ckptool.save, which writes the names"
)
NAMELESS = (
    "the file does not name the parameters of its optimizer, and shapes and order do not prove "
    "which state belongs to which parameter"
)
COUNTS = "the file's optimizer has 6 parameters in groups of 3, 3, the optimizer"
LACKS = "the state of an optimizer is wanted, and there is none in the file"
OWN_FILE = (
    "load_into(model, {'model': ..., 'optimizer': ckptool.load(FILE)}, optimizer=...) where it is "
    "in a file of its own"
)
KIND = "the file's optimizer is of another kind than"
SPLIT = {"parameters": lambda model: groups(model, "weight$")}
REFUSED = [
    ({"parameters": unnamed}, adam, NAMELESS, VOUCH),
    ({"parameters": unnamed, "kind": torch.optim.LBFGS}, lbfgs, NAMELESS, VOUCH),
    ({"parameters": lambda model: unnamed(model)[:2]}, adam, NAMELESS, ALONE),
    ({}, lambda model: adam(three()),
     "the optimizer's parameters are not the model's: none of them is in it",
     "build the optimizer over the parameters of the model that is loaded"),
    ({}, flattened, "the optimizer's parameter 0 is from FSDP: each rank has a part of it",
     "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True "
     "loads such state, by names"),
    (SPLIT, lambda model: torch.optim.Adam(groups(model, "^a")),
     "a.bias is in group 1 of the file, and others of group 0 of the optimizer are in group 0",
     PARTIAL),
    (SPLIT, lambda model: torch.optim.Adam([model.a.weight, model.b.weight]),
     f"{COUNTS} 2 in 2; first difference: c.weight is in the file only", PARTIAL),
    (SPLIT, lambda model: torch.optim.Adam([*unnamed(model), torch.nn.Parameter(torch.ones(3))]),
     f"{COUNTS} 7 in 7; first difference: parameter 6 is in the optimizer only", PARTIAL),
    ({"parameters": lambda model: list(model.a.named_parameters(prefix="a"))},
     lambda model: torch.optim.Adam(model.b.parameters()),
     "the file's optimizer is over other parameters: a.weight is in the file only and b.weight is "
     "in the optimizer only", VOUCH),
    ({"kind": torch.optim.LBFGS}, lambda model: torch.optim.LBFGS(unnamed(model)[::-1]),
     "the optimizer keeps one state of all parameters, in another order", ALONE),
    ({}, of_kind("SGD"), f"{KIND} SGD: it has betas and lacks dampening, momentum, nesterov",
     ALONE),
    ({"parameters": lambda model: [(f"x{n}", p) for n, p in model.named_parameters()]}, stepped,
     "the file's optimizer is over other parameters: xa.weight is in the file only and a.weight is "
     "in the optimizer only", VOUCH),
    (changed(lambda _: torch.ones(5, 7)), stepped,
     "the state of a.weight has the shape [5, 7], and the parameter [3, 3]", ALONE),
    (changed(lambda held: held.double() + 1e300), stepped,
     "of the optimizer's state a.weight/exp_avg does not survive float64 -> float32, and of 5 more "
     "tensors", "allow_lossy_cast=['*/exp_avg']"),
    (lambda model: {**given_by(model), "optimizer_d": stepped(model).state_dict()}, stepped,
     "there are 2 optimizers: optimizer, optimizer_d",
     "`optimizer_key='optimizer'`; or `optimizer_key='optimizer_d'`"),
    (lambda model: {"epoch": 1, "model": model.state_dict()}, stepped, LACKS, OWN_FILE),
    ({"kind": torch.optim.SGD}, of_kind("Adam"),
     f"{KIND} Adam: it has dampening, momentum, nesterov and lacks betas", ALONE),
    ({"kind": torch.optim.SGD}, of_kind("Adam", Around),
     f"{KIND} Adam: it has dampening, momentum, nesterov and lacks betas", ALONE),
    ({"kind": torch.optim.RMSprop}, of_kind("Adagrad", Thin),
     f"{KIND} Adagrad: it has alpha, momentum and lacks lr_decay", ALONE),
    ({"kind": torch.optim.Adadelta}, of_kind("Adafactor"), f"{KIND} Adafactor: it has rho", ALONE),
    ({}, of_kind("NAdam"), f"{KIND} NAdam: it lacks momentum_decay", ALONE),
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
    with untouched_by(UsageError, model, match="is neither None nor 'position'"):
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
