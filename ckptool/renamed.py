"""Names of before: options and arguments that are refused with the name that took their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from ckptool.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., object])

RENAMED_OPTIONS = {
    ("cast", "--all"): "--cast-optimizer",
    ("convert", "--cast"): "--dtype",
    ("convert", "--device-map"): "--map",
    ("diff", "--map"): "--rename",
    ("match", "--map"): "--rename",
    ("rename", "--map"): "--rename",
    ("rename", "--map-file"): "--rename-file",
    ("train", "--overwrite"): "--force",
}
"""Options of before, each with the name that took its place."""


def renamed_arguments(**now: str) -> Callable[[_Function], _Function]:
    """Return a decorator that refuses arguments of before, and names what took their place.

    Raises:
        UsageError: by the decorated function, if one is given.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(*args: object, **given: object) -> object:
            old = next(filter(now.__contains__, given), None)
            if old is not None:
                raise UsageError(f"{function.__name__} has no argument {old}", hint=now[old])
            return function(*args, **given)

        return cast("_Function", call)

    return decorate
