"""Keys with variables, as the rules of a recipe have them: `layers.{n}.{w:wq|wk}.weight`.

`{n}` is one part without a dot, `{x*}` any text, `{w:a|b}` one of these, `{rank:02}` a number of
two digits, `{n+1}`, `{n+layers}` and `{3-n}` a shifted number. A `?` at the end: may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ckptool.errors import UsageError
from ckptool.words import printable

MAX_PATTERN = 2_000
"""Characters of a pattern, choices included."""
MAX_KEY = 4_096
"""Characters of a key that patterns are compared with."""
_MAX_VARIABLES = 12
_MAX_LOOSE = 2
"""Variables of a pattern with ends that only a search finds: the work grows by each."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_VARIABLE = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:(?P<text>\*)|:0(?P<width>[1-9])|:(?P<choices>.*)|(?P<by>[+-]\w+))?",
    re.ASCII | re.DOTALL,
)
_MIRRORED = re.compile(r"(?P<by>\w+)-(?P<name>[A-Za-z_]\w*)", re.ASCII)

Values = dict[str, str | int]
"""What the variables of a pattern are in one key: texts, of a choice its position."""


class Variable(NamedTuple):
    """One variable of a pattern."""

    name: str
    kind: str
    """`part`, `text`, `choice` or `number`."""
    choices: tuple[str, ...] = ()
    width: int = 0
    """Digits, if zeros fill a number up."""
    shift: str = ""
    """A number or a parameter: what is added to the variable, or it is taken from."""
    sign: int = 0
    """1: the variable plus the shift, -1: the shift minus the variable; 0: no shift."""

    @property
    def regex(self) -> str:
        """Return what it matches, greedy and without its group."""
        if self.kind == "choice":
            return "|".join(map(re.escape, self.choices))
        if self.width:
            more = rf"|[1-9][0-9]{{{self.width},8}}" if self.width < 9 else ""
            return rf"[0-9]{{{self.width}}}{more}"
        return {"part": r"[^./]+", "text": ".*", "number": r"0|[1-9][0-9]{0,8}"}[self.kind]


def _variable(text: str, pattern: str) -> Variable:
    if found := _MIRRORED.fullmatch(text):
        return Variable(found["name"], "number", shift=found["by"], sign=-1)
    found = _VARIABLE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{printable(f'{{{text}}}')} in {printable(pattern)!r} is not a variable",
            hint="write {n}, {x*}, {w:a|b}, {rank:02}, {n+1} or {3-n}",
        )
    if found["by"]:
        shift = found["by"].removeprefix("+")
        return Variable(found["name"], "number", shift=shift, sign=1)
    if found["choices"] is not None:
        return Variable(found["name"], "choice", tuple(found["choices"].split("|")))
    if found["width"]:
        return Variable(found["name"], "number", width=int(found["width"]))
    return Variable(found["name"], "text" if found["text"] else "part")


@dataclass(frozen=True)
class Pattern:
    """A pattern of keys."""

    text: str
    """As it is written, without the `?`."""
    literals: tuple[str, ...]
    """The texts around the variables, one more than those."""
    variables: tuple[Variable, ...]
    is_optional: bool = False

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Return the pattern of a text.

        Raises:
            UsageError: the text is not a pattern.
        """
        if not text or len(text) > MAX_PATTERN:
            size = f"has {len(text):,} characters, expected 1 to {MAX_PATTERN:,}"
            raise UsageError(f"the key {printable(text)!r} {size}")
        bare = text.removesuffix("?")
        parts = _FIELD.split(bare)
        literals, fields = tuple(parts[::2]), parts[1::2]
        if any("{" in one or "}" in one for one in literals) or not bare:
            raise UsageError(f"{printable(text)!r} has an unbalanced brace, or is empty")
        if len(fields) > _MAX_VARIABLES:
            raise UsageError(f"{printable(text)!r} has more than {_MAX_VARIABLES} variables")
        variables = tuple(_variable(one, text) for one in fields)
        made = cls(bare, literals, variables, is_optional=bare != text)
        if sum(map(made._is_loose, range(len(variables)))) > _MAX_LOOSE:
            what = f"more than {_MAX_LOOSE} variables without a dot or slash after them"
            raise UsageError(f"{printable(text)!r} has {what}")
        return made

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(one.name for one in self.variables)

    def choices_of(self, name: str) -> int:
        """Return how many choices a variable has; 0: it is any number or text."""
        return next((len(one.choices) for one in self.variables if one.name == name), 0)

    def _is_loose(self, at: int) -> bool:
        """Return whether only a search tells where a variable ends."""
        kind, after = self.variables[at].kind, self.literals[at + 1]
        is_last = at + 1 == len(self.variables) and not after
        return kind == "text" or (kind == "part" and not is_last and after[:1] not in (".", "/"))

    def completed(self, choices: Mapping[str, tuple[str, ...]]) -> Pattern:
        """Return the pattern with the choices that another side of its rule has for a variable."""
        variables = tuple(
            one._replace(kind="choice", choices=choices[one.name])
            if one.kind in ("part", "text") and choices.get(one.name)
            else one
            for one in self.variables
        )
        return self if variables == self.variables else replace(self, variables=variables)

    def bound(self, params: Mapping[str, int]) -> Pattern:
        """Return the pattern with numbers in the place of the parameters that shift variables.

        Raises:
            UsageError: a parameter is unknown.
        """
        made = []
        for one in self.variables:
            word = one.shift.lstrip("-")
            if one.sign and not word.isdigit():
                if word not in params:
                    text = f"{printable(self.text)!r} needs the parameter {printable(word)!r}"
                    raise UsageError(text, hint=f"add --param {word}=NUMBER")
                shift = -params[word] if one.shift.startswith("-") else params[word]
                made.append(one._replace(shift=str(shift)))
            else:
                made.append(one)
        return replace(self, variables=tuple(made))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        known: dict[str, int] = {}
        made = re.escape(self.literals[0])
        for at, one in enumerate(self.variables):
            if one.name in known and one.kind != "number":
                made += f"(\\{known[one.name]})"
            else:
                known.setdefault(one.name, at + 1)
                is_part = one.kind == "part" and not self._is_loose(at)
                made += f"({one.regex}{'+' if is_part else ''})"  # possessive: no way back to try
            made += re.escape(self.literals[at + 1])
        return re.compile(made, re.DOTALL)

    def match(self, key: str) -> Values | None:
        """Return the variables of a key; None if the pattern is of other keys."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        values: Values = {}
        for one, text in zip(self.variables, found.groups(), strict=True):
            value: str | int = text
            if one.kind == "choice":
                value = one.choices.index(text)
            elif one.sign:
                number = one.sign * (int(text) - int(one.shift))
                if number < 0:
                    return None
                value = str(number)
            elif one.width:
                value = str(int(text))
            if values.setdefault(one.name, value) != value:
                return None
        return values

    def covers(self, key: str, *, is_path: bool = False) -> bool:
        """Return whether it matches a key; of a path the last key, if it has no `/` itself."""
        match = self.match_last if is_path and "/" not in self.text else self.match
        return match(key) is not None

    def match_last(self, key: str) -> Values | None:
        """Return what `match` does of a path's last key."""
        return self.match(key.rpartition("/")[2])

    def fill(self, values: Mapping[str, str | int]) -> str:
        """Return the key with these values; a variable without one stays as `{name}`.

        Raises:
            UsageError: a shifted number would be negative, or is no number.
        """
        made = self.literals[0]
        for one, literal in zip(self.variables, self.literals[1:], strict=True):
            is_known = one.name in values
            made += self._filled(one, values[one.name]) if is_known else f"{{{one.name}}}"
            made += literal
        return made

    def _filled(self, one: Variable, value: str | int) -> str:
        if one.kind == "choice" and isinstance(value, int):
            return one.choices[value]
        text = str(value)
        if one.kind != "number":
            return text
        if is_number(text):
            number = one.sign * int(text) + int(one.shift) if one.sign else int(text)
            if number >= 0:
                return str(number).zfill(one.width)
        raise UsageError(f"{printable(self.text)!r} cannot have {one.name} = {printable(text)}")


def is_number(text: str | int) -> bool:
    """Return whether a value of a variable is a whole number without zeros before it."""
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", str(text), re.ASCII) is not None


def first_missing(
    numbers: Collection[tuple[int, ...]], counts: Iterable[int]
) -> tuple[int, ...] | None:
    """Return the first of all combinations of numbers below the counts that is not there."""
    most = len(numbers) + 1  # among so many one is missing, however large a count is
    every = product(*(range(min(count, most)) for count in counts))
    return next((one for one in every if one not in numbers), None)


def patterns(texts: Iterable[str]) -> list[Pattern]:
    """Return the patterns of one rule, each with the choices that another one has.

    Raises:
        UsageError: one is none, or two have lists of another length for one variable.
    """
    made = [Pattern.parse(text) for text in texts]
    choices: dict[str, tuple[str, ...]] = {}
    for pattern in made:
        for one in pattern.variables:
            known = choices.setdefault(one.name, one.choices) if one.choices else one.choices
            if len(known) != len(one.choices):
                counts = f"{len(known)} and {len(one.choices)}"
                text = f"the variable {one.name!r} has lists of {counts} words"
                raise UsageError(f"{text} in {printable(pattern.text)!r}")
    return [one.completed(choices) for one in made]
