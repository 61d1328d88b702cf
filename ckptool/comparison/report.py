"""The data of a page about a checkpoint, and about its differences from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, Path, TensorRef
from ckptool.core.names import map_to_bare_names
from ckptool.core.optimizers import find_model, fits_shape, list_groups, list_names
from ckptool.core.sections import MODEL_KINDS, get_named_tensors
from ckptool.core.tree import is_within, name_of
from ckptool.core.values import summarize, to_json_path
from ckptool.diagnosis import Diagnosis
from ckptool.diagnosis.contents import detect_devices
from ckptool.diagnosis.info import Info, summarize_and_diagnose
from ckptool.errors import NotRepresentable, TorchMissing
from ckptool.files.source import Progress
from ckptool.inspection.listing import make_tensor_rows
from ckptool.inspection.stats import TensorStats, stats
from ckptool.transforms.schedule_free import match_parameters

if TYPE_CHECKING:
    from ckptool.comparison.aligning import Alignment
    from ckptool.comparison.diff import Diff

BINS = 24
_MOST_CHARACTERS = 200
"""The most characters of a value as text."""


@dataclass(frozen=True, slots=True)
class FileSummary:
    """The data of one file on the page, except its tensors."""

    info: Info
    diagnosis: Diagnosis
    """Of the header, for this machine."""
    values: Mapping[str, str] = field(default_factory=dict)
    """The values and objects outside of all sections, by path, as text. An object with
    attributes is listed by these."""
    parameters: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """The name of each parameter by the path of its state in an optimizer, without wrapper
    prefixes, if names or positions prove it."""

    def name_parameter(self, path: Sequence[str | int]) -> tuple[str, ...]:
        """Return the path of an optimizer tensor, with the key of its parameter for the number.

        `("optimizer", "state", 0, "exp_avg")` becomes `("optimizer", "state", "fc.weight",
        "exp_avg")`. Other paths are only turned into text.
        """
        components = tuple(map(str, path))
        for length in range(1, len(components)):
            if name := self.parameters.get(components[:length]):
                return (*components[: length - 1], name, *components[length:])
        return components


def summarize_file(checkpoint: Checkpoint) -> FileSummary:
    """Return the summary of a file, from its header."""
    info, diagnosis = summarize_and_diagnose(checkpoint, detect_devices())
    settled = checkpoint.with_late_values()
    return FileSummary(
        info, diagnosis, dict(_list_values(settled)), dict(_name_parameters(checkpoint))
    )


def _list_values(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value, and of each attribute of an object."""
    for section in checkpoint.sections:
        if section.kind != "values":
            continue
        for path, leaf in section.node.items():
            if isinstance(leaf, TensorRef):
                continue
            # With `plain`, it is a numpy scalar.
            if isinstance(leaf, Opaque) and leaf.attributes and not leaf.plain:
                for key, value in leaf.attributes.items():
                    yield name_of((*path, key)), summarize(value, _MOST_CHARACTERS)
            else:
                yield name_of(path), summarize(leaf, _MOST_CHARACTERS)


def _name_parameters(checkpoint: Checkpoint) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each parameter's state, and the name of the parameter.

    An optimizer without a model in the file has names only if it stores them. Positions are used
    only if each state has the shape of its parameter.
    """
    models = [section for section in checkpoint.sections if section.kind in MODEL_KINDS]
    optimizers = [section for section in checkpoint.sections if section.kind == "optimizer"]
    for section in optimizers:
        model, states = find_model(section, models, optimizers), section.node["state"]
        if model is None:
            numbers = [number for group in list_groups(section) for number in group]
            keys = dict(zip(numbers, list_names(section), strict=False))
        else:
            keys = match_parameters(checkpoint, section, model)
            tensors = get_named_tensors(model.node)
            shapes = {number: tensors[key].shape for number, key in keys.items() if key in tensors}
            if not all(fits_shape(states.get(number, {}), shapes[number]) for number in shapes):
                continue
        names = map_to_bare_names([key for key in keys.values() if key])
        for number, key in keys.items():
            if key and number in states:
                path = to_json_path((*section.path, "state", number))
                yield tuple(map(str, path)), names[key]


@dataclass(frozen=True, slots=True)
class Report:
    """The data of the page."""

    file: FileSummary
    tensors: tuple[TensorStats, ...]
    """The tensors of the first file, without statistics if values were not read."""
    measured: bool
    """True if values were read."""
    key: str | None = None
    """The path to which the tensors are limited."""
    other: FileSummary | None = None
    diff: Diff | None = None
    chart: tuple[Bar, ...] = ()
    """Every tensor of either file, in the order of the first."""
    notes: tuple[str, ...] = ()


def report(
    checkpoint: Checkpoint,
    other: Checkpoint | None = None,
    *,
    key: str | None = None,
    values: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Collect the data of a checkpoint, and its differences from `other`.

    Args:
        checkpoint: Open.
        other: Open, to compare with.
        key: Include only the tensors below this path.
        values: Read the tensors. Without it, or without torch, statistics are left out.
        progress: Called with the bytes done and the total bytes.

    Raises:
        NotFound: `key` is missing or ambiguous (`AmbiguousName`).
        NameCollision: two entries of one file would be compared under one name.
        CorruptFile: values cannot be read.
        LimitExceeded: nesting, or strides that repeat bytes, exceed the limits.
    """
    notes: list[str] = []
    rows = None
    if values:
        try:
            rows = stats(checkpoint, key=key, bins=BINS, progress=progress).tensors
        except (TorchMissing, NotRepresentable) as error:
            notes.append(f"the values were not measured: {error.message}")
    else:
        notes.append("the values of the tensors were not read")
    head = Report(
        file=summarize_file(checkpoint),
        tensors=tuple(_list_tensors(checkpoint, key)) if rows is None else rows,
        measured=rows is not None,
        key=key,
        notes=tuple(notes),
    )
    if other is None:
        return head
    return _add_differences(head, checkpoint, other, structure=not values, progress=progress)


def _list_tensors(checkpoint: Checkpoint, key: str | None) -> Iterator[TensorStats]:
    """Yield the tensors below `key`, without statistics."""
    below: Path = ()
    if key is not None:
        below, _ = resolve(checkpoint, key)
    selected = [(path, tensor) for path, tensor in checkpoint.tensors() if is_within(path, below)]
    first_names: dict[Any, str] = {}
    for (_, tensor), row in zip(selected, make_tensor_rows(selected), strict=True):
        tie = None if tensor.place is None else first_names.get(tensor.place)
        first_names.setdefault(tensor.place, row.name)
        yield TensorStats(row, measures=None, tie=tie)


def _add_differences(
    base: Report,
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    structure: bool,
    progress: Progress | None,
) -> Report:
    """Return the report with the differences from another file."""
    from ckptool.comparison.aligning import align
    from ckptool.comparison.diff import diff

    difference = diff(checkpoint, other, key=base.key, structure=structure, progress=progress)
    alignment = align(checkpoint, other, key=base.key)
    return replace(
        base,
        other=summarize_file(other),
        diff=difference,
        chart=make_bars(checkpoint, other, alignment, difference),
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One tensor of either file: its status, and how much it changed."""

    name: str
    """The path as in a diff, without wrapper prefixes."""
    status: str
    """`=` if no difference counts, else as in a diff: `A`, `D`, `M`, `R`, `T`."""
    change: float | None = None
    """`Difference.rel_norm`; None if the values were not compared."""


def make_bars(a: Checkpoint, b: Checkpoint, alignment: Alignment, diff: Diff) -> tuple[Bar, ...]:
    """Return a bar for each tensor of A, in its order, with those of only B in between.

    A bar of only B follows the tensor before it in B, if A has that too. A renamed tensor has one
    bar, that of A.

    Args:
        a: The first checkpoint.
        b: The other one.
        alignment: The pairs of their entries.
        diff: The differences of as many entries.
    """
    # Only differences that make the files differ: another device, for example, may not.
    changed = {row.a.name: row for row in diff.changed if row.counts}
    renamed_in_a = {row.a.name for row in diff.renamed}
    renamed_in_b = {row.b.name for row in diff.renamed}
    bar_by_path: dict[Path, Bar] = {}
    for pair in alignment.pairs:
        if isinstance(pair.a.leaf, TensorRef):
            row = changed.get(name_of(pair.a.path))
            change = row.difference.rel_norm if row and row.difference else None
            bar_by_path[pair.a.path] = Bar(pair.name, row.status if row else "=", change)
    for entry in alignment.only_a:
        if isinstance(entry.leaf, TensorRef):
            bar_by_path[entry.path] = Bar(entry.name, "R" if entry.name in renamed_in_a else "D")
    added = {
        entry.path: Bar(entry.name, "A")
        for entry in alignment.only_b
        if isinstance(entry.leaf, TensorRef) and entry.name not in renamed_in_b
    }
    path_in_a = {pair.b.path: pair.a.path for pair in alignment.pairs}
    added_after: dict[Path | None, list[Bar]] = {}
    previous = None  # the path in A of the last tensor of B that A has too
    for path, _ in b.tensors():
        previous = path_in_a.get(path, previous)
        if path in added:
            added_after.setdefault(previous, []).append(added[path])
    ordered = added_after.get(None, [])
    for path, _ in a.tensors():
        ordered += [bar_by_path[path]] if path in bar_by_path else []
        ordered += added_after.get(path, ())
    return tuple(ordered)
