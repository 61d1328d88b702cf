"""Import and run the user's own code, `module:factory`, and report its errors.

Only code that the user names is imported and called, never code named in a file.
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
"""The form of `module:factory`."""
_MOST_NAMED = 6
"""The most names in a hint."""
HINT = "write a function without arguments that returns the model: def build(): return Net(...)"


@contextmanager
def use_working_directory() -> Iterator[None]:
    """Put the working directory first on the path, as `python -m` does.

    What user code prints goes to stderr, so that stdout has only ckptool's own output.
    """
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = before


def import_object(text: str) -> Any:
    """Import the module and return the object of `module:name`.

    Raises:
        TorchMissing: if the module needs torch, which is not installed.
        UsageError: if the object does not exist, or the import raises an error.
    """
    match = FACTORY.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{printable(text)!r} is not module:factory", hint="give a name such as net:Net"
        )
    module, attribute = match.groups()
    hint = "put the module in this folder, on PYTHONPATH or in the environment"
    if module.endswith(".py"):
        hint = f"write {module.removesuffix('.py')}:..., without .py"
    node = run_user_code(lambda: import_module(module), f"{text}: importing {module} raised", hint)
    for part in attribute.split("."):
        node = run_user_code(partial(_get_attribute, text, node, part), f"{text} raised", HINT)
    return node


def _get_attribute(text: str, node: Any, name: str) -> Any:
    """Return an attribute of a module or class; a hint names the available ones."""
    try:
        return getattr(node, name)
    except AttributeError as error:
        raise UsageError(f"{text}: {error}", hint=_hint_available_names(node)) from error


def _hint_available_names(node: Any) -> str:
    """Return a hint with the models in a module or class, and the module's own callables."""
    module_name = getattr(node, "__name__", "")

    def can_build_model(value: Any) -> bool:
        """Return True for a model, or a callable that was defined in this module."""
        is_own = getattr(value, "__module__", "") == module_name
        return is_model(value) or (callable(value) and is_own)

    candidates = [
        name
        for name, value in getattr(node, "__dict__", {}).items()
        if not name.startswith("_") and can_build_model(value)
    ]
    if not candidates:
        return "give module:name, for example net:Net"
    return f"use {listed(candidates, _MOST_NAMED)}"


def run_user_code(make: Callable[[], Any], prefix: str, hint: str) -> Any:
    """Return the result of the user's code; an error message begins with `prefix`.

    Raises:
        TorchMissing: if the code needs torch, which is not installed.
        UsageError: if the code raises any other error.
    """
    try:
        return make()
    except (CheckpointError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise TorchMissing(
                f"{prefix} ModuleNotFoundError: torch is not installed", hint="pip install torch"
            ) from error
        message = " ".join(str(error).split())
        text = f"{prefix} {type(error).__name__}{f': {message}' if message else ''}"
        raise UsageError(text, hint=_find_raising_line(error) or hint) from error


def _find_raising_line(error: BaseException) -> str | None:
    """Return the innermost line of user code in the traceback, or None."""
    working_directory = os.path.join(os.getcwd(), "")  # with a slash at the end
    package = os.path.join(os.path.dirname(__file__), "")
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(working_directory)
        and not frame.filename.startswith(package)
        and "site-packages" not in frame.filename
    ]
    if not user_frames:
        return None
    name = os.path.relpath(user_frames[-1].filename)
    return f"see {name}, line {user_frames[-1].lineno}"


def is_model(node: Any) -> bool:
    """Return True for a state dict or an `nn.Module`, without importing torch."""
    torch = sys.modules.get("torch")
    return isinstance(node, Mapping) or (torch is not None and isinstance(node, torch.nn.Module))
