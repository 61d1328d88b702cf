"""What is on both sides and of another form: under a parametrization, in one tensor or several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ckptool.matching.slots import Slot

__all__ = ["reformed"]

_INSIDE = re.compile(r"(?:(.*)\.)?parametrizations\.([^.]+)\.(.+)")
_KINDS = {
    frozenset({"original0", "original1"}): "weight_norm",
    frozenset({"original", "0._u", "0._v"}): "spectral_norm",
}
_HOOKS = re.compile(r"(.*)_(g|orig)$")
"""How a name ends that `torch.nn.utils.weight_norm` or `spectral_norm` gave."""
_DEEPEST = 24
_MOST_NAMES = 20_000
"""Of more left over than these elements are not counted."""
_MOST_SHOWN = 3

_T = TypeVar("_T")
_Place = tuple[str, str]
"""The path of a module, and the tensor's own name."""
Reformed = tuple[str, str]
"""What is seen, and what helps."""


def reformed(
    unused: Mapping[str, Slot],
    missing: Mapping[str, Slot],
    names: Mapping[str, str],
    met: Mapping[str, str] = MappingProxyType({}),
    *,
    as_a_whole: bool = True,
) -> tuple[Reformed, ...]:
    """What the model lacks that the file has in another form.

    `names`: what the model itself calls its own, by the names that are given here. `met`: names of
    the model, each with that of the file which is known to be the same. `as_a_whole`: what is left
    may be told to be the same altogether, and not just that of a module.
    """
    known = {own: name for name, own in met.items()}
    unused = {known.get(own, own): slot for own, slot in unused.items()}
    of_file, of_model = (
        dict(_parametrized(*sides)) for sides in ((unused, missing), (missing, unused))
    )
    told = []
    for (kind, weight), paths in _by_kind(of_model, besides=of_file):
        own = [full for bare, full in names.items() if bare.startswith((*_fronts(paths),))]
        told.append(_as_in_model(kind, weight, paths, by_hooks=any(map(_HOOKS.match, own))))
    told += [_as_in_file(*key, paths) for key, paths in _by_kind(of_file, besides=of_model)]
    both = {place: (of_file[place], of_model[place]) for place in of_file if place in of_model}
    told += [_as_in_both(*key, paths) for key, paths in _by_kind(both)]
    return tuple(told) or tuple(_in_other_tensors(unused, missing, as_a_whole=as_a_whole))


def _parametrized(
    inside: Mapping[str, Slot], others: Mapping[str, Slot]
) -> Iterator[tuple[_Place, str]]:
    """The tensors that are so on the one side, and otherwise on the other, each with the kind."""
    parts, theirs = _parts(inside), _parts(others)
    for (path, weight), held in parts.items():
        plain = f"{path}.{weight}" if path else weight
        if plain in others or (path, weight) in theirs:
            known = next((slot.form for slot in held.values() if slot.form), None)
            yield (path, weight), known or _KINDS.get(frozenset(held), "a parametrization")


def _parts(side: Mapping[str, Slot]) -> dict[_Place, dict[str, Slot]]:
    """The tensors of each parametrization, by what stands behind the path of that."""
    parts: dict[_Place, dict[str, Slot]] = {}
    for name, slot in side.items():
        found = _INSIDE.fullmatch(name)
        if found is not None:
            parts.setdefault((found[1] or "", found[2]), {})[found[3]] = slot
    return parts


def _by_kind(
    found: Mapping[_Place, _T], *, besides: Container[_Place] = ()
) -> list[tuple[tuple[_T, str], list[str]]]:
    """By kind and the tensor's own name the modules that have it so, but for some."""
    kinds: dict[tuple[_T, str], list[str]] = {}
    for (path, weight), kind in found.items():
        if (path, weight) not in besides:
            kinds.setdefault((kind, weight), []).append(path)
    return [*kinds.items()]


def _fronts(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        yield f"{path}.parametrizations." if path else "parametrizations."


def _as_in_file(kind: str, weight: str, paths: list[str]) -> Reformed:
    where = _modules(paths)
    text = f"the file has {kind} on {where}, and the model has not"
    if kind not in _KINDS.values():
        return text, "load into a model with the same parametrization, and remove it then"
    return text, (
        f"torch.nn.utils.parametrizations.{kind}(module{_named(weight)}) on {where} of the model, "
        "load, then torch.nn.utils.parametrize.remove_parametrizations"
        f"(module, {weight!r}): no rule does what {kind} does"
    )


def _as_in_both(kinds: tuple[str, str], weight: str, paths: list[str]) -> Reformed:
    where, (mine, theirs) = _modules(paths), kinds
    other = theirs if theirs != mine else "another"
    text = f"the file has {mine} on {where}, and the model has {other}"
    return text, (
        f"load into a model that has {mine} on {where}{_of(weight)} instead, as the file has, "
        f"remove that and put {theirs} on then: no rule makes the one of the other"
    )


def _as_in_model(kind: str, weight: str, paths: list[str], *, by_hooks: bool) -> Reformed:
    where = _modules(paths)
    text = f"the model has {kind} on {where}, and the file has not"
    if by_hooks and kind == "spectral_norm":  # torch's remove_spectral_norm leaves a hook behind
        return text, f"load before torch.nn.utils.spectral_norm is put on {where} of the model"
    remove = f"torch.nn.utils.parametrize.remove_parametrizations(module, {weight!r})"
    if by_hooks and kind == "weight_norm":
        remove = f"torch.nn.utils.remove_weight_norm(module{_named(weight)})"
    return text, f"{remove} on {where} of the model, load, then put {kind} on again"


def _of(weight: str) -> str:
    return "" if weight == "weight" else f" (of {weight!r})"


def _named(weight: str) -> str:
    """As an argument; torch itself takes `weight`."""
    return "" if weight == "weight" else f", {weight!r}"


def _modules(paths: list[str], *, root: str = "the root") -> str:
    from ckptool.matching.folding import folded  # seldom needed

    return folded([path or root for path in paths], _MOST_SHOWN)


def _in_other_tensors(
    unused: Mapping[str, Slot], missing: Mapping[str, Slot], *, as_a_whole: bool
) -> Iterator[Reformed]:
    """Modules that lack as many elements as the file has over there, in other shapes."""
    if max(len(unused), len(missing)) > _MOST_NAMES:
        return
    ours, theirs = _contents(unused), _contents(missing)
    equal = {
        path
        for path in ours.keys() & theirs.keys()
        if ours[path] != theirs[path] and 1 < _elements(ours[path]) == _elements(theirs[path])
    }
    outer = {front for path in equal for front in _above(path)}
    inner = [path for path in theirs if path in equal - outer and (path or as_a_whole)]
    if inner:
        where = _modules(inner, root="the model")
        yield (
            f"the file has all elements that {where} lacks, in other tensors",
            "no rule makes one tensor of several, or several of one: give load_into the state "
            "dict in the form that the model has",
        )


def _contents(side: Mapping[str, Slot]) -> dict[str, Counter[tuple[int | None, ...]]]:
    """The shapes below each path; not where one is not known."""
    found: dict[str, Counter[tuple[int | None, ...]]] = {}
    unknown: set[str] = set()
    for name, slot in side.items():
        for path in _above(name):
            if slot.shape is None or None in slot.shape:
                unknown.add(path)
            else:
                found.setdefault(path, Counter())[slot.shape] += 1
    return {path: shapes for path, shapes in found.items() if path not in unknown}


def _above(name: str) -> Iterator[str]:
    """The modules that it is in, the outermost first."""
    if name:
        yield ""
    dots = (at for at, letter in enumerate(name) if letter == ".")
    yield from (name[:at] for at in islice(dots, _DEEPEST))


def _elements(shapes: Counter[tuple[int | None, ...]]) -> int:
    total = 0
    for shape, count in shapes.items():
        size = count
        for length in shape:
            size *= length or 0
        total += size
    return total
