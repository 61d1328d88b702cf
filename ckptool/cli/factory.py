"""The model that the user's own code builds, for `--like module:factory`.

No function of the library that reads files takes such a word.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ckptool.errors import UsageError
from ckptool.factories import FACTORY, HINT, a_class, at_home, named, run
from ckptool.loading.live.on_meta import on_meta

__all__ = ["built", "is_factory", "referred"]


def is_factory(text: str) -> bool:
    """Whether a word names `module:factory`; where there is a file of that name, it is the file."""
    return FACTORY.fullmatch(text) is not None and not os.path.lexists(text)


def referred(text: str) -> Any:
    """What a word of the command line stands for: what `module:factory` builds, else a path.

    Raises:
        TorchMissing, UsageError: as `built`.
    """
    return built(text) if is_factory(text) else text


def built(text: str) -> Any:
    """The model, or state dict, that `module:factory` names or makes.

    The working directory is on the path meanwhile, and what the code prints goes to stderr. A
    class or function is called without arguments: on the meta device first, where nothing is
    allocated, then as it is.

    Raises:
        TorchMissing: torch is not installed.
        UsageError: the code raised; or what it names is no model and makes none.
    """
    with at_home():
        node = named(text)
        if _is_model(node):
            return node
        if not callable(node):
            raise UsageError(
                f"{text} is {a_class(node)}, and neither a model nor what makes one", hint=HINT
            )
        made = on_meta(node)
        if made is None:
            made = run(node, f"{text} raised", HINT)
    if not _is_model(made):
        raise UsageError(f"{text} returned {a_class(made)}, and no model", hint=HINT)
    return made


def _is_model(node: Any) -> bool:
    """Whether it is a state dict or an `nn.Module`; whoever has one of those has imported torch."""
    torch = sys.modules.get("torch")
    return isinstance(node, Mapping) or (torch is not None and isinstance(node, torch.nn.Module))
