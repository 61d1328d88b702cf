"""Names rewritten by rules throughout a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import UsageError
from ckptool.statedict import model_state_dict, sections, wrapped_names
from ckptool.transforms.name_rules import Rule, rules_of
from ckptool.transforms.naming import NamePlan, distinct, stays
from ckptool.transforms.nearest import similar
from ckptool.words import counted, listed, printable

__all__ = ["rename"]

_HINT = "make the rules narrower, or rename one of the two to something else first"
_BELOW = "z"
"""Stands for a name below a module that has none."""
_MOST_IDLE = 3
"""Names of a table that are nowhere, each told with what is like it."""


def rename(
    checkpoint: Checkpoint,
    rules: Iterable[Rule | str] = (),
    *,
    prefixes: Iterable[str] = (),
    key: Any = None,
) -> Checkpoint:
    r"""Rewrite the names of every state dict, or of the one under `key`.

    Rules are applied in order, each to what the one before made of a name: `REGEX=>REPL` as a
    text, or what `regex_rule`, `prefix_rule` and `table_rule` give; then the `prefixes`,
    `OLD=NEW`. `_metadata` follows, and so do optimizers that hold names. A pickled module stays
    as it is, with a warning; one tells of each rule that matched nothing. Nothing to change: the
    same checkpoint comes back.

    Raises:
        NameCollision: two entries would get one name.
        NotFound: nothing of that `key`.
        UsageError: a text that is no rule; nothing would be left of a name, or a `/` come in.
    """
    made = _Renaming(rules_of(rules, prefixes), checkpoint.path)
    plan = NamePlan(checkpoint.path, _HINT)
    every = distinct(sections(checkpoint.root))
    for part in every if key is None else [model_state_dict(checkpoint, key)]:
        names = wrapped_names(part.node)
        if part.kind == "state_dict":
            plan.rename(part, names, made.of(names), made.module)
        elif part.kind == "module":
            made.look_at(names)
            plan.changes.append(stays(part))
    plan.follow(every, lambda own: made.of(own) if key is None else {})
    plan.changes[:0] = made.changes()
    plan.changes.extend(made.warnings())
    return plan.applied(checkpoint)


@dataclass(frozen=True, slots=True)
class _Step:
    """One rule that matched a name."""

    rule: int
    old: str
    new: str


class _Renaming:
    """The rules over names, each name once, and what each rule has done."""

    def __init__(self, rules: list[Rule], file: str) -> None:
        self._rules = rules
        self._file = file
        self._steps: dict[str, list[_Step]] = {}
        self._changed = [0 for _ in rules]
        self._examples: list[_Step | None] = [None for _ in rules]

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Old name to new, of the names that change; what each rule does to them is counted."""
        renamed: dict[str, str] = {}
        for name in names:
            new = self._new(name)
            if not new and name:
                raise UsageError(
                    f"nothing would be left of the name {printable(name)!r}",
                    file=self._file or None,
                    hint="every tensor needs a name: let the rules keep a part of it",
                )
            if "/" in new and "/" not in name:
                raise UsageError(
                    f"{printable(new)!r} has a / in it, and so has no address",
                    file=self._file or None,
                    hint="dots stand between the parts of a name",
                )
            for step in self._steps[name]:
                if step.old != step.new:
                    self._changed[step.rule] += 1
                    self._examples[step.rule] = self._examples[step.rule] or step
            if new != name:
                renamed[name] = new
        return renamed

    def look_at(self, names: Iterable[str]) -> None:
        """Note which rules match names that stay all the same."""
        for name in names:
            self._new(name)

    def module(self, path: str) -> str:
        """The path of a module without names, as if there were one below it."""
        before = f"{path}." if path else ""
        new = self._run(f"{before}{_BELOW}")
        name = new[-1].new if new else f"{before}{_BELOW}"
        above, _, last = name.rpartition(".")
        return above if last == _BELOW else path

    def _new(self, name: str) -> str:
        if name not in self._steps:
            self._steps[name] = self._run(name)
        steps = self._steps[name]
        return steps[-1].new if steps else name

    def _run(self, name: str) -> list[_Step]:
        steps: list[_Step] = []
        for at, rule in enumerate(self._rules):
            new = rule.apply(name)
            if new is not None:
                steps.append(_Step(at, name, new))
                name = new
        return steps

    def changes(self) -> Iterator[Change]:
        """What each rule did."""
        for rule, count, example in zip(self._rules, self._changed, self._examples, strict=True):
            if example is not None:
                such = f"{printable(example.old)} -> {printable(example.new)}"
                text = f"{printable(rule.text)} changed {counted(count, 'name')}: {such}"
                yield Change("rename", text, count)

    def warnings(self) -> Iterator[Change]:
        """Which rules did nothing, or which names of a table were nowhere."""
        matched: list[set[str]] = [set() for _ in self._rules]
        for step in chain.from_iterable(self._steps.values()):
            matched[step.rule].add(step.old)
        for at, rule in enumerate(self._rules):
            idle = [name for name in rule.wanted if name not in matched[at]]
            if not matched[at]:
                yield self._idle(f"{printable(rule.text)} matched no name", at, idle)
            elif rule.exact and idle:
                text = f"{len(idle):,} of the {len(rule.wanted):,} names in {printable(rule.text)}"
                yield self._idle(f"{text} are nowhere: {listed(idle)}", at, idle)

    def _idle(self, text: str, rule: int, idle: list[str]) -> Change:
        names = list(self._arriving(rule))
        near = dict.fromkeys(
            name for wanted in idle[:_MOST_IDLE] for name in similar(wanted, names)
        )
        return Change("warning", f"{text}; there is {listed(near)}" if near else text)

    def _arriving(self, rule: int) -> Iterator[str]:
        """The names as the rules before this one leave them."""
        for name, steps in self._steps.items():
            yield next((step.new for step in reversed(steps) if step.rule < rule), name)
