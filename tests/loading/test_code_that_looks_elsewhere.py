"""Code that runs while a model is loaded may look at any of it: it sees what torch shows it."""

import random
from functools import partial

import pytest
import torch
from torch import nn

from ckptool.loading import load_into as installing
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched

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
            monkeypatch.setattr(installing, "_COPIED", copied)
            mine = Tree(seed, seed % 4 == 0)
            untouched = Untouched(mine.model)
            assert outcome(lambda model, given=given: load_into(model, given), mine) == wanted
            assert mine.log == torchs.log, (seed, given)
            if wanted:
                untouched.check()
            else:
                assert mine.found() == found, (seed, given)
