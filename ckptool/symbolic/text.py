"""Decode text in pickles: Python 2 strings and names, escapes, persistent ids as a repr."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

from ckptool.core.model import ByteString, Global


def decode_python2(raw: bytes) -> str:
    """Return a Python 2 `str` as text (UTF-8 if valid, else Latin-1), which keeps its bytes."""
    if raw.isascii():
        return str(raw, "ascii")
    try:
        text = ByteString(str(raw, "utf-8"))
    except UnicodeDecodeError:
        text = ByteString(str(raw, "latin-1"))
    text.raw = raw
    return text


def to_bytes(node: Any) -> bytes | None:
    """Return the bytes of a bytes object, which old protocols store as text; None for others."""
    if isinstance(node, bytes):
        return node
    if isinstance(node, ByteString):
        return node.raw
    if isinstance(node, str):
        try:
            return node.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return None


def unescape(text: bytes) -> bytes:
    """Return the bytes of a quoted Python 2 string literal."""
    is_quoted = len(text) >= 2 and text[:1] == text[-1:] and text[:1] in (b"'", b'"')
    if not is_quoted:
        raise ValueError("a string without quotes")
    content, _length = codecs.escape_decode(text[1:-1])
    return content


_PYTHON2_NAMES = {
    "__builtin__.xrange": "builtins.range",
    "__builtin__.long": "builtins.int",
    "__builtin__.unicode": "builtins.str",
    "itertools.izip": "builtins.zip",
    "UserDict.UserDict": "collections.UserDict",
    "UserList.UserList": "collections.UserList",
}
_PYTHON2_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "cPickle": "pickle",
    "Queue": "queue",
    "ConfigParser": "configparser",
}

MEMORY_FORMATS = frozenset(
    {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
)
"""The constants of `torch` that are a `torch.memory_format`."""


def to_modern_name(module: str, name: str) -> str:
    """Return the current qualified name (as `_compat_pickle` maps the names in pickles)."""
    qualified = f"{module}.{name}"
    return _PYTHON2_NAMES.get(qualified) or f"{_PYTHON2_MODULES.get(module, module)}.{name}"


_TEXT_PID = re.compile(
    r"\('storage', <class '([\w.]+)\.(\w+)'>, '([^']*)', '([^']*)', (\d{1,19})(?:, (None))?\)"
)


def parse_text_pid(text: str, find: Callable[[str, str], Global]) -> Any:
    """Parse a protocol-0 persistent id that is the repr of a tuple; return other text unchanged."""
    match = _TEXT_PID.fullmatch(text)
    if match is None:
        return text
    module, name, key, location, count, view = match.groups()
    pid = ("storage", find(module, name), key, location, int(count))
    return pid if view is None else (*pid, None)  # `view` is the text "None"
