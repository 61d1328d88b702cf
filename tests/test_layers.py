"""Data walks one way: a room imports only from the rooms above it."""

import ast
from pathlib import Path

import pytest

from tests.sources import calls, imports, room, trees

ROOMS = [
    "_version",
    "_lazy",
    "words",
    "remedies",
    "errors",
    "renamed",
    "limits",
    "dtypes",
    "quotes",
    "files",
    "factories",
    "core",
    "symbolic",
    "formats",
    "tensors",
    "transforms",
    "recipes",
    "matching",
    "writing",
    "inspection",
    "loading",
    "conversion",
    "diagnosis",
    "comparison",
    "trainer",
    "render",
    "api",
    "results",
    "cli",
]
INSIDE = {
    "core": [
        "model",
        "quantizers",
        "modules",
        "checkpoint",
        "quantization_config",
        "tree",
        "names",
        "addressing",
        "sections",
        "finding",
        "reading",
        "values",
        "placeholders",
        "optimizers",
    ],
    "conversion": ["fit", "steps", "layout"],
    "loading": [
        "ranks",
        "snapshot",
        "inert",
        "load",
        "fill",
        "target",
        "source",
        "plan",
        "positions",
        "saved_optimizer",
        "optimizer",
        "load_into",
        "save",
    ],
}
"""Rooms that have several inside: what those are, and the modules beside them, in their order."""

ROOMS_INSIDE = sorted({file.rpartition("/")[0] for file in trees() if file.count("/") == 2})

DOORS = {"__init__", "__main__"}
"""The package's own entrances import from everywhere."""

UPWARD = {
    ("_lazy.py", "Result", "__str__"),
    ("_lazy.py", "Result", "__repr__"),
    ("core/model.py", "TensorRef", "torch"),
    *(
        ("core/checkpoint.py", "Checkpoint", method)
        for method in (
            "then",
            "strip_module",
            "add_module",
            "rename",
            "remap",
            "save",
            "state_dict",
        )
    ),
    ("formats/distributed/zero.py", "_cast_masters"),
}
"""Functions that print, make tensors, chain, write, or compute what training computed: their lazy
imports are the only calls upward."""

WITH_TORCH = {"tensors", "loading", "trainer"}
ABOVE_TORCH = {"trainer"}
"""Rooms of which nothing is of use without torch; what imports them does so inside functions."""


def files_of(*exempt):
    return [file for file in trees() if room(file) not in exempt]


def is_type_hint_or_method(found, file):
    return found.typing_only or (file, *found.scope) in UPWARD


def test_the_calls_upward_are_those_that_are_named():
    found = {
        (file, *one.scope)
        for file in files_of(*DOORS)
        for one in imports(file, trees()[file])
        for there in [room(one.module.removeprefix("ckptool."))]
        if not one.typing_only and one.module.startswith("ckptool.")
        if ROOMS.index(there) > ROOMS.index(room(file))
    }
    assert found == UPWARD


def rooms_imported(file):
    for found in imports(file, trees()[file]):
        if found.module.startswith("ckptool") and not is_type_hint_or_method(found, file):
            names = [found.module] if found.module != "ckptool" else found.names
            yield from ((found.line, room(name.removeprefix("ckptool."))) for name in names)


def test_every_room_has_its_place_in_the_order():
    assert {room(file) for file in files_of(*DOORS)} == set(ROOMS)


def test_a_room_imports_only_from_rooms_above_it():
    assert not [
        f"{file}:{line} imports {there}, which lies below {room(file)}"
        for file in files_of(*DOORS)
        for line, there in rooms_imported(file)
        if ROOMS.index(there) > ROOMS.index(room(file))
    ]


def part(file):
    """The room inside a room that a file lies in; the module itself where it lies in none."""
    return Path(file).with_suffix("").parts[1]


def parts_imported(file):
    """What a module imports from its own room, each with the part that it lies in."""
    for found in imports(file, trees()[file]):
        path = found.module.split(".")
        is_method = file in ("core/checkpoint.py", "core/model.py") and found.scope
        if path[:2] == ["ckptool", room(file)] and not (found.typing_only or is_method):
            yield from ((found, name) for name in path[2:3] or found.names)


@pytest.mark.parametrize("outside", INSIDE)
def test_a_room_inside_imports_only_from_those_above_it(outside):
    order = [*INSIDE[outside], "__init__"]
    files = [file for file in trees() if room(file) == outside]
    assert {part(file) for file in files} == set(order)
    assert not [
        f"{file}:{found.line} imports {there}, which lies below {part(file)}"
        for file in files
        for found, there in parts_imported(file)
        if order.index(there) > order.index(part(file))
    ]


@pytest.mark.parametrize("inside", ROOMS_INSIDE)
def test_what_a_room_inside_imports_does_not_import_it_again(inside):
    around: dict[str, set[str]] = {}
    for file in trees():
        if room(file) == room(inside) and "/" in file:
            around.setdefault(part(file), set()).update(name for _, name in parts_imported(file))
    here = part(inside)
    todo, met = sorted(around[here] - {here}), set()
    while todo:
        one = todo.pop()
        if one not in met:
            met.add(one)
            assert here not in around.get(one, ()), f"{one} and {here} import each other"
            todo.extend(around.get(one, ()))


def imported(package, *, unless=()):
    """The imports of a package, with their files."""
    for file in trees():
        for found in imports(file, trees()[file]) if file not in unless else ():
            if room(found.module) == package:
                yield file, found


def test_torch_is_imported_only_inside_functions_of_the_rooms_that_make_tensors():
    real = [(file, found) for file, found in imported("torch") if not found.typing_only]
    assert {room(file) for file, _ in real} == WITH_TORCH
    at_the_top = {room(file) for file, found in real if not found.scope}
    assert at_the_top == ABOVE_TORCH


WITH_ARRAYS = {"formats/foreign/gguf.py"}
"""Files that hand arrays to another library, by imports inside a function."""


def test_numpy_is_no_dependency():
    assert not list(imported("numpy", unless=WITH_ARRAYS))


def test_the_library_never_prints():
    assert not [
        f"{file}:{line} calls {name}"
        for file in files_of("cli", "render")
        for name, line in calls(trees()[file])
        if name == "print" or name.startswith(("sys.stdout", "sys.stderr", "click."))
    ]


def test_no_assert_stands_for_a_check():
    assert not [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def test_the_tests_own_eyes_see_nested_and_relative_imports():
    tree = ast.parse("def f():\n    from ..errors import X\n    import torch.nn\n")
    found = list(imports("formats/deep.py", tree))
    assert [(one.module, one.scope) for one in found] == [
        ("ckptool.errors", ("f",)),
        ("torch.nn", ("f",)),
    ]


ONE_ANOTHER: set[frozenset[str]] = set()
"""Modules that may import each other, also lazily: what a later step unties."""


def modules_imported(file):
    """The files of the modules that a module imports, at whatever depth."""
    for found in imports(file, trees()[file]):
        if found.module.split(".")[0] != "ckptool" or is_type_hint_or_method(found, file):
            continue
        base = "/".join(found.module.split(".")[1:])
        for name in found.names or ("",):
            paths = (f"{base}/{name}.py", f"{base}/{name}/__init__.py", f"{base}/__init__.py")
            paths = (*paths[:2], f"{base}.py", paths[2])
            there = next((one for path in paths if (one := path.lstrip("/")) in trees()), None)
            if there not in (None, file):
                yield there


def circles(edges):
    """The sets of nodes that reach each other."""
    reached = {}
    for node in edges:
        todo, met = [*edges[node]], set()
        while todo:
            one = todo.pop()
            if one not in met:
                met.add(one)
                todo.extend(edges[one])
        reached[node] = met
    return {
        frozenset(other for other in reached[node] if node in reached[other])
        for node in edges
        if node in reached[node]
    }


def test_no_modules_import_each_other_not_even_inside_functions():
    inside = [file for file in trees() if room(file) not in DOORS]
    edges = {file: {one for one in modules_imported(file) if one in inside} for file in inside}
    assert circles(edges) == ONE_ANOTHER


def test_circles_are_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == {
        frozenset("bc"),
        frozenset("d"),
    }


def compared(node):
    """The operands of a comparison, or the object and arguments of `startswith` and `endswith`."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr in ("startswith", "endswith"):
        yield from (node.func.value, *node.args)


def knows_a_format_by_name(node):
    operands = list(compared(node))
    of_format = any(isinstance(one, ast.Attribute) and one.attr == "format" for one in operands)
    texts = [one.value for one in operands if isinstance(one, ast.Constant)]
    return of_format and any(isinstance(text, str) for text in texts)


def test_a_format_is_asked_what_it_is_and_not_known_by_its_name():
    assert not [
        f"{file}:{node.lineno} compares the name of a format: give formats an attribute"
        for file in files_of("formats")
        for node in ast.walk(trees()[file])
        if knows_a_format_by_name(node)
    ]
