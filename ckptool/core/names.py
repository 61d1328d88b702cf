"""Keys of a state dict: the components added by wrappers, and repeated layers as one.

`DataParallel` and `DistributedDataParallel` add `module`, `torch.compile` adds `_orig_mod`, FSDP
`_fsdp_wrapped_module` (`_fpw_module` before torch 1.12), activation checkpointing
`_checkpoint_wrapped_module`, Lightning with FSDP or DeepSpeed `_forward_module`. They nest in any
order. A wrapper is a whole component of a key, never a part of one.

`module` is also a common name for a real layer, so it counts as a wrapper only if every key starts
with it. The other names are never layers, and count anywhere.

Keys of repeated layers are shown as one: `layers.{0..31}.mlp.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from heapq import nlargest
from itertools import chain, islice, product, repeat
from math import prod
from typing import Any, NamedTuple

from ckptool.errors import NameCollision, UsageError
from ckptool.words import printable

WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)

STATISTICS = frozenset({"num_batches_tracked", "running_mean", "running_var"})
"""Last components of the buffers of batch norms."""
BUFFER_NAMES = STATISTICS | {"inv_freq", "n_averaged", "position_ids"}
"""Last components of buffers, for files that do not distinguish them from parameters."""
PEFT = "base_model.model."
"""The prefix that PEFT adds to the keys of the base model."""
N_AVERAGED = "n_averaged"
"""The counter of `AveragedModel`, next to its `module`."""

_MOST, _LONGEST = 2000, 120
"""The most names to compare, and characters of each: a hostile file may have many."""
_CANDIDATES = 20
"""Names compared letter by letter, chosen by their letter counts."""
_WORDS = 4

RULES_HINT = "make the rules narrower, or rename one of the two first"
COLLISION_HINT = "remove fewer levels, or only one wrapper prefix"

Renamer = Callable[[str], str]


class StripResult(NamedTuple):
    """The result of stripping wrapper components from keys."""

    renamed: dict[str, str]
    """The keys that change, old to new."""
    levels: int
    """The number of outermost components removed."""
    wrappers: tuple[str, ...]
    """The removed wrappers, outermost first, each once."""
    rename_module: Renamer
    """The same change for the path of a module, for `_metadata`."""


class _Level(NamedTuple):
    """One component to remove: the first of every key, or the first match of `pattern`."""

    pattern: re.Pattern[str]
    kinds: tuple[str, ...]

    def apply(self, name: str) -> str:
        """Return the key without the component."""
        return self.pattern.sub(r"\1", name, count=1)


def counts(name: Any) -> bool:
    """Return True if a key shows its wrappers; that of `AveragedModel`'s counter does not."""
    return isinstance(name, str) and name != N_AVERAGED


def strip_names(
    names: Collection[str],
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> StripResult:
    """Strip the wrapper components from the keys of a state dict's tensors and `_extra_state`s.

    One level is the outermost component: `module` if every key starts with it, otherwise the
    leftmost other wrapper of each key. Repeats until nothing changes, or `levels` times. With
    `only`, strips only these wrappers, and with `at`, only wrappers on and below this submodule.

    Raises:
        NameCollision: if two keys would become the same.
        UsageError: if `only` is not a known wrapper, or `levels` is less than 1.
    """
    kinds = _checked_kinds(only)
    if levels is not None and levels < 1:
        raise UsageError(f"levels must be at least 1, not {levels}")
    before = f"{at}." if at else ""
    old = [name for name in names if name.startswith(before)]
    new = [name[len(before) :] for name in old]
    done: list[_Level] = []
    while levels is None or len(done) < levels:
        level = _outermost([name for name in new if counts(name)], kinds)
        if level is None:
            break
        new = [level.apply(name) if counts(name) else name for name in new]
        done.append(level)
    renamed = {
        was: before + now for was, now in zip(old, new, strict=True) if was[len(before) :] != now
    }
    check_collisions(names, renamed)
    return StripResult(
        renamed,
        len(done),
        tuple(dict.fromkeys(kind for level in done for kind in level.kinds)),
        lambda path: _below(path, before, done),
    )


def bare_names(names: Collection[str]) -> dict[str, str]:
    """Return each key with its form without wrappers; none changes if two would become the same."""
    try:
        renamed = strip_names(names).renamed
    except NameCollision:
        renamed = {}
    return {name: renamed.get(name, name) for name in names}


def common_wrapper(bare: Mapping[str, str]) -> str:
    """Return the wrapper prefix that every key of a state dict has, by its `bare_names`."""
    fronts = {name.removesuffix(short) for name, short in bare.items() if name.endswith(short)}
    return fronts.pop() if len(fronts) == 1 and all(map(str.endswith, bare, bare.values())) else ""


_WRAPPED = re.compile(
    rf"(?<![^/])(?:(?:{'|'.join(WRAPPERS)})\.)+|(?<=\.)(?:(?:{'|'.join(WRAPPERS[1:])})\.)+"
)


def may_be_wrapped(text: str, *, inside: bool = False) -> bool:
    """Return True if a text of one or many keys has the name of a wrapper before a dot.

    With `inside`, only wrappers that may follow other components of a key.
    """
    return any(f"{word}." in text for word in (WRAPPERS[1:] if inside else WRAPPERS))


def wrapper_remover(names: Collection[str]) -> Renamer | None:
    """Return the function that strips wrappers in one container, or None if it has none.

    No key changes if two would become the same, as in `bare_names`.
    """
    own = [name for name in names if name != N_AVERAGED]
    if not own or not may_be_wrapped("\n".join(own), inside=True):  # the fast path for `module`
        front = ""
        while own and all(map(str.startswith, own, repeat(f"{front}module."))):
            front += "module."
        return (lambda name: name.removeprefix(front)) if front else None
    try:
        stripped = strip_names(names)
    except NameCollision:
        return None
    return stripped.rename_module if stripped.renamed else None


def unwrapped(name: str) -> str:
    """Return a key, or a path with `/`, without all possible wrapper prefixes."""
    return _WRAPPED.sub("", name) if may_be_wrapped(name) else name


def _checked_kinds(only: str | Sequence[str] | None) -> tuple[str, ...]:
    kinds = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    unknown = [kind for kind in kinds if kind not in WRAPPERS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is not a known wrapper prefix", hint=f"one of {', '.join(WRAPPERS)}"
        )
    return kinds


def _outermost(names: Sequence[str], kinds: tuple[str, ...]) -> _Level | None:
    """Return the next component to remove, or None."""
    if not names:
        return None
    kept = _alternatives(kind for kind in WRAPPERS if kind not in kinds and kind != "module")
    if "module" in kinds:
        front = re.compile(rf"^((?:{kept}\.)*)module\.", re.DOTALL)
        if all(map(front.match, names)):
            return _Level(front, ("module",))
    text = "\n".join(names)  # one fast search finds the wrappers that can occur at all
    others = _alternatives(kind for kind in kinds if kind != "module" and kind in text)
    inner = re.compile(rf"(^|\.)({others})\.")
    if others == _alternatives(()):
        return None
    found = dict.fromkeys(match[2] for name in names if (match := inner.search(name)))
    return _Level(inner, tuple(found)) if found else None


def _alternatives(kinds: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, kinds)) or '(?!)'})"


def _below(path: str, before: str, done: list[_Level]) -> str:
    if not f"{path}.".startswith(before):
        return path
    inner = path[len(before) :]
    for level in done:
        inner = level.apply(f"{inner}.")[:-1] if inner else inner  # the end of the wrapped module
    return before + inner if inner else before[:-1]


def wrappers_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the wrappers in the keys, outermost first, each once."""
    names = list(filter(counts, names))
    found: dict[str, None] = {}
    while (level := _outermost(names, WRAPPERS)) is not None:
        names = list(filter(counts, map(level.apply, names)))
        found.update(dict.fromkeys(level.kinds))
    return tuple(found)


def wrapped_in_part(
    names: Iterable[str], *, only: str | Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Return the keys with `module.` and those without, if most have it; else nothing.

    This `module` may be a layer, and stays: a wrapper would add it to every key. `only` selects
    wrappers, as in `strip_names`.
    """
    names = list(filter(counts, names))
    within = [name for name in names if name.startswith("module.")]
    others = [name for name in names if not name.startswith("module.")]
    is_part = 0 < len(others) < len(within) and "module" in _checked_kinds(only)
    return (within, others) if is_part else ([], [])


def prefixed(wrapper: str, at: str | None = None) -> Renamer:
    """Return the rename that adds `wrapper` to the model, or to its submodule `at`.

    Raises:
        UsageError: if `wrapper` is not a known wrapper.
    """
    _checked_kinds(wrapper)
    before = f"{at}." if at else ""

    def rename(name: str) -> str:
        if not counts(name) or not name.startswith(before):
            return name
        return f"{before}{wrapper}.{name[len(before) :]}"

    return rename


def add_name(wrapper: str, at: str | None = None) -> Renamer:
    """Return the rename of module paths that corresponds to `prefixed`."""
    rename = prefixed(wrapper, at)
    return lambda path: rename(f"{path}." if path else "").removesuffix(".")


def check_collisions(
    names: Iterable[Any],
    renamed: dict[str, str],
    *,
    file: str | None = None,
    place: str | None = None,
    hint: str = COLLISION_HINT,
) -> None:
    """Refuse a rename that makes two keys the same; the other arguments are for the message.

    Raises:
        NameCollision: if there are two; the message shows both.
    """
    if not renamed:
        return
    origin: dict[Any, Any] = {}
    for name in names:
        new = renamed.get(name, name) if isinstance(name, str) else name
        if new in origin:
            both = " and ".join(repr(printable(str(old))) for old in (origin[new], name))
            where = f" in {place}" if place else ""
            raise NameCollision(
                f"{both} would both become {printable(str(new))!r}{where}", file=file, hint=hint
            )
        origin[new] = name


def similar(wanted: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return the names most similar to `wanted`, else names with a similar component."""
    known = list(islice((name for name in names if len(name) <= _LONGEST), _MOST))
    wanted = wanted[:_LONGEST]
    if found := _closest(wanted, known, most, 0.6):
        return found
    words = [word for word in re.findall(r"\w+", wanted) if len(word) > 1 and not word.isdecimal()]
    parts_of = {name: re.split(r"[./]", name) for name in known}
    parts = list(islice(dict.fromkeys(chain.from_iterable(parts_of.values())), _MOST))
    near = [part for word in words[:_WORDS] for part in _closest(word, parts, most, 0.75)]
    found = [name for part in near for name in known if part in parts_of[name]]
    return list(dict.fromkeys(found))[:most]


def _closest(wanted: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    matcher = SequenceMatcher(b=wanted)

    def bound(name: str) -> float:
        matcher.set_seq1(name)
        return matcher.quick_ratio()

    return get_close_matches(wanted, nlargest(_CANDIDATES, names, key=bound), most, cutoff)


_NUMBER = re.compile(r"(?<![^./])(0|[1-9][0-9]{0,8})(?![^./])")
_MOST_NUMBERS = 4  # of a name; a hostile one has a million, each compared with the others

_Place = tuple[int, ...]
"""The numbers in a key, from left to right."""
_Box = tuple[tuple[int, ...], ...]
"""The values of each number of a pattern; every combination is a key."""


class Family(NamedTuple):
    """Keys that differ only in numbers, in their original order.

    `label` is exact: `layers.{0..1}.experts.{0..3,8}.w` is ten keys. The label of a single key is
    the key.
    """

    label: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """The position of each among all keys, counted from 0."""


def families(names: Iterable[tuple[str, Hashable]]) -> list[Family]:
    """Group keys that are equal in signature and differ only in numeric components.

    Components end at a `.` or `/`. If keys have several numbers and some combinations are missing,
    they are grouped along the number that leaves the fewest groups. Each key is in one family, and
    families are in the order of their first keys.
    """
    groups: dict[tuple[Hashable, tuple[str, ...]], dict[_Place, list[tuple[int, str]]]] = {}
    for number, (name, signature) in enumerate(names):
        texts, place = numbered(name)
        group = groups.setdefault((signature, texts), {})
        group.setdefault(place, []).append((number, name))
    found = []
    for (_, texts), group in groups.items():
        for box in _boxes(list(group)):
            members = sorted(member for place in product(*box) for member in group[place])
            numbers, folded = zip(*members, strict=True)
            found.append(Family(_label(texts, box), folded, numbers))
    return sorted(found, key=lambda family: family.numbers[0])


def numbered(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts around the numbers of a key, and the numbers."""
    parts = _NUMBER.split(name, _MOST_NUMBERS)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def ranges(numbers: Iterable[int]) -> str:
    """Return `{0..3,8}` for 0, 1, 2, 3 and 8."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _boxes(places: Sequence[_Place]) -> Iterator[_Box]:
    """Divide distinct places into few full boxes (not always the fewest possible).

    The values on one line along an axis form one side of a box. Lines with the same values are
    divided in the same way, with one number less.
    """
    sides = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*places, strict=True))
    if prod(map(len, sides)) == len(places):
        yield sides
        return
    axis = min(range(len(sides)), key=lambda axis: len({_without(p, axis) for p in places}))
    lines: dict[_Place, list[int]] = {}
    for place in places:
        lines.setdefault(_without(place, axis), []).append(place[axis])
    alike: dict[_Place, list[_Place]] = {}
    for rest, values in lines.items():
        alike.setdefault(tuple(sorted(values)), []).append(rest)
    for side, rests in alike.items():
        for box in _boxes(rests):
            yield (*box[:axis], side, *box[axis:])


def _without(place: _Place, axis: int) -> _Place:
    return place[:axis] + place[axis + 1 :]


def _label(texts: tuple[str, ...], box: _Box) -> str:
    label = texts[0]
    for side, text in zip(box, texts[1:], strict=True):
        label += (str(side[0]) if len(side) == 1 else ranges(side)) + text
    return label
