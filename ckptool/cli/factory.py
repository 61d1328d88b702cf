"""The model that the user's own code builds, for `--like module:factory`.

Only the command line takes `module:factory`; the functions of the library do not.
"""

from __future__ import annotations

import os
from typing import Any

from ckptool.errors import FileMissing, UsageError
from ckptool.factories import FACTORY, HINT, a_class, at_home, is_model, named, run
from ckptool.loading.target import on_meta
from ckptool.words import printable

__all__ = ["built", "referred"]

_FORMS = "a checkpoint, or code of yours that builds the model: module:factory, as in net:build"


def referred(text: str) -> Any:
    """Return the model that `module:factory` builds, or the path of a file of that name.

    Raises:
        TorchMissing, UsageError: as `built`; or the text names a script without a factory.
        FileMissing: there is no such file.
    """
    is_file = os.path.lexists(text)
    if FACTORY.fullmatch(text) and not is_file:
        return built(text)
    if text.endswith(".py") and os.path.isfile(text):
        stem = os.path.basename(text).removesuffix(".py")
        raise UsageError(f"{printable(text)} is a Python script", hint=f"{stem}:factory; {HINT}")
    if not is_file:
        raise FileMissing("there is no such file", file=text, hint=_FORMS)
    return text


def built(text: str) -> Any:
    """Return the model, or state dict, that `module:factory` names or makes.

    The working directory is on the path, and what the code prints goes to stderr. A class or
    function is called without arguments, on the meta device if possible.

    Raises:
        TorchMissing: torch is not installed.
        UsageError: the code raised an error, or returned no model.
    """
    with at_home():
        node = named(text)
        if is_model(node):
            return node
        if not callable(node):
            raise UsageError(
                f"{text} is {a_class(node)}, and neither a model nor what makes one", hint=HINT
            )
        made = on_meta(node)
        if made is None:
            made = run(node, f"{text} raised", HINT)
    if not is_model(made):
        raise UsageError(f"{text} returned {a_class(made)}, and no model", hint=HINT)
    return made
