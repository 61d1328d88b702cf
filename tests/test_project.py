"""What the project promises about itself: its package, its version, its public names."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

import ckptool
from ckptool._version import __version__
from tests.sources import PROJECT, imports, room, trees

RUNS_CODE = re.compile(
    r"(.*\.)?(eval|exec|execfile|__import__|import_module|run_module|run_path|find_class)$"
    r"|(c?[pP]ickle|_pickle|dill|cloudpickle|marshal|shelve|joblib)\..*"
    r"|torch\.(load|jit\.load|package\..*|hub\..*)"
    r"|(os\.(system|popen|exec.*|spawn.*)|subprocess\..*)"
    r"|(builtins\.)?compile$"
)
CODE_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy",
    "subprocess", "code", "codeop", "imp", "pydoc",
}  # fmt: skip


def test_the_public_names_exist():
    assert None not in [getattr(ckptool, name) for name in ckptool.__all__]


def test_the_public_names_are_listed_once_and_shown_by_dir():
    assert len(ckptool.__all__) == len(set(ckptool.__all__))
    assert set(ckptool.__all__) <= set(dir(ckptool))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        ckptool.no_such_name  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_the_command_line():
    code = "import sys, ckptool; print(sorted({'torch', 'numpy', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_one():
    assert ckptool.__version__ == __version__
    assert re.search(rf"^## {re.escape(__version__)}\b", changelog(), re.MULTILINE)


def test_the_installed_version_is_that_of_the_source():
    try:
        installed = importlib.metadata.version("ckptool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from the source tree, not installed")
    assert installed == __version__


def changelog():
    return (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")


TORCH_MODULE = re.compile(r"import_module\('torch(_xla)?[.\w]*'\)")
"""An import by a name that stands in the source: mypy has no types of these modules."""
LAZY_IMPORTS = {
    "_lazy.py": "import_module(f'{package}.{home}')",
    "render/__init__.py": "import_module(f'ckptool.render.{module_name}')",
    "cli/group.py": "import_module(f'ckptool.cli.{file}')",
    "formats/registry.py": "importlib.import_module(f'ckptool.formats.{self.module}')",
    "factories.py": "import_module(module)",
    "trainer/strategies/__init__.py": "import_module(f'{__name__}.{home}')",
}
"""The package's own modules, imported by names that stand in its own source.

And the user's code, which `module:factory` names: `--like` and `--model` of the command line.
"""


def test_nothing_in_the_library_can_run_what_a_file_says():
    found = [
        (file, ast.unparse(node))
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and RUNS_CODE.match(ast.unparse(node.func))
        if not (file.startswith("trainer/") and TORCH_MODULE.fullmatch(ast.unparse(node)))
    ]
    assert sorted(found) == sorted(LAZY_IMPORTS.items())
    every = [(file, one.module) for file, tree in trees().items() for one in imports(file, tree)]
    assert not [one for one in every if room(one[1]) in CODE_MODULES]


def test_only_a_word_of_the_user_names_code_of_theirs():
    homes = {"ckptool.factories", "ckptool.cli.like"}
    naming = [
        file for file, tree in trees().items() for one in imports(file, tree) if one.module in homes
    ]
    assert {room(file) for file in naming} == {"cli", "trainer"}


def test_the_public_names_are_at_home_in_the_package():
    rooms = {room(file) for file in trees()}
    assert {room(home) for home in ckptool._HOMES} <= rooms


IGNORED = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
import tests.conftest
look = "import signal; print(signal.SIG_IGN in map(signal.getsignal, (1, 2, 15)))"
signal.raise_signal(signal.SIGHUP)  # goes by, as nohup asks
sys.exit(subprocess.run([sys.executable, "-c", look], capture_output=True).stdout != b"False\\n")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_what_ignores_signals_starts_no_test_that_does():
    done = subprocess.run([sys.executable, "-c", IGNORED], cwd=PROJECT, check=False)
    assert done.returncode == 0


def test_a_public_class_name_stands_for_one_class():
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert names
    assert [name for name, count in names.items() if count > 1] == []


def test_a_function_of_more_than_seven_lines_has_a_docstring():
    functions = [
        (file, node)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert len(functions) > 1000
    bare = [
        f"{file}:{node.lineno} {node.name}"
        for file, node in functions
        if node.end_lineno - node.lineno >= 7
        and ast.get_docstring(node) is None
        and not node.name.startswith("__")
        and not any(ast.unparse(one).endswith("overload") for one in node.decorator_list)
    ]
    assert bare == []
