"""What the words in two names have in common."""

from __future__ import annotations

import re

__all__ = ["are_alike", "are_opposite", "words_of"]

_WORD = re.compile("[A-Z]*[a-z]+|[A-Z]+")
_STEM = 4
"""Letters at the end of two words that make them a pair: `encoder` and `decoder`."""
_MOST = 64
_COUNTERPARTS = [
    frozenset(words.split())
    for words in (
        "actor critic",
        "policy value",
        "student teacher",
        "online target",
        "source target",
        "src tgt",
        "query key value",
        "image text audio video",
        "vision text audio language",
        "visual text audio",
        "user item",
        "left right",
        "up down",
        "top bottom",
        "lower upper",
        "low high",
        "inner outer",
        "first second third",
        "forward backward",
        "input output",
        "in out",
        "real imag",
        "real fake",
        "local global",
        "fast slow",
        "prior posterior",
        "mean var std",
        "mu sigma",
        "row col",
        "positive negative",
        "content style",
    )
]
"""Words for the parts of one whole: each has its own part, and none is another's name."""


def words_of(name: str) -> list[str]:
    """The words in it, without numbers."""
    return [word.lower() for word in _WORD.findall(name)[:_MOST]]


def are_alike(one: str, other: str) -> bool:
    """Whether all words of the one are the other's too, or short for one: `attn`, `self_attention`.

    One of which nothing but a number is known is like any.
    """
    shorter, longer = sorted((words_of(one), words_of(other)), key=len)
    return all(any(_is_short(a, b) or _is_short(b, a) for b in longer) for a in shorter)


def are_opposite(one: str, other: str) -> bool:
    """Whether two names are made alike, so that what they differ in is what tells them apart.

    `cross_attn` and `self_attn`, `encoder_q` and `encoder_k`, `encoder` and `decoder`, `actor` and
    `critic`.
    """
    ours, theirs = words_of(one), words_of(other)
    if are_alike(one, other):
        return False
    if min(len(ours), len(theirs)) > 1 and not {*ours}.isdisjoint(theirs):
        return True
    return any(_are_a_pair(a, b) for a in ours for b in theirs if a != b)


def _are_a_pair(one: str, other: str) -> bool:
    if one[-_STEM:] == other[-_STEM:] and min(len(one), len(other)) > _STEM:
        return True
    return any(one in words and other in words for words in _COUNTERPARTS)


def _is_short(one: str, other: str) -> bool:
    """Whether a word begins as another does, and has the rest of its letters in their order."""
    rest = iter(other)
    return one[0] == other[0] and all(letter in rest for letter in one)
