"""Globs for some names and no others."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.matching.globs import escaped_glob, globs_of


def layers(numbers, *ends):
    return [f"layers.{number}.{end}" for number in numbers for end in ends]


OTHERS = [*layers(range(32), "attn.k.weight", "mlp.weight"), "embed.weight", "head"]
Q, V = "attn.q.weight", "attn.v.weight"


@pytest.mark.parametrize(
    ("names", "others", "globs"),
    [
        (["a", "b"], ["c"], ("a", "b")),
        (["a[0]"], ["a0"], ("a[[]0]",)),
        (["a", "b", "c", "d"], [], ("a", "b", "c", "d")),
        (layers(range(4), "w"), [], ("layers.*",)),
        (layers(range(32), Q, V), OTHERS, ("layers.*.attn.q.weight", "layers.*.attn.v.weight")),
        (layers(range(32), "lora.q.A", "lora.q.B"), OTHERS, ("layers.*.lora.*",)),
        (layers(range(32, 48), "mlp.weight"), OTHERS,
         ("layers.3[2-9].mlp.weight", "layers.4[0-7].mlp.weight")),
        (layers(range(32, 48), Q, V), layers(range(32), Q, V),
         ("layers.3[2-9].*", "layers.4[0-7].*")),
        (layers((0, 2, 4, 6), Q, V), layers((1, 3, 5), Q, V), ("layers.[0246].*",)),
        ([*(f"head.{end}" for end in "abcd"), "norm.w"], OTHERS, ("head.*", "norm.w")),
        ([f"n{n}{c}.w" for n in range(9) for c in "abc"], OTHERS, ()),
        (["x" * 5000], [], ()),
        ([f"layers.{n}.experts.{e}.w" for n in (0, 2) for e in range(3)],
         [f"layers.1.experts.{e}.w" for e in range(3)], ("layers.[02].*",)),
    ],
)  # fmt: skip
def test_a_few_globs_or_none(names, others, globs):
    assert globs_of(names, [*names, *others]) == globs


names = st.lists(st.text("a01.[*", min_size=1, max_size=12), unique=True, max_size=30)


@given(names, names)
def test_they_match_those_names_and_no_other(some, others):
    found = globs_of(some, [*some, *others])
    if found:
        assert all(any(fnmatchcase(name, glob) for glob in found) for name in some)
        rest = set(others).difference(some)
        assert not [name for name in rest if any(fnmatchcase(name, glob) for glob in found)]


@given(st.text("ab[]*?!", min_size=1), st.text("ab[]*?!"))
def test_a_name_is_no_pattern(name, other):
    assert fnmatchcase(name, escaped_glob(name))
    assert fnmatchcase(other, escaped_glob(name)) is (name == other)
