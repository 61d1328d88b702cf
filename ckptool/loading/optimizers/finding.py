"""Which optimizer's state is meant: that in the model's file, or one that a trainer put beside it.

transformers writes `optimizer.pt`, accelerate `optimizer.bin` and, of more of them,
`optimizer_1.bin`, each the whole of one `state_dict()`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound
from ckptool.formats.identify import shell
from ckptool.formats.model_folder import opens_as
from ckptool.loading.fitting.states import State
from ckptool.loading.optimizers.pairing import ALONE
from ckptool.loading.optimizers.saved import Saved
from ckptool.optimizers import model_of, owner, shapes_in
from ckptool.remedies import Remedy
from ckptool.statedict import MODEL_KINDS, Section, is_optimizer, sections
from ckptool.tree import resolve
from ckptool.words import listed, printable

__all__ = ["Unchosen", "found_optimizer"]

_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
_FOLDER = re.compile(r"optimizer_\d+")
"""How accelerate calls the distributed checkpoint of an optimizer of FSDP's."""
_AVERAGES = frozenset(("average", "averaged", "avg", "best", "ema", "polyak", "shadow", "swa"))
"""Words in the names of a model's averages, and of its copies."""
_NONE = "the state of an optimizer is asked for, and there is none"


class Unchosen(Exception):
    """Why no optimizer of the file is the one to load, as a sentence, and what helps."""

    def __init__(self, text: str, remedy: Remedy | str) -> None:
        """Keep both."""
        super().__init__(text)
        self.remedy = remedy


def found_optimizer(state: State, key: Any = None) -> Saved:
    """The optimizer that belongs to the model of `state`, or what `key` says.

    In the file of the model; where that has none, and a folder was given, in the one file of an
    optimizer that lies there. `key` is an address in that, or the name of such a file.

    Raises:
        Unchosen: there is none, or none that is certain.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
        UnreadableFile: the file of the optimizer cannot be opened.
    """
    names = [] if state.folder is None else _inside(state.folder, _FILE)
    if key in names:
        return _of_file(state, key, None)
    if key is not None and not names:
        return _under(state.tree, key)
    every = sections(state.tree.root)
    if any(one.kind == "optimizer" for one in every):
        return _of_tree(state, state.tree, every, state.section.holder, key)
    if not names:
        raise _none(state)
    if len(names) > 1:
        none = "" if key is None else f"none of them is called {printable(str(key))!r}: "
        raise Unchosen(
            f"{none}there are {len(names)} files of optimizers beside the model: "
            f"{listed(map(repr, names))}",
            Remedy(instead=tuple(map(_taking, names))),
        )
    return _of_file(state, names[0], key)


def _inside(folder: str, names: re.Pattern[str]) -> list[str]:
    """What is called so in a folder."""
    with suppress(OSError):
        return sorted(filter(names.fullmatch, os.listdir(folder)))
    return []


def _of_file(state: State, name: str, key: Any) -> Saved:
    """The optimizer in a file of the folder that was given."""
    tree = state.opened(os.path.join(state.folder or "", name))
    try:
        found = _of_tree(state, tree, sections(tree.root), None, key)
    except Unchosen as error:
        raise Unchosen(f"{name!r}, beside the model: {error}", error.remedy) from None
    except AmbiguousName:
        raise
    except NotFound as error:
        error.message += f"; the file of an optimizer beside the model is {name!r}"
        raise
    return replace(found, notes=(f"the state is that of {name!r}, beside the model",))


def _none(state: State) -> Unchosen:
    """That there is none, and what lies beside the file that has none."""
    folder = state.folder
    if folder is None and state.file:
        folder = os.path.dirname(state.file) or "."
        names = _inside(folder, _FILE)
        if names and opens_as(folder, state.file):
            text = f"{_NONE} in the file, but {listed(map(repr, names))} beside it"
            return Unchosen(text, f"load_into(model, {folder!r}, optimizer=...) looks there too")
    for name in _inside(folder, _FOLDER) if folder is not None else ():
        parts, whole = (shell(os.path.join(folder or "", one)) for one in (name, "optimizer.bin"))
        return Unchosen(
            f"{_NONE} in a file: {name!r}, beside the model, is a distributed checkpoint (DCP)",
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{parts} {whole} makes a file of it",
        )
    return Unchosen(
        _NONE,
        "load_into(model, {'model': ..., 'optimizer': ckptool.load(FILE)}, optimizer=...) "
        "where it is in a file of its own",
    )


def _under(tree: Checkpoint, key: Any) -> Saved:
    path, node = resolve(tree, key, accept=_is_one)
    return Saved(tree, Section(path, "optimizer", node, node))


def _of_tree(
    state: State, tree: Checkpoint, every: Sequence[Section], model: Any, key: Any
) -> Saved:
    """The optimizer under `key`, else the only one of the file, or the only one of `model`.

    Raises:
        Unchosen: there is none, or none that is certain.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
    """
    if key is not None:
        return _under(tree, key)
    models = _once(one for one in every if one.kind in MODEL_KINDS)
    found = _once(one for one in every if one.kind == "optimizer")
    if not found:
        raise Unchosen("it holds no state of an optimizer", ALONE)
    owners = [model_of(one, models, found) for one in found]
    own = [
        one
        for one, owner in zip(found, owners, strict=True)
        if owner is not None and owner.holder is model
    ]
    if len(own) == 1:
        return Saved(tree, own[0])
    names = [printable(one.name) for one in found]
    if len(found) == 1:
        others = [one for one in models if one.holder is not model]
        is_here = len(others) < len(models)
        whose = _whose(found[0], owners[0], state.section, others) if is_here else None
        if whose is None:
            return Saved(tree, found[0])
        raise Unchosen(
            f"the only optimizer, {names[0]}, {whose}",
            Remedy(note=ALONE, instead=(_taking(found[0].name, " takes it all the same"),)),
        )
    may_be = [owner is None or _trains(owner, state.section) for owner in owners]
    raise Unchosen(
        f"there are {len(found)} optimizers: {listed(names)}", _either(state, found, may_be)
    )


def _whose(
    section: Section, of: Section | None, chosen: Section, others: Sequence[Section]
) -> str | None:
    """Why the only optimizer may be that of another model than the one chosen; None: it is not.

    An average has its model's own parameters, so that nothing is mistaken where it is chosen.
    """
    if of is not None:
        is_other = not _trains(of, chosen)
        return (
            f"is that of {printable(of.name)}, which is not the model chosen" if is_other else None
        )
    if not owner(chosen) or _averaged(chosen) is not None:
        return None
    shapes = Counter(shapes_in(section).values())
    rivals = [
        printable(one.name)
        for one in others
        if _averaged(one) is None and shapes <= Counter(tensor.shape for _, tensor in one.tensors())
    ]
    return f"may be that of {listed(rivals)} as well" if rivals else None


def _trains(of: Section, chosen: Section) -> bool:
    """Whether a model is the one chosen, or, by their names, that is its average."""
    return of.holder is chosen.holder or _averaged(chosen) in ("", owner(of))


def _averaged(section: Section) -> str | None:
    """Whose average it is: `disc` of `disc_ema`, empty of `ema`; None: by its name it is none."""
    words = re.findall("[A-Z]*[a-z]+|[A-Z]+", "_".join(map(str, section.path)).lower())
    rest = [word for word in words if word not in _AVERAGES]
    return None if len(rest) == len(words) else owner(replace(section, path=("_".join(rest),)))


def _either(state: State, found: Sequence[Section], may_be: Sequence[bool]) -> Remedy:
    """Every optimizer, those of other models last; as what helps one that alone can be meant."""
    shapes = Counter(slot.shape for slot in state.slots.values())
    likely: list[Remedy] = []
    rest: list[Remedy] = []
    for one, may in zip(found, may_be, strict=True):
        fits = may and Counter(shapes_in(one).values()) <= shapes
        (likely if fits else rest).append(_taking(one.name))
    if len(likely) != 1:
        return Remedy(instead=(*likely, *rest))
    why = " is the only one that can be of the model's state dict, by its name and shapes"
    return likely[0]._replace(note=why, instead=tuple(rest))


def _taking(name: str, note: str = "") -> Remedy:
    return Remedy((("optimizer_key", name),), note)


def _is_one(node: Any) -> bool:
    return isinstance(node, dict) and is_optimizer(node)


def _once(found: Iterator[Section]) -> list[Section]:
    """Each section once, under its first path."""
    once: dict[int, Section] = {}
    for one in found:
        once.setdefault(id(one.holder), one)
    return list(once.values())
