"""Recipes as data: parse TOML or JSON, check and reverse."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ckptool.errors import UnreadableFile, UsageError
from ckptool.files.source import FileSource
from ckptool.recipes.axes import Equation, Misfit, list_axes, pair_parts
from ckptool.recipes.names import Pattern, parse_patterns
from ckptool.recipes.params import Term, parse_term, refuse_cycles
from ckptool.words import listed, printable

_MAX_RECIPE_BYTES = 1 << 18
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?<![\w-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{100}}")
"""A key of TOML with more than 100 parts: tomllib needs memory for the square of their number."""
"""The largest size of a recipe."""
_MAX_RULES, _MAX_PARAMS, _MAX_PASSES, _MAX_ALTERNATIVES, _MAX_KEYS = 2_000, 200, 16, 16, 64
_SHIPPED = Path(__file__).parent / "shipped"
_FIELDS = {"about", "files", "rest", "drop", "params", "tied", "names", "tensors", "pass"}


_Entries = TypeVar("_Entries")


class Sides(NamedTuple, Generic[_Entries]):
    """Entries of a recipe for its source, and for its target."""

    source: _Entries
    target: _Entries

    def swap(self) -> Sides[_Entries]:
        """Return the entries for the inverse recipe."""
        return Sides(self.target, self.source)


@dataclass(frozen=True)
class RecipeRule:
    """A rule for tensors with matching keys."""

    left: tuple[Pattern, ...]
    right: tuple[Pattern, ...]
    equations: tuple[Equation, ...]
    """The first one that fits the shapes applies; without equations, elements do not change."""
    is_optional: bool
    number: int
    """The position among the rules of the pass."""

    @classmethod
    def parse(
        cls, left: Sequence[str], right: Sequence[str], axes: Sequence[str], number: int = 0
    ) -> RecipeRule:
        """Return a rule for patterns of keys on both sides, and equations in `axes`.

        Raises:
            UsageError: a text is no pattern or no equation, or they do not fit together.
        """
        patterns = parse_patterns([*left, *right])
        rule = cls(
            tuple(patterns[: len(left)]),
            tuple(patterns[len(left) :]),
            tuple(map(Equation.parse, axes)),
            any(pattern.is_optional for pattern in patterns),
            number,
        )
        rule._check_names()
        rule.invert()._check_names()
        for equation in rule.equations:
            rule._check_pairs(equation)
        return rule

    @property
    def text(self) -> str:
        """The rule as text: the keys of both sides."""
        left, right = (
            ", ".join(pattern.text for pattern in side) for side in (self.left, self.right)
        )
        return printable(f"{left} -> {right}")

    @cached_property
    def common(self) -> tuple[str, ...]:
        """The variables of both sides; tensors with equal values form a group."""
        left, right = (
            frozenset().union(*(pattern.names for pattern in side)) for side in self._sides
        )
        return tuple(sorted(left & right))

    @property
    def _sides(self) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
        return self.left, self.right

    @cached_property
    def stacked(self) -> tuple[tuple[str, ...], ...]:
        """For each key on the left, the variables that the right side does not have."""
        return tuple(self._list_own_variables(pattern) for pattern in self.left)

    @cached_property
    def unstacked(self) -> tuple[tuple[str, ...], ...]:
        """For each key on the right, the variables that the left side does not have."""
        return tuple(self._list_own_variables(pattern) for pattern in self.right)

    def _list_own_variables(self, pattern: Pattern) -> tuple[str, ...]:
        """Return the variables of a key that the other side does not have."""
        names = (
            variable.name for variable in pattern.variables if variable.name not in self.common
        )
        return tuple(dict.fromkeys(names))

    @cached_property
    def takes_single(self) -> bool:
        """True if a group has one tensor for each key on the left."""
        return not any(self.stacked)

    @cached_property
    def renames(self) -> bool:
        """True if the rule only renames single tensors."""
        names = self.left[0].names ^ self.right[0].names
        return len(self.left) == len(self.right) == 1 and not (self.equations or names)

    def invert(self) -> RecipeRule:
        """Return the inverse rule."""
        equations = tuple(equation.invert() for equation in self.equations)
        return replace(self, left=self.right, right=self.left, equations=equations)

    def bind(self, params: Mapping[str, int]) -> RecipeRule:
        """Return the rule with the values of the parameters that shift variables."""
        left, right = (
            tuple(pattern.bind(params) for pattern in side) for side in (self.left, self.right)
        )
        return replace(self, left=left, right=right)

    def _check_names(self) -> None:
        """Refuse a left key that lacks a common variable, and several keys without an equation.

        Common variables, those of the keys on both sides, tell which tensors belong together.

        Raises:
            UsageError: if there is one.
        """
        for pattern in self.left:
            if missing := [name for name in self.common if name not in pattern.names]:
                text = f"{printable(pattern.text)!r} does not have the variable {listed(missing)}"
                raise UsageError(f"{text} of the other keys in {self.text}")
        if not self.equations and (len(self.left) > 1 or len(self.right) > 1):
            raise UsageError(f"the rule {self.text} has several keys on one side, but no axes")

    def _check_pairs(self, equation: Equation) -> None:
        """Refuse an equation with another number of tensors than the rule, or unpaired parts.

        Raises:
            UsageError: with the reason; also if a variable of a key is an axis of its own tensor.
        """
        for side, keys in ((equation.left, self.left), (equation.right, self.right)):
            if len(side) != len(keys):
                text = f"the equation {equation.text!r} has {len(side)} tensors on one side"
                raise UsageError(f"{text} where the rule has {len(keys)}: {self.text}")
        try:
            for names, side in ((self.stacked, equation.left), (self.unstacked, equation.right)):
                for variables, dimensions in zip(names, side, strict=True):
                    if duplicates := [name for name in list_axes(dimensions) if name in variables]:
                        raise Misfit(
                            f"{listed(duplicates)} is both a variable of the key and an axis"
                        )
            expanded = equation.expand_ellipsis([len(tensor) for tensor in equation.left])
            # The sizes do not matter for the pairs, so each axis gets size 2.
            pairs = self.pair_parts(expanded, dict.fromkeys(expanded.axes, 2))
            filled_tensors = {target for _source, _source_part, target, _target_part in pairs}
            if len(filled_tensors) < len(self.right):
                raise Misfit("a tensor on the right has only padding")
        except Misfit as misfit:
            text = f"the equation {equation.text!r} is wrong: {misfit.text}"
            raise UsageError(f"{text}, in {self.text}") from None

    def pair_parts(self, equation: Equation, sizes: Mapping[str, int]) -> Iterator[Any]:
        """Yield the matching parts of an equation, as `axes.pair_parts` does.

        A variable that only one side's key has may be an axis on the other side.
        """
        left_key_axes = [frozenset(names) & equation.right_axes for names in self.stacked]
        right_key_axes = [frozenset(names) & equation.left_axes for names in self.unstacked]
        parts = equation.list_left_parts(sizes), equation.list_right_parts(sizes)
        return pair_parts(*parts, left_key_axes, right_key_axes)


@dataclass(frozen=True)
class Recipe:
    """A conversion of the keys and tensors of one layout to those of another."""

    name: str
    about: str
    passes: tuple[tuple[RecipeRule, ...], ...]
    params: Mapping[str, tuple[Term, ...]]
    files: str | None = None
    """The file names of the source (reversed: of the target): `consolidated.{rank:02}.pth`."""
    keeps_rest: bool = False
    """True if tensors without a matching rule are kept."""
    drop: Sides[tuple[Pattern, ...]] = field(
        default_factory=lambda: Sides[tuple[Pattern, ...]]((), ())
    )
    """The keys left out of the source, and of the target when reversed."""
    tied: Sides[dict[str, str]] = field(default_factory=lambda: Sides[dict[str, str]]({}, {}))
    """Keys of the source, and of the target, that are tied to another key if they are missing."""
    is_reversed: bool = False
    text: str = field(default="", repr=False, compare=False)
    """The TOML or JSON text."""

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Load a shipped recipe by its name, or a `.toml` or `.json` file.

        Raises:
            UsageError: there is none, or it is wrong; the message has the line or the rule.
        """
        path = Path(source)
        is_name = path.suffix not in (".toml", ".json") and re.fullmatch(r"[\w-]+", str(source))
        if is_name:
            path = _SHIPPED / f"{source}.toml"
            if not path.is_file():
                known = [name for name, _ in list_shipped()]
                text = f"no recipe is named {printable(str(source))!r}"
                raise UsageError(text, hint=f"give a .toml file, or one of {listed(known, 30)}")
        try:
            file = FileSource(path)
            try:
                data = file.read(0, min(file.size, _MAX_RECIPE_BYTES + 1))
            finally:
                file.close()
        except UnreadableFile as error:
            raise UsageError(error.message, file=path, hint=error.hint) from error
        if len(data) > _MAX_RECIPE_BYTES:
            raise UsageError(f"the recipe is larger than {_MAX_RECIPE_BYTES:,} bytes", file=path)
        try:
            return cls.parse(data.decode(), name=path.stem, is_json=path.suffix == ".json")
        except UnicodeDecodeError:
            raise UsageError("the recipe is not UTF-8", file=path) from None
        except UsageError as error:
            error.file = None if is_name else os.fspath(path)
            raise

    @classmethod
    def parse(cls, text: str, *, name: str, is_json: bool = False) -> Recipe:
        """Parse a recipe in TOML or JSON.

        Raises:
            UsageError: it is wrong; the message has the line or the rule.
        """
        if len(text) > _MAX_RECIPE_BYTES:
            raise UsageError(
                f"the recipe {printable(name)} has more than {_MAX_RECIPE_BYTES:,} bytes"
            )
        is_json = is_json or text.lstrip()[:1] == "{"
        if not is_json and _DEEP_KEY.search(text):
            raise UsageError(f"the recipe {printable(name)} has a key of more than 100 parts")
        try:
            data = json.loads(text) if is_json else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            kind = "JSON" if is_json else "TOML"
            raise UsageError(f"the recipe {printable(name)} is not {kind}: {why}") from None
        return replace(_Reader(text, name).parse_recipe(data), text=text)

    @classmethod
    def from_rule(
        cls, from_: str | Sequence[str], to: str | Sequence[str], axes: str | Sequence[str] = ()
    ) -> Recipe:
        """Return a recipe with one rule, which keeps all other tensors.

        Raises:
            UsageError: the rule is wrong.
        """
        left, right, equations = (
            [texts] if isinstance(texts, str) else texts for texts in (from_, to, axes)
        )
        rule = RecipeRule.parse(left, right, equations)
        return cls(name="rule", about="", passes=((rule,),), params={}, keeps_rest=True)

    def invert(self) -> Recipe:
        """Return the inverse recipe."""
        passes = tuple(tuple(rule.invert() for rule in rules) for rules in reversed(self.passes))
        return replace(
            self,
            passes=passes,
            drop=self.drop.swap(),
            tied=self.tied.swap(),
            is_reversed=not self.is_reversed,
        )

    @property
    def uses_paths(self) -> bool:
        """True if the recipe matches whole paths: a key of its source contains a `/`."""
        if any("/" in pattern.text for pattern in self.drop.source):
            return True
        for rules in self.passes:
            if any("/" in pattern.text for rule in rules for pattern in rule.left):
                return True
            if any("/" in pattern.text for rule in rules for pattern in rule.right):
                return False  # the paths of later passes are made by this one
        return False

    def keeps_for_next_pass(self, rule: RecipeRule) -> bool:
        """Return True if a rule keeps a key unchanged for the next pass, such as `{x*}` -> `{x*}`.

        With it, a pass may rename the keys of one version and leave those of another. Such a rule
        does not count as a match.
        """
        variables = rule.left[0].variables
        has_text = any(variable.kind == "text" for variable in variables)  # as `{x*}`
        return rule.left == rule.right and has_text and rule.renames and len(self.passes) > 1

    def find_unfinished(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that still contain a `/`, although the target has no paths.

        A rule that only keeps a key for the next pass (`{x*}` -> `{x*}`) does not finish it.
        """
        if not self.uses_paths or self.invert().uses_paths:  # paths of source, target
            return []
        return [key for key in keys if "/" in key]

    @property
    def words(self) -> frozenset[str]:
        """All possible parameter names: in `params`, in equations, and variables with their shifts.

        A variable can be shifted by a parameter, or by one with a minus sign.
        """
        rules = [rule for rules in self.passes for rule in rules]
        axes = (name for rule in rules for equation in rule.equations for name in equation.axes)
        patterns = [pattern for rule in rules for pattern in (*rule.left, *rule.right)]
        variables = (variable for pattern in patterns for variable in pattern.variables)
        words = (
            word.lstrip("-") for variable in variables for word in (variable.name, variable.shift)
        )
        return frozenset((*self.params, *axes, *words))


class _Reader:
    """A parser of recipes in TOML or JSON."""

    def __init__(self, text: str, name: str) -> None:
        """Take the text, in which errors are located, and the name of the recipe."""
        self._text, self._name = text, name

    def parse_recipe(self, data: Any) -> Recipe:
        """Return the recipe of the parsed TOML or JSON.

        Raises:
            UsageError: if the data is not a recipe.
        """
        with self._locate_errors(""):
            _check_keys(data, _FIELDS)
            about, files, rest = (_read_text(data, key) for key in ("about", "files", "rest"))
            if rest not in (None, "refuse", "keep"):
                raise UsageError(f'rest is {printable(rest)!r}, expected "refuse" or "keep"')
        passes = data.get("pass", [data])  # without `pass`, the rules are at the top
        with self._locate_errors("pass"):
            if not isinstance(passes, list) or not 1 <= len(passes) <= _MAX_PASSES:
                raise UsageError(f"pass is not a list of 1 to {_MAX_PASSES} tables")
            if "pass" in data and not data.keys().isdisjoint(("names", "tensors")):
                raise UsageError("names and tensors are outside the passes")
        recipe = Recipe(
            name=self._name,
            about=printable(about or ""),
            passes=tuple(self._parse_rules(table, is_pass="pass" in data) for table in passes),
            params=self._parse_params(data.get("params", {})),
            files=self._check_files(files),
            keeps_rest=rest == "keep",
            drop=self._parse_sides(data, "drop", self._parse_drop, ()),
            tied=self._parse_sides(data, "tied", self._parse_tied, {}),
        )
        if not any(recipe.passes):
            raise UsageError(f"the recipe {printable(self._name)} has no rules")
        return recipe

    @contextmanager
    def _locate_errors(self, subject: str, *texts: str) -> Iterator[None]:
        """Add the recipe, and the line of one of the texts, to the errors of a block."""
        try:
            yield
        except UsageError as error:
            line = next(filter(None, map(self._find_line, texts)), None)
            place = f", line {line}" if line else f", {subject}" if subject else ""
            error.message = f"recipe {printable(self._name)}{place}: {error.message}"
            raise

    def _find_line(self, text: str) -> int | None:
        """Return the line of the first occurrence of a text in the recipe, or None.

        It is searched as in a string of JSON or TOML, and not as a part of a longer key.
        """
        escaped = re.escape(json.dumps(text, ensure_ascii=False)[1:-1])  # without its quotes
        match = re.search(rf"(?<![\w.}}*/-]){escaped}(?![\w.{{*/-])", self._text)
        return None if match is None else self._text.count("\n", 0, match.start()) + 1

    def _parse_rules(self, data: Any, is_pass: bool) -> tuple[RecipeRule, ...]:
        """Return the rules of one pass, or (not `is_pass`) of a recipe that has only these."""
        with self._locate_errors("pass"):
            if is_pass:
                _check_keys(data, {"names", "tensors"})
            tensors, names = data.get("tensors", []), data.get("names", {})
            if not isinstance(tensors, list) or not isinstance(names, dict):
                raise UsageError("tensors is not a list of tables, or names is not a table")
            if len(tensors) + len(names) > _MAX_RULES:
                raise UsageError(f"a pass has more than {_MAX_RULES:,} rules")
        rules: list[RecipeRule] = []
        for table in tensors:
            with self._locate_errors("tensors", *self._first_key(table)):
                _check_keys(table, {"from", "to", "axes"})
                left, right = (_read_texts(table, key) for key in ("from", "to"))
                if not left or not right:
                    raise UsageError("a rule needs from and to")
                equations = _read_texts(table, "axes", _MAX_ALTERNATIVES)
                rules.append(RecipeRule.parse(left, right, equations, len(rules)))
        for old, new in names.items():
            with self._locate_errors("names", old):
                if not isinstance(new, str):
                    raise UsageError(f"{printable(old)!r} has no new key")
                rules.append(RecipeRule.parse([old], [new], [], len(rules)))
        return tuple(rules)

    @staticmethod
    def _first_key(data: Any) -> list[str]:
        """Return the first key of a rule, with which its line is found, as a list."""
        keys = data.get("from") if isinstance(data, dict) else None
        first = keys[0] if isinstance(keys, list) and keys else keys
        return [first] if isinstance(first, str) else []

    def _parse_params(self, data: Any) -> dict[str, tuple[Term, ...]]:
        """Return the definitions of each parameter."""
        params: dict[str, tuple[Term, ...]] = {}
        with self._locate_errors("params"):
            if not isinstance(data, dict) or len(data) > _MAX_PARAMS:
                raise UsageError(f"params is not a table of at most {_MAX_PARAMS} parameters")
            for name, value in data.items():
                definitions = value if isinstance(value, list) else [value]
                if (
                    not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
                    or len(definitions) > _MAX_ALTERNATIVES
                ):
                    text = f"{printable(name)!r} is not the name of a parameter"
                    raise UsageError(f"{text}, or has more than {_MAX_ALTERNATIVES} definitions")
                params[name] = tuple(map(parse_term, definitions))
            refuse_cycles(params)
        return params

    def _check_files(self, files: str | None) -> str | None:
        """Return the pattern of file names, or refuse it."""
        with self._locate_errors("files", files or ""):
            if files is not None:
                pattern = Pattern.parse(files)
                has_only_numbers = all(
                    variable.kind == "number" and not variable.sign
                    for variable in pattern.variables
                )
                is_path = any(re.search(r"[/\\:\0]", literal) for literal in pattern.literals)
                is_numbered = bool(pattern.variables) and has_only_numbers
                if not is_numbered or is_path or files.startswith("."):
                    text = f"{printable(files)!r} is not a file name with a number"
                    raise UsageError(text, hint='write files = "consolidated.{rank:02}.pth"')
        return files

    def _parse_sides(self, data: Any, key: str, read: Any, default: Any) -> Sides[Any]:
        """Return the values of `from` and `to` in the table `key`, each read by `read`.

        A missing one is `default`.
        """
        with self._locate_errors(key):
            table = data.get(key, {})
            _check_keys(table, {"from", "to"})
            source = read(table["from"]) if "from" in table else default
            target = read(table["to"]) if "to" in table else default
        return Sides(source, target)

    @staticmethod
    def _parse_drop(value: Any) -> tuple[Pattern, ...]:
        """Return the patterns of the keys to leave out."""
        return tuple(map(Pattern.parse, _read_texts({"drop": value}, "drop", _MAX_RULES)))

    @staticmethod
    def _parse_tied(table: Any) -> dict[str, str]:
        """Return the tied keys, each with the key of its tensor."""
        is_table = isinstance(table, dict) and all(
            isinstance(target, str) for target in table.values()
        )
        if not is_table or len(table) > _MAX_RULES:
            raise UsageError('"tied" is not a table of keys')
        if chained := [key for key, target in table.items() if target in table]:
            raise UsageError(f"{listed(chained)} is tied to a key that is itself tied")
        return dict(table)


def _check_keys(data: Any, known: set[str]) -> None:
    """Refuse data that is not a table, or has unknown keys."""
    if not isinstance(data, dict):
        raise UsageError(f"found a {type(data).__name__}, expected a table")
    if unknown := sorted(data.keys() - known):
        raise UsageError(f"unknown key {listed(unknown)}", hint=f"use {listed(sorted(known), 20)}")


def _read_text(data: Any, key: str) -> str | None:
    """Return a string of a table, or None."""
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{key} is not a string")
    return value


def _read_texts(data: Any, key: str, max_count: int = _MAX_KEYS) -> list[str]:
    """Return a string, or a list of strings, as a list."""
    value = data.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{key} is not a string or a list of strings")
    if len(texts) > max_count:
        raise UsageError(f"{key} has more than {max_count:,} strings")
    return texts


def list_shipped() -> tuple[tuple[str, str], ...]:
    """Return the name and the description of each shipped recipe."""
    return tuple((recipe.name, recipe.about) for recipe in load_shipped())


@cache
def load_shipped() -> list[Recipe]:
    """Return the shipped recipes, sorted by name."""
    return [Recipe.load(path.stem) for path in sorted(_SHIPPED.glob("*.toml"))]
