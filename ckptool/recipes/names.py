"""Keys with variables in the rules of a recipe: `layers.{n}.{w:wq|wk}.weight`.

`{n}` is one part without a dot, `{x*}` any text, `{w:a|b}` one of these, `{rank:02}` a number of
two digits, `{n+1}`, `{n+layers}` and `{3-n}` a shifted number. A `?` at the end: optional.
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
_MAX_SEARCHED_VARIABLES = 2
"""The most variables with an end that only a search finds: each multiplies the work."""

_BRACED = re.compile(r"\{([^{}]*)\}")
_VARIABLE = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:(?P<text>\*)|:0(?P<width>[1-9])|:(?P<choices>.*)|(?P<by>[+-]\w+))?",
    re.ASCII | re.DOTALL,
)
_MIRRORED = re.compile(r"(?P<by>\w+)-(?P<name>[A-Za-z_]\w*)", re.ASCII)

Values = dict[str, str | int]
"""The values of a pattern's variables in one key, by name: texts, or the index of a choice."""


class Variable(NamedTuple):
    """One variable of a pattern."""

    name: str
    kind: str
    """`part`, `text`, `choice` or `number`."""
    choices: tuple[str, ...] = ()
    width: int = 0
    """The number of digits to which zeros fill a number; 0 for none."""
    shift: str = ""
    """A number, or the name of a parameter: `1` in `{n+1}`, `3` in `{3-n}`."""
    sign: int = 0
    """1: the key has the variable plus the shift; -1: the shift minus the variable; 0: no shift."""

    @property
    def regex(self) -> str:
        """The regular expression that matches the variable, greedy, without its group.

        A number has up to 9 digits, or `width`; one longer than `width` has no leading zeros.
        """
        if self.kind == "choice":
            return "|".join(map(re.escape, self.choices))
        if self.width:
            more = rf"|[1-9][0-9]{{{self.width},8}}" if self.width < 9 else ""
            return rf"[0-9]{{{self.width}}}{more}"
        return {"part": r"[^./]+", "text": ".*", "number": r"0|[1-9][0-9]{0,8}"}[self.kind]


def _parse_variable(text: str, pattern: str) -> Variable:
    """Parse the text between two braces of a pattern, such as `n+1`.

    Raises:
        UsageError: if it is not a variable.
    """
    if match := _MIRRORED.fullmatch(text):
        return Variable(match["name"], "number", shift=match["by"], sign=-1)
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{printable(f'{{{text}}}')} in {printable(pattern)!r} is not a variable",
            hint="write {n}, {x*}, {w:a|b}, {rank:02}, {n+1} or {3-n}",
        )
    if match["by"]:
        shift = match["by"].removeprefix("+")
        return Variable(match["name"], "number", shift=shift, sign=1)
    if match["choices"] is not None:
        return Variable(match["name"], "choice", tuple(match["choices"].split("|")))
    if match["width"]:
        return Variable(match["name"], "number", width=int(match["width"]))
    return Variable(match["name"], "text" if match["text"] else "part")


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
        """Parse a pattern.

        Raises:
            UsageError: if the text is not a pattern.
        """
        if not text or len(text) > MAX_PATTERN:
            size = f"has {len(text):,} characters, expected 1 to {MAX_PATTERN:,}"
            raise UsageError(f"the key {printable(text)!r} {size}")
        bare = text.removesuffix("?")
        parts = _BRACED.split(bare)
        literals, fields = tuple(parts[::2]), parts[1::2]
        if any("{" in literal or "}" in literal for literal in literals) or not bare:
            raise UsageError(f"{printable(text)!r} has an unbalanced brace, or is empty")
        if len(fields) > _MAX_VARIABLES:
            raise UsageError(f"{printable(text)!r} has more than {_MAX_VARIABLES} variables")
        variables = tuple(_parse_variable(variable, text) for variable in fields)
        parsed = cls(bare, literals, variables, is_optional=bare != text)
        if sum(map(parsed._needs_search, range(len(variables)))) > _MAX_SEARCHED_VARIABLES:
            count = f"more than {_MAX_SEARCHED_VARIABLES} variables"
            raise UsageError(f"{printable(text)!r} has {count} without a dot or slash after them")
        return parsed

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(variable.name for variable in self.variables)

    def count_choices(self, name: str) -> int:
        """Return the number of choices of a variable, or 0 if it is any number or text."""
        return next(
            (len(variable.choices) for variable in self.variables if variable.name == name), 0
        )

    def _needs_search(self, index: int) -> bool:
        """Return True if only a search of the key finds the end of a variable.

        A part ends at the next dot or slash, if one follows in the pattern or the key ends there.
        """
        kind, after = self.variables[index].kind, self.literals[index + 1]
        is_last = index + 1 == len(self.variables) and not after
        return kind == "text" or (kind == "part" and not is_last and after[:1] not in (".", "/"))

    def add_choices(self, choices: Mapping[str, tuple[str, ...]]) -> Pattern:
        """Return the pattern with the choices that another pattern of its rule has, by variable.

        Numbers, and variables with choices of their own, stay as they are.
        """
        variables = tuple(
            variable._replace(kind="choice", choices=choices[variable.name])
            if variable.kind in ("part", "text") and choices.get(variable.name)
            else variable
            for variable in self.variables
        )
        return self if variables == self.variables else replace(self, variables=variables)

    def bind(self, params: Mapping[str, int]) -> Pattern:
        """Return the pattern with the values of the parameters that shift variables.

        A variable without a shift, or shifted by a number as in `{n+1}`, does not change.

        Raises:
            UsageError: if a parameter is unknown.
        """
        bound_variables = []
        for variable in self.variables:
            parameter = variable.shift.lstrip("-")
            if variable.sign and not parameter.isdigit():
                if parameter not in params:
                    text = f"{printable(self.text)!r} needs the parameter {printable(parameter)!r}"
                    raise UsageError(text, hint=f"add --param {parameter}=NUMBER")
                shift = -params[parameter] if variable.shift.startswith("-") else params[parameter]
                bound_variables.append(variable._replace(shift=str(shift)))
            else:
                bound_variables.append(variable)
        return replace(self, variables=tuple(bound_variables))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        """The regular expression of the whole key, with a group for each variable.

        A repeated variable refers back to its first group. Numbers are compared by `match`, because
        they may be shifted.
        """
        groups: dict[str, int] = {}
        regex = re.escape(self.literals[0])
        for index, variable in enumerate(self.variables):
            if variable.name in groups and variable.kind != "number":
                regex += f"(\\{groups[variable.name]})"
            else:
                groups.setdefault(variable.name, index + 1)
                ends_at_separator = variable.kind == "part" and not self._needs_search(index)
                # `[^./]++` is possessive: without backtracking.
                regex += f"({variable.regex}{'+' if ends_at_separator else ''})"
            regex += re.escape(self.literals[index + 1])
        return re.compile(regex, re.DOTALL)

    def match(self, key: str) -> Values | None:
        """Return the values of the variables in a key, or None if the pattern does not match it.

        A choice becomes its index, a shifted number is shifted back, and zeros of a number with a
        width are removed. A variable that occurs twice must have one value.
        """
        match = self._regex.fullmatch(key)
        if match is None:
            return None
        values: Values = {}
        for variable, text in zip(self.variables, match.groups(), strict=True):
            value: str | int = text
            if variable.kind == "choice":
                value = variable.choices.index(text)
            elif variable.sign:  # for `{n+1}`, `4` is n = 3; for `{3-n}` the sign is -1
                number = variable.sign * (int(text) - int(variable.shift))
                if number < 0:
                    return None
                value = str(number)
            elif variable.width:
                value = str(int(text))
            if values.setdefault(variable.name, value) != value:
                return None
        return values

    def covers(self, key: str, *, is_path: bool = False) -> bool:
        """Return True if it matches a key; for a path the last key, unless the pattern has `/`."""
        match = self.match_last if is_path and "/" not in self.text else self.match
        return match(key) is not None

    def match_last(self, key: str) -> Values | None:
        """Match the last key of a path."""
        return self.match(key.rpartition("/")[2])

    def fill(self, values: Mapping[str, str | int]) -> str:
        """Return the key with these values; a variable without one stays as `{name}`.

        Raises:
            UsageError: if a shifted number would be negative, or is not a number.
        """
        key = self.literals[0]
        for variable, literal in zip(self.variables, self.literals[1:], strict=True):
            if variable.name in values:
                key += self._format_value(variable, values[variable.name])
            else:
                key += f"{{{variable.name}}}"
            key += literal
        return key

    def _format_value(self, variable: Variable, value: str | int) -> str:
        """Return the text of a variable in a key."""
        if variable.kind == "choice" and isinstance(value, int):
            return variable.choices[value]
        text = str(value)
        if variable.kind != "number":
            return text
        if is_number(text):
            number = variable.sign * int(text) + int(variable.shift) if variable.sign else int(text)
            if number >= 0:
                return str(number).zfill(variable.width)
        raise UsageError(
            f"{printable(self.text)!r} cannot have {variable.name} = {printable(text)}"
        )


def is_number(text: str | int) -> bool:
    """Return True if the value of a variable is a whole number without leading zeros."""
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", str(text), re.ASCII) is not None


def find_first_missing(
    numbers: Collection[tuple[int, ...]], counts: Iterable[int]
) -> tuple[int, ...] | None:
    """Return the first combination of numbers below the counts that is missing, or None.

    `counts` has the number of values at each place: with (2, 1), (0, 0) and (1, 0) are expected.
    """
    max_count = len(numbers) + 1  # more cannot be present, so a large count costs nothing
    combinations = product(*(range(min(count, max_count)) for count in counts))
    return next((combination for combination in combinations if combination not in numbers), None)


def parse_patterns(texts: Iterable[str]) -> list[Pattern]:
    """Parse the patterns of one rule; each gets the choices that another one has.

    Raises:
        UsageError: if a text is not a pattern, or two have lists of another length for a variable.
    """
    parsed = [Pattern.parse(text) for text in texts]
    choices: dict[str, tuple[str, ...]] = {}
    for pattern in parsed:
        for variable in pattern.variables:
            if not variable.choices:
                continue
            known = choices.setdefault(variable.name, variable.choices)
            if len(known) != len(variable.choices):
                counts = f"{len(known)} and {len(variable.choices)}"
                text = f"the variable {variable.name!r} has lists of {counts} words"
                raise UsageError(f"{text} in {printable(pattern.text)!r}")
    return [pattern.add_choices(choices) for pattern in parsed]
