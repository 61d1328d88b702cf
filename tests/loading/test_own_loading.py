"""Models that load in a way of their own, and code that looks at them meanwhile."""

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from ckptool.loading import load_into as installing
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched, saved, untouched_by

torch.manual_seed(0)


class Turned(nn.Module):
    """Takes `old.weight` for `proj.weight`, the other way round."""

    def __init__(self):
        super().__init__()
        self.proj, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}old.weight" in state:
            state[f"{prefix}proj.weight"] = state.pop(f"{prefix}old.weight").t()
            state[f"{prefix}proj.bias"] = state.pop(f"{prefix}old.bias")
        super()._load_from_state_dict(state, prefix, *rest)

    @staticmethod
    def saved():
        return {
            **{f"old.{name}": value for name, value in nn.Linear(3, 3).state_dict().items()},
            **{f"head.{name}": value for name, value in nn.Linear(3, 3).state_dict().items()},
        }


class TurnedByHook(nn.Module):
    """The same by a hook that is given to the module, which knows it by its closure."""

    def __init__(self):
        super().__init__()
        self.proj, self.head, self.seen = nn.Linear(3, 3), nn.Linear(3, 3), 0

        def hook(state, prefix, *rest):
            self.seen += 1
            if f"{prefix}old.weight" in state:
                state[f"{prefix}proj.weight"] = state.pop(f"{prefix}old.weight").t()
                state[f"{prefix}proj.bias"] = state.pop(f"{prefix}old.bias")

        self._register_load_state_dict_pre_hook(hook)

    saved = staticmethod(Turned.saved)


class ByVersion(nn.Module):
    """Renames what files of its first version have, as torchvision's `MLPBlock`."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(2, 4))
        self.add_module("3", nn.Linear(4, 2))

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None or metadata["version"] < 2:
            for number, new in enumerate("03"):
                for kind in ("weight", "bias"):
                    old = f"{prefix}linear_{number + 1}.{kind}"
                    if old in state:
                        state[f"{prefix}{new}.{kind}"] = state.pop(old)
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    @staticmethod
    def saved():
        old = nn.Module()
        old.linear_1, old.linear_2 = nn.Linear(2, 4), nn.Linear(4, 2)
        return old.state_dict()


class Fused(nn.Module):
    """One weight of what were three."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(3, 9)
        self.out = nn.Linear(3, 3)

    def _load_from_state_dict(self, state, prefix, *rest):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{part}.{kind}", None) for part in "qkv"]
            if parts[0] is not None:
                state[f"{prefix}qkv.{kind}"] = torch.cat(parts)
        super()._load_from_state_dict(state, prefix, *rest)

    @staticmethod
    def saved():
        old = nn.Module()
        old.q, old.k, old.v, old.out = (nn.Linear(3, 3) for _ in range(4))
        return old.state_dict()


class Split(nn.Module):
    """Three of what was one, by a bound hook."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 3) for _ in range(3))
        self._register_load_state_dict_pre_hook(self._split)

    def _split(self, state, prefix, *rest):
        for kind in ("weight", "bias"):
            whole = state.pop(f"{prefix}qkv.{kind}", None)
            if whole is not None:
                for part, value in zip("qkv", whole.chunk(3), strict=True):
                    state[f"{prefix}{part}.{kind}"] = value

    @staticmethod
    def saved():
        old = nn.Module()
        old.qkv = nn.Linear(3, 9)
        return old.state_dict()


class Dropping(nn.Module):
    """Files had an entry that nobody needs, and lack one that it can make."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("scale", torch.zeros(3))

    def _load_from_state_dict(self, state, prefix, *rest):
        state.pop(f"{prefix}position_ids", None)
        state.setdefault(f"{prefix}scale", torch.full((3,), 7.0))
        super()._load_from_state_dict(state, prefix, *rest)

    @staticmethod
    def saved():
        return {
            **{f"lin.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()},
            "position_ids": torch.arange(4),
        }


class Cropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self._register_load_state_dict_pre_hook(self._crop)

    def _crop(self, state, prefix, *rest):
        name = f"{prefix}embed.weight"
        state[name] = state[name][:4]

    @staticmethod
    def saved():
        return {"embed.weight": torch.randn(6, 2)}


class Growing(nn.Module):
    """Takes the shape of what it is given."""

    def __init__(self):
        super().__init__()
        self.bank = nn.Parameter(torch.zeros(0, 2))
        self.lin = nn.Linear(2, 2)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.bank = nn.Parameter(torch.empty_like(state[f"{prefix}bank"]))
        super()._load_from_state_dict(state, prefix, *rest)

    @staticmethod
    def saved():
        lin = nn.Linear(2, 2).state_dict()
        return {"bank": torch.randn(5, 2), **{f"lin.{n}": value for n, value in lin.items()}}


class Forgiving(nn.Module):
    """Says that nothing is missing."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.adapter = nn.Linear(2, 2)
        self.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())

    @staticmethod
    def saved():
        return {f"lin.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}


class Owner(nn.Module):
    """Takes it all into its own hands."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(
            {name.replace("linear", "lin"): value for name, value in state_dict.items()}, strict
        )

    @staticmethod
    def saved():
        return {f"linear.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}


KINDS = [Turned, TurnedByHook, ByVersion, Fused, Split, Dropping, Cropping, Growing, Forgiving]


def nested(kind):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), kind(), nn.Linear(7, 5))


def nested_state(kind):
    state = nested(nn.Identity).state_dict()
    inner = kind.saved()
    state.update({f"1.{name}": value for name, value in inner.items()})
    state._metadata.update(
        {f"1.{path}" if path else "1": entry for path, entry in _versions(inner).items()}
    )
    return state


def _versions(state):
    return getattr(state, "_metadata", {})


def prefixed(state, front):
    made = type(state)((f"{front}{name}", value) for name, value in state.items())
    made._metadata = {"": {}} | {
        f"{front}{path}".strip("."): entry for path, entry in _versions(state).items()
    }
    return made


def assert_same(model, other):
    mine, its = model.state_dict(), other.state_dict()
    assert list(mine) == list(its)
    for name, value in its.items():
        assert torch.equal(mine[name], value), name


def as_torch(model, state):
    model.load_state_dict(copy.deepcopy(state))
    return model


@pytest.mark.parametrize("kind", [*KINDS, Owner])
def test_the_root_loads_as_torch_does(kind, tmp_path):
    state = kind.saved()
    file = saved(tmp_path / "a.pth", state)
    torch.manual_seed(5)
    first, second, third = kind(), kind(), kind()
    second.load_state_dict(copy.deepcopy(first.state_dict()), strict=False)
    third.load_state_dict(copy.deepcopy(first.state_dict()), strict=False)
    as_torch(first, state)
    report = load_into(second, file)
    assert_same(second, first)
    assert report.fits
    assert (report.coverage == 1) is (kind is not Forgiving)
    load_into(third, state)
    assert_same(third, first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_does_whatever_is_around_and_match_gives_torch_what_it_asks_for(kind, tmp_path):
    state = nested_state(kind)
    expected = as_torch(nested(kind), state)
    for front in ("", "module.", "model."):
        file = saved(tmp_path / "a.pth", prefixed(state, front))
        for wrap in (lambda model: model, nn.DataParallel, torch.compile):
            model = nested(kind)
            report = load_into(wrap(model), file)
            assert_same(model, expected)
            assert report.fits
    model = nested(kind)
    fitting, report = ckptool.match(prefixed(state, "module."), model)
    model.load_state_dict(fitting)
    assert_same(model, expected)
    assert report.fits
    if kind is not Forgiving:
        with torch.device("meta"):
            model = nested(kind)
        assert load_into(model, saved(tmp_path / "a.pth", state)).coverage == 1
        assert_same(model, expected)


def test_what_own_code_makes_for_meta_tensors_is_assigned_as_torch_assigns_it(tmp_path):
    torch.save(Fused.saved(), tmp_path / "a.pth")
    with torch.device("meta"):
        model, judge = Fused().double(), Fused().double()
    load_into(model, tmp_path / "a.pth")
    judge.load_state_dict(torch.load(tmp_path / "a.pth"), assign=True)
    assert model.qkv.weight.dtype == judge.qkv.weight.dtype == torch.float32
    assert torch.equal(model.qkv.weight, judge.qkv.weight)


def test_the_report_says_who_takes_what():
    report = load_into(Fused(), Fused.saved())
    assert dict(report.kept) == {
        f"qkv.{kind}": "filled by Fused's own loading code" for kind in ("weight", "bias")
    }
    assert set(dict(report.left_out).values()) == {"loaded by Fused's own loading code"}
    report = load_into(Forgiving(), Forgiving.saved())
    assert set(dict(report.kept).values()) == {"not required by Forgiving's own loading code"}
    assert report.coverage == 0.5


def test_trying_leaves_the_model_alone():
    model = TurnedByHook()
    with untouched_by(MatchError, model):
        load_into(model, {**TurnedByHook.saved(), "more": torch.ones(1)})
    assert model.seen == 0


def test_what_is_still_missing_is_refused():
    state = Fused.saved()
    del state["out.weight"]
    model = Fused()
    with untouched_by(MatchError, model) as caught:
        load_into(model, state)
    assert caught.value.report.missing_keys == ["out.weight"]
    assert caught.value.report.unexpected_keys == []


class Counting(Fused):
    """Wants to see numbers."""

    def _load_from_state_dict(self, state, prefix, *rest):
        assert all(float(value.sum()) < 1e9 for value in state.values())
        super()._load_from_state_dict(state, prefix, *rest)


def test_code_that_looks_at_numbers_sees_those_of_the_file():
    state = Fused.saved()
    model = Counting()
    load_into(model, state)
    assert_same(model, as_torch(Counting(), state))


def test_nothing_is_concluded_inside_such_a_module():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(3, 3)

        def _load_from_state_dict(self, state, prefix, *rest):
            super()._load_from_state_dict(state, prefix, *rest)

    state = {f"old.{name}": value for name, value in nn.Linear(3, 3).state_dict().items()}
    with pytest.raises(MatchError):
        load_into(Silent(), state)


class StrictAlone(nn.Module):
    """Looks for missing names itself, and only where it is strict."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def load_state_dict(self, state_dict, strict=True):
        lacking = self.state_dict().keys() - state_dict.keys()
        if strict and lacking:
            raise RuntimeError(f"lacking {sorted(lacking)}")
        return super().load_state_dict({**self.state_dict(), **state_dict}, strict)


def test_a_loader_that_forgives_only_what_is_not_strict_is_strict_where_the_caller_is():
    model = StrictAlone()
    with untouched_by((RuntimeError, MatchError), model, match=r"lin\.bias"):
        load_into(model, {"lin.weight": torch.ones(2, 2)})
    load_into(model, {"lin.weight": torch.ones(2, 2)}, allow_missing=["lin.bias"])
    assert torch.equal(model.lin.weight, torch.ones(2, 2))


DOES = ["reads", "writes", "scales", "copies", "moves", "renews", "raises"]


class Part(nn.Module):
    """With code that is told what to do, of one kind or several."""

    def __init__(self, tensors, children):
        super().__init__()
        self.weight, self.bias = map(nn.Parameter, tensors[:2])
        self.register_buffer("scale", tensors[2])
        self.register_buffer("passing", torch.ones(4), persistent=False)
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)


class Loading(Part):
    def _load_from_state_dict(self, state, prefix, *rest):
        self.code("loading before", state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)
        self.code("loading after", state, prefix)


class Extra(Part):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        self.code("extra", {}, "")


class Tree:
    """A random model of one seed, the same each time, and what its code has seen."""

    def __init__(self, seed, raises):
        dice = random.Random(seed)
        torch.manual_seed(seed)
        self.log, self.parts = [], []
        self.does = DOES if raises else DOES[:-1]
        self.flat = torch.randn(48)
        self.model = self.part(dice, 3)
        for number, part in enumerate(self.parts):
            self.give_code(dice, number, part)

    def tensors(self, dice):
        if self.parts and dice.random() < 0.15:
            other = dice.choice(self.parts)
            return [other.weight, other.bias, torch.randn(4)]  # tied
        if dice.random() < 0.3:
            at = dice.randrange(3) * 8
            views = [self.flat[at : at + 4], self.flat[at + 4 : at + 8]]
            return [*views, self.flat[at + 2 : at + 6] if dice.random() < 0.3 else torch.randn(4)]
        return [torch.randn(4) for _ in range(3)]

    def part(self, dice, depth):
        kind = dice.choice([Part, Part, Part, Loading, Extra])
        tensors = self.tensors(dice)
        children = [self.part(dice, depth - 1) for _ in range(dice.randrange(4) if depth else 0)]
        if children and dice.random() < 0.1:
            children.append(dice.choice(children))
        made = kind(tensors, children)
        self.parts.append(made)
        return made

    def give_code(self, dice, number, part):
        def code(when):
            return partial(self.run, dice.choice(self.does), when, number, dice.randrange(1 << 30))

        told = {when: code(when) for when in ("loading before", "loading after", "extra")}
        part.code = lambda when, state, prefix: told[when](state, prefix)
        if dice.random() < 0.15:
            before = code("pre")
            part._register_load_state_dict_pre_hook(
                lambda state, prefix, *rest: before(state, prefix)
            )
        if dice.random() < 0.2:
            after = code("post")

            def hook(module, keys):
                after({}, "")

            part.register_load_state_dict_post_hook(hook)

    def run(self, what, when, number, seed, state, prefix):
        dice = random.Random(seed)
        one, other = dice.choice(self.parts), dice.choice(self.parts)
        name = dice.choice(["weight", "bias", "scale"])
        seen = [t.tolist() for p in (one, other) for t in (p.weight, p.bias, p.scale, p.passing)]
        asked = [key for key in sorted(state) if dice.random() < 0.2 and "extra" not in key]
        given = {key: state[key].tolist() for key in asked}
        self.log.append((what, when, number, prefix, seen, given))
        target, source = getattr(one, name), getattr(other, name)
        with torch.no_grad():
            if what == "writes":
                target.fill_(7)
            elif what == "scales":
                target.mul_(2)
            elif what == "copies":
                target.data.copy_(source)
            elif what == "moves":
                target.data = source.detach().clone() if dice.random() < 0.5 else source.data
            elif what == "renews":
                made = target.detach() + 1
                setattr(one, name, nn.Parameter(made) if name != "scale" else made)
            elif what == "raises":
                raise ValueError("so it was told")

    def found(self):
        every = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: (tensor.tolist(), tensor._version) for name, tensor in every}


def outcome(load, tree):
    try:
        load(tree.model)
    except ValueError as error:
        return str(error)
    return ""


def file_of(seed, path):
    source = Tree(seed, raises=False)
    with torch.no_grad():
        source.flat.add_(3)
        for part in source.parts:
            part.weight.add_(3), part.bias.add_(5), part.scale.add_(7)
    state = source.model.state_dict()
    torch.save(state, path)
    return state


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_it_sees_and_leaves_what_it_would_with_torch(first, tmp_path, monkeypatch):
    path = tmp_path / "f.pth"
    for seed in range(first, first + 40):
        state = file_of(seed, path)
        torchs = Tree(seed, seed % 4 == 0)
        wanted = outcome(lambda model, given=state: model.load_state_dict(given), torchs)
        found = None if wanted else torchs.found()
        kept = [0, 1 << 20] if seed & 4 else [1 << 20, 0]
        for given, copied in zip((state, path), kept, strict=True):
            monkeypatch.setattr(installing, "_MAX_COPIED_BYTES", copied)
            mine = Tree(seed, seed % 4 == 0)
            untouched = Untouched(mine.model)
            assert outcome(lambda model, given=given: load_into(model, given), mine) == wanted
            assert mine.log == torchs.log, (seed, given)
            if wanted:
                untouched.check()
            else:
                assert mine.found() == found, (seed, given)
