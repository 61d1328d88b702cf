"""Hooks and extra states see what torch shows them, and little is held beside the model for it."""

import copy
import functools

import pytest
import torch
from torch import nn

from ckptool.errors import MatchError, UnreadableFile
from ckptool.loading.filling import installing, timing
from ckptool.loading.fitting.states import State
from ckptool.loading.live import undoing
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched

SIZE = 64


class Block(nn.Module):
    """Of children that are alike, with tensors of its own."""

    def __init__(self, *children):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("offset", torch.randn(SIZE))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)


class Extra(Block):
    """Its extra state is set where it is told to."""

    def get_extra_state(self):
        return {"some": 1}

    def set_extra_state(self, state):
        self.passing += 1
        getattr(self, "seen", lambda: None)()


def leaf():
    return nn.Linear(SIZE, SIZE)


def nested(kind=Extra):
    return Block(kind(Extra(leaf()), Block(leaf(), nn.BatchNorm1d(4))), leaf())


def looked_on(model, hooks):
    """The log of what every watcher sees: `hooks` are kinds by the path of a module."""
    log = []
    for path, module in model.named_modules():
        contents = lambda module=module: {  # noqa: E731
            name: tensor.clone()
            for held in (module.named_parameters(), module.named_buffers())
            for name, tensor in held
        }
        if "pre" in hooks.get(path, ()):

            def before(state, prefix, *_, contents=contents):
                log.append(("pre", prefix, contents(), dict(state)))

            module._register_load_state_dict_pre_hook(before)
        if "post" in hooks.get(path, ()):

            def after(module, keys, path=path, contents=contents):
                log.append(("post", path, contents(), {}))

            module.register_load_state_dict_post_hook(after)
        if isinstance(module, Extra):
            module.seen = lambda path=path, contents=contents: log.append(
                ("extra", path, contents(), {})
            )
    return log


def same(logs):
    ours, theirs = logs
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    for (_, _, *mine), (_, _, *other) in zip(ours, theirs, strict=True):
        for some, others in zip(mine, other, strict=True):
            assert list(some) == list(others)
            for name in some:
                assert (
                    some[name] == others[name]
                    if isinstance(some[name], dict)
                    else torch.equal(some[name], others[name])
                ), name
    return True


@pytest.fixture(params=["file", "dict"])
def source(request, tmp_path):
    state = nested().state_dict()
    if request.param == "dict":
        return state
    torch.save(state, tmp_path / "f.pth")
    return tmp_path / "f.pth"


HOOKS = [
    {},
    {"": ("post",)},
    {"": ("pre",)},
    {"c0": ("post",)},
    {"c0": ("pre", "post")},
    {"": ("post",), "c0.c0": ("pre",), "c0.c1.c0": ("post",)},
    {"c0.c0": ("post",), "c1": ("post",), "c0.c1": ("pre",)},
]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_everyone_sees_what_torch_shows(source, hooks, kept, monkeypatch):
    monkeypatch.setattr(installing, "_COPIED", kept)
    model = nested()
    other = copy.deepcopy(model)
    logs = looked_on(model, hooks), looked_on(other, hooks)
    load_into(model, source)
    other.load_state_dict(source if isinstance(source, dict) else torch.load(source))
    assert same(logs)
    for name, value in other.state_dict().items():
        found = model.state_dict()[name]
        assert found == value if isinstance(value, dict) else torch.equal(found, value), name


def held_beside(model, source, monkeypatch):
    """How many bytes are copied, to be put back or for torch, at the most."""
    monkeypatch.setattr(installing, "_COPIED", 0)
    held = {}
    copy, value = undoing._Held.copy, State.value

    def copied(self):
        copy(self)
        if self.content is not None:
            held["copied", id(self.content)] = self.content

    def made(self, name):
        found = value(self, name)
        if isinstance(found, torch.Tensor):
            held["made", id(found)] = found
        return found

    with monkeypatch.context() as patch:
        patch.setattr(undoing._Held, "copy", copied)
        patch.setattr(State, "value", made)
        load_into(model, source)
    return sum(tensor.nbytes for tensor in held.values())


def bytes_of(model):
    return sum(tensor.nbytes for tensor in undoing.tensors_of(model))


OWN = 2 * SIZE * 4 + 8
"""Bytes of the tensors of a `Block`'s own."""


def test_what_is_held_beside_a_model(tmp_path, monkeypatch):
    def beside(model):
        torch.save(model.state_dict(), tmp_path / "f.pth")
        return held_beside(model, tmp_path / "f.pth", monkeypatch)

    assert beside(Block(Block(leaf()), leaf())) == 0
    for kind, path in ((Extra, None), (Block, ""), (Block, "c0")):  # whatever is looked at
        after = kind(Block(leaf()), leaf())
        if path is not None:
            after.get_submodule(path).register_load_state_dict_post_hook(lambda *_: None)
        assert beside(after) == bytes_of(after)
    before = Block(Block(leaf()), leaf())
    before._register_load_state_dict_pre_hook(lambda state, *_: state["c1.bias"].shape)
    assert beside(before) == bytes_of(before) + 4 * SIZE + OWN - 8  # what is asked for, and its own
    normed = Block(nn.utils.parametrizations.weight_norm(leaf()), leaf())
    assert beside(normed) == 0  # code of torch's own, which changes names
    spectral = Block(nn.utils.spectral_norm(leaf()), leaf())
    assert beside(spectral) == 2 * bytes_of(spectral.c0)
    averaged = torch.optim.swa_utils.AveragedModel(Block(Block(leaf()), leaf()))
    assert beside(averaged) == 0


class Remaking(Extra):
    """Makes, or moves, what is inside when its extra state is set."""

    how = "new"

    def set_extra_state(self, state):
        super().set_extra_state(state)
        if self.how == "new":
            self.c0 = Extra(leaf())
        else:
            self.c1.c0, self.c0.c0 = self.c0.c0, self.c1.c0


@pytest.mark.parametrize("how", ["new", "moved"])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_an_extra_state_that_makes_what_is_inside_anew(source, how, kept, monkeypatch):
    monkeypatch.setattr(installing, "_COPIED", kept)
    model = nested(Remaking)
    model.c0.how = how
    wanted = source if isinstance(source, dict) else torch.load(source)
    load_into(model, source)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(model.state_dict()[name], value), name
    untouched = Untouched(model)
    with monkeypatch.context() as patch:
        patch.setattr(installing.Installation, "_fill", failing)
        with pytest.raises(UnreadableFile):
            load_into(model, nested().state_dict())
    untouched.check()


def failing(*_):
    raise UnreadableFile("the disk is gone")


def test_a_file_that_cannot_be_read_on_the_way(source, monkeypatch):
    monkeypatch.setattr(installing, "_COPIED", 0)
    model = nested()
    model.register_load_state_dict_post_hook(lambda *_: None)
    untouched = Untouched(model)
    filled = []

    def fill(fills):
        filled.append(list(fills))
        if len(filled) == 4:
            failing()
        installing.fill(filled[-1])

    monkeypatch.setattr(timing, "fill", fill)
    with pytest.raises(UnreadableFile, match="the disk is gone"):
        load_into(model, source)
    untouched.check()
    assert filled[0]


def renamed(state, prefix, *_):
    state[prefix + "scale"], state[prefix + "offset"] = (
        state.pop(prefix + "offset"),
        state.pop(prefix + "scale"),
    )


def kept_as_it_is(state, prefix, *_, module):
    state[prefix + "c0.weight"] = module.c0.weight


def dropped(state, prefix, *_):
    del state[prefix + "c1.bias"]


def changed(state, prefix, *_):
    state[prefix + "c0.bias"] *= 2


@pytest.mark.parametrize("hook", [renamed, kept_as_it_is, dropped, changed])
@pytest.mark.parametrize("at", ["", "c0"])
def test_what_a_hook_does_to_the_state_dict_counts(source, hook, at):
    model = Block(Block(leaf(), leaf()), leaf()) if at else Block(leaf(), leaf())
    given = Block(Block(leaf(), leaf()), leaf()) if at else Block(leaf(), leaf())
    other = copy.deepcopy(model)
    for one in (model, other):
        holder = one.get_submodule(at)
        if hook is kept_as_it_is:
            hooked = functools.partial(hook, module=holder)
            holder._register_load_state_dict_pre_hook(hooked)
        else:
            holder._register_load_state_dict_pre_hook(hook)
    path = source if not isinstance(source, dict) else None
    state = given.state_dict()
    if path is not None:
        torch.save(state, path)
    missing = other.load_state_dict(copy.deepcopy(state), strict=False).missing_keys
    if missing:
        untouched = Untouched(model)
        with pytest.raises(MatchError, match="missing once its hooks have run"):
            load_into(model, state if path is None else path)
        untouched.check()
        return
    load_into(model, copy.deepcopy(state) if path is None else path)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())


def test_a_dict_that_a_hook_keeps_is_read_while_the_file_is_open(source):
    model, kept = nested(), []
    model._register_load_state_dict_pre_hook(lambda state, *_: kept.append(state))
    model.c0._register_load_state_dict_pre_hook(lambda state, *_: kept.append(state))
    load_into(model, source)
    wanted = source if isinstance(source, dict) else torch.load(source)
    assert kept[0].keys() == wanted.keys()
    assert torch.equal(kept[1]["c0.c0.c0.weight"], wanted["c0.c0.c0.weight"])
    assert torch.equal(kept[0]["c1.weight"], wanted["c1.weight"])


def test_an_extra_state_that_gives_what_is_inside_another_shape(source):
    class Resizing(Extra):
        def set_extra_state(self, state):
            self.c1.c0.weight.data = torch.zeros(2, 2)

    model = nested(Resizing)
    untouched = Untouched(model)
    with pytest.raises(MatchError, match=r"size mismatch for c0\.c1\.c0\.weight"):
        load_into(model, source)
    untouched.check()


def test_a_module_in_two_places_is_filled_before_each(tmp_path):
    model = Block(Extra(leaf()))
    model.again = model.c0
    source = Block(Extra(leaf()))
    source.again = source.c0
    torch.save(source.state_dict(), tmp_path / "f.pth")
    log = looked_on(model, {})
    load_into(model, tmp_path / "f.pth")
    assert [path for _, path, *_ in log] == ["c0", "c0"]
    assert all(torch.equal(one[2]["scale"], source.c0.scale) for one in log)
