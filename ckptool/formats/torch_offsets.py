"""Where torch takes storages to be that it does not look up: the sums of `.format_version`.

A zip with that record lets `torch.load(map_location="meta")`, and readers that ask for it, add up
sizes in place of reading local headers (torch/serialization.py `_get_offset`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptool.formats.torch_zip import ALIGNMENT
from ckptool.formats.zip_writer import Place

__all__ = ["COMPUTING", "Laid", "alignment_of", "computed_offsets"]

COMPUTING = (".format_version", ".storage_alignment")
"""The records that let torch compute where storages are, instead of looking it up."""


class Laid(NamedTuple):
    """A storage's record as it lies in the file."""

    name: bytes
    """With the folder."""
    size: int
    header: int
    payload: int
    """Offset of its first byte."""


def alignment_of(stated: str | None) -> int | None:
    """What `.storage_alignment` says, None where torch can make nothing of it."""
    text = str(ALIGNMENT) if stated is None else stated
    return int(text) if text.isdecimal() and int(text) > 0 else None


def computed_offsets(used: Iterable[Laid], alignment: int) -> Iterator[int | None]:
    """Where torch takes each payload to begin, in the order in which the pickle first uses them.

    The first is looked up and must have the key 0: it is None where it has another, and nothing
    follows.
    """
    header = 0
    for position, laid in enumerate(used):
        if position == 0 and not laid.name.endswith(b"/data/0"):
            yield None
            return
        header = header if position else laid.header
        place = Place(laid.name, laid.size, header, alignment)
        computed = place.payload if position else laid.payload
        yield computed
        header = computed + laid.size + place.descriptor_size
