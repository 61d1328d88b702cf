"""Complaints from comparing the weights with a reference, and an optimizer with its parameters.

`Optimizer.load_state_dict` matches by position, and checks only the number and sizes of the
groups (torch/optim/optimizer.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptool.conversion.fit import Fit, Reference, compared
from ckptool.core.model import Shape, TensorRef
from ckptool.core.names import BUFFER_NAMES, map_to_bare_names
from ckptool.core.optimizers import (
    find_model,
    find_shapes,
    has_training_weights,
    list_groups,
    list_names,
)
from ckptool.core.sections import Section, get_named_tensors
from ckptool.core.tree import drop_ties
from ckptool.diagnosis.complaint import (
    Choice,
    Complaint,
    Steps,
    Subject,
    names_of,
    unwrapped,
)
from ckptool.diagnosis.models import INTEGERS, is_floating
from ckptool.inspection.commands import ema_command
from ckptool.matching import DtypeChange, MatchReport
from ckptool.matching.align import is_average_counter
from ckptool.matching.judging import Allowance, difference
from ckptool.matching.known_renames import MERGE
from ckptool.quotes import quote
from ckptool.transforms import Rename, Strip, Take
from ckptool.words import are, counted, listed, printable, shell

_HALF_LOADED = (
    "load_state_dict raises only at the end: by then it has copied the matching tensors, so the "
    "model is half loaded"
)
_PARAMETRIZED = re.compile(r"(?:^|\.)parametrizations\.(\w+)\.")
_FORMS = (
    ("_mask", "_orig", "torch.nn.utils.prune.remove(module, {0}) ({1} = {1}_orig * {1}_mask)"),
    ("_u", "_orig", "torch.nn.utils.remove_spectral_norm(module, {0})"),
    ("_g", "_v", "torch.nn.utils.remove_weight_norm(module, {0})"),
)
"""Two suffixes under which torch stores one weight, and the function that joins them."""
_INTERPOLATE = "ckptool convert FILE OUT --interpolate-pos GLOB=HxW"
_MOST_JOINED = 20
"""Tensors of one module that are compared: q, k, v, their biases and a projection."""
_WITHOUT_STATE = "load the weights without the optimizer; its state restarts from zero"


def fit(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about differences from the reference.

    A command with `like` is proposed only if its result fits the reference strictly.
    """
    if subject.reference is None or subject.model is None:
        return
    target = subject.reference.target
    report = compared(subject.checkpoint, subject.model, target)
    averages = (name for name, _ in report.kept if is_average_counter(name))
    missing, unexpected = (*report.missing_keys, *averages), report.unexpected_keys
    lost = len(missing) + len(report.mismatched)
    differs = difference(report, lost, unexpected)
    alone = not (lost or differs)
    allowed = True if unexpected and alone else None
    like = (Fit(subject.reference, allow_unexpected=allowed),)
    rules = tuple(one.rule for one in report.proposed if one.rule)
    choices = (Choice((Rename(rules), *like), "fitting"),) if rules else ()
    remedy = _hint_for(subject.model, subject.reference, report, missing, differs)
    yield from _renamed(subject.model, report, () if lost else like)
    if missing:
        yield Complaint(
            "missing",
            f"{len(missing):,} of the {counted(report.names, 'tensor')} in the reference "
            f"{are(len(missing))} missing",
            names_of(missing),
            hint=remedy,
            quote=quote("missing-key", printable(missing[0])),
            effect=f"with strict=False they keep their initial values. {_HALF_LOADED}",
            choices=choices,
        )
    if unexpected:
        yield Complaint(
            "unexpected",
            f"{counted(len(unexpected), 'tensor')} {are(len(unexpected))} not in the reference",
            names_of(unexpected),
            hint="" if missing else remedy,
            quote=quote("unexpected-key", printable(unexpected[0])),
            effect=f"with strict=False they are left out. {_HALF_LOADED}",
            fix=like if alone else None,
        )
    heads = _without_heads(subject.reference, report)
    yield from _shapes(report, "" if missing else differs, heads)
    yield from _types(report.cast)


def _hint_for(
    model: Section,
    reference: Reference,
    report: MatchReport,
    missing: Sequence[str],
    differs: str,
) -> str:
    """Return a hint why keys differ, and how to make them equal."""
    unexpected = report.unexpected_keys
    if differs == MERGE or report.recipe:
        return differs.replace("ADAPTER", "FILE")
    if form := _parametrization_call(unexpected):
        return f"call {form} on the model that saved it, and save it again"
    if form := _parametrization_call(missing):
        return f"the file has plain weights: call {form} on the new model, then load"
    held, wanted = get_named_tensors(model.node), reference.target.slots
    ours = {name: held[name].shape for name in unexpected if name in held}
    theirs = {name: shape for name in missing if (shape := wanted[name].shape) is not None}
    for whole, parts, text in (
        (theirs, ours, "{0} = torch.cat([{1}])"),
        (ours, theirs, "{1} = {0}.chunk({2})"),
    ):
        if found := _joined(whole, parts):
            shown = ", ".join(map(printable, found[1]))
            code = text.format(printable(found[0]), shown, len(found[1]))
            return f"in code: {code}, in the order in which the model uses them"
    if report.proposed:
        command = f"ckptool match FILE --like {shell(reference.word)}"
        return f"{command} shows the proposed rules for the keys"
    if not report.fitting:
        return "no key matches: the file is for a different architecture"
    if differs or not missing:
        return differs
    kept = listed(names_of(missing, most=2))
    return f"load with strict=False: the model keeps its own {kept}"


def _parametrization_call(names: Collection[str]) -> str:
    """Return the torch call that makes weights plain again; "" if they are plain."""
    held = set(names)
    for name in names:
        if (found := _PARAMETRIZED.search(name)) is not None:
            return f"torch.nn.utils.parametrize.remove_parametrizations(module, {found[1]!r})"
        for ending, other, function in _FORMS:
            bare = name.removesuffix(ending)
            if bare != name and bare + other in held:
                last = bare.rpartition(".")[2]
                return function.format(printable(repr(last)), printable(last))
    return ""


def _joined(whole: Mapping[str, Shape], parts: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
    """Find a tensor with the rows of several others next to it: `qkv` of `q`, `k` and `v`."""
    beside: dict[str, list[str]] = {}
    for part in parts:
        beside.setdefault(".".join(part.split(".")[:-2]), []).append(part)
    for name, shape in whole.items():
        above = name.rpartition(".")[0]
        for path in (above, above.rpartition(".")[0]):
            near = [
                part
                for part in beside.get(path, ())[:_MOST_JOINED]
                if name.endswith(part.rpartition(".")[2])
                and len(shape) == len(parts[part]) > 0
                and shape[1:] == parts[part][1:]
            ]
            if len(near) > 1 and sum(parts[part][0] or 0 for part in near) == shape[0]:
                return name, near
    return None


def _renamed(model: Section, report: MatchReport, fix: Steps | None) -> Iterator[Complaint]:
    """Yield a complaint about keys that rules rename to those of the reference."""
    pairs: dict[str, str] = {}
    texts = []
    for renaming in report.renamed:
        if renaming.kind == "known" and all(
            "parametrizations." in new for _, new in renaming.names
        ):
            continue  # torch itself loads the old form of weight_norm
        pairs.update(renaming.names)
        texts.append(printable(renaming.text))
    if not pairs:
        return
    kinds = {one.kind for one in report.renamed}
    rules = tuple(one.rule for one in report.renamed)
    if not fix:  # only the keys: missing tensors have their own complaint
        fix = (Rename(rules),) if all(rules) else None
    bare = unwrapped(model)
    is_stripped = report.fits and all(bare.get(own) == new for own, new in pairs.items())
    yield Complaint(
        "wrappers" if kinds == {"wrapper"} else "renamed",
        f"keys differ from the reference: {listed(texts, most=3)}",
        names_of(pairs),
        quote=quote("missing-key", printable([*pairs.values()][-1])),
        effect="with strict=False they are left out, without an error",
        fix=fix,
        resume=(Strip(),) if is_stripped else None,
    )


def _without_heads(reference: Reference, report: MatchReport) -> tuple[Choice, ...]:
    """Return the conversion without the tensors of other shapes, if all others match."""
    given = dict(Allowance().judged(report).remedy.arguments)
    names = given.get("allow_mismatched")
    if not isinstance(names, tuple) or not given.keys() <= {"allow_mismatched", "allow_unexpected"}:
        return ()
    extra = given.get("allow_unexpected")
    steps = Fit(
        reference,
        allow_mismatched=names,
        allow_unexpected=extra if isinstance(extra, (bool, tuple)) else None,
    )
    code = f"ckptool.load_into(model, FILE, allow_missing={list(names)!r})"
    return (Choice((steps,), "fitting", code),)


def _shapes(report: MatchReport, differs: str, choices: tuple[Choice, ...]) -> Iterator[Complaint]:
    wrong = report.mismatched
    if not wrong:
        return
    first, names = wrong[0], [one.name for one in wrong]
    resized = any("pos" in one.name and len(one.shape) == len(one.wanted) for one in wrong)
    shown = (f"{one.name} (file {list(one.shape)}, model {list(one.wanted)})" for one in wrong)
    yield Complaint(
        "size-mismatch",
        f"the shape of {counted(len(wrong), 'tensor')} differs from the reference: "
        f"{listed(shown, most=3)}",
        names_of(names),
        hint=differs
        or (f"resize position embeddings ({_INTERPOLATE}), or " * resized)
        + "delete them from the state dict and load with strict=False: the model keeps its own "
        + listed(names_of(names, most=2)),
        quote=quote("size", printable(first.name), list(first.shape), list(first.wanted)),
        effect=f"strict=False does not skip it. {_HALF_LOADED}",
        choices=() if resized or differs else choices,
    )


def _types(casts: Sequence[DtypeChange]) -> Iterator[Complaint]:
    truncated = [one for one in casts if is_floating(one.before) and not is_floating(one.after)]
    rounded = [one for one in casts if one not in truncated]
    if truncated:
        yield Complaint(
            "cast-to-integer",
            f"{counted(len(truncated), 'floating-point tensor')} would load into integer or "
            f"boolean buffers: {_kinds(truncated)}",
            names_of(one.name for one in truncated),
            hint="in code: state[name] = state[name].long(), if the values are integers",
            severity="misleads",
            effect="load_state_dict copies them without an error: 2.87 becomes 2, inf the smallest "
            "integer, and any value except 0 True.",
        )
    if rounded:
        yield Complaint(
            "dtype",
            f"the dtype of {counted(len(rounded), 'tensor')} differs from the reference: "
            f"{_kinds(rounded)}",
            names_of(one.name for one in rounded),
            hint=f"ckptool cast FILE --dtype {rounded[0].after} --dry-run counts what overflows, "
            "underflows and loses precision",
            severity="note",
            effect="load_state_dict casts to the model's dtype without an error; values that are "
            "too large become inf (65,520 and more in float16).",
        )


def _kinds(casts: Sequence[DtypeChange]) -> str:
    return listed(dict.fromkeys(f"file {one.before}, model {one.after}" for one in casts), most=4)


def training(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about optimizer state that would load for the wrong parameter, or none."""
    for section in subject.optimizers:
        if subject.models and has_training_weights(section):
            yield Complaint(
                "training-weights",
                "the optimizer is schedule-free and was saved in train mode, so the model has "
                "training weights",
                (_where(section),),
                hint=f"{ema_command(subject.checkpoint)} writes the weights for evaluation",
                severity="misleads",
                effect="load_state_dict loads them without an error, but they evaluate worse than "
                "those after optimizer.eval().",
            )
        for found in _complaints(subject, section):
            # Fixed by extracting the model without it, if that model is known.
            fix = (Take(model_only=True),) if subject.model is not None else None
            yield replace(found, fix=fix, hint=found.hint if subject.models else None)


def _complaints(subject: Subject, section: Section) -> Iterator[Complaint]:
    if section.is_foreign:
        return
    if not section.node["param_groups"]:
        yield Complaint(
            "optimizer-groups",
            "the optimizer has no parameter groups",
            (f"{_where(section)}/param_groups",),
            hint=_WITHOUT_STATE,
            quote=quote("group-count"),
        )
        return
    known = {key for group in list_groups(section) for key in group}
    gone = [key for key in section.node["state"] if key not in known]
    if gone:
        yield Complaint(
            "optimizer-leftover",
            f"the optimizer has the state of {counted(len(gone), 'parameter')} that its groups "
            "do not have",
            names_of(f"{_where(section)}/state/{key}" for key in gone),
            hint=_WITHOUT_STATE,
            severity="misleads",
            effect="The optimizer loads it without an error and never uses it.",
        )
    model = find_model(section, subject.models, subject.optimizers)
    if model is not None and (subject.model is None or subject.model.holder is model.holder):
        yield from _against_model(section, model)


def _likely_parameters(model: Section, tensors: dict[str, TensorRef]) -> dict[str, Shape]:
    """Return keys and shapes of the likely parameters, which a state dict does not mark.

    Integer tensors and known buffers are not parameters.
    """
    names = unwrapped(model)
    return {
        names.get(name, name): tensor.shape
        for name, tensor in tensors.items()
        if is_floating(tensor.dtype) and name.rpartition(".")[2] not in BUFFER_NAMES | INTEGERS
    }


def _where(section: Section) -> str:
    return printable(section.name) or "the root"


def _against_model(section: Section, model: Section) -> Iterator[Complaint]:
    """Yield complaints about an optimizer state that does not belong to this model."""
    once = drop_ties(((name,), value) for name, value in get_named_tensors(model.node).items())
    tensors = {str(path[0]): tensor for path, tensor in once}
    weights = _likely_parameters(model, tensors)
    order = [key for group in list_groups(section) for key in group]
    states = find_shapes(section)
    foreign = Counter(states.values()) - Counter(one.shape for one in tensors.values())
    if len(order) > len(tensors):
        text = f"the optimizer was saved for {counted(len(order), 'parameter')}"
        yield _misfit(section, f"{text}, but the model has {counted(len(tensors), 'tensor')}")
    elif foreign:
        text = "the optimizer has {} with shapes that no tensor of the model has"
        yield _misfit(section, text.format(counted(foreign.total(), "state")))
    elif len(order) == len(weights) and len(section.node["param_groups"]) == 1:
        own = list_names(section)
        names = list(map(map_to_bare_names(own).__getitem__, own))
        if names and set(names) != set(weights):
            return
        shapes = [weights[name] for name in names] if names else list(weights.values())
        pairs = zip(order, shapes, strict=True)
        wrong = [at for at, (key, shape) in enumerate(pairs) if states.get(key, shape) != shape]
        if wrong:
            yield _permuted(wrong, names or list(weights))


def _misfit(section: Section, what: str) -> Complaint:
    return Complaint(
        "optimizer-size",
        what,
        (_where(section),),
        hint=_WITHOUT_STATE,
        quote=quote("group-size"),
        effect="or step() fails on a size",
    )


def _permuted(wrong: list[int], names: Sequence[str]) -> Complaint:
    return Complaint(
        "optimizer-order",
        "the optimizer lists its parameters in a different order from the model: "
        f"the shapes of {counted(len(wrong), 'state')} differ from those of the parameters there",
        names_of(names[at] for at in wrong),
        hint="build the optimizer with its parameters in the saved order, or load the weights "
        "without the optimizer",
        severity="misleads",
        effect="load_state_dict of the optimizer matches by position and checks no shapes: "
        "parameters get the moments of other parameters, and step() fails or, with equal shapes, "
        "uses them.",
    )
