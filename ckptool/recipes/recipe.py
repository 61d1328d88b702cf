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
from typing import Any, TypeAlias

from ckptool.errors import UnreadableFile, UsageError
from ckptool.files.source import FileSource
from ckptool.recipes.axes import Equation, Misfit, axes_of, pairs
from ckptool.recipes.names import Pattern, patterns
from ckptool.recipes.params import Term, parse_term, refuse_cycles
from ckptool.words import listed, printable

_MOST_BYTES = 1 << 18
"""The largest size of a recipe."""
_MOST_RULES, _MOST_PARAMS, _MOST_PASSES, _MOST_WAYS, _MOST_KEYS = 2_000, 200, 16, 16, 64
_SHIPPED = Path(__file__).parent / "shipped"
_FIELDS = {"about", "files", "rest", "drop", "params", "tied", "names", "tensors", "pass"}

Way: TypeAlias = "tuple[int, int, int]"
"""The pass, rule and equation that matched a tensor."""


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
        """Return a rule for keys and equations.

        Raises:
            UsageError: they are none, or do not fit together.
        """
        every = patterns([*left, *right])
        made = cls(
            tuple(every[: len(left)]),
            tuple(every[len(left) :]),
            tuple(map(Equation.parse, axes)),
            any(one.is_optional for one in every),
            number,
        )
        made._check_names()
        made.reversed()._check_names()
        for equation in made.equations:
            made._check_pairs(equation)
        return made

    @property
    def text(self) -> str:
        """The rule as text: the keys of both sides."""
        left, right = (", ".join(one.text for one in side) for side in (self.left, self.right))
        return printable(f"{left} -> {right}")

    @cached_property
    def common(self) -> tuple[str, ...]:
        """The variables of both sides; tensors with equal values form a group."""
        left, right = (frozenset().union(*(one.names for one in side)) for side in self._sides)
        return tuple(sorted(left & right))

    @property
    def _sides(self) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
        return self.left, self.right

    @cached_property
    def stacked(self) -> tuple[tuple[str, ...], ...]:
        """For each key on the left, the variables that the right side does not have."""
        return tuple(self._own(one) for one in self.left)

    @cached_property
    def unstacked(self) -> tuple[tuple[str, ...], ...]:
        """For each key on the right, the variables that the left side does not have."""
        return tuple(self._own(one) for one in self.right)

    def _own(self, pattern: Pattern) -> tuple[str, ...]:
        found = (one.name for one in pattern.variables if one.name not in self.common)
        return tuple(dict.fromkeys(found))

    @cached_property
    def takes_single(self) -> bool:
        """Whether a group has one tensor for each key on the left."""
        return not any(self.stacked)

    @cached_property
    def renames(self) -> bool:
        """Whether the rule only renames single tensors."""
        names = self.left[0].names ^ self.right[0].names
        return len(self.left) == len(self.right) == 1 and not (self.equations or names)

    def reversed(self) -> RecipeRule:
        """Return the inverse rule."""
        equations = tuple(one.reversed() for one in self.equations)
        return replace(self, left=self.right, right=self.left, equations=equations)

    def bound(self, params: Mapping[str, int]) -> RecipeRule:
        """Return the rule with parameter values in place of the parameters that shift variables."""
        left, right = (tuple(one.bound(params) for one in side) for side in (self.left, self.right))
        return replace(self, left=left, right=right)

    def _check_names(self) -> None:
        for one in self.left:
            if lost := [name for name in self.common if name not in one.names]:
                text = f"{printable(one.text)!r} does not have the variable {listed(lost)}"
                raise UsageError(f"{text} of the other keys in {self.text}")
        if not self.equations and (len(self.left) > 1 or len(self.right) > 1):
            raise UsageError(f"the rule {self.text} has several keys on one side, but no axes")

    def _check_pairs(self, equation: Equation) -> None:
        """Check that an equation has as many tensors as the rule, and that its parts match."""
        for side, keys in ((equation.left, self.left), (equation.right, self.right)):
            if len(side) != len(keys):
                text = f"the equation {equation.text!r} has {len(side)} tensors on one side"
                raise UsageError(f"{text} where the rule has {len(keys)}: {self.text}")
        try:
            for names, side in ((self.stacked, equation.left), (self.unstacked, equation.right)):
                for own, dimensions in zip(names, side, strict=True):
                    if twice := [name for name in axes_of(dimensions) if name in own]:
                        raise Misfit(f"{listed(twice)} is both a variable of the key and an axis")
            spread = equation.spread([len(one) for one in equation.left])
            made = {pair[2] for pair in self.paired(spread, dict.fromkeys(spread.axes, 2))}
            if len(made) < len(self.right):
                raise Misfit("a tensor on the right has only padding")
        except Misfit as misfit:
            text = f"the equation {equation.text!r} is wrong: {misfit.text}"
            raise UsageError(f"{text}, in {self.text}") from None

    def paired(self, equation: Equation, sizes: Mapping[str, int]) -> Iterator[Any]:
        """Yield the matching parts of an equation (`axes.pairs`)."""
        left = [frozenset(names) & equation.right_axes for names in self.stacked]
        right = [frozenset(names) & equation.left_axes for names in self.unstacked]
        parts = equation.left_parts(sizes), equation.right_parts(sizes)
        return pairs(*parts, left, right)


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
    """Whether tensors without a matching rule are kept."""
    drop: tuple[tuple[Pattern, ...], tuple[Pattern, ...]] = ((), ())
    """The keys left out of the source, and of the target when reversed."""
    tied: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Keys of the source, and of the target, that are tied to another key if they are missing."""
    is_reversed: bool = False
    text: str = field(default="", repr=False, compare=False)
    """The TOML or JSON text."""

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Return a shipped recipe by name, or read a `.toml` or `.json` file.

        Raises:
            UsageError: there is none, or it is wrong; the message has the line or the rule.
        """
        path = Path(source)
        is_name = path.suffix not in (".toml", ".json") and re.fullmatch(r"[\w-]+", str(source))
        if is_name:
            path = _SHIPPED / f"{source}.toml"
            if not path.is_file():
                known = [name for name, _ in shipped_recipes()]
                text = f"no recipe is named {printable(str(source))!r}"
                raise UsageError(text, hint=f"give a .toml file, or one of {listed(known, 30)}")
        try:
            file = FileSource(path)
            try:
                data = file.read(0, min(file.size, _MOST_BYTES + 1))
            finally:
                file.close()
        except UnreadableFile as error:
            raise UsageError(error.message, file=path, hint=error.hint) from error
        if len(data) > _MOST_BYTES:
            raise UsageError(f"the recipe is larger than {_MOST_BYTES:,} bytes", file=path)
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
        if len(text) > _MOST_BYTES:
            raise UsageError(f"the recipe {printable(name)} has more than {_MOST_BYTES:,} bytes")
        is_json = is_json or text.lstrip()[:1] == "{"
        try:
            data = json.loads(text) if is_json else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            kind = "JSON" if is_json else "TOML"
            raise UsageError(f"the recipe {printable(name)} is not {kind}: {why}") from None
        return replace(_Reader(text, name).recipe(data), text=text)

    @classmethod
    def of_rule(
        cls, from_: str | Sequence[str], to: str | Sequence[str], axes: str | Sequence[str] = ()
    ) -> Recipe:
        """Return a recipe with one rule, which keeps all other tensors.

        Raises:
            UsageError: the rule is wrong.
        """
        left, right, ways = ([x] if isinstance(x, str) else x for x in (from_, to, axes))
        rule = RecipeRule.parse(left, right, ways)
        return cls("rule", "", ((rule,),), {}, keeps_rest=True)

    def reversed(self) -> Recipe:
        """Return the inverse recipe."""
        passes = tuple(tuple(rule.reversed() for rule in one) for one in reversed(self.passes))
        return replace(
            self,
            passes=passes,
            drop=self.drop[::-1],
            tied=self.tied[::-1],
            is_reversed=not self.is_reversed,
        )

    @property
    def uses_paths(self) -> bool:
        """Whether the recipe matches whole paths: a key of its source contains a `/`."""
        if any("/" in one.text for one in self.drop[0]):
            return True
        for rules in self.passes:
            if any("/" in one.text for rule in rules for one in rule.left):
                return True
            if any("/" in one.text for rule in rules for one in rule.right):
                return False  # what has a path in a later pass was made in this one
        return False

    def passes_on(self, rule: RecipeRule) -> bool:
        """Return True if a rule keeps a key for another pass.

        So a recipe takes the keys of several versions. It does not take what no other rule takes.
        """
        variables = rule.left[0].variables
        is_any = rule.left == rule.right and any(one.kind == "text" for one in variables)
        return is_any and rule.renames and len(self.passes) > 1

    def unfinished(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that still contain a path, if the target has none."""
        if not self.uses_paths or self.reversed().uses_paths:
            return []
        return [key for key in keys if "/" in key]

    @property
    def words(self) -> frozenset[str]:
        """All possible parameter names."""
        rules = [rule for rules in self.passes for rule in rules]
        axes = (name for rule in rules for one in rule.equations for name in one.axes)
        keys = [one for rule in rules for one in (*rule.left, *rule.right)]
        variables = (v for one in keys for v in one.variables)
        words = (word.lstrip("-") for v in variables for word in (v.name, v.shift))
        return frozenset((*self.params, *axes, *words))


class _Reader:
    """A parser of recipes in TOML or JSON."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name

    def recipe(self, data: Any) -> Recipe:
        with self._naming(""):
            _check_keys(data, _FIELDS)
            about, files, rest = (_text(data, key) for key in ("about", "files", "rest"))
            if rest not in (None, "refuse", "keep"):
                raise UsageError(f'rest is {printable(rest)!r}, expected "refuse" or "keep"')
        passes = data.get("pass", [data])
        with self._naming("pass"):
            if not isinstance(passes, list) or not 1 <= len(passes) <= _MOST_PASSES:
                raise UsageError(f"pass is not a list of 1 to {_MOST_PASSES} tables")
            if "pass" in data and not data.keys().isdisjoint(("names", "tensors")):
                raise UsageError("names and tensors are outside the passes")
        made = Recipe(
            self._name,
            printable(about or ""),
            tuple(self._rules(one, "pass" in data) for one in passes),
            self._params(data.get("params", {})),
            self._files(files),
            rest == "keep",
            self._sides(data, "drop", self._drop, ()),
            self._sides(data, "tied", self._tied, {}),
        )
        if not any(made.passes):
            raise UsageError(f"the recipe {printable(self._name)} has no rules")
        return made

    @contextmanager
    def _naming(self, subject: str, *texts: str) -> Iterator[None]:
        """Add the recipe, and the line of one of the texts, to errors of a block."""
        try:
            yield
        except UsageError as error:
            line = next(filter(None, map(self._line, texts)), None)
            place = f", line {line}" if line else f", {subject}" if subject else ""
            error.message = f"recipe {printable(self._name)}{place}: {error.message}"
            raise

    def _line(self, text: str) -> int | None:
        """Return the line of the first occurrence of a text in the recipe."""
        words = re.escape(json.dumps(text, ensure_ascii=False)[1:-1])
        found = re.search(rf"(?<![\w.}}*/-]){words}(?![\w.{{*/-])", self._text)
        return None if found is None else self._text.count("\n", 0, found.start()) + 1

    def _rules(self, data: Any, is_pass: bool) -> tuple[RecipeRule, ...]:
        with self._naming("pass"):
            if is_pass:
                _check_keys(data, {"names", "tensors"})
            tensors, names = data.get("tensors", []), data.get("names", {})
            if not isinstance(tensors, list) or not isinstance(names, dict):
                raise UsageError("tensors is not a list of tables, or names is not a table")
            if len(tensors) + len(names) > _MOST_RULES:
                raise UsageError(f"a pass has more than {_MOST_RULES:,} rules")
        made: list[RecipeRule] = []
        for one in tensors:
            with self._naming("tensors", *self._needles(one)):
                _check_keys(one, {"from", "to", "axes"})
                left, right = (_texts(one, key) for key in ("from", "to"))
                if not left or not right:
                    raise UsageError("a rule needs from and to")
                ways = _texts(one, "axes", _MOST_WAYS)
                made.append(RecipeRule.parse(left, right, ways, len(made)))
        for old, new in names.items():
            with self._naming("names", old):
                if not isinstance(new, str):
                    raise UsageError(f"{printable(old)!r} has no new key")
                made.append(RecipeRule.parse([old], [new], [], len(made)))
        return tuple(made)

    @staticmethod
    def _needles(data: Any) -> list[str]:
        held = data.get("from") if isinstance(data, dict) else None
        first = held[0] if isinstance(held, list) and held else held
        return [first] if isinstance(first, str) else []

    def _params(self, data: Any) -> dict[str, tuple[Term, ...]]:
        made: dict[str, tuple[Term, ...]] = {}
        with self._naming("params"):
            if not isinstance(data, dict) or len(data) > _MOST_PARAMS:
                raise UsageError(f"params is not a table of at most {_MOST_PARAMS} parameters")
            for name, value in data.items():
                ways = value if isinstance(value, list) else [value]
                if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or len(ways) > _MOST_WAYS:
                    text = f"{printable(name)!r} is not the name of a parameter"
                    raise UsageError(f"{text}, or has more than {_MOST_WAYS} definitions")
                made[name] = tuple(map(parse_term, ways))
            refuse_cycles(made)
        return made

    def _files(self, files: str | None) -> str | None:
        with self._naming("files", files or ""):
            if files is not None:
                pattern = Pattern.parse(files)
                numbers = all(one.kind == "number" and not one.sign for one in pattern.variables)
                is_path = any(re.search(r"[/\\:\0]", one) for one in pattern.literals)
                if not pattern.variables or not numbers or is_path or files.startswith("."):
                    text = f"{printable(files)!r} is not a file name with a number"
                    raise UsageError(text, hint='write files = "consolidated.{rank:02}.pth"')
        return files

    def _sides(self, data: Any, key: str, read: Any, default: Any) -> tuple[Any, Any]:
        with self._naming(key):
            held = data.get(key, {})
            _check_keys(held, {"from", "to"})
            first, second = (
                read(held[side]) if side in held else default for side in ("from", "to")
            )
        return first, second

    @staticmethod
    def _drop(held: Any) -> tuple[Pattern, ...]:
        return tuple(map(Pattern.parse, _texts({"drop": held}, "drop", _MOST_RULES)))

    @staticmethod
    def _tied(held: Any) -> dict[str, str]:
        is_table = isinstance(held, dict) and all(isinstance(one, str) for one in held.values())
        if not is_table or len(held) > _MOST_RULES:
            raise UsageError("tied is not a table of keys")
        if chained := [key for key, one in held.items() if one in held]:
            raise UsageError(f"{listed(chained)} is tied to a key that is itself tied")
        return dict(held)


def _check_keys(data: Any, known: set[str]) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"found a {type(data).__name__}, expected a table")
    if unknown := sorted(data.keys() - known):
        raise UsageError(f"unknown key {listed(unknown)}", hint=f"use {listed(sorted(known), 20)}")


def _text(data: Any, key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{key} is not a string")
    return value


def _texts(data: Any, key: str, most: int = _MOST_KEYS) -> list[str]:
    """Return a string, or a list of strings, as a list."""
    value = data.get(key, [])
    made = [value] if isinstance(value, str) else value
    if not isinstance(made, list) or not all(isinstance(one, str) for one in made):
        raise UsageError(f"{key} is not a string or a list of strings")
    if len(made) > most:
        raise UsageError(f"{key} has more than {most:,} strings")
    return made


def shipped_recipes() -> tuple[tuple[str, str], ...]:
    """Return the name and the description of each shipped recipe."""
    return tuple((one.name, one.about) for one in all_shipped())


@cache
def all_shipped() -> list[Recipe]:
    """Return the shipped recipes, sorted by name."""
    return [Recipe.load(path.stem) for path in sorted(_SHIPPED.glob("*.toml"))]
