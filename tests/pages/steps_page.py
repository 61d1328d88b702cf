"""The page on steps: what each is, its fields, and the options that ask for it."""

from __future__ import annotations

import dataclasses
import inspect

from ckptool.conversion.steps import STEPS
from ckptool.transforms import Step

_VERBS = {
    "Take": "extract", "Strip": "strip-module", "Wrap": "add-module", "Rename": "rename",
    "Plain": "extract", "Cast": "cast", "Compact": "compact", "Remap": "remap",
    "Masters": "extract, cast",
}  # fmt: skip

HEAD = """# A change is a step

Whatever ckptool changes in a checkpoint is a step: a small frozen class whose fields are its
options. A step takes a path, an open checkpoint or a state dict in memory; `Checkpoint.then` and
`ckptool.convert` take several, in the order in which you give them:

```python
ckptool.convert("model.pth", "small.safetensors", ckptool.Strip(), ckptool.Cast("bfloat16"))
with ckptool.open("model.pth") as checkpoint:
    checkpoint.then(ckptool.Strip(), ckptool.Remap("cpu")).save("plain.pth")
state_dict = ckptool.Strip()(state_dict)
```

The options of `ckptool convert` are the same steps. Options have no order, so they are carried out
in the order of this table, which `python -m tests.pages` makes from the classes. What is not taken
need not be intact: `--salvage` judges what `Take` leaves. [docs/api.md](api.md) has each field with
its meaning, [docs/adding-a-step.md](adding-a-step.md) says how to add one.

| step | what it does | fields | options of `convert` | verb |
|---|---|---|---|---|
"""


def _options(kind: type[Step]) -> str:
    if kind.__name__ == "Strip":
        return "`--wrappers`, `--at`"
    if kind.flag:
        return f"`--{kind.flag.replace('=', ' ')}`"
    names = [kind.options.get(one.name, one.name) for one in dataclasses.fields(kind)]
    return ", ".join(f"`--{name.replace('_', '-')}`" for name in names if name)


def page() -> str:
    """Return the page."""
    rows = []
    for kind in STEPS:
        if kind.__name__ == "Concat":  # it becomes a recipe
            continue
        what = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        names = ", ".join(f"`{one.name}`" for one in dataclasses.fields(kind))
        verb = _VERBS.get(kind.__name__, "")
        rows.append(f"| `{kind.__name__}` | {what} | {names} | {_options(kind)} | {verb} |\n")
    return HEAD + "".join(rows)
