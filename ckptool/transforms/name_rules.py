"""Rules that rename keys: regular expressions, prefixes, tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from ckptool.core.names import find_similar
from ckptool.errors import FileDenied, FileMissing, UsageError
from ckptool.words import counted, listed, printable

_MAX_COMPARED = 3
"""The number of unused keys of a rule that are compared with all keys, which takes long."""


class Rule(NamedTuple):
    """A rule that renames keys."""

    text: str
    """The text that the user wrote."""
    apply: Callable[[str], str | None]
    """Returns the new key, or None if the rule does not match."""
    wanted: tuple[str, ...]
    """The keys that it looks for, if known, to propose similar ones."""
    exact: bool = False
    """True if each of `wanted` should be found."""
    regex: str = ""
    """The rule as `REGEX=>REPL`, if it has this form."""


def regex_rule(text: str) -> Rule:
    r"""Return the rule `REGEX=>REPL`, which replaces every match like `re.sub` (`\1`, `\g<name>`).

    Raises:
        UsageError: if the text has another form, REGEX is not a regular expression, or REPL refers
            to a missing group.
    """
    regex, arrow, replacement = text.partition("=>")
    if not arrow or not regex:
        raise UsageError(
            f"'{printable(text)}' is not a rule of the form REGEX=>REPL",
            hint=r"for example '^backbone\.=>encoder.'",
        )
    try:
        pattern = re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"'{printable(regex)}' is not a regular expression: {error}",
            hint=r"a backslash before . [ ( * + ? takes them as they are",
        ) from error
    try:
        pattern.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(
            f"'{printable(replacement)}' is not a replacement for '{printable(regex)}': {error}",
            hint=rf"it has {pattern.groups} groups; \1 is the first, \g<name> a named one",
        ) from error

    def apply(name: str) -> str | None:
        """Return the key with all matches replaced, or None if there are none."""
        new, count = pattern.subn(replacement, name)
        return new if count else None

    # The text without anchors and escapes is the wanted key, if the expression has no other syntax.
    literal = re.sub(r"\\(.)", r"\1", regex.strip("^$"))
    return Rule(text, apply, (literal,), regex=text)


def prefix_rule(text: str) -> Rule:
    """Return the rule `OLD=NEW` for whole components at the start of a key.

    `backbone.=encoder.` is the same as `backbone=encoder`; `model.=` removes a prefix, and
    `=model.` adds one to every key.

    Raises:
        UsageError: if the text has another form, or both sides are empty.
    """
    old, equals, new = (part.strip().removesuffix(".") for part in text.partition("="))
    if not equals or not (old or new):
        raise UsageError(
            f"'{printable(text)}' is not a rule of the form OLD=NEW",
            hint="use for example backbone=encoder; model.= removes a prefix, =model. adds one",
        )
    before = f"{old}." if old else ""
    after = f"{new}." if new else ""

    def apply(name: str) -> str | None:
        """Return the key with the new prefix, or None if it does not have the old one."""
        if old and name == old:
            return new
        return after + name.removeprefix(before) if name.startswith(before) else None

    return Rule(text, apply, (old,))


def convert_prefix_to_regex(text: str) -> str:
    r"""Return the text `REGEX=>REPL` that is equivalent to the prefix rule `OLD=NEW`.

    `a=b` becomes `^a(\.|$)=>b\1`, `a=` becomes `^a\.=>`, and `=b` becomes `^=>b.`.
    """
    old, _, new = (part.strip().removesuffix(".") for part in text.partition("="))
    replacement = new.replace("\\", r"\\")
    if not old:
        return f"^=>{replacement}."
    return f"^{re.escape(old)}" + (rf"(\.|$)=>{replacement}\1" if new else r"\.=>")


def table_rule(mapping: Mapping[str, str], text: str = "the table") -> Rule:
    """Return the rule that renames whole keys by a table, old to new; `text` is for messages."""
    table = dict(mapping)
    return Rule(text, table.get, tuple(table), exact=True)


def parse_rules(rules: Iterable[Rule | str], prefixes: Iterable[str] = ()) -> list[Rule]:
    """Return the rules in order: texts `REGEX=>REPL` or `Rule`s, then the prefixes `OLD=NEW`.

    Raises:
        UsageError: if an item is not a rule, or a list is a single text.
    """
    checked: list[Rule] = []
    for given, parse in ((rules, regex_rule), (prefixes, prefix_rule)):
        if isinstance(given, (str, Rule)):
            raise UsageError(f"expected a list of rules, not {given!r}", hint=f"[{given!r}]")
        for item in given:
            if not isinstance(item, (str, Rule)):
                raise UsageError(f"a rule is a string REGEX=>REPL or OLD=NEW, not {item!r}")
            checked.append(item if isinstance(item, Rule) else parse(item))
    return checked


class RuleMatch(NamedTuple):
    """A rule that matched a key."""

    rule: int
    """The index of the rule."""
    old: str
    """The key after the rules before this one."""
    new: str


class AppliedRules:
    """Applies rules to the keys of a file, each key once, and counts the matches of each rule."""

    def __init__(self, rules: Iterable[Rule], file: str = "") -> None:
        """Apply the rules in order; `file` is for error messages."""
        self.rules = list(rules)
        self.file = file
        self.matches_by_key: dict[str, list[RuleMatch]] = {}
        """The matches of each key of the file, in the order of the rules."""

    def rename_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Return the new key by old key.

        Raises:
            UsageError: if a key becomes empty.
        """
        new_keys = {name: self.rename_key(name) for name in names}
        for name, new in new_keys.items():
            if name and not new:  # a key that is empty in the file may stay so
                raise UsageError(
                    f"the rules would leave nothing of the key {printable(name)!r}",
                    file=self.file or None,
                    hint="change the rules to keep a part of each key",
                )
        return new_keys

    def rename_key(self, name: str) -> str:
        """Return the key after all rules."""
        if name not in self.matches_by_key:
            self.matches_by_key[name] = self.find_matches(name)
        matches = self.matches_by_key[name]
        return matches[-1].new if matches else name

    def find_matches(self, name: str) -> list[RuleMatch]:
        """Return the rules that match a key, in order, each with the key before and after it."""
        matches: list[RuleMatch] = []
        for index, rule in enumerate(self.rules):
            new = rule.apply(name)
            if new is not None:
                matches.append(RuleMatch(index, name, new))
                name = new
        return matches

    def describe_unused(self) -> Iterator[str]:
        """Yield a text for each rule that matches no key, or has table keys that are not found."""
        matched_keys_by_rule: list[set[str]] = [set() for _ in self.rules]
        for match in chain.from_iterable(self.matches_by_key.values()):
            matched_keys_by_rule[match.rule].add(match.old)
        for index, (rule, matched_keys) in enumerate(
            zip(self.rules, matched_keys_by_rule, strict=True)
        ):
            unused = [name for name in rule.wanted if name not in matched_keys]
            if not matched_keys:
                suggestions = self._suggest_keys(index, unused)
                yield f"rule {printable(rule.text)} matches no key{suggestions}"
            elif rule.exact and unused:  # a table names each key
                keys = counted(len(rule.wanted), "key")
                text = f"{len(unused):,} of {keys} in {printable(rule.text)} not found"
                yield f"{text}: {listed(unused)}{self._suggest_keys(index, unused)}"

    def _suggest_keys(self, index: int, unused: list[str]) -> str:
        """Return a question with the existing keys most similar to the unused keys of a rule.

        Existing keys are compared as the rule at `index` gets them, after the rules before it. The
        result is empty if no key is similar.
        """
        names = [
            next((match.new for match in reversed(matches) if match.rule < index), name)
            for name, matches in self.matches_by_key.items()
        ]
        suggestions = dict.fromkeys(
            name for wanted in unused[:_MAX_COMPARED] for name in find_similar(wanted, names)
        )
        return f"; did you mean {listed(suggestions)}?" if suggestions else ""


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a user's file.

    Raises:
        FileMissing: if the file does not exist.
        FileDenied: if the system denies access.
        UsageError: if the file is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except FileNotFoundError as error:
        raise FileMissing("no such file", file=path) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 text ({error.reason})", file=path) from error
    except OSError as error:
        raise FileDenied(f"cannot be read: {error.strerror}", file=path) from error


def read_map_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a table of keys, old to new, from a file: a JSON object, or two columns.

    Columns are separated by a tab, else a comma, else white space. With a tab or comma, keys may
    contain blanks. `#` starts a comment.

    Raises:
        FileMissing: if the file does not exist.
        FileDenied: if the system denies access.
        UsageError: if a line has another form; the message shows the line.
    """
    text = read_text(path)
    is_json = text.lstrip().startswith(("{", "["))
    table: dict[str, str] = {}
    for where, old, new in _read_json_rows(path, text) if is_json else _read_columns(path, text):
        if table.setdefault(old, new) != new:
            raise _table_error(path, f"{where}{printable(old)!r} already has another new key")
    return table


def _read_columns(path: str | os.PathLike[str], text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the text `line N: ` for messages, the old and the new key of each row of a table.

    Empty rows and comments are skipped.
    """
    for line, row in enumerate(text.splitlines(), start=1):
        content = re.sub(r"(^|\s)#.*", "", row).strip()
        if not content:
            continue
        # None: any white space separates the columns.
        separator = next((separator for separator in "\t," if separator in content), None)
        words = [word.strip() for word in content.split(separator)]
        if len(words) != 2 or not all(words):
            fact = f"{printable(row)!r} is not a pair of an old and a new key"
            raise _table_error(path, f"line {line}: {fact}")
        yield f"line {line}: ", words[0], words[1]


def _read_json_rows(path: str | os.PathLike[str], text: str) -> Iterator[tuple[str, str, str]]:
    """Yield for each pair of a JSON object the text "" (no line number), the old and new key."""
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError) as error:
        raise _table_error(path, f"the file is not valid JSON: {error}") from error
    if not text.lstrip().startswith("{"):
        raise _table_error(path, "expected a JSON object from old to new keys")
    for old, new in pairs:
        if not isinstance(new, str):
            raise _table_error(path, f"the new key of {printable(old)!r} is not a string")
        yield "", old, new


def _table_error(path: Any, fact: str) -> UsageError:
    """Return the error for a table of another form."""
    return UsageError(fact, file=path, hint="write two columns, old and new key, or a JSON object")
