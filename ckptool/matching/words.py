"""What the words in two names have in common."""

from __future__ import annotations

import re

__all__ = ["are_alike", "are_opposite", "words_of"]

_WORD = re.compile("[A-Z]*[a-z]+|[A-Z]+")
_STEM = 4
"""Letters at the end of two words that make them a pair: `encoder` and `decoder`."""
_MOST = 64
_WHOLES = """
encoder enc | decoder dec
actor pi policy | critic vf qf value v q
generator gen g | discriminator disc d
student online main model | teacher target ema momentum average averaged avg swa shadow
query q wq | key k wk | value v wv
query question | passage context document doc | answer
image img vision visual vit rgb | text txt language bert | audio speech | video | depth
source src | target tgt trg
prior | posterior post
pre before | post after
mean mu loc | variance var logvar | std sigma logstd
scale gamma | shift beta
gate | up | down
left | right
start begin first one | second two | third three | end last stop
top upper high | bottom lower low | middle mid
inner | outer
forward fwd | backward bwd reverse
input in inp i | output out o | forget f | reset | update | cell
attention attn | feedforward ffn ff mlp
spatial space | temporal time
user | item
real | imag imaginary
real | fake
local | global
fast | slow
fine | coarse rough
row | column col
height | width
positive pos | negative neg
content | style
clean | noisy noise
old | new
odd | even
classification cls | regression reg | box bbox | mask
duration | pitch | energy
subject head | object tail | relation rel
parent | child
categorical cat | numerical num
rgb color | flow motion | depth | thermal infrared
visual vision | textual | acoustic
camera cam | lidar | radar
classifier | regressor
cond conditional | uncond unconditional
fg foreground | bg background
lr | hr
sender | receiver
policy | reward
chosen | rejected
unet | controlnet | vae
base | refiner
rpn | roi
"""
"""The parts of one whole, a line each, with the words for each part: none is another's name."""

_COPIES = """
student online teacher target ema momentum average averaged avg swa shadow
old best previous prev frozen reference ref copy backup
"""
"""Words that say which of several copies of one part is meant."""


def _parts(wholes: str) -> dict[str, dict[int, int]]:
    """Of each word which part it is, of which wholes."""
    parts: dict[str, dict[int, int]] = {}
    for whole, line in enumerate(wholes.split("\n")):
        for part, words in enumerate(line.split("|")):
            for word in words.split():
                parts.setdefault(word, {})[whole] = part
    return parts


_PARTS = _parts(_WHOLES)
_COPY = frozenset(_COPIES.split())


def words_of(name: str) -> list[str]:
    """The words in it, without numbers."""
    return [word.lower() for word in _WORD.findall(name)[:_MOST]]


def are_alike(one: str, other: str) -> bool:
    """Whether all words of the one are the other's too, or short for one: `attn`, `self_attention`.

    One of which nothing but a number is known is like any. Another copy of the same is none.
    """
    shorter, longer = sorted((words_of(one), words_of(other)), key=len)
    if shorter and _are_copies(shorter, longer):
        return False
    return all(any(_is_like(a, b) for b in longer) for a in shorter)


def are_opposite(one: str, other: str) -> bool:
    """Whether two names are made alike, so that what they differ in is what tells them apart.

    `cross_attn` and `self_attn`, `encoder_q` and `encoder_k`, `encoder` and `decoder`, `actor` and
    `critic`, `ema_unet` and `unet`.
    """
    ours, theirs = words_of(one), words_of(other)
    if not (ours and theirs) or are_alike(one, other):
        return False
    if _are_copies(ours, theirs):
        return True
    if min(len(ours), len(theirs)) > 1 and not {*ours}.isdisjoint(theirs):
        return True
    return any(_are_a_pair(a, b) for a in ours for b in theirs if a != b)


def _are_copies(ours: list[str], theirs: list[str]) -> bool:
    """Whether one of the two says of which copy it is, and the other does not say the same."""
    return any(
        word in _COPY and not any(_is_like(word, other) for other in others)
        for words, others in ((ours, theirs), (theirs, ours))
        for word in words
    )


def _are_a_pair(one: str, other: str) -> bool:
    if one[-_STEM:] == other[-_STEM:] and min(len(one), len(other)) > _STEM:
        return True
    return _are_told_apart(one, other)


def _are_told_apart(one: str, other: str) -> bool:
    """Whether the two are words for different parts of one whole."""
    theirs = _PARTS.get(other, {})
    return any(theirs.get(whole, part) != part for whole, part in _PARTS.get(one, {}).items())


def _is_like(one: str, other: str) -> bool:
    return _is_short(one, other) or _is_short(other, one)


def _is_short(one: str, other: str) -> bool:
    """Whether a word begins as another does, and has the rest of its letters in their order."""
    rest = iter(other)
    is_short = one[0] == other[0] and all(letter in rest for letter in one)
    return is_short and not _are_told_apart(one, other)
