"""The user's own code that builds a model, for `--like module:factory`.

It is imported and called because the user named it on the command line; nothing of a file ever is,
and no function of the library takes such a word.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any

from ckptool.errors import CheckpointError, FileMissing, TorchMissing, UsageError
from ckptool.loading.live.on_meta import on_meta
from ckptool.paths import listed, printable

__all__ = ["built", "is_factory", "referred"]

_FACTORY = re.compile(r"([^\W\d]\w*(?:\.\w+)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_FORMS = "a checkpoint, or code of yours that builds the model: module:factory, as in net:build"
_MOST_NAMED = 6
_HINT = "a function without arguments that returns the model: def build(): return Net(...)"


def is_factory(text: str) -> bool:
    """Whether a word names `module:factory`; where there is a file of that name, it is the file."""
    return _FACTORY.fullmatch(text) is not None and not os.path.lexists(text)


def referred(text: str) -> Any:
    """What a word of the command line stands for: what `module:factory` builds, else a path.

    Raises:
        TorchMissing, UsageError: as `built`; or it is a script, without the factory.
        FileMissing: it is neither.
    """
    if is_factory(text):
        return built(text)
    if text.endswith(".py") and os.path.isfile(text):
        stem = os.path.basename(text).removesuffix(".py")
        raise UsageError(f"{printable(text)} is a Python script", hint=f"{stem}:factory; {_HINT}")
    if not os.path.lexists(text):
        raise FileMissing("there is no such file", file=text, hint=_FORMS)
    return text


def built(text: str) -> Any:
    """The model, or state dict, that `module:factory` names or makes.

    The working directory is on the path meanwhile, and what the code prints goes to stderr. A
    class or function is called without arguments: on the meta device first, where nothing is
    allocated, then as it is.

    Raises:
        TorchMissing: torch is not installed.
        UsageError: the code raised; or what it names is no model and makes none.
    """
    found = _FACTORY.fullmatch(text)
    if found is None:
        raise UsageError(f"{printable(text)!r} is not of the form module:factory", hint="net:Net")
    with _at_home(), redirect_stdout(sys.stderr):
        named = _named(text, *found.groups())
        if _is_model(named):
            return named
        if not callable(named):
            raise UsageError(
                f"{text} is {_class(named)}, and neither a model nor what makes one", hint=_HINT
            )
        made = on_meta(named)
        if made is None:
            made = _run(named, f"{text} raised", _HINT)
    if not _is_model(made):
        raise UsageError(f"{text} returned {_class(made)}, and no model", hint=_HINT)
    return made


@contextmanager
def _at_home() -> Iterator[None]:
    """The working directory at the front of the path, as `python -m` has it."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _named(text: str, module: str, attribute: str) -> Any:
    node = _run(lambda: import_module(module), f"{text}: importing {module} raised", _found(module))
    for part in attribute.split("."):
        node = _run(partial(_attribute, text, node, part), f"{text} raised", _HINT)
    return node


def _attribute(text: str, node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except AttributeError as error:
        raise UsageError(f"{text}: {error}", hint=_there(node)) from error


def _there(node: Any) -> str:
    """What of a module, or a class, may have been meant."""
    home = getattr(node, "__name__", "")
    own = [
        name
        for name, value in getattr(node, "__dict__", {}).items()
        if not name.startswith("_")
        and (_is_model(value) or (callable(value) and getattr(value, "__module__", "") == home))
    ]
    return f"there is {listed(own, _MOST_NAMED)}" if own else "module:name, as in net:Net"


def _found(module: str) -> str:
    stem = module.removesuffix(".py")
    return f"{stem}:..., without .py" if stem != module else "modules are looked for from here on"


def _run(make: Callable[[], Any], what: str, hint: str) -> Any:
    """The user's code, whose faults are told in a sentence."""
    try:
        return make()
    except CheckpointError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it raises, it is its own
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise TorchMissing(
                f"{what} ModuleNotFoundError: torch is not installed", hint="pip install torch"
            ) from error
        said = " ".join(str(error).split())
        text = f"{what} {type(error).__name__}{f': {said}' if said else ''}"
        raise UsageError(text, hint=hint) from error


def _is_model(node: Any) -> bool:
    """Whether it is a state dict or an `nn.Module`; whoever has one of those has imported torch."""
    torch = sys.modules.get("torch")
    return isinstance(node, Mapping) or (torch is not None and isinstance(node, torch.nn.Module))


def _class(node: Any) -> str:
    """`an int`, `a Net`, `None`."""
    name = type(node).__name__
    if node is None:
        return "None"
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
