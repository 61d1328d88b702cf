"""The average of several checkpoints, and other mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import (
    Storage,
    TensorRef,
    copy_with_items,
    replace_elements,
    row_major_strides,
)
from ckptool.core.names import N_AVERAGED, map_to_bare_names
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import MODEL_KINDS, Section, find_model_state_dict, find_sections
from ckptool.core.tree import describe_location, name_of, rebuild
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.tensors.averaging import Averager, Elements, run_of_tensor
from ckptool.tensors.bytewise import has_same_content
from ckptool.transforms.casting import FLOATING, Originals
from ckptool.transforms.dequantizing import refuse_dependent_tensors
from ckptool.transforms.extraction import extract_state_dict
from ckptool.transforms.names import list_distinct_sections
from ckptool.words import counted, listed, printable

Tensors = tuple[TensorRef, ...]
"""The tensors of one key, one from each file."""


MEAN, SLERP, TASK = MODES = ("mean", "slerp", "task")


@dataclass(frozen=True)
class _Mixing:
    """The formula that computes one tensor from the tensors of one key."""

    mode: str
    count: int
    """The number of files."""
    weights: tuple[float, ...]
    """The weight of each file in a mean; empty if all are equal."""
    t: float
    """The position of `slerp`, or the factor of `task`."""

    @classmethod
    def from_arguments(
        cls, mode: str, count: int, weights: Sequence[float], t: float | None
    ) -> _Mixing:
        """Return the mixing for the arguments of `average`.

        Raises:
            UsageError: if the arguments do not suit this number of files.
        """
        if mode not in MODES:
            raise UsageError(f"mode takes {listed(MODES)}, not {mode!r}")
        numbers = tuple(map(float, weights))
        if mode == MEAN:
            has_weights = len(weights) == count and sum(weights) != 0
            is_valid = count >= 2 and (not weights or has_weights) and t is None
        else:
            is_valid = count == {SLERP: 2, TASK: 3}[mode] and not weights
        total = sum(map(abs, numbers))  # infinite if a sum of the weights overflows
        if not is_valid or not all(map(isfinite, (*numbers, total, t or 0))):
            raise UsageError(
                {
                    MEAN: "mode mean needs two or more checkpoints, and one finite weight for each "
                    "with a sum that is not 0",
                    SLERP: "mode slerp needs two checkpoints and one finite number t",
                    TASK: "mode task needs three checkpoints and one finite number t",
                }[mode],
                hint={
                    MEAN: "ckptool average A B --weights 0.7,0.3 -o OUT",
                    SLERP: "ckptool average A B --mode slerp --t 0.5 -o OUT",
                    TASK: "ckptool average A B C --mode task --t 1 -o OUT",
                }[mode],
            )
        default_t = 0.5 if mode == SLERP else 1.0
        return cls(mode, count, numbers, default_t if t is None else float(t))

    def make_storage(
        self, averager: Averager, elements: list[Elements], like: Storage, dtype: str, name: str
    ) -> Storage:
        """Return a storage like `like` that computes the mixture of one key when it is read.

        `elements` are those of the tensors, one from each file; `name` is the key for messages.
        """
        if self.mode == SLERP:
            return averager.interpolate_on_arc(elements, like, dtype, name, self.t)
        if self.mode == TASK:
            first, second, third = elements
            # The first is added last, so that the difference of equal tensors is exactly 0.
            terms, weights = [second, third, first], (self.t, -self.t, 1.0)
            return averager.average(terms, like, dtype, name, weights=weights)
        return averager.average(elements, like, dtype, name, weights=self.weights)

    def __str__(self) -> str:
        """Return the phrase for the receipt."""
        if self.mode == SLERP:
            return f"interpolated along the arc from the first file to the second, at {self.t:g}"
        if self.mode == TASK:
            return f"the first file + {self.t:g} (the second - the third)"
        weighted = f", weighted {', '.join(f'{weight:g}' for weight in self.weights)}"
        return f"the mean of {self.count} files{weighted if self.weights else ''}"


def _compute_means(
    tensors_by_key: Sequence[tuple[str, Tensors]], files: Sequence[str], mixing: _Mixing
) -> tuple[dict[int, TensorRef], list[Change]]:
    """Return the mean by the identity of the first file's tensor, and warnings of lost sharing.

    Each mean has its own storage. Keys that are tied in every file share one mean.

    Raises:
        UsageError: if keys are tied in the first file, but not in another.
    """
    averager = Averager()
    mean_by_places: dict[object, TensorRef] = {}  # by the places of a key's tensors in all files
    mean_by_id: dict[int, TensorRef] = {}
    key_by_id: dict[int, str] = {}
    places_by_storage: dict[int, dict[str, object]] = {}
    for name, tensors in tensors_by_key:
        identity, storage = id(tensors[0]), tensors[0].storage
        places = tuple(tensor.place for tensor in tensors)
        if places not in mean_by_places:
            mean_by_places[places] = _compute_mean(averager, name, tensors, mixing)
        mean = mean_by_places[places]
        tied_key = key_by_id.setdefault(identity, name)
        if mean_by_id.setdefault(identity, mean) is not mean:
            raise UsageError(
                f"{printable(tied_key)!r} and {printable(name)!r} are tied in this file and "
                "separate in another",
                file=files[0],
                hint=f"untie them first: ckptool convert --ties copy {files[0]} OUT",
            )
        places_by_storage.setdefault(id(storage), {})[name] = places
    # Different views of one storage; ties have equal places, and still share their mean.
    separated = [
        name
        for places_by_key in places_by_storage.values()
        if len({*places_by_key.values()}) > 1
        for name in places_by_key
    ]
    text = f"no longer share memory: {listed(separated)}"
    warnings = [Change("warning", text, len(separated))] if separated else []
    return mean_by_id, warnings


def _compute_mean(averager: Averager, name: str, tensors: Tensors, mixing: _Mixing) -> TensorRef:
    """Return a tensor like the first with the mean of all.

    It keeps the strides of the first if these have no gaps; otherwise it is in row-major order.
    """
    first = tensors[0]
    if first.storage is None:
        raise UsageError("tensors without data cannot be averaged")
    axes, stride = first.memory_order, first.stride
    has_gaps = not first.permuted(axes).is_contiguous
    if has_gaps:
        axes = list(range(len(stride)))
        stride = row_major_strides(first.sizes)
    elements = [run_of_tensor(tensor.permuted(axes)) for tensor in tensors]
    storage = mixing.make_storage(averager, elements, first.storage, first.dtype, name)
    # The means are plain elements: torch's lazy `conj` and `neg` are applied.
    return replace(first, storage=storage, offset=0, stride=stride, flags=())


_SAME, _FIRST = "same", "first"
Names = dict[str, TensorRef]


def average(
    checkpoints: Sequence[Checkpoint],
    *,
    mode: str = MEAN,
    weights: Sequence[float] = (),
    t: float | None = None,
    ints: str = _SAME,
    key: Any = None,
) -> Checkpoint:
    """Return the first checkpoint with the mean of all files in the floating tensors of its models.

    Averages every state dict and pickled module with the model of the same path in the other files,
    or the only one there, matching keys without wrapper prefixes. Sums are accumulated in float64
    or complex128, in the order of the files, and rounded to the dtype in the first file. Every mean
    has its own storage; ties of the first file stay. Leaves out optimizers and schedulers.
    Everything else is from the first file.

    Args:
        checkpoints: Two or more open checkpoints. Keep them open until the result is written.
        mode: `mean`; `slerp` of two files; `task`: first + `t` * (second - third).
        weights: The weight of each file in a mean. They are divided by their sum.
        t: The position of `slerp` between the first file (0) and the second (1), or the factor of
            `task`.
        ints: `same`: integer and boolean tensors must be equal; `first`: take those of the first.
        key: The path of one state dict to average.

    Raises:
        NotRepresentable: if weights are quantized or have no values (`refuse_placeholders`).
        UsageError: if the mode needs more or fewer files; tensors differ in shape or kind, or have
            no plain elements; integers differ; or keys are tied in the first file, but not in
            another.
        NotFound: if there is no model, or a key is not in every file.
        AmbiguousName: if `key` matches several state dicts.
    """
    mixing = _Mixing.from_arguments(mode, len(checkpoints), weights, t)
    if ints not in (_SAME, _FIRST):
        raise UsageError(f"ints takes 'same' or 'first', not {ints!r}")
    first, models = _pair_models(checkpoints, key)
    for model, others in models:
        for checkpoint, section in zip(checkpoints, (model, *others), strict=True):
            refuse_placeholders(checkpoint, section)
    plan = _Plan(checkpoints, ints, mixing)
    for model, others in models:
        plan.add_model(model, others)
    averaged_in_first = [tensors[0] for _, tensors in plan.averaged]
    refuse_dependent_tensors(first, {id(tensor) for tensor in averaged_in_first})
    means, warnings = _compute_means(
        plan.averaged, [checkpoint.path for checkpoint in checkpoints], mixing
    )
    new_root = _replace_averaged(first, means, averaged_in_first)
    sources = {id(source): source for checkpoint in checkpoints for source in checkpoint.sources}
    rest_changes = [] if key is not None else list(_report_rest(first, new_root))
    result = first.with_root(new_root, *plan.list_changes(), *warnings, *rest_changes)
    return replace(result, sources=tuple(sources.values()))


def _pair_models(
    checkpoints: Sequence[Checkpoint], key: Any
) -> tuple[Checkpoint, list[tuple[Section, list[Section]]]]:
    """Return the first checkpoint, and its models with their counterparts in the other files.

    With `key`, the checkpoint is reduced to the state dict at this path, its one model.
    """
    first, *others = checkpoints
    if key is not None:
        chosen = extract_state_dict(first, key)
        section = Section((), "state_dict", chosen.root, chosen.root)
        return chosen, [(section, [_find_state_dict(key, other) for other in others])]
    models = _list_models(first)
    if not models:
        find_model_state_dict(first)  # raises the error
    counterparts = [_find_counterparts(first, models, other) for other in others]
    # One tuple of counterparts for each model: from lists by file to lists by model.
    by_model = zip(*counterparts, strict=True)
    return first, [(model, list(others)) for model, others in zip(models, by_model, strict=True)]


def _list_models(checkpoint: Checkpoint) -> list[Section]:
    """Return the models of a checkpoint, each once."""
    return list_distinct_sections(
        section for section in checkpoint.sections if section.kind in MODEL_KINDS
    )


def _find_state_dict(key: Any, checkpoint: Checkpoint) -> Section:
    """Return the state dict at the path `key`, or the only one of a file without this path."""
    try:
        return find_model_state_dict(checkpoint, key)
    except AmbiguousName:  # a kind of NotFound
        raise
    except NotFound as error:
        models = _list_models(checkpoint)
        if len(models) != 1:
            raise error
        return models[0]


def _find_counterparts(
    first: Checkpoint, models: list[Section], other: Checkpoint
) -> list[Section]:
    """Return the models of another file in the order of the first's, matched by path.

    If both files have only one model, the paths may differ.
    """
    other_models = _list_models(other)
    if len(models) == len(other_models) == 1:
        return other_models
    names = [section.name for section in models]
    other_by_name = {section.name: section for section in other_models}
    for missing_names, owner, lacking in (
        ({*names} - other_by_name.keys(), first, other),
        (other_by_name.keys() - {*names}, other, first),
    ):
        if missing_names:
            shown = listed(name or "the root" for name in sorted(missing_names))
            raise NotFound(
                f"{lacking.path} has no state dict {shown}; only {owner.path} has it",
                file=lacking.path,
                hint="average one state dict with --key NAME",
            )
    return [other_by_name[name] for name in names]


def _get_tensors_by_key(section: Section) -> Names:
    """Return the tensors of a section by key."""
    depth = len(section.path)
    return {name_of(path[depth:]): tensor for path, tensor in section.tensors()}


def _classify_dtype(tensor: TensorRef) -> str:
    """Return `floating`, `complex` or `integer`, the classes with different rules."""
    if tensor.dtype in FLOATING:
        return "floating"
    return "complex" if tensor.dtype.startswith("complex") else "integer"


@dataclass
class _Plan:
    """The tensors to average, and the tensors that must be equal."""

    checkpoints: Sequence[Checkpoint]
    ints: str
    mixing: _Mixing
    averaged: list[tuple[str, Tensors]] = field(default_factory=list)
    """Keys with the tensors of all files."""
    _mean_changes: list[Change] = field(default_factory=list)
    _counter_changes: list[Change] = field(default_factory=list)
    _integer_count: int = 0
    _retyped_keys: list[str] = field(default_factory=list)

    def add_model(self, section: Section, others: list[Section]) -> None:
        """Plan the tensors of a model in the first checkpoint, with its counterparts.

        Raises:
            UsageError, NotFound: if the models do not match.
        """
        first = _get_tensors_by_key(section)
        tensors_by_file = [
            first,
            *(_rename_like(first, _get_tensors_by_key(other)) for other in others),
        ]
        files = [checkpoint.path for checkpoint in self.checkpoints]
        # The counter of AveragedModel, which a plain model does not have; that of the first stays.
        if not all(N_AVERAGED in tensors for tensors in tensors_by_file):
            for path, tensors in zip(files, tensors_by_file, strict=True):
                if tensors.pop(N_AVERAGED, None) is not None:
                    kind = "keep" if tensors is first else "left-out"
                    text = f"{N_AVERAGED} of {path}, which is not a weight"
                    self._counter_changes.append(Change(kind, text, 1))
        for path, other in zip(files[1:], tensors_by_file[1:], strict=True):
            only_first = [name for name in first if name not in other]
            only_other = [name for name in other if name not in first]
            facts = [
                f"only {owner} has {listed(keys, most=3)}; {lacking} does not"
                for keys, owner, lacking in (
                    (only_first, files[0], path),
                    (only_other, path, files[0]),
                )
                if keys
            ]
            if facts:
                raise NotFound("; ".join(facts), file=path)
        n_before = len(self.averaged)
        for name in first:
            self._add_tensor(name, tuple(tensors[name] for tensors in tensors_by_file))
        n_means = len(self.averaged) - n_before
        text = f"{self.mixing}: {counted(n_means, 'tensor')}{describe_location(section.path)}"
        self._mean_changes.append(Change("average", text, n_means))

    def list_changes(self) -> Iterator[Change]:
        """Yield a change for everything that was averaged or kept."""
        yield from self._mean_changes
        if self._integer_count:
            first = self.checkpoints[0].path
            how = "equal in all files" if self.ints == _SAME else f"those of {first}"
            text = f"{counted(self._integer_count, 'integer tensor')}: {how}"
            yield Change("keep", text, self._integer_count)
        yield from self._counter_changes
        if self._retyped_keys:
            text = (
                "dtypes differ between the files, rounded to that of the first: "
                f"{listed(self._retyped_keys)}"
            )
            yield Change("warning", text, len(self._retyped_keys))

    def _add_tensor(self, name: str, tensors: Tensors) -> None:
        """Plan the tensors of one key, one from each file; integers are only counted.

        Raises:
            UsageError: if they differ in shape or kind, or have no plain elements.
        """
        first, kind = tensors[0], _classify_dtype(tensors[0])
        for checkpoint, tensor in zip(self.checkpoints, tensors, strict=True):
            self._check_tensor(name, first, tensor, checkpoint.path)
        if kind == "integer":
            self._integer_count += 1
            return
        if first.kind == "numpy":
            raise UsageError(
                f"{printable(name)!r} is a numpy array, which cannot be averaged",
                file=self.checkpoints[0].path,
                hint="convert it to a tensor first: ckptool convert --plain",
            )
        self.averaged.append((name, tensors))
        if len({tensor.dtype for tensor in tensors}) > 1:
            self._retyped_keys.append(name)

    def _check_tensor(self, name: str, first: TensorRef, tensor: TensorRef, file: str) -> None:
        """Refuse a tensor of `file` that differs from the first in shape, kind or integers.

        Also one without plain elements, if these are averaged or compared. A message is
        `'w' is int64 here and int32 in first.pth`.
        """
        first_path, kind = self.checkpoints[0].path, _classify_dtype(first)
        must_be_equal = kind == "integer" and self.ints == _SAME
        hint = "add --ints first to take those of the first file" if must_be_equal else None
        if tensor.shape != first.shape:
            fact, hint = f"has the shape {list(tensor.shape)} here and {list(first.shape)}", None
        elif _classify_dtype(tensor) != kind:
            fact, hint = f"is {tensor.dtype} here and {first.dtype}", None
        elif must_be_equal and tensor.dtype != first.dtype:
            fact = f"is {tensor.dtype} here and {first.dtype}"
        elif not tensor.has_content and (must_be_equal or kind != "integer"):
            text = f"{printable(name)!r} is a {tensor.kind} tensor, which has no plain values"
            raise UsageError(text, file=file)
        elif must_be_equal and tensor is not first and not has_same_content(first, tensor):
            fact = f"({first.dtype}) has other integers here than"
        else:
            return
        raise UsageError(f"{printable(name)!r} {fact} in {first_path}", file=file, hint=hint)


def _rename_like(first: Names, other: Names) -> Names:
    """Return the tensors of another file by the keys of the first, ignoring wrapper prefixes.

    If the keys differ in more than these prefixes, they are unchanged.
    """
    if first.keys() == other.keys():
        return other
    first_key_by_bare = {bare: key for key, bare in map_to_bare_names(first).items()}
    bare_keys = map_to_bare_names(other)
    other_by_bare = {bare_keys[key]: tensor for key, tensor in other.items()}
    differing_keys = first_key_by_bare.keys() ^ other_by_bare.keys()
    if not differing_keys <= {N_AVERAGED}:  # AveragedModel, a wrapper, adds this counter
        return other
    return {first_key_by_bare.get(bare, bare): tensor for bare, tensor in other_by_bare.items()}


def _replace_averaged(
    first: Checkpoint, means: dict[int, TensorRef], averaged: list[TensorRef]
) -> Any:
    """Return the first's tree with averaged tensors, without optimizers and schedulers."""
    originals = Originals(first.root, averaged)
    left_out = {
        id(section.holder)
        for section in first.sections
        if section.kind in ("optimizer", "scheduler")
    }

    def replace_leaf(node: Any) -> Any:
        """Return an averaged tensor with the elements of its mean; any other node unchanged."""
        original = originals.find(node)
        if original is None:
            return node
        mean = means[id(original)]
        return replace_elements(
            node, storage=mean.storage, offset=mean.offset, stride=mean.stride, flags=mean.flags
        )

    def is_left_out(node: Any) -> bool:
        """Return True for an optimizer or scheduler, or a list with only these (Lightning's)."""
        if isinstance(node, (list, tuple)) and node:
            return all(id(item) in left_out for item in node)
        return id(node) in left_out

    def filter_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict without optimizers and schedulers."""
        kept = [(key, value) for key, value in mapping.items() if not is_left_out(value)]
        return mapping if len(kept) == len(mapping) else copy_with_items(mapping, kept)

    return rebuild(first.root, replace_leaf, filter_entries)


def _report_rest(first: Checkpoint, new_root: Any) -> Iterator[Change]:
    """Yield a change for everything outside the models: left out, or taken from the first file."""
    for section in first.sections:
        count = len(section.tensors())
        if section.kind in ("optimizer", "scheduler"):
            content = f" ({counted(count, 'tensor')})" if count else ""
            text = f"the {section.kind} {printable(section.name)}{content}"
            yield Change("left-out", text, count)
    for section in find_sections(new_root):
        if section.kind == "values":
            names = dict.fromkeys(name_of(path[:1]) for path in section.node)
            text = f"took from {first.path}: {listed(names)}"
            yield Change("keep", text, len(section.node))
