"""The user's own code that a word names, `module:factory`: imported, run, its faults told.

It is imported and called because the user named it; nothing of a file ever comes here.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any

from ckptool.errors import CheckpointError, TorchMissing, UsageError
from ckptool.words import listed, printable

FACTORY = re.compile(r"([^\W\d]\w*(?:\.\w+)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
"""What `module:factory` looks like."""
_MOST_NAMED = 6
HINT = "a function without arguments that returns the model: def build(): return Net(...)"


@contextmanager
def at_home() -> Iterator[None]:
    """Around the user's code: the working directory is on the path, what is printed is on stderr.

    The directory is at the front, as `python -m` has it.
    """
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = before


def named(text: str) -> Any:
    """Return the object that `module:name` names, the module imported.

    Raises:
        TorchMissing: the module needs torch, which is not installed.
        UsageError: there is none; or importing it raised.
    """
    found = FACTORY.fullmatch(text)
    if found is None:
        raise UsageError(f"{printable(text)!r} is not of the form module:factory", hint="net:Net")
    module, attribute = found.groups()
    hint = "modules are imported from this folder, PYTHONPATH and the environment"
    if module.endswith(".py"):
        hint = f"{module.removesuffix('.py')}:..., without .py"
    node = run(lambda: import_module(module), f"{text}: importing {module} raised", hint)
    for part in attribute.split("."):
        node = run(partial(_attribute, text, node, part), f"{text} raised", HINT)
    return node


def _attribute(text: str, node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except AttributeError as error:
        raise UsageError(f"{text}: {error}", hint=_there(node)) from error


def _there(node: Any) -> str:
    """Return what of a module, or a class, may have been meant."""
    home = getattr(node, "__name__", "")
    own = [
        name
        for name, value in getattr(node, "__dict__", {}).items()
        if not name.startswith("_")
        and (is_model(value) or (callable(value) and getattr(value, "__module__", "") == home))
    ]
    return f"there is {listed(own, _MOST_NAMED)}" if own else "module:name, as in net:Net"


def run(make: Callable[[], Any], what: str, hint: str) -> Any:
    """Return what the user's code returns; a fault is a sentence that begins with `what`.

    Raises:
        TorchMissing: it needs torch, which is not installed.
        UsageError: it raised anything else.
    """
    try:
        return make()
    except (CheckpointError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever it raises, it is its own
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise TorchMissing(
                f"{what} ModuleNotFoundError: torch is not installed", hint="pip install torch"
            ) from error
        said = " ".join(str(error).split())
        text = f"{what} {type(error).__name__}{f': {said}' if said else ''}"
        raise UsageError(text, hint=_place(error) or hint) from error


def _place(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that raised the error; None if there is none."""
    here, ours = (os.path.join(path, "") for path in (os.getcwd(), os.path.dirname(__file__)))
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(here)
        and not frame.filename.startswith(ours)
        and "site-packages" not in frame.filename
    ]
    if not own:
        return None
    name = os.path.relpath(own[-1].filename)
    return f"it was raised in {name}, line {own[-1].lineno}"


def is_model(node: Any) -> bool:
    """Return whether an object is a state dict or an `nn.Module`, without importing torch."""
    torch = sys.modules.get("torch")
    return isinstance(node, Mapping) or (torch is not None and isinstance(node, torch.nn.Module))
