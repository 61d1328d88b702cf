"""Match the names of a file with those of a model: the steps in their order, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptool.core.names import RULES_HINT, check_collisions
from ckptool.errors import without_query
from ckptool.matching.align import KeyAlignment, align, is_average_counter, proposals
from ckptool.matching.known_renames import BATCHES, FOREIGN, beside, uncounted
from ckptool.matching.report import (
    Ambiguity,
    MatchReport,
    Mismatch,
    Renaming,
    Slot,
    casts_of,
    counted,
    most_allowed,
)
from ckptool.transforms.name_rules import AppliedRules, Rule, prefix_regex, regex_rule

_NOT_COUNTED = "files of torch before 0.4.1 and of other libraries do not have this counter"
_NO_LAYER = "torch does not need this counter if its layer is missing"
_NO_AVERAGE = "the file is not from an AveragedModel"
_WAS_AVERAGE = "the counter of an AveragedModel, which this model is not"
_UNCOUNTED = "the model's normalization does not count batches"
_MOST_LEFT = 200
"""Names left over on a side of which some may be the same; of more nobody is asked."""


class Match(NamedTuple):
    """Which name of the file goes where, and the report of it."""

    pairs: dict[str, str]
    """Name in the model to name in the file, of what is to be loaded, in the model's order.

    Tied names of which one is in the file all have that one. Mismatched names are not here.
    """
    renamed: dict[str, str]
    """Every name of the file to what the rules make of it, matched or not: for files written."""
    report: MatchReport


def matched(
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    *,
    rules: Iterable[Rule] = (),
    metadata: Mapping[str, Any] | None = None,
    closed: Collection[str] = (),
    foreign: bool = False,
    file: str = "",
    model: str = "",
) -> Match:
    """Match the names of a file with those that a model has.

    Args:
        have: What stands under the names of the file.
        want: What the model has.
        rules: The user's, applied to the file's names before anything else.
        metadata: `_metadata` of the file's state dict: its versions say which counters old files
            lack.
        closed: Paths of the model's modules that load in a way of their own: no name below them
            is respelled.
        foreign: Whether the names are those of TensorFlow, Keras or Flax.
        file: What the report calls the file.
        model: What the report calls the model.

    Raises:
        NameCollision: the user's rules make two names one.
        UsageError: the user's rules leave nothing of a name.
    """
    rules = list(rules)
    made = AppliedRules(rules, file)
    by_user = made.of(have)
    if rules:
        check_collisions(by_user, by_user, file=file or None, hint=RULES_HINT)
    foreigns = FOREIGN.items() if foreign else ()
    spelling = [regex_rule(rule)._replace(text=text) for text, rule in foreigns]
    ruled = _spelled(by_user, spelling, want) if foreign else by_user
    origin = {new: own for own, new in ruled.items()}
    named = {ruled[own]: slot for own, slot in have.items()}
    found = align(named, want, closed=closed, is_ruled=named.keys() != have.keys())
    direct = {name: origin[own] for name, own in {**found.mismatched, **found.pairs}.items()}
    wrong = {name: direct[name] for name in found.mismatched}
    met = {name: direct[name] for name in found.pairs}
    tied = _tied(want, met, wrong)
    pairs = {name: met[name] for name in want if name in met}
    missing = [name for name in want if name not in pairs and name not in wrong]
    taken = {*pairs.values(), *wrong.values()}
    unused = [own for own in have if own not in taken]
    kept = _kept(missing, want, pairs, wrong, metadata)
    left_out = _left_out(unused, pairs)
    missing = [name for name in missing if name not in kept]
    unused = [own for own in unused if own not in left_out]
    wanted = {own: name for name, own in direct.items()}
    renamed = (
        *_by_rules("rule", rules, {own: own for own in have}, wanted),
        *_by_rules("known", spelling, by_user, wanted),
        *_by_steps(found, ruled, direct),
    )
    ambiguous, proposed = _proposed(found, origin, missing, unused)
    report = MatchReport(
        file=without_query(file),
        model=model,
        missing_keys=missing,
        unexpected_keys=unused,
        mismatched=tuple(
            Mismatch(name, own, have[own].shape or (), want[name].shape or ())
            for name, own in ((name, wrong[name]) for name in want if name in wrong)
        ),
        renamed=renamed,
        cast=casts_of(pairs, have, want),
        tied=tied,
        ambiguous=ambiguous,
        proposed=proposed,
        recipe=_recipe(have, want) if missing and unused else "",
        left_out=tuple(left_out.items()),
        kept=tuple(kept.items()),
        notes=tuple(made.idle()),
        **counted(want, pairs, kept),
    )
    return Match(pairs, _rewritten(ruled, wanted, renamed), report)


def _recipe(have: Collection[str], want: Collection[str]) -> str:
    from ckptool.recipes import leads_to  # most files fit

    return leads_to(have, want) or ""


def _spelled(
    names: Mapping[str, str], rules: Sequence[Rule], want: Collection[str]
) -> dict[str, str]:
    """Return names after all rules, until they are the model's.

    Those that would become one stay as they are.
    """
    spelled = dict(names)
    for rule in rules:
        left = [(own, at) for own, at in spelled.items() if at not in want]
        spelled.update((own, rule.apply(at) or at) for own, at in left)
    often = Counter(spelled.values())
    return {own: new if often[new] == 1 else names[own] for own, new in spelled.items()}


def _tied(
    want: Mapping[str, Slot], met: dict[str, str], wrong: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Give all names of one tensor what one of them has; return those tensors that are loaded."""
    groups: dict[Any, list[str]] = {}
    for name, slot in want.items():
        if slot.tie is not None:
            groups.setdefault(slot.tie, []).append(name)
    tied = []
    for names in groups.values():
        source = next((met[name] for name in names if name in met), None)
        if source is not None and len(names) > 1:
            for name in names:
                if name not in wrong:
                    met.setdefault(name, source)
            tied.append(tuple(names))
    return tuple(tied)


def _kept(
    missing: Sequence[str],
    want: Mapping[str, Slot],
    pairs: Mapping[str, str],
    wrong: Collection[str],
    metadata: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return the missing counters that torch does not ask for, each with the reason."""
    free = uncounted(missing, pairs, metadata)
    kept = {}
    for name in missing:
        if name in free and beside(name) in want:
            near = beside(name)
            kept[name] = _NOT_COUNTED if near in pairs or near in wrong else _NO_LAYER
        elif is_average_counter(name):
            kept[name] = _NO_AVERAGE
    return kept


def _left_out(unused: Sequence[str], pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the file's counters that the model has no use for, each with the reason."""
    near = {own for name, own in pairs.items() if unused and name.endswith("running_mean")}
    left_out = {}
    for own in unused:
        if is_average_counter(own):
            left_out[own] = _WAS_AVERAGE
        elif own.rpartition(".")[2] == BATCHES and beside(own) in near:
            left_out[own] = _UNCOUNTED
    return left_out


def _proposed(
    found: KeyAlignment, origin: Mapping[str, str], missing: Sequence[str], unused: Sequence[str]
) -> tuple[tuple[Ambiguity, ...], tuple[Renaming, ...]]:
    """Return the questions that a rule decides, and the rules that would match more."""
    if not missing or not unused:
        return (), ()
    proposed = tuple(
        Renaming(
            "proposed",
            one.rule.replace("=>", " -> ", 1),
            tuple((origin[own], name) for name, own in one.names.items()),
            one.rule,
        )
        for one in proposals(found)
    )
    asked: list[Ambiguity] = []
    if found.questions:
        own = dict.fromkeys(origin[own] for one in found.questions for own in one.names.values())
        wanted = dict.fromkeys(name for one in found.questions for name in one.names)
        rules = tuple(one.rule for one in proposed)
        asked.append(Ambiguity(tuple(own), tuple(wanted), rules))
    for ways in [[one] for one in proposed] if found.questions else [proposed]:
        done = {name for one in ways for pair in one.names for name in pair}
        rest = [name for name in missing if name not in done]
        asked += _undecided(found, origin, rest, [own for own in unused if own not in done])
    return tuple(asked), proposed


def _undecided(
    found: KeyAlignment, origin: Mapping[str, str], missing: Sequence[str], unused: Sequence[str]
) -> tuple[Ambiguity, ...]:
    """Return the few names left over of which some may be the same tensors.

    Their last components and shapes are equal, one begins with the other (`fc.weight_orig`), or one
    ends with the other.
    """
    most = min(most_allowed(len(found.want)), _MOST_LEFT)
    if not (0 < len(missing) <= most and 0 < len(unused) <= most):
        return ()
    left, lost = {*unused}, {*missing}
    mine, theirs = (
        sorted((name.replace("parametrizations.", ""), full) for name, full in names.items())
        for names in found.bare
    )
    mine = [(name, full) for name, full in mine if origin[full] in left]
    alike = [
        (origin[own], full)
        for name, full in theirs
        if full in lost
        for short, own in mine
        if _may_be(short, name)
        or (
            short.rpartition(".")[2] == name.rpartition(".")[2]
            and found.have[own].shape in (found.want[full].shape, None)
        )
    ]
    if not alike:
        return ()
    own, wanted = (tuple(dict.fromkeys(names)) for names in zip(*alike, strict=True))
    return (Ambiguity(own, wanted),)


def _may_be(own: str, name: str) -> bool:
    """Return whether one of two names begins or ends with the other."""
    return (
        f".{own}".endswith(f".{name}")
        or f".{name}".endswith(f".{own}")
        or own.startswith(name)
        or name.startswith((f"{own}.", f"{own}_"))
    )


def _by_steps(
    found: KeyAlignment, ruled: Mapping[str, str], direct: Mapping[str, str]
) -> Iterator[Renaming]:
    for step in found.steps:
        names = tuple(
            (own, name)
            for name, own in direct.items()
            if (name if step.side else ruled[own]) in step.changed
        )
        if names:
            yield Renaming(step.kind, step.text, names, step.rule)


def _by_rules(
    kind: str, rules: Sequence[Rule], names: Mapping[str, str], wanted: Mapping[str, str]
) -> Iterator[Renaming]:
    now = dict(names)
    for rule in rules:
        changed = {own: new for own, at in now.items() if (new := rule.apply(at) or at) != at}
        pairs = tuple((own, wanted[own]) for own in changed if own in wanted)
        if pairs:
            is_prefix = not rule.regex and not rule.exact and "=" in rule.text
            regex = prefix_regex(rule.text) if is_prefix else rule.regex or ""
            yield Renaming(kind, rule.text, pairs, regex)
        now.update(changed)


def _rewritten(
    ruled: Mapping[str, str], matched: Mapping[str, str], renamed: Iterable[Renaming]
) -> dict[str, str]:
    """Return every name of the file as it is afterwards.

    Matched names are the model's. The rest is what the rules make of it, or stays as the user's
    rules left it where another name is called so.
    """
    taken = set(matched.values())
    rules = [regex_rule(one.rule) for one in renamed if one.kind != "rule" and one.rule]
    names = dict(ruled)
    for own, at in ruled.items():
        if own in matched:
            names[own] = matched[own]
            continue
        new = at
        for rule in rules:
            new = rule.apply(new) or new
        names[own] = new = at if new in taken else new
        taken.add(new)
    return names
