"""Recipes as data: what is read, what is refused with its line, and what is hostile."""

import json
import os
import tomllib

import pytest

from ckptool.errors import UsageError
from ckptool.recipes import Recipe, list_shipped

WHOLE = """
about = "two layouts"
files = "model.{rank:02}.pth"
rest = "keep"
drop = { from = ["x"], to = ["y.{n}"] }

[params]
heads = ["params.json:n_heads", "config.json:text_config.heads", 4]
half = "heads // 2"

[tied]
to = { "head" = "embed" }

[names]
"{rank:02}/a.{n}" = "b.{n}"

[[tensors]]
from = ["{rank:02}/c.{n}"]
to = "d.{n}"
axes = ["o heads -> (rank o) heads", "o i -> o (rank i)"]
"""


def test_a_recipe_is_the_same_in_toml_and_json():
    recipe = Recipe.parse(WHOLE, name="one")
    assert recipe == Recipe.parse(json.dumps(tomllib.loads(WHOLE)), name="one")
    assert (recipe.name, recipe.about, recipe.files) == (
        "one",
        "two layouts",
        "model.{rank:02}.pth",
    )
    assert recipe.uses_paths
    assert not recipe.invert().uses_paths
    assert recipe.invert().invert() == recipe
    assert [rule.text for rule in recipe.invert().passes[0]] == [
        "d.{n} -> {rank:02}/c.{n}",
        "b.{n} -> {rank:02}/a.{n}",
    ]
    assert recipe.invert().passes[0][0].equations[1].text == "o (rank i) -> o i"


def test_a_recipe_is_loaded_by_its_name_or_its_path(tmp_path):
    for name, about in list_shipped():
        assert Recipe.load(name).about == about
    (tmp_path / "mine.toml").write_text(WHOLE)
    assert Recipe.load(tmp_path / "mine.toml").name == "mine"
    with pytest.raises(UsageError, match="no recipe is named 'llama-9'") as error:
        Recipe.load("llama-9")
    assert "llama-meta-to-hf" in error.value.hint
    with pytest.raises(UsageError, match="no such file"):
        Recipe.load(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        Recipe.load(tmp_path / "pipe.toml")
    (tmp_path / "latin.toml").write_bytes(b"about = '\xe9'")
    with pytest.raises(UsageError, match="not UTF-8"):
        Recipe.load(tmp_path / "latin.toml")


WRONG = [
    ("a = ", "not TOML: Invalid value"),
    ("{", "not JSON"),
    ("[1]\n", "unknown key 1"),
    ("rules = 1", "unknown key rules"),
    ("about = 1", "about is not a string"),
    ("about = 'x'", "no rules"),
    ("rest = 'drop'\n[names]\na='b'", "rest is 'drop'"),
    ("names = 1", "not a table"),
    ("[names]\na = 1", "recipe wrong, line 2: 'a' has no new key"),
    ("[names]\n\n'{a' = 'b'", r"recipe wrong, line 3: '\{a' has an unbalanced brace, or is empty"),
    ("[[tensors]]\nfrom = 'a'", "needs from and to"),
    ("[[tensors]]\nfrom = 'a'\nto = 'b'\nequation = 'c'", "unknown key equation"),
    ("[[tensors]]\nfrom = 'a'\nto = 'b'\naxes = 'i o -> (i'", "line 2: the equation"),
    ("[[tensors]]\nfrom = 'a'\nto = ['b', 'c']\naxes = '(q + k) -> q, q'", "line 2.*no part"),
    ("[[tensors]]\nfrom = ['a', 'b']\nto = 'c'", "line 2: the rule a, b -> c has several keys"),
    ("[names]\na='b'\n[[pass]]\n[pass.names]\nc='d'", "names and tensors are outside the passes"),
    ("pass = []", "list of 1 to 16"),
    ("[names]\na='b'\n[params]\nx = 'y'\ny = ['z', 'x + 1']", "x, y depend on each other"),
    ("[names]\na='b'\n[params]\nx = 'config:head_dim // 2'", "is not a key in a file"),
    ("[names]\na='b'\n[params]\nx = '../config.json:head'", "is not a key in a file"),
    ("[names]\na='b'\n[params]\nx = '/etc/passwd:root'", "is not a key in a file"),
    ("[names]\na='b'\n[params]\nx = '__import__(1)'", "is not arithmetic"),
    ("[names]\na='b'\n[params]\nx = '2 ** 9'", "is not arithmetic"),
    ("[names]\na='b'\n[params]\nx = 'y.z'", "is not arithmetic"),
    ("[names]\na='b'\n[params]\nx = 1.5", "is not a parameter"),
    ("[names]\na='b'\n[params]\nx = true", "is not a parameter"),
    ("[names]\na='b'\n[params]\n'x y' = 1", "is not the name of a parameter"),
    ("files = '../x.{n:02}.pth'\n[names]\na='b'", "line 1: .* is not a file name with a number"),
    ("files = 'a/x.{n:02}.pth'\n[names]\na='b'", "is not a file name"),
    ("files = '{x*}.pth'\n[names]\na='b'", "is not a file name with a number"),
    ("files = 'x.pth'\n[names]\na='b'", "is not a file name with a number"),
    ("drop = ['a']\n[names]\na='b'", "recipe wrong, drop: found a list, expected a table"),
    ("[tied]\nto = {a = 'b', b = 'c'}\n[names]\na='b'", "a is tied to a key that is itself tied"),
    ("[names]\n'{w:a|b}' = '{w:a|b|c}'", "lists of 2 and 3 words"),
]


@pytest.mark.parametrize(("text", "match"), WRONG)
def test_a_recipe_that_is_wrong_in_itself_is_refused(text, match):
    with pytest.raises(UsageError, match=match) as error:
        Recipe.parse(text, name="wrong")
    assert "recipe wrong" in error.value.message


HOSTILE = {
    "huge": "# " + "x" * (1 << 18),
    "deep toml": "a = " + "[" * 50_000,
    "deep json": '{"names": ' * 20_000,
    "deep keys": "a" + ".a" * 60_000 + " = 1",
    "deep quoted keys": "[" + "'a' . " * 40_000 + '"a"]',
    "a long word": "a" * 250_000,
    "many quotes": "'\"" * 120_000,
    "many rules": "[names]\n" + "\n".join(f"'a{n}' = 'b{n}'" for n in range(2001)),
    "many params": "[names]\na='b'\n[params]\n" + "\n".join(f"p{n} = 1" for n in range(201)),
    "a long circle": "[names]\na='b'\n[params]\n"
    + "\n".join(f"p{n} = 'p{(n + 1) % 200}'" for n in range(200)),
    "many passes": "[[pass]]\nnames = {a = 'b'}\n" * 17,
    "many parts": f"[[tensors]]\nfrom='a'\nto='b'\naxes='{'(a + b) ' * 60}-> a'",
    "deep axes": f"[[tensors]]\nfrom='a'\nto='b'\naxes='{'(' * 200}a{')' * 200} -> a'",
    "a deep expression": "[names]\na='b'\n[params]\nx = '" + "(" * 99 + "1" + ")" * 99 + "+'",
    "a large number": "[names]\na='b'\n[params]\nx = " + "9" * 4000,
    "many words": "[names]\n'{w:" + "|".join(["a"] * 2000) + "}' = 'b'",
    "many variables": "[names]\n'" + "{x*}a" * 300 + "' = 'b'",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_recipe_is_refused_at_once(text):
    with pytest.raises(UsageError):
        Recipe.parse(text, name="hostile")
