"""The library's own source text, for the tests that hold its rules."""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parent.parent
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""Hints name the program as a shell finds it."""
PACKAGE = PROJECT / "ckptool"


@dataclass(frozen=True)
class Import:
    """One module that is imported, where, and inside which functions and classes."""

    module: str
    names: tuple[str, ...]
    line: int
    scope: tuple[str, ...]
    typing_only: bool


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its path below the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def room(file: str) -> str:
    """The room that a file or a dotted name below `ckptool` lies in."""
    return file.replace("/", ".").split(".")[0]


def imports(file: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a module, those inside functions and `if TYPE_CHECKING` too."""
    package = ["ckptool", *Path(file).parts[:-1]]
    yield from _imports(tree, package, (), typing_only=False)


def _imports(
    node: ast.AST, package: list[str], scope: tuple[str, ...], *, typing_only: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, scope, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *filter(None, [child.module])])
            names = tuple(alias.name for alias in child.names)
            yield Import(module, names, child.lineno, scope, typing_only)
        else:
            inner, typing = scope, typing_only
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                typing = True
            yield from _imports(child, package, inner, typing_only=typing)


def calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What is called, as written (`pickle.loads`), and in which line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno
