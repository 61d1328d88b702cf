"""Equations of axes, judged by torch: reshape, split, permute and cat."""

from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ckptool
from ckptool.errors import UsageError
from ckptool.recipes import Recipe, assembling, relayout
from ckptool.recipes.axes import Equation, Misfit, Product, Sum, compute_size

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.float64]


def taken_apart(tensor, dims, sizes):
    """The parts of a tensor, each as a dict of its axes in order and the elements: by torch."""
    todo = [([], list(zip(dims, tensor.shape, strict=True)), tensor)]
    parts = []
    while todo:
        names, rest, held = todo.pop(0)
        if not rest:
            parts.append((names, held))
            continue
        (one, _), *rest = rest
        at = len(names)
        if isinstance(one, str):
            todo.insert(0, ([*names, one], rest, held))
        elif isinstance(one, Product):
            shape = [compute_size(factor, sizes) for factor in one.factors]
            opened = held.reshape(*held.shape[:at], *shape, *held.shape[at + 1 :])
            todo.insert(0, (names, [*zip(one.factors, shape, strict=True), *rest], opened))
        else:
            shape = [compute_size(term, sizes) for term in one.terms]
            pieces = zip(one.terms, torch.split(held, shape, at), strict=True)
            todo[:0] = [(names, [(term, 0), *rest], piece) for term, piece in pieces]
    return parts


def put_together(dims, sizes, parts):
    """The tensor of some parts, which are taken from the list in their order."""

    def built(todo, names):
        for at, one in enumerate(todo):
            if isinstance(one, Product):
                return built([*todo[:at], *one.factors, *todo[at + 1 :]], names)
            if isinstance(one, Sum):
                every = [built([*todo[:at], term, *todo[at + 1 :]], names) for term in one.terms]
                axis = sum(size(term) for term in todo[:at])
                flat = [part.reshape(*head(todo[:at]), -1, *head(todo[at + 1 :])) for part in every]
                return torch.cat(flat, axis)
        wanted = sorted(name for name in todo if name != "1")
        found = next(one for one in parts if sorted(n for n in one[0] if n != "1") == wanted)
        parts.remove(found)
        own = [name for name in found[0] if name != "1"]
        plain = found[1].reshape([sizes_of(name) for name in own])
        order = [own.index(name) for name in todo if name != "1"]
        return plain.permute(order).reshape([sizes_of(name) for name in todo])

    def size(_):
        return 1

    def sizes_of(name):
        return compute_size(name, sizes)

    def head(some):
        return [compute_size(one, sizes) for one in some]

    return built(list(dims), []).reshape([compute_size(one, sizes) for one in dims])


def judged(equation, tensors, sizes):
    """What torch makes of an equation."""
    parts = [
        part
        for tensor, dims in zip(tensors, equation.left, strict=True)
        for part in taken_apart(tensor, dims, sizes)
    ]
    return [put_together(dims, sizes, parts) for dims in equation.right]


def grouped(draw, factors):
    """Factors as dimensions, some of them in parentheses."""
    dims, at = [], 0
    while at < len(factors):
        count = draw(st.integers(1, 3))
        some = factors[at : at + count]
        dims.append(some[0] if len(some) == 1 else f"({' '.join(some)})")
        at += count
    return " ".join(dims)


@st.composite
def equations(draw):
    """An equation, and the sizes of its axes."""
    sizes = {name: draw(st.integers(1, 4)) for name in "abcdxyz"}
    common = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
    terms = draw(
        st.sampled_from([["x", "y"], ["x", "x", "x"], ["x", "1", "1"], ["(x y)", "x", "z"]])
    )

    def tensor(some):
        inner = some[0] if len(some) == 1 else f"({' + '.join(some)})"
        factors = draw(st.permutations([*common, inner]))
        return grouped(draw, factors)

    def side():
        if draw(st.booleans()):
            return tensor(terms)
        return ", ".join(tensor([term.strip("()") if " " in term else term]) for term in terms)

    text = f"{side()} -> {side()}"
    return text, {name: sizes[name] for name in Equation.parse(text).axes}


def saved(tmp_path, state):
    torch.save(state, tmp_path / "in.pth")
    return ckptool.open(tmp_path / "in.pth")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Cut what is moved into pieces that small tensors have several of."""
    for name, value in {
        "_MAX_BLOCK_BYTES": 96,
        "_MIN_WIDE_READ_BYTES": 40,
        "_TILE_BYTES": 64,
        "_MAX_TILE_ROWS": 2,
        "_MIN_RUN_BYTES": 24,
        "_MIN_REMOTE_RUN_BYTES": 48,
    }.items():
        monkeypatch.setattr(assembling, name, value)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_equation_does_what_torch_does_and_leads_back(tmp_path_factory, data):
    text, sizes = data.draw(equations())
    dtype = data.draw(st.sampled_from(DTYPES))
    equation = Equation.parse(text)
    state, names = (
        {},
        [[f"{side}{n}" for n in range(len(getattr(equation, side)))] for side in ("left", "right")],
    )
    for name, dims in zip(names[0], equation.left, strict=True):
        shape = [compute_size(one, sizes) for one in dims]
        flat = torch.randint(-100, 100, (prod(shape),)).to(dtype)
        order = data.draw(st.permutations(range(len(shape))))
        strided = flat.reshape([shape[axis] for axis in order])  # saved with other strides
        state[name] = strided.permute([order.index(axis) for axis in range(len(shape))])
    recipe = Recipe.from_rule(names[0], names[1], text)
    with saved(tmp_path_factory.mktemp("axes"), state) as checkpoint:
        made = relayout(checkpoint, recipe, sizes)
        found = {path[-1]: tensor.torch() for path, tensor in made.tensors()}
        expected = judged(equation, list(state.values()), sizes)
        for name, one in zip(names[1], expected, strict=True):
            assert torch.equal(found[name], one), text
        back = relayout(made, recipe.invert(), sizes)
        for name, one in back.by_name.items():
            assert torch.equal(one.torch(), state[name]), text
        assert made.changes[-1].count == 1
        for _, tensor in made.tensors():
            start = data.draw(st.integers(0, tensor.nbytes))
            stop = data.draw(st.integers(start, tensor.nbytes))
            assert tensor.data.read(start, stop - start) == tensor.read()[start:stop]


def test_variables_of_keys_are_axes_of_the_other_side(tmp_path):
    whole = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    state = {f"{a}.{b}.w": whole[a, b].clone() for a in range(2) for b in range(3)}
    recipe = Recipe.from_rule("{a}.{b}.w", "{w:x|y|z|u}.v", "w i -> (a i) b")
    with saved(tmp_path, state) as checkpoint:
        made = relayout(checkpoint, recipe, {})
        for at, name in enumerate("xyzu"):
            expected = whole[:, :, at].permute(0, 2, 1).reshape(10, 3)
            assert torch.equal(made.by_name[f"{name}.v"].torch(), expected)
        assert made.changes[-1].text == "reversible with --reverse --param a=2"
        back = relayout(made, recipe.invert(), {"a": 2})
        assert {name: one.read() for name, one in back.by_name.items()} == {
            name: one.read() for name, one in checkpoint.by_name.items()
        }


CASES = [
    ("(h half 2) ... -> (h 2 half) ...", {"half": 3}, [(12, 5)], [(12, 5)]),
    ("i o -> o i", {}, [(3, 4)], [(4, 3)]),
    ("o i 1 1 -> o i", {}, [(3, 4, 1, 1)], [(3, 4)]),
    ("(e d) f -> e d f", {"e": 2}, [(6, 4)], [(2, 3, 4)]),
    ("(q + k + k) i -> q i, k i, k i", {"q": 6}, [(10, 3)], [(6, 3), (2, 3), (2, 3)]),
    ("(g (per + 1 + 1) d) ... -> (g per d) ..., (g d) ..., (g d) ...", {"per": 3, "d": 2},
     [(20, 3)], [(12, 3), (4, 3), (4, 3)]),
    ("(c + c') ... -> (c' + c) ...", {}, [(6,)], [(6,)]),
    ("n ->", {}, [(1,)], None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "known", "shapes", "targets"), CASES)
def test_shapes_decide_the_sizes_of_axes(text, known, shapes, targets):
    if targets is None:
        with pytest.raises(UsageError, match="no part on the left"):
            Recipe.from_rule("a", "b", text)
        return
    equation, sizes = (
        Equation.parse(text).expand_ellipsis([len(one) for one in shapes]),
        dict(known),
    )
    equation.solve(shapes, sizes)
    assert equation.compute_right_shapes(sizes) == targets


@pytest.mark.parametrize(
    ("text", "shape", "match"),
    [
        ("(h half 2) i -> (h 2 half) i", (12, 4), "the size of h, half is unknown"),
        ("(c + c) i -> c i, c i", (5, 4), "5 is not divisible into"),
        ("(h 4) i -> h 4 i", (6, 4), "6 is not divisible into"),
        ("o i -> i o", (6,), "has 1 dimension"),
        ("o ... -> ... o", (), "has 0 dimension"),
        ("(a (a + 1)) -> a (a + 1)", (6,), "is 12"),
    ],
)
def test_a_shape_that_does_not_fit_is_told(text, shape, match):
    equation = Equation.parse(text)
    with pytest.raises(Misfit, match=match):
        equation.expand_ellipsis([len(shape)]).solve([shape], {})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no axes"),
        ("a b", "'a b' is wrong: unexpected 'end'"),
        ("a -> b -> c", "wrong: unexpected '->'"),
        ("(a -> a", "not closed"),
        ("a) -> a", r"wrong: unexpected '\)'"),
        ("a + b -> a b", r"wrong: unexpected '\+'"),
        ("() -> a", "parentheses or a summand are empty"),
        ("(a + ) -> a", "parentheses or a summand are empty"),
        ("(...) -> a", "inside parentheses"),
        ("... ... -> ...", "several"),
        ("a ; b -> a", "';'"),
        ("(" * 9 + "a" + ")" * 9 + " -> a", "parentheses are nested more than 8 deep"),
        ("a " * 401 + "-> a", "more than 400"),
        (" ".join("(a + b)" for _ in range(9)) + " -> a", "more than 256 parts"),
    ],
)
def test_what_is_no_equation_is_refused(text, match):
    with pytest.raises(UsageError, match=match):
        Equation.parse(text)


@pytest.mark.parametrize(
    ("left", "right", "text", "match"),
    [
        ("a", "b", "(q + k) i -> q i", "but no part on the right"),
        ("a", "b", "q i -> (q + k) i", "a part on the right has"),
        ("a", "b", "(q q) -> q", "twice"),
        ("a", ["b", "c"], "q -> q", "1 tensors on one side where the rule has 2"),
        ("a", ["b", "c"], [], "several keys on one side, but no axes"),
        ("a.{n}", ["b.{n}", "c"], "(c + c) -> c, c", "does not have the variable n"),
        ("a.{n}", "b", "n i -> n i", "n is both a variable of the key and an axis"),
        ("a", ["b", "c"], "i -> i, _p", "a tensor on the right has only padding"),
    ],
)
def test_a_rule_that_leaves_something_over_is_refused(left, right, text, match):
    with pytest.raises(UsageError, match=match):
        Recipe.from_rule(left, right, text)
