"""The arguments of `load_into` and `match`, looked at first: a typing error is no permission.

What is allowed is looked at by `matching.Allowance`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptool.errors import CheckpointError, DeviceError, UsageError
from ckptool.remedies import Given, Remedy
from ckptool.tensors.materialise import Placement
from ckptool.transforms.name_rules import Rule, prefix_regex

__all__ = ["advising", "check_arguments", "check_lists", "check_order"]


_SAYS_NOTHING = {"strict": True}
"""What an argument is where it changes nothing; False unless it stands here."""


def check_arguments(
    *,
    switches: Mapping[str, Any],
    lists: Mapping[str, Any],
    map_location: Any,
    optimizer_order: Any,
) -> None:
    """Refuse values that would be taken for something that was not meant.

    `switches` are True, False or None, by the name of the argument; `lists` hold texts.

    Raises:
        UsageError: naming the first, and what it may be.
        DeviceError: `map_location` is no device that torch knows of.
    """
    import torch

    Placement(map_location)
    if isinstance(map_location, str):
        try:
            torch.device(map_location)
        except RuntimeError:
            raise DeviceError(
                f"map_location={map_location!r} is no device", hint="'cpu', 'cuda:0', ..."
            ) from None
    for name, value in switches.items():
        if not any(value is one for one in (None, True, False)):
            _refuse(name, value, "None or True or False")
    check_lists(**lists)
    check_order(optimizer_order)


def check_lists(**lists: Any) -> None:
    """Refuse what is no list of texts, or of what stands for them, by the name of the argument.

    Raises:
        UsageError: naming the first.
    """
    for name, value in lists.items():
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            shown = f"{name}=[{value!r}]" if isinstance(value, str) else None
            _refuse(name, value, "a list", shown)


def check_order(order: Any) -> None:
    """Refuse what is no order of an optimizer's parameters.

    Raises:
        UsageError: it is no word that is known.
    """
    if order is not None and not (isinstance(order, str) and order == "position"):
        raise UsageError(f"optimizer_order={order!r} is neither None nor 'position'")


@contextmanager
def advising(**given: Any) -> Iterator[None]:
    """Have what helps name what was given already as well: it is given in place of that."""
    try:
        yield
    except CheckpointError as error:
        if error.remedy is not None:
            error.advise(_beside(error.remedy, _as_told(given)))
        raise


def _as_told(arguments: Mapping[str, Any]) -> dict[str, Given]:
    """Arguments as a remedy has them, without those that say nothing or cannot be told."""
    told: dict[str, Given] = {}
    for name, value in arguments.items():
        some = (value,) if isinstance(value, str) and name.startswith("allow_") else value
        if isinstance(some, (str, float, int)) and some is not _SAYS_NOTHING.get(name, False):
            told[name] = some
        elif isinstance(some, Collection) and some:
            texts = tuple(one.regex if isinstance(one, Rule) else one for one in some)
            if all(isinstance(one, str) and one for one in texts):
                told[name] = texts
    return told


def _beside(remedy: Remedy, given: Mapping[str, Given]) -> Remedy:
    """The same with what was given, each list before what is told to be added to it."""
    arguments, before = dict(remedy.arguments), dict(given)
    if "rules" in arguments and "prefixes" in given:  # the rules told are for names after both
        as_rules = map(prefix_regex, _texts(given["prefixes"]))
        before |= {"rules": (*_texts(given.get("rules", ())), *as_rules), "prefixes": ()}
    if arguments:
        told = {name: _after(before.get(name), value) for name, value in arguments.items()}
        arguments = {**before, **told}
    ways = tuple(_beside(way, given) for way in remedy.instead)
    return remedy._replace(arguments=tuple(arguments.items()), instead=ways)


def _after(one: Given | None, other: Given) -> Given:
    """A list that goes on, each rule as often as it is to be applied; anything else anew."""
    if isinstance(one, tuple) and isinstance(other, (str, tuple)):
        return (*one, *_texts(other))
    return other


def _texts(given: Given) -> tuple[str, ...]:
    return given if isinstance(given, tuple) else (str(given),)


def _refuse(name: str, value: Any, wanted: str, hint: str | None = None) -> None:
    raise UsageError(f"{name}={value!r} is not {wanted}", hint=hint or f"{name} is {wanted}")
