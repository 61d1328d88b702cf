"""What `__metadata__` carries for us: tied names, their places, a state dict's `_metadata`.

A tie is an entry `dropped name: kept name`, as safetensors.torch.save_model writes it. The places
of the dropped names stand in an entry of our own, so that the order of the state dict comes back;
where there is that entry, no other name is tied. So a text that happens to be the name of a tensor
stays a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from ckptool.errors import CorruptFile
from ckptool.formats.safetensors_header import parse_json
from ckptool.model import OrderedMap, TensorRef

__all__ = [
    "FORMAT",
    "PLACES",
    "RESERVED",
    "VERSIONS",
    "metadata_of",
    "plain_versions",
    "restored",
]

FORMAT, VERSIONS, PLACES = "format", "_metadata", "ckptool.tied"
RESERVED = frozenset({FORMAT, VERSIONS, PLACES})
"""Keys that are never a tied name."""


def restored(
    tensors: Mapping[str, TensorRef],
    metadata: Mapping[str, str],
    known: Mapping[str, str] = MappingProxyType({}),
) -> tuple[OrderedMap, dict[str, str]]:
    """The state dict with its tied names and its `_metadata`, and the entries that are neither.

    `known` are ties (`dropped: kept`) that are told elsewhere, and need not be among the entries.
    """
    places = _object(metadata.get(PLACES))
    told = {name: kept for name, kept in metadata.items() if places is None or name in places}
    ties = _candidates(tensors, {**known, **told})
    order = _order(list(tensors), list(ties), places or {})
    root = OrderedMap((name, tensors[ties.get(name, name)]) for name in order)
    rest = {key: text for key, text in metadata.items() if key not in ties and key != PLACES}
    versions = _versions(metadata.get(VERSIONS))
    if versions is not None:
        root.attributes["_metadata"] = versions
        del rest[VERSIONS]
    return root, rest


def _candidates(tensors: Collection[str], entries: Mapping[str, str]) -> dict[str, str]:
    """The entries that tie a name to one of the `tensors`, as far as one can see."""
    return {
        name: kept
        for name, kept in entries.items()
        if name not in RESERVED and name not in tensors and kept in tensors
    }


def _order(names: list[str], tied: list[str], places: Mapping[str, Any]) -> list[str]:
    """All names, the tied ones where they stood; at the end where nobody knows."""
    total = len(names) + len(tied)
    at: dict[int, str] = {}
    for name in tied:
        place = places.get(name)
        if type(place) is int and 0 <= place < total:
            at.setdefault(place, name)
    placed = set(at.values())
    others = iter([*names, *(name for name in tied if name not in placed)])
    return [at[place] if place in at else next(others) for place in range(total)]


def _versions(text: str | None) -> OrderedMap | None:
    """The `_metadata` of a state dict (module path -> dict); None where the text is none."""
    found = _object(text)
    if found is None or not all(isinstance(value, dict) for value in found.values()):
        return None
    return OrderedMap(found)


def _object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a text; None for anything else: these entries are free for all."""
    try:
        found = parse_json(text or "null")
    except CorruptFile:
        return None
    return found if isinstance(found, dict) else None


def metadata_of(
    ties: Mapping[str, str],
    names: Collection[str],
    versions: Any,
    free: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The entries for the ties (`dropped: kept`) of a state dict, and for its `_metadata`.

    `names` is all its tensors in order; `versions` is plain (`plain_versions`), empty for none;
    `free` are the entries of others, of which none is to be taken for a tie.
    """
    entries = {VERSIONS: _text(versions)} if versions else {}
    if ties or _candidates(set(names) - ties.keys(), free):
        places = {name: place for place, name in enumerate(names) if name in ties}
        entries |= {**ties, PLACES: _text(places)}
    return entries


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def plain_versions(attributes: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """What JSON can hold of a state dict's `_metadata`, and the names of what it cannot.

    The names are module paths of `_metadata`, or attributes of the state dict beside it.
    """
    versions = attributes.get("_metadata")
    lost = [str(name) for name in attributes if name != "_metadata"]
    if not isinstance(versions, dict):
        return {}, lost if versions is None else [*lost, "_metadata"]
    kept = {name: value for name, value in versions.items() if _is_entry(name, value)}
    lost.extend(f"_metadata of {name!r}" for name in versions if name not in kept)
    return kept, lost


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, dict) and _is_plain(value)


def _is_plain(node: Any) -> bool:
    """Whether JSON gives it back as it was."""
    if isinstance(node, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in node.items())
    if isinstance(node, list):
        return all(map(_is_plain, node))
    if isinstance(node, float):
        return math.isfinite(node)
    return node is None or isinstance(node, (bool, int, str))
