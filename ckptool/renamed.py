"""Former names of options and arguments, which are refused with their current name."""

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
"""Former options, each with its current name."""


def refuse_renamed_arguments(**hints: str) -> Callable[[_Function], _Function]:
    """Return a decorator that refuses former arguments (`hints`: former name -> hint).

    Raises:
        UsageError: by the decorated function, if one is given.
    """

    def decorate(function: _Function) -> _Function:
        """Return the function with a check of its keyword arguments."""

        @wraps(function)
        def call(*args: object, **keywords: object) -> object:
            """Call the function, unless a former argument is given."""
            old = next(filter(hints.__contains__, keywords), None)
            if old is not None:
                raise UsageError(f"{function.__name__} has no argument {old}", hint=hints[old])
            return function(*args, **keywords)

        return cast("_Function", call)

    return decorate
