"""Wrapper names: what DataParallel and its like put before the names of a state dict.

`DataParallel` and `DistributedDataParallel` put `module` there, `torch.compile` `_orig_mod`, FSDP
`_fsdp_wrapped_module` (`_fpw_module` before torch 1.12), activation checkpointing
`_checkpoint_wrapped_module`, Lightning with FSDP or DeepSpeed `_forward_module`. They nest in any
order. A wrapper is a whole component of a name, never a substring of one.

`module` is a common name for a real layer as well, so it counts as a wrapper only where every name
begins with it. The other words are nobody's layers: they count wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ckptool.errors import NameCollision, UsageError
from ckptool.words import printable

__all__ = [
    "COLLISION_HINT",
    "N_AVERAGED",
    "WRAPPERS",
    "Rename",
    "StripResult",
    "add_name",
    "check_collisions",
    "counts",
    "prefixed",
    "strip_names",
    "wrapped_in_part",
    "wrappers_of",
]

WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)

N_AVERAGED = "n_averaged"
"""The counter that `AveragedModel` keeps beside its `module`."""

COLLISION_HINT = "take fewer levels off, or only one kind of wrapper"

Rename = Callable[[str], str]


class StripResult(NamedTuple):
    """What taking wrapper components off some names comes to."""

    renamed: dict[str, str]
    """Old name to new, of the names that change."""
    levels: int
    """How many times an outermost component went."""
    wrappers: tuple[str, ...]
    """The kinds that went, outermost first, each once."""
    rename_module: Rename
    """The same done to the path of a module, as `_metadata` has them."""


class _Level(NamedTuple):
    """One component taken off: at the front of every name, or the first that `pattern` finds."""

    pattern: re.Pattern[str]
    kinds: tuple[str, ...]

    def apply(self, name: str) -> str:
        """The name without the component."""
        return self.pattern.sub(r"\1", name, count=1)

    def apply_module(self, path: str) -> str:
        """The module's path without it; the wrapped module itself ends with the component."""
        return self.apply(f"{path}.")[:-1] if path else path


def counts(name: Any) -> bool:
    """Whether a tensor's name says which wrappers there are: `AveragedModel`'s counter does not."""
    return isinstance(name, str) and name != N_AVERAGED


def strip_names(
    names: Collection[str],
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> StripResult:
    """Take the wrapper components off the names of one state dict's tensors and `_extra_state`s.

    One level is the outermost component: `module` where every name begins with it, otherwise the
    leftmost other wrapper of each name. That is repeated until nothing changes, or `levels`
    times. `only` narrows to some kinds (those before them stay), `at` to the wrappers on and below
    the submodule of that path.

    Raises:
        NameCollision: two names would become one.
        UsageError: `only` names no wrapper, or `levels` is less than 1.
    """
    kinds = _checked_kinds(only)
    if levels is not None and levels < 1:
        raise UsageError(f"at least one level must go, not {levels}")
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


def _checked_kinds(only: str | Sequence[str] | None) -> tuple[str, ...]:
    kinds = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    unknown = [kind for kind in kinds if kind not in WRAPPERS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is no wrapper that is known", hint=f"one of {', '.join(WRAPPERS)}"
        )
    return kinds


def _outermost(names: Sequence[str], kinds: tuple[str, ...]) -> _Level | None:
    """The next component to go, None where there is no more."""
    if not names:
        return None
    kept = _alternatives(kind for kind in WRAPPERS if kind not in kinds and kind != "module")
    if "module" in kinds:
        front = re.compile(rf"^((?:{kept}\.)*)module\.", re.DOTALL)
        if all(map(front.match, names)):
            return _Level(front, ("module",))
    text = "\n".join(names)  # one fast search says which of the words can be there at all
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
        inner = level.apply_module(inner)
    return before + inner if inner else before[:-1]


def wrappers_of(names: Iterable[str]) -> tuple[str, ...]:
    """The kinds of wrapper that the names carry, outermost first, each once."""
    names = list(filter(counts, names))
    found: dict[str, None] = {}
    while (level := _outermost(names, WRAPPERS)) is not None:
        names = list(filter(counts, map(level.apply, names)))
        found.update(dict.fromkeys(level.kinds))
    return tuple(found)


def wrapped_in_part(
    names: Iterable[str], *, only: str | Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """The names that `module.` begins, most of all, and those that it does not; else nothing.

    Such a `module` may be a layer, and stays: that of a wrapper would be before every name.
    `only` narrows to some kinds of wrapper, as in `strip_names`.
    """
    names = list(filter(counts, names))
    within = [name for name in names if name.startswith("module.")]
    others = [name for name in names if not name.startswith("module.")]
    is_part = 0 < len(others) < len(within) and "module" in _checked_kinds(only)
    return (within, others) if is_part else ([], [])


def prefixed(wrapper: str, at: str | None = None) -> Rename:
    """The rename that puts `wrapper` around the model, or around its submodule `at`.

    Raises:
        UsageError: `wrapper` is none that is known.
    """
    _checked_kinds(wrapper)
    before = f"{at}." if at else ""

    def rename(name: str) -> str:
        if not counts(name) or not name.startswith(before):
            return name
        return f"{before}{wrapper}.{name[len(before) :]}"

    return rename


def add_name(wrapper: str, at: str | None = None) -> Rename:
    """The rename of module paths that goes with `prefixed`."""
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
    """Refuse a renaming after which two of the names are one; the rest is for the message.

    Raises:
        NameCollision: naming both.
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
                f"{both} would both be named {printable(str(new))!r}{where}", file=file, hint=hint
            )
        origin[new] = name
