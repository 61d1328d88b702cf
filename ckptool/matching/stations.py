"""The names of a file on their way to those of a model, station by station."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptool.matching.spelling import Respelled
from ckptool.matching.ways import Way, without_front

__all__ = ["Column", "Stations"]

Column = list[str]
"""One name each."""


class Stations(NamedTuple):
    """What each name is called at each station; where none changes, it is the same list."""

    own: Column
    ruled: Column
    """After the user's rules."""
    outer: Column
    """Without wrappers in front."""
    unwrapped: Column
    """Without any."""
    bare: Column
    """Without a front."""
    spelled: Column
    """In the model's spelling."""
    inferred: Column
    """After the rules that were inferred."""
    fronted: Column
    """With the model's front."""
    inner: Column
    """With the wrappers that the model has inside."""
    wanted: Column
    respelled: Column
    """What was done to the spelling, in words."""

    @classmethod
    def of(
        cls,
        pairs: Mapping[str, str],
        ruled: Mapping[str, str],
        way: Way,
        mine: Mapping[str, Respelled],
        theirs: Mapping[str, Respelled],
    ) -> Stations:
        """Between the names of each pair, model's and file's; those in an old spelling are told."""
        wanted, own = list(pairs), list(pairs.values())
        after = [ruled[name] for name in own] if ruled else own
        unwrapped, outer = _less_wrappers(after, way.have.form)
        fronted, inner = _less_wrappers(wanted, way.want.form)
        bare = _less_front(unwrapped, way.have.front)
        inferred = _less_front(fronted, way.want.front)
        spelled, respelled = bare, bare
        if mine or theirs:
            both = [
                _respelled(name, mine.get(name), theirs.get(last))
                for name, last in zip(bare, inferred, strict=True)
            ]
            spelled, respelled = [name for name, _ in both], [text for _, text in both]
        columns = outer, unwrapped, bare, spelled, inferred, fronted, inner
        if way.have.form and way.want.form:
            columns = _with_kept_front(after, wanted, columns)
        return cls(own, after, *columns, wanted, respelled)


_Columns = tuple[Column, Column, Column, Column, Column, Column, Column]


def _less_wrappers(names: Column, form: Mapping[str, str]) -> tuple[Column, Column]:
    """The names without any wrappers, and without those in front alone."""
    if not form:
        return names, names
    bare = [form.get(name, name) for name in names]
    outer = [
        short if name.endswith(short) else without_front(name, short)
        for name, short in zip(names, bare, strict=True)
    ]
    if outer == bare:
        return bare, bare
    return bare, names if outer == names else outer


def _less_front(names: Column, front: str) -> Column:
    return [name.removeprefix(front) for name in names] if front else names


def _respelled(name: str, mine: Respelled | None, theirs: Respelled | None) -> tuple[str, str]:
    """A bare name in the model's spelling, and what was done to it in words."""
    made = name if mine is None else mine.of(name)
    if theirs is not None:
        made = made.removesuffix(theirs.new) + theirs.old
    if made != name:
        old = mine.old if mine is not None else theirs.new if theirs is not None else ""
        new = theirs.old if theirs is not None else mine.new if mine is not None else ""
        return made, f"{old} -> {new}"
    return name, ""


def _with_kept_front(ruled: Column, wanted: Column, columns: _Columns) -> _Columns:
    """The stations with the wrappers in front that both ends have, where only wrappers differ."""
    kept = [
        _kept(*ends)
        for ends in zip(ruled, wanted, columns[0], columns[1], columns[5], columns[6], strict=True)
    ]
    if not any(kept):
        return columns
    with_front: dict[int, Column] = {}
    for column in columns:
        if id(column) not in with_front:
            with_front[id(column)] = [
                front + name for front, name in zip(kept, column, strict=True)
            ]
    outer, unwrapped, bare, spelled, inferred, fronted, inner = (
        with_front[id(column)] for column in columns
    )
    return outer, unwrapped, bare, spelled, inferred, fronted, inner


def _kept(ruled: str, wanted: str, outer: str, unwrapped: str, fronted: str, inner: str) -> str:
    if unwrapped != fronted or len(outer) == len(ruled) or len(inner) == len(wanted):
        return ""
    off, on = ruled.removesuffix(outer).split("."), wanted.removesuffix(inner).split(".")
    same = 0
    while same < min(len(off), len(on)) - 1 and off[same] == on[same]:
        same += 1
    return "".join(f"{word}." for word in off[:same])
