"""Align the names of a file with those of a model.

What is applied: wrapper components come off either side, old spellings become today's
(`known_renames`), equal names are pairs, and one prefix is taken off or put before the names if
more than half of them pair by that. Each step has its rule. `proposals` finds what is likely beyond
that, for the user to decide; no name is ever paired by a proposal.

All steps take time in proportion to the names times their depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptool.core.model import Shape
from ckptool.core.names import N_AVERAGED, WRAPPERS
from ckptool.matching.known_renames import BATCHES, Respelling, respellings
from ckptool.matching.report import Slot, fits
from ckptool.transforms.name_rules import regex_rule

_MOST_QUESTIONS = 3
"""More alternatives nobody reads."""
_LONGEST = 1000
"""Characters. A longer name is only compared as a whole: each of its parts would be copied."""
_NUMBER = re.compile(r"\d+")
_MODULES = re.compile(r"(?:module\.)*")
_COUNTER = re.compile(r"(?:module\.)*n_averaged")
"""The counter of an average around the whole model."""
_WORDS = re.compile(rf"(?<![^.])(?:{'|'.join(word for word in WRAPPERS if word != 'module')})\.")
"""Wrapper components that no layer is called."""
_MOST_RULES = 64
"""Rules of one step; where there would be more, none is made for it."""
_SAYS_NOTHING: tuple[Shape | None, ...] = (None, (), (1,))
"""Shapes that so many tensors have that they identify none."""

Names = dict[str, str]
"""Names as they are compared, each with the whole name."""


class AlignmentStep(NamedTuple):
    """A change on the way from the names of the file to those of the model."""

    kind: str
    """`wrapper`, `prefix` or `known`."""
    text: str
    """For people: `module. removed`, `gamma -> weight`."""
    rule: str
    """`REGEX=>REPL` for the names that the earlier steps have made; empty: no rule does just it."""
    side: int
    """0: `changed` are whole names of the file; 1: of the model."""
    changed: Collection[str]


class Prefix(NamedTuple):
    """Components in front of names that one side has and the other has not."""

    text: str
    """With its dot."""
    is_removed: bool
    """Whether it comes off the file's names; else it is put before them."""
    names: Mapping[str, str]
    """Whole names of the model, each with the name in the file that the prefix gives it."""
    collides: bool
    """Whether names without the prefix would collide with those that lose it."""


class Proposal(NamedTuple):
    """A rule that a user may give."""

    rule: str
    """`REGEX=>REPL`, for the names of the file."""
    names: Mapping[str, str]
    """Whole names of the model, each with the name in the file that becomes it."""


class _Form(NamedTuple):
    names: Names
    steps: tuple[AlignmentStep, ...] = ()


@dataclass
class KeyAlignment:
    """Which name of the file is which of the model."""

    have: Mapping[str, Slot]
    want: Mapping[str, Slot]
    bare: tuple[Names, Names]
    """The names of the file and of the model without wrapper components and the prefix."""
    today: tuple[Names, Names]
    """The bare names in today's spelling."""
    steps: tuple[AlignmentStep, ...] = ()
    """From the file's names to the model's."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Name of the model to name in the file."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """The same for names of another shape."""
    questions: tuple[Proposal, ...] = ()
    """Prefixes of which one may be meant, the first with the most votes. A rule is empty where no
    single rule does it."""


def is_average_counter(name: str) -> bool:
    """Return whether a name is that of `AveragedModel`'s counter, which is beside the wrapper."""
    return name == N_AVERAGED or name.endswith(f".{N_AVERAGED}")


def align(
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    *,
    closed: Collection[str] = (),
    is_ruled: bool = False,
) -> KeyAlignment:
    """Pair the names of a file with those of a model, as far as that is certain.

    Args:
        have: What stands under the names of the file.
        want: What the model has.
        closed: Paths of the model's modules below which no name is respelled.
        is_ruled: Whether rules of the user have given names: no prefix contradicts equal ones then.
    """
    files, models = list(_forms(have, 0)), list(_forms(want, 1))
    ways: list[_KeyForms] = []
    for mine in files:
        for theirs in models:
            ways.append(_KeyForms(have, want, mine, theirs, closed))
            if ways[-1].score == len(want):
                break
    best = max(ways, key=lambda way: way.score)
    if not best.score:
        best = ways[-1]
    found = _paired(best)
    if best.score < len(want) and not (is_ruled and best.score):
        found = _with_prefix(found, ways[-1])
    return found


class _KeyForms:
    """The keys of the file and of the model in one spelling each."""

    def __init__(
        self,
        have: Mapping[str, Slot],
        want: Mapping[str, Slot],
        mine: _Form,
        theirs: _Form,
        closed: Collection[str],
    ) -> None:
        self.have, self.want, self.forms = have, want, (mine, theirs)
        self.closed = closed
        self.respelled = _respelled(mine.names, theirs.names, closed)
        self.own = _spelled(mine.names, self.respelled[0])
        self.wanted = _spelled(theirs.names, self.respelled[1])
        self.score = sum(
            [
                (own := self.own.get(name)) is not None and fits(have[own], want[full])
                for name, full in self.wanted.items()
            ]
        )


def _respelled(
    mine: Names, theirs: Names, closed: Collection[str]
) -> tuple[dict[str, Respelling], dict[str, Respelling]]:
    """Return the names of either side to compare in today's spelling.

    A name that both sides have is left, unless it means something else on the other one.
    """
    both = respellings(mine), respellings(theirs)
    if not any(both):
        return both
    inside = tuple(f"{path}." if path else "" for path in closed)
    kept = {name.rpartition(".")[0] for name, full in theirs.items() if full.startswith(inside)}
    left, right = (
        {
            name: part
            for name, part in found.items()
            if (name not in others or other.get(name, part) != part)
            and kept.isdisjoint(one.rpartition(".")[0] for one in (name, part.of(name)))
        }
        for found, others, other in ((both[0], theirs, both[1]), (both[1], mine, both[0]))
    )
    return left, right


def _spelled(names: Names, respelled: Mapping[str, Respelling]) -> Names:
    if not respelled:
        return names
    return {
        (respelled[name].of(name) if name in respelled else name): full
        for name, full in names.items()
    }


def _forms(slots: Mapping[str, Slot], side: int) -> Iterator[_Form]:
    """Yield the names as they are, without wrappers, and without `module` in submodules too.

    A form that changes nothing more, or that makes two names one, is left out.
    """
    # In the order of what a model may legitimately be called: a submodule can be named `module`, so
    # that name is taken off last, and only where the shorter forms did not fit.
    last = short = {name: name for name in slots}
    yield _Form(last)
    every = "\n".join(slots)
    steps: list[AlignmentStep] = []
    if any(word in every for word in WRAPPERS if word != "module"):
        short = {_WORDS.sub("", name): name for name in slots}
        changed = {full for name, full in short.items() if name != full}
        if side:
            steps += _inserted(short, last, side)
        elif changed:
            words = dict.fromkeys(word for name in changed for word in _WORDS.findall(name))
            text = f"{', '.join(words)} removed"
            steps.append(AlignmentStep("wrapper", text, f"{_WORDS.pattern}=>", 0, changed))
    counted = [name for name in short if not _COUNTER.fullmatch(name)]
    front = _MODULES.match(common_module(counted))[0] if counted else ""  # type: ignore[index]
    if front:
        often = front.count(".")
        part = re.compile(rf"^(?:module\.){{1,{often}}}" if often > 1 else r"^module\.")
        changed = {full for name, full in short.items() if name.startswith("module.")}
        short = {
            name[len(front) :] if name.startswith(front) else part.sub("", name): full
            for name, full in short.items()
        }
        if side == 0:
            steps.append(
                AlignmentStep("wrapper", f"{front} removed", f"{part.pattern}=>", 0, changed)
            )
        else:
            steps.append(AlignmentStep("wrapper", f"{front} added", f"^=>{front}", 1, changed))
    if len(short) == len(last) and short.keys() != last.keys():
        last = short
        yield _Form(last, tuple(steps))
    else:
        steps = []
    paths = set(wrapped_submodules(name for name in last if not is_average_counter(name)))
    if paths:
        inner = {_without_submodules(name, paths): full for name, full in last.items()}
        if len(inner) == len(last):
            yield _Form(inner, (*steps, *_inserted(inner, last, side)))


def _inserted(short: Names, long: Names, side: int) -> list[AlignmentStep]:
    """Return a step for each place where the long names have wrappers that the short ones lack.

    Of the file they come off, the outermost first; of the model they are put in, in that order
    too: whoever follows the steps of a model reads them backwards.
    """
    names = {full: name for name, full in long.items()}
    places: dict[tuple[str, str], set[str]] = {}
    for name, full in short.items():
        if name != names[full] and len(names[full]) <= _LONGEST:
            for place in _places(name.split("."), names[full].split(".")):
                places.setdefault(place, set()).add(full)
    text = "\n".join(name for name in short if not is_average_counter(name))
    steps = []
    for (path, words), changed in sorted(places.items(), key=lambda one: one[0][0].count(".")):
        before = rf"{_pattern(path)}\." if path else ""
        after = f"{_filled(path)}." if path else ""
        rule = rf"^{before}{escaped(words)}=>{after}" if side == 0 else f"^{before}=>{after}{words}"
        is_exact = len(places) <= _MOST_RULES and len(changed) == len(
            re.findall(f"^{before}", text, re.MULTILINE)
        )
        does = "removed" if side == 0 else "added"
        steps.append(
            AlignmentStep("wrapper", f"{words} {does}", rule if is_exact else "", side, changed)
        )
    return steps


def _places(short: list[str], long: list[str]) -> Iterator[tuple[str, str]]:
    """Yield where components were put into a name: the path before them, and what was put in."""
    at, words = 0, ""
    for part in long:
        if at < len(short) and part == short[at]:
            if words:
                yield _template(".".join(short[:at])), words
            at, words = at + 1, ""
        else:
            words += f"{part}."


def wrapped_submodules(names: Iterable[str]) -> list[str]:
    """Return the paths below which every name continues with `module`, outermost first.

    Such are the names of models of which only a part was inside `DataParallel`.
    """
    below: dict[str, set[str]] = {}
    some = [name for name in names if len(name) <= _LONGEST]
    heads = {name.partition(".")[0] for name in some if ".module." in name}
    for name in some if heads else ():
        path, _, rest = name.partition(".")
        for part in rest.split(".") if path in heads else ():
            below.setdefault(path, set()).add(part)
            path = f"{path}.{part}"
    return [
        path for path, parts in below.items() if parts == {"module"} and f"{path}.module" in below
    ]


def _without_submodules(name: str, paths: set[str]) -> str:
    if ".module." not in name or len(name) > _LONGEST:
        return name
    kept, path = [], ""
    for part in name.split("."):
        if part != "module" or path not in paths:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def ends(name: str) -> Iterator[int]:
    """Yield where the components of a name after the first one begin."""
    at = name.find(".") + 1 if len(name) <= _LONGEST else 0
    while at:
        yield at
        at = name.find(".", at) + 1


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by what they are with `*` for numbers: there are few of those."""
    names = list(names)
    texts = _NUMBER.sub("*", "\n".join(names)).split("\n")  # one call for all is faster
    if len(texts) != len(names):  # a name has a line break
        texts = [_template(name) for name in names]
    groups: dict[str, list[str]] = {}
    for text, name in zip(texts, names, strict=True):
        groups.setdefault(text, []).append(name)
    return groups


def _shortened(
    longer: Mapping[str, list[str]], shorter: Mapping[str, list[str]], names: Names
) -> Iterator[tuple[str, str]]:
    """Yield the names of one side with the part of each that is a name of the other side."""
    for text, some in longer.items():
        for depth, at in enumerate(ends(text), 1):
            if text[at:] in shorter:
                for name in some:
                    rest = name.split(".", depth)[depth]
                    if rest in names:
                        yield name, rest


def _votes(way: _KeyForms) -> Counter[tuple[str, bool]]:
    """Count the votes for each prefix, and whether it comes off the file's names.

    A name votes for each prefix without which the other side has it, with its shape.
    """
    votes: Counter[tuple[str, bool]] = Counter()
    own, wanted = _grouped(way.own), _grouped(way.wanted)
    for name, rest in _shortened(own, wanted, way.wanted):
        if fits(way.have[way.own[name]], way.want[way.wanted[rest]]):
            votes[name[: len(name) - len(rest)], True] += 1
    for name, rest in _shortened(wanted, own, way.own):
        if fits(way.have[way.own[rest]], way.want[way.wanted[name]]):
            votes[name[: len(name) - len(rest)], False] += 1
    return votes


def _match_with_prefix(way: _KeyForms, text: str, is_removed: bool) -> Prefix:
    """Pair the keys that match once the prefix is added or removed."""
    longer, shorter = (way.own, way.wanted) if is_removed else (way.wanted, way.own)
    below = {name[len(text) :]: full for name, full in longer.items() if name.startswith(text)}
    both = ((full, shorter[rest]) for rest, full in below.items() if rest in shorter)
    pairs = ((other, full) if is_removed else (full, other) for full, other in both)
    names = {full: own for full, own in pairs if fits(way.have[own], way.want[full])}
    collides = len(below) < len(longer) and any(
        name in below and not name.startswith(text) for name in longer
    )
    return Prefix(text, is_removed, names, collides)


def _with_prefix(found: KeyAlignment, way: _KeyForms) -> KeyAlignment:
    """Take the prefix with most votes off its side if more than half of the names pair by it.

    Half of the smaller side will do where no name is equal, no other prefix has half as many votes,
    and the names are not below another path too. Else it is a question. More than half as many
    equal names as votes are right.
    """
    votes = _votes(way)
    if not votes:
        return found
    (text, is_removed), count = max(votes.items(), key=lambda vote: (vote[1], -len(vote[0][0])))
    if count < 2 * len(found.pairs):
        return found
    best = _match_with_prefix(way, text, is_removed)
    less, more = sorted((len(way.own), len(way.wanted)))
    if 2 * len(best.names) < less:
        return found
    rivals = [
        one
        for one, votes_of_one in votes.most_common()
        if 2 * votes_of_one > count
        and not (one[1] == is_removed and (one[0].startswith(text) or text.startswith(one[0])))
    ]
    is_doubtful = rivals or found.pairs or _is_elsewhere(best, way)
    if not is_doubtful or 2 * len(best.names) > more:
        return _paired(way, best)
    every = (best, *(_match_with_prefix(way, *one) for one in rivals[: _MOST_QUESTIONS - 1]))
    found.questions = tuple(Proposal(_asking(one, way), one.names) for one in every)
    taken = {*found.pairs.values()}
    if any(
        not found.pairs.keys().isdisjoint(one.names) or not taken.isdisjoint(one.names.values())
        for one in every
    ):
        found.pairs, found.mismatched = {}, {}
    return found


def _is_elsewhere(prefix: Prefix, way: _KeyForms) -> bool:
    """Return whether the side without the prefix has most of the names below a path as well."""
    text, is_removed = prefix.text, prefix.is_removed
    longer, shorter = (way.own, way.wanted) if is_removed else (way.wanted, way.own)
    rests = {name[len(text) :]: full for name, full in longer.items() if name.startswith(text)}
    paths = Counter(
        name[: len(name) - len(rest)]
        for name, rest in _shortened(_grouped(shorter), _grouped(rests), rests)
    )
    return 2 * max(paths.values(), default=0) > len(prefix.names)


def _paired(way: _KeyForms, prefix: Prefix | None = None) -> KeyAlignment:
    """Pair the names that are equal without the wrappers and the prefix."""
    have, want = way.have, way.want
    sides, respelled = [form.names for form in way.forms], way.respelled
    if prefix is not None:
        side, size = 0 if prefix.is_removed else 1, len(prefix.text)
        names = sides[side]
        sides[side] = {n[size:]: full for n, full in names.items() if n.startswith(prefix.text)}
        for name, full in names.items() if len(sides[side]) < len(names) else ():
            if not name.startswith(prefix.text):
                sides[side].setdefault(name, full)
        respelled = _respelled(sides[0], sides[1], way.closed)
    mine, theirs = map(_spelled, sides, respelled)
    found = KeyAlignment(have, want, (sides[0], sides[1]), (mine, theirs))
    for name, full in theirs.items():
        own = mine.get(name)
        if own is None:
            continue
        if fits(have[own], want[full]):
            found.pairs[full] = own
        elif have[own].shape is not None:
            found.mismatched[full] = own
    steps = [*way.forms[0].steps]
    for at, parts in enumerate(respelled):
        steps += _known(found, at, parts)
    if prefix is not None:
        steps.insert(
            len(steps) if side else len(way.forms[0].steps), _prefix_step(prefix, names, found)
        )
    found.steps = (*steps, *reversed(way.forms[1].steps))
    return found


def _prefix_step(prefix: Prefix, names: Names, found: KeyAlignment) -> AlignmentStep:
    text = prefix.text
    changed = {full for name, full in names.items() if name.startswith(text)}
    if prefix.is_removed:
        rule = "" if prefix.collides else f"^{escaped(text)}=>"
        return AlignmentStep("prefix", f"{text} removed", rule, 0, changed)
    rule = f"^=>{literal(text)}" if changed.issuperset(found.pairs) else ""
    return AlignmentStep("prefix", f"{text} added", rule, 1, changed)


def _known(
    found: KeyAlignment, side: int, parts: Mapping[str, Respelling]
) -> Iterator[AlignmentStep]:
    """Yield a step for each ending that becomes today's, of a model for each that was today's."""
    groups: dict[tuple[str, str], set[str]] = {}
    for name, part in parts.items():
        before, after = (part.old, part.new) if side == 0 else (part.new, part.old)
        kept = len(common_module([before, after]))
        groups.setdefault((before[kept:], after[kept:]), set()).add(found.bare[side][name])
    names = found.bare[0] if side == 0 else found.today[1]
    for (before, after), changed in groups.items():
        rule = rf"(^|\.){escaped(before)}$=>\1{literal(after)}"
        if len(groups) > _MOST_RULES or len(changed) < sum(
            f".{name}".endswith(f".{before}") for name in names
        ):
            rule = ""
        yield AlignmentStep("known", f"{before} -> {after}", rule, side, changed)


def _asking(prefix: Prefix, way: _KeyForms) -> str:
    """Return the rule for a prefix that names of the file have behind their wrappers."""
    names = {full: name for name, full in way.forms[0].names.items()}
    some = prefix.names.values() if prefix.is_removed else names
    front = _front((own for own in some if not is_average_counter(own)), names)
    if front is None or (prefix.is_removed and prefix.collides):
        return ""
    old, new = (prefix.text, "") if prefix.is_removed else ("", prefix.text)
    return f"^{escaped(front + old)}=>{literal(front + new)}"


def _front(names: Iterable[str], bare: Mapping[str, str]) -> str | None:
    """Return what all names have in front of their bare ones; None: they differ in more."""
    fronts = {n.removesuffix(bare[n]) if n.endswith(bare[n]) else None for n in names}
    return fronts.pop() if len(fronts) == 1 else None


def proposals(found: KeyAlignment) -> list[Proposal]:
    """Return rules that would pair more names, for the user to decide; the questions' if any.

    A subtree is proposed for another one where both have the same names, numbers and shapes below
    them, counters aside, and no third one has. `layers.0` and `layers.1` are one subtree,
    `layers.*`.
    """
    if found.questions:
        return [one for one in found.questions if one.rule]
    mine, theirs = _Side(found, 0), _Side(found, 1)
    chosen: dict[str, str] = {}
    for tree, path in sorted(mine.free.items(), key=lambda one: (-one[0].size, len(one[1]))):
        other = theirs.free.get(tree, path)
        is_new = other not in mine.paths and path.count("*") == other.count("*")
        if is_new and not any(path[: at - 1] in chosen for at in ends(path)):
            chosen[path] = other
    return list(_as_rules(chosen, found, mine, theirs))


def common_module(names: Collection[str]) -> str:
    """Return the path, with its dot, of the innermost module that all names are in."""
    # What the first and the last in order begin with, all between them begin with.
    first, last = min(names), max(names)
    ends = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: first.rfind(".", 0, next(ends, len(first))) + 1]


def _template(name: str) -> str:
    return _NUMBER.sub("*", name)


class _Subtree(NamedTuple):
    """What is below a path, all of its numbers together."""

    size: int
    content: int
    """The sum of the hashes of what is below: equal for equal names, numbers and shapes."""
    kind: int
    """The same without the numbers."""


class _Side:
    """The names of one side, and the subtrees in which nothing is paired, each unlike any other."""

    def __init__(self, found: KeyAlignment, side: int) -> None:
        pairs = {**found.pairs, **found.mismatched}
        used = pairs.keys() if side else {*pairs.values()}
        slots = found.want if side else found.have
        self.names = {n: full for n, full in found.today[side].items() if "*" not in n}
        self.groups = _grouped(self.names)
        self.paths: set[str] = set()
        sizes: Counter[str] = Counter()
        contents: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        closed: set[str] = set()
        telling: set[str] = set()
        for text, some in self.groups.items():
            full = [self.names[name] for name in some]
            shapes = [slots[one].shape for one in full]
            numbers = map(tuple, map(_NUMBER.findall, some))
            content = sum(map(hash, zip(numbers, shapes, strict=True)))
            kind = sum(map(hash, shapes))
            is_used = not used.isdisjoint(full)
            tells = any(shape not in _SAYS_NOTHING for shape in shapes)
            for at in ends(text):
                path, rest = text[: at - 1], text[at:]
                self.paths.add(path)
                if text.endswith(BATCHES):
                    continue
                sizes[path] += len(some)
                contents[path] += hash((rest, content))
                kinds[path] += hash((rest, kind))
                if is_used:
                    closed.add(path)
                if tells or any(map(str.isalpha, rest.rpartition(".")[0])):
                    telling.add(path)
        every = {path: _Subtree(n, contents[path], kinds[path]) for path, n in sizes.items()}
        often = Counter((tree.size, tree.kind) for tree in every.values())
        self.free = {
            tree: path
            for path, tree in every.items()
            if path in telling and path not in closed and often[tree.size, tree.kind] == 1
        }


def _as_rules(
    chosen: Mapping[str, str], found: KeyAlignment, mine: _Side, theirs: _Side
) -> Iterator[Proposal]:
    """Yield a rule for each renamed path, the deepest first."""
    bare = {full: name for name, full in found.bare[0].items()}
    below: dict[str, list[str]] = {path: [] for path in chosen}
    for text, some in mine.groups.items():
        path = next((text[: at - 1] for at in ends(text) if text[: at - 1] in chosen), None)
        if path is not None:
            below[path] += some
    changed: set[str] = set()
    for path, other in sorted(chosen.items(), key=lambda one: -one[0].count(".")):
        if path in changed:  # the rule would change what an earlier rule has made
            continue
        before, after = _pattern(path), _filled(other)
        apply = regex_rule(rf"^{before}\.=>{after}.").apply
        news = {apply(name): mine.names[name] for name in below[path]}
        names = {
            theirs.names[new]: full
            for new, full in news.items()
            if new in theirs.names and fits(found.have[full], found.want[theirs.names[new]])
        }
        front = _front(news.values(), bare)
        if front is not None:
            changed.update((other, *(other[: at - 1] for at in ends(other))))
            yield Proposal(rf"^{escaped(front)}{before}\.=>{literal(front)}{after}.", names)


def _pattern(path: str) -> str:
    return escaped(path).replace(r"\*", r"(\d+)")


def _filled(path: str) -> str:
    """Return a replacement for a path, with the numbers that `_pattern` has found for `*`."""
    first, *others = literal(path).split("*")
    return first + "".join(rf"\{n}{text}" for n, text in enumerate(others, 1))


def escaped(text: str) -> str:
    """Return a regular expression for the text, in which no arrow ends it."""
    return re.escape(text).replace("=>", "=[>]")


def literal(text: str) -> str:
    """Return what a rule has to say for the text to be put in."""
    return text.replace("\\", r"\\")
