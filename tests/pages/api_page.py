"""`docs/api.md`: every public name with its signature, fields, methods and errors.

griffe reads the sources: nothing is imported, the page is the same on every Python.
"""

import re
from functools import cache
from textwrap import dedent

import griffe

from tests.sources import PROJECT

PARTS = {
    "Opening": ["open", "Checkpoint", "Details", "Change", "Limits"],
    "Into a model": ["load_state_dict", "load_into", "match", "MatchReport", "load", "save"],
    "Questions": [
        *(
            "list_tensors",
            "Listing",
            "info",
            "Info",
            "diff",
            "Diff",
            "stats",
            "Stats",
            "verify",
            "Verdict",
            "scan",
            "Scan",
        ),
        *("Finding", "doctor", "Diagnosis", "Complaint", "report", "PageReceipt"),
    ],
    "Changes": [
        *("strip_module", "add_module", "rename", "remap", "convert", "average"),
        "merge_lora",
        *("Receipt", "recover", "Recovery"),
    ],
    "What a checkpoint is made of": ["TensorRef", "Storage", "Opaque", "InertObject"],
    "Steps": [
        *(
            "Step",
            "Take",
            "Strip",
            "Wrap",
            "Rename",
            "Relayout",
            "Reshape",
            "Fit",
            "Plain",
            "Untie",
            "Cast",
        ),
        *("Compact", "Remap", "Masters", "Flatten", "Salvage", "Nest"),
        *("Overlay", "Drop", "Move", "Set"),
    ],
}
"""The public names of `ckptool` and `ckptool.results`, as a reader meets them."""

HEAD = """# Every public name

This page is generated from the sources by `make docs`. For the command line, see
[docs/cli.md](cli.md).

- A **shape** is a tuple of ints, one per dimension, `()` for a scalar; None stands for a ragged
  dimension. **Strides** and **offsets** count elements; **sizes** (`nbytes`, `size`, limits) count
  bytes; shares range from 0 to 1.
- A **device** is the tag in the file: `"cpu"`, `"cuda:3"`, `"xla:0"`, ...; a **dtype** is torch's
  name without `torch.`: `"float32"`.
- A **path** into a file is a tuple of keys, `("state_dict", "conv1.weight")`. A **key** argument is
  such a tuple, or the keys joined by `/`.
- A **Source** is a path or an open checkpoint. A **MapLocation** is a `map_location` as in
  `torch.load`. A **Keep** is a list of globs, or a dict from globs to dtypes. **Words** is one
  string or several. **Rules** are strings, or rules of `transforms`.
- Functions that change a path or a checkpoint return the changed checkpoint: close it, or use it as
  a context manager. For a dict in memory they return a dict.
- Only functions that create or accept tensors import torch (`load_state_dict`, `load_into`,
  `match`, `load`, `save`, `TensorRef.torch`, statistics, casts).
"""


@cache
def package() -> griffe.Module:
    """The sources, parsed."""
    found = griffe.load("ckptool", search_paths=[PROJECT], docstring_parser="google")
    assert isinstance(found, griffe.Module)
    return found


def address(name: str) -> str:
    """A public name below `ckptool`: a class is in `results`."""
    return f"results.{name}" if name[0].isupper() else name


def at(path: str) -> griffe.Object:
    """What has that path below `ckptool`, wherever it is defined."""
    found = package()[address(path)]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(found, griffe.Module):  # a module hides the function that it is named for
        return at(f"{path}.{found.name}")
    return found


def public(module: griffe.Module) -> list[str]:
    """The names in its `__all__`."""
    return [str(name).strip("'\"") for name in module.exports or []]


def _errors() -> list[griffe.Class]:
    """The public errors and warnings, each below what it is one of."""
    found = [at(f"errors.{name}") for name in public(package()["errors"]) if name[0].isupper()]
    return sorted(found, key=lambda one: one.lineno)


def _met() -> list[griffe.Class]:
    """Classes that no `__all__` has, but the fields of those that it has are of."""
    known = [at(name) for names in PARTS.values() for name in names]
    found, waiting = [], [one for one in known if isinstance(one, griffe.Class)]
    while waiting:
        for _, member in fields_of(waiting.pop()):
            annotation = member.annotation
            parts = annotation.iterate() if isinstance(annotation, griffe.Expr) else []
            for name in (part for part in parts if isinstance(part, griffe.ExprName)):
                one = _class_at(name.canonical_path)
                if one is not None and one not in [*known, *found]:
                    found.append(one)
                    waiting.append(one)
    return sorted(found, key=lambda one: one.path)


def _class_at(path: str) -> griffe.Class | None:
    if not path.startswith("ckptool."):
        return None
    found = at(path.removeprefix("ckptool."))
    return found if isinstance(found, griffe.Class) and found.labels & {"dataclass"} else None


def page() -> str:
    """The whole of it."""
    lines = [HEAD]
    for title, names in PARTS.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += _entry(f"ckptool.{address(name)}", at(name))
    lines.append("## Met inside these\n")
    for one in _met():
        lines += [f"### {one.name}\n", *_sections(one), *_fields(one)]
    lines += ["## Errors\n", "| | is a | |", "|---|---|---|"]
    for error in _errors():
        bases = ", ".join(f"`{base}`" for base in error.bases)
        lines.append(f"| `{error.name}` | {bases} | {_one_line(_prose(error))} |")
    lines.append("")
    lines += ["Every one has:\n", *_fields(at("errors.CheckpointError"))]
    trainer = package()["trainer"]
    lines += ["## The trainer\n", _prose(trainer), ""]
    for name in public(trainer):
        lines += _entry(f"ckptool.trainer.{name}", at(f"trainer.{name}"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip() + "\n")


def _entry(title: str, thing: griffe.Object) -> list[str]:
    """A heading, the signature, and all that its docstrings say."""
    if isinstance(thing, griffe.Function):
        return [f"### {title}\n", *_function(thing, title)]
    assert isinstance(thing, griffe.Class)
    lines = [f"### {title}\n", *_sections(thing), *_fields(thing)]
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", thing.name).lower()
    for method in _methods(thing):
        lines += [f"#### {thing.name}.{method.name}\n", *_function(method, f"{name}.{method.name}")]
    return lines


def _methods(thing: griffe.Class) -> list[griffe.Function]:
    return [
        member
        for name, member in thing.all_members.items()
        if isinstance(member, griffe.Function) and _is_told(name, member)
    ]


def _is_told(name: str, member: griffe.Object) -> bool:
    """Whether it is for those who use the library."""
    return not name.startswith("_") and not (member.parent and member.parent.name == "Protocol")


def _function(thing: griffe.Function, title: str) -> list[str]:
    return [
        "```text",
        *_signature(thing, title.removeprefix("ckptool.")),
        "```\n",
        *_sections(thing),
    ]


def _signature(thing: griffe.Function, title: str) -> list[str]:
    """As it would be called, a parameter a line where it would be too long."""
    shown, starred = [], False
    for parameter in thing.parameters:
        if parameter.name == "self":
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not starred:
            shown.append("*")
        starred |= kind in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        )
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(str(kind.value), "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}"
        shown.append(text)
    ending = f" -> {thing.returns}"
    whole = f"{title}({', '.join(shown)}){ending}"
    if len(whole) <= 100:
        return [whole]
    return [f"{title}(", *(f"    {one}," for one in shown), f"){ending}"]


def _sections(thing: griffe.Object) -> list[str]:
    """The docstring: its text, and lists of arguments, results and errors."""
    lines: list[str] = []
    for section in thing.docstring.parsed if thing.docstring else []:
        if section.kind is griffe.DocstringSectionKind.text:
            lines += [_fenced(section.value), ""]
            continue
        if section.kind is griffe.DocstringSectionKind.attributes:
            continue  # they stand in the table of the fields
        names = {"parameters": "Arguments", "returns": "Returns", "raises": "Raises"}
        lines += [f"{names.get(section.kind.value, section.kind.value.capitalize())}:\n"]
        for item in section.value:
            name = getattr(item, "name", "") or item.annotation
            what = _one_line(item.description)
            is_named = section.kind is not griffe.DocstringSectionKind.returns
            lines.append(f"- `{name}`: {what}" if is_named else f"- {what}")
        lines.append("")
    return lines


def _fenced(text: str) -> str:
    """Indented examples as code, which they are, whatever stands around them."""
    return re.sub(
        r"(?:^|\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)",
        lambda found: f"\n\n```python\n{dedent(found[1]).strip()}\n```\n\n",
        text,
    )


def _fields(thing: griffe.Class) -> list[str]:
    """A table of what an instance has: fields and properties."""
    told = {
        item.name: item.description
        for section in (thing.docstring.parsed if thing.docstring else [])
        if section.kind is griffe.DocstringSectionKind.attributes
        for item in section.value
    }
    rows = []
    for name, member in fields_of(thing):
        is_default = member.value is not None and "dataclass" in thing.labels
        default = f" = {member.value}" if is_default and "factory" not in str(member.value) else ""
        kind = f"{member.annotation}{default}".replace("|", "\\|")
        rows.append(f"| `{name}` | `{kind}` | {_one_line(_prose(member) or told.get(name, ''))} |")
    return ["| | | |", "|---|---|---|", *rows, ""] if rows else []


def fields_of(thing: griffe.Class) -> list[tuple[str, griffe.Attribute]]:
    """What an instance has, by name."""
    return [
        (name, member)
        for name, member in thing.all_members.items()
        if isinstance(member, griffe.Attribute)
        and _is_told(name, member)
        and member.annotation is not None
        and member.labels & {"instance-attribute", "dataclass-field", "property"}
    ]


def _prose(thing: griffe.Object) -> str:
    """The text of a docstring, without its lists."""
    parsed = thing.docstring.parsed if thing.docstring else []
    texts = [part.value for part in parsed if part.kind is griffe.DocstringSectionKind.text]
    return _fenced("\n\n".join(texts))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
