"""Parameters of a recipe: given numbers, entries of a configuration, or computed from others."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque
from ckptool.errors import UsageError
from ckptool.files.place import place_of
from ckptool.recipes.axes import MAX_SIZE
from ckptool.words import listed, printable

_MAX_CONFIG_BYTES = 1 << 20
"""The largest size of a configuration."""
_MAX_TERM_LENGTH = 200
_CHECKPOINT = "checkpoint"
_CONFIG_KEY = re.compile(r"([\w-]+\.json|checkpoint):(\w+(?:\.\w+)*)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("//", operator.floordiv),
}


class ConfigKey(NamedTuple):
    """A key of a JSON file next to the weights, or of the checkpoint itself."""

    file: str
    """The file name, or `checkpoint`."""
    keys: tuple[str, ...]
    """The keys on the way to the value: `text_config`, `num_heads`."""


@dataclass(frozen=True)
class Arithmetic:
    """An expression over numbers and other parameters."""

    text: str
    tree: ast.expr = field(compare=False)

    @property
    def names(self) -> set[str]:
        """The parameters in the expression."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}


Term: TypeAlias = "int | ConfigKey | Arithmetic"


def parse_term(value: object) -> Term:
    """Parse one definition of a parameter.

    Raises:
        UsageError: if the value is not a definition.
    """
    if type(value) is int and 0 <= value < MAX_SIZE:
        return value
    if not isinstance(value, str) or len(value) > _MAX_TERM_LENGTH:
        raise UsageError(f"{printable(str(value))!r} is not a parameter", hint=_HINT_TERM)
    if ":" in value:
        match = _CONFIG_KEY.fullmatch(value.strip())
        if match is None:
            raise UsageError(f"{printable(value)!r} is not a key in a file", hint=_HINT_TERM)
        return ConfigKey(match[1], tuple(match[2].split(".")))
    try:
        tree = ast.parse(value.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"{printable(value)!r} is not arithmetic", hint=_HINT_TERM) from None
    if not _is_arithmetic(tree):
        raise UsageError(f"{printable(value)!r} is not arithmetic", hint=_HINT_TERM)
    return Arithmetic(value.strip(), tree)


_HINT_TERM = (
    "write a number, config.json:KEY, checkpoint:KEY, or + - * // of parameters and numbers"
)


def _is_arithmetic(node: ast.expr) -> bool:
    """Return True if the tree has only parameters, whole numbers and `+ - * //`."""
    match node:
        case ast.BinOp(left, operation, right):
            return type(operation) in _OPERATORS and _is_arithmetic(left) and _is_arithmetic(right)
        case ast.Constant(value):
            return type(value) is int
        case ast.Name(name):
            return _NAME.fullmatch(name) is not None
    return False


def refuse_cycles(params: Mapping[str, Sequence[Term]]) -> None:
    """Refuse parameters that depend on themselves.

    Raises:
        UsageError: if there are some; the message lists them.
    """
    unresolved = {  # by parameter, the parameters in its definitions
        name: {needed for term in terms if isinstance(term, Arithmetic) for needed in term.names}
        for name, terms in params.items()
    }
    while unresolved:
        resolved = [name for name, needed in unresolved.items() if not needed & unresolved.keys()]
        if not resolved:
            raise UsageError(f"parameters {listed(unresolved)} depend on each other")
        for name in resolved:
            del unresolved[name]


class Params:
    """The parameters of one run, computed at its start."""

    def __init__(
        self,
        terms: Mapping[str, Sequence[Term]],
        given: Mapping[str, int | str],
        checkpoint: Checkpoint,
        configs: Iterable[Path],
    ) -> None:
        """Compute the parameters of a recipe.

        A value in `given` comes first. Otherwise the first definition (term) with a value counts.
        Configurations are read next to the checkpoint, then from the folders or files `configs`.

        Raises:
            UsageError: if a value is not a whole number, or a configuration is not a JSON object.
        """
        path = checkpoint.path
        own_paths = [path, os.path.dirname(path)] if path else []
        self._config_paths = [*own_paths, *map(os.fspath, configs)]
        self._checkpoint = checkpoint
        self._config_by_name: dict[str, Mapping[str, Any]] = {}
        """The content of each configuration that was read."""
        self.values = {name: _parse_given(name, value) for name, value in given.items()}
        self.given = tuple(self.values)
        """The names of the parameters that the user gave."""
        self.origins = dict.fromkeys(self.values, "")
        """By parameter, the configuration that it is from, or ""."""
        for name in _order_by_dependency(terms):
            if name not in self.values:
                self._define(name, terms[name])

    def _define(self, name: str, terms: Iterable[Term]) -> None:
        """Store a parameter and its origin, from the first definition with a value, if any."""
        for term in terms:
            value = self._evaluate_term(name, term)
            if value is None:
                continue
            if not 0 <= value < MAX_SIZE:
                raise UsageError(f"parameter {name} would be {value:,}")
            self.values[name] = value
            self.origins[name] = term.file if isinstance(term, ConfigKey) else ""
            return

    def _evaluate_term(self, name: str, term: Term) -> int | None:
        """Return the value of a definition of a parameter.

        None if its key is missing in the configuration, or a parameter in it has no value.

        Raises:
            UsageError: if the configuration has something else than a whole number.
        """
        if isinstance(term, int):
            return term
        if isinstance(term, Arithmetic):
            return self._compute(term) if term.names <= self.values.keys() else None
        node: Any = self._read_config(term.file)
        for key in term.keys:
            node = _entries_of(node).get(key)
        if node is None or (type(node) is int and 0 <= node < MAX_SIZE):
            return node
        where = f"{term.file}: {'.'.join(term.keys)}"
        text = f"{where} is {printable(repr(node))}, expected a whole number"
        raise UsageError(text, hint=f"add --param {name}=NUMBER")

    def _compute(self, term: Arithmetic) -> int:
        """Return the value of an expression of known parameters.

        Raises:
            UsageError: if it is out of range, or divides by zero.
        """

        def evaluate(node: ast.expr) -> int:
            """Return the value of a node of the expression."""
            if isinstance(node, ast.BinOp):
                _symbol, operation = _OPERATORS[type(node.op)]
                result = operation(evaluate(node.left), evaluate(node.right))
                if abs(result) > MAX_SIZE:
                    raise UsageError(f"{term.text!r} is out of range")
                return result
            if isinstance(node, ast.Name):
                return self.values[node.id]
            return int(ast.literal_eval(node))

        try:
            return evaluate(term.tree)
        except ZeroDivisionError:
            raise UsageError(f"{term.text!r} divides by zero") from None

    def _read_config(self, name: str) -> Mapping[str, Any]:
        """Return the content of a configuration by its file name.

        `checkpoint` has the entries of the root of the checkpoint. If the root has only dicts, one
        for each rank, the entries of the first one are added.
        """
        if name == _CHECKPOINT:
            root_entries = _entries_of(self._checkpoint.root)
            nested = list(map(_entries_of, root_entries.values()))
            are_ranks = bool(nested) and all(nested)  # a value that is not a dict has no entries
            first_rank = nested[0] if are_ranks else {}
            return {**first_rank, **root_entries}
        if name not in self._config_by_name:
            self._config_by_name[name] = self._read_json(name)
        return self._config_by_name[name]

    def _read_json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON file next to the checkpoint or in a given folder, or {}."""
        for base in self._config_paths:
            path = base if os.path.basename(base) == name else os.path.join(base, name)
            place = place_of(path)
            if not place.is_file(path):
                continue
            source = place.open(path)
            try:
                content = json.loads(source.read(0, min(source.size, _MAX_CONFIG_BYTES + 1)))
            except (ValueError, RecursionError):
                content = None
            finally:
                source.close()
            if not isinstance(content, dict):
                raise UsageError("is not a JSON object", file=path)
            return content
        return {}


def _entries_of(node: Any) -> Mapping[Any, Any]:
    """Return the attributes of an object, or a dict itself; {} for anything else."""
    if isinstance(node, Opaque):
        return node.attributes
    return node if isinstance(node, dict) else {}


def _parse_given(name: str, value: int | str) -> int:
    """Return the whole number that the user gave for a parameter."""
    text = str(value).strip()
    if type(value) is bool or not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        text = f"parameter {printable(name)} is {printable(str(value))!r}, expected a number"
        raise UsageError(text, hint=f"write --param {printable(name)}=NUMBER")
    return int(text)


def _order_by_dependency(terms: Mapping[str, Sequence[Term]]) -> list[str]:
    """Return the names of the parameters, each after the ones that it depends on."""
    visited: dict[str, None] = {}

    def visit(name: str) -> None:
        """Visit the parameters in the definitions of one, and then this one."""
        if name in visited:
            return
        for term in terms[name]:
            if isinstance(term, Arithmetic):
                for needed in sorted(term.names & terms.keys()):
                    visit(needed)
        visited[name] = None

    for name in terms:
        visit(name)
    return list(visited)
