"""Complaints from comparing the weights with a reference, and an optimizer with its parameters.

`Optimizer.load_state_dict` matches by position, and checks only the number and sizes of the
groups (torch/optim/optimizer.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptool.conversion.fit import Fit, Reference, match_section
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
    map_to_bare_keys,
    summarize_names,
)
from ckptool.diagnosis.models import INTEGER_BUFFERS, is_floating
from ckptool.inspection.commands import ema_command
from ckptool.matching import DtypeChange, MatchReport
from ckptool.matching.align import is_average_counter
from ckptool.matching.judging import Allowance, explain_misfit
from ckptool.matching.known_renames import MERGE
from ckptool.quotes import quote
from ckptool.transforms import Rename, Strip, Take
from ckptool.transforms.ema import find_average_prefix
from ckptool.words import are, counted, listed, printable, shell

_EFFECT_HALF_LOADED = (
    "load_state_dict raises only at the end: by then it has copied the matching tensors, so the "
    "model is half loaded"
)
_PARAMETRIZED_KEY = re.compile(r"(?:^|\.)parametrizations\.(\w+)\.")
_PARAMETRIZATIONS = (
    ("_mask", "_orig", "torch.nn.utils.prune.remove(module, {0}) ({1} = {1}_orig * {1}_mask)"),
    ("_u", "_orig", "torch.nn.utils.remove_spectral_norm(module, {0})"),
    ("_g", "_v", "torch.nn.utils.remove_weight_norm(module, {0})"),
)
"""Two suffixes under which torch stores one weight, and the call that joins them.

In the call, {0} is the attribute in quotes and {1} without, for example weight.
"""
_INTERPOLATE_COMMAND = "ckptool convert FILE OUT --interpolate-pos GLOB=HxW"
_MAX_JOINED = 20
"""Tensors of one module that are compared: q, k, v, their biases and a projection."""
_HINT_WITHOUT_STATE = "load the weights without the optimizer; its state restarts from zero"


def check_fit(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about differences from the reference.

    A command with `like` is proposed only if its result fits the reference strictly. The first
    complaint about keys has the hint.
    """
    if subject.reference is None or subject.model is None:
        return
    target = subject.reference.target
    report = match_section(subject.checkpoint, subject.model, target)
    averages = (name for name, _ in report.kept if is_average_counter(name))
    missing, unexpected = (*report.missing_keys, *averages), report.unexpected_keys
    lost_count = len(missing) + len(report.mismatched)
    # Why the file cannot be for this model, "" if it can.
    misfit_reason = explain_misfit(report, lost_count, unexpected)
    has_all = not (lost_count or misfit_reason)
    fit_steps = (Fit(subject.reference, allow_unexpected=True if unexpected and has_all else None),)
    rules = tuple(rename.rule for rename in report.proposed if rename.rule)
    choices = (Choice((Rename(rules), *fit_steps), "fitting"),) if rules else ()
    hint = _hint_for_keys(subject, subject.model, subject.reference, report, missing, misfit_reason)
    yield from _check_renamed_keys(subject.model, report, () if lost_count else fit_steps)
    if missing:
        tensors = counted(report.names, "tensor")
        every = f"all {tensors}" if report.names > 1 else "the only tensor"
        which = every if len(missing) == report.names else f"{len(missing):,} of the {tensors}"
        yield Complaint(
            "missing",
            f"{which} in the reference {are(len(missing))} missing",
            summarize_names(missing),
            hint=hint,
            quote=quote("missing-key", printable(missing[0])),
            effect=f"with strict=False they keep their initial values. {_EFFECT_HALF_LOADED}",
            choices=choices,
        )
    if unexpected:
        yield Complaint(
            "unexpected",
            f"{counted(len(unexpected), 'tensor')} {are(len(unexpected))} not in the reference",
            summarize_names(unexpected),
            hint="" if missing else hint,
            quote=quote("unexpected-key", printable(unexpected[0])),
            effect=f"with strict=False they are left out. {_EFFECT_HALF_LOADED}",
            fix=fit_steps if has_all else None,
        )
    shape_choices = _choose_without_mismatched(subject.reference, report)
    yield from _check_shapes(report, "" if missing else misfit_reason, shape_choices)
    yield from _check_dtypes(report.cast)


def _hint_for_keys(
    subject: Subject,
    model: Section,
    reference: Reference,
    report: MatchReport,
    missing: Sequence[str],
    misfit_reason: str,
) -> str:
    """Return a hint why keys differ from the reference, and how to make them equal.

    The first cause that applies: adapters, a recipe, parametrizations, joined tensors, averages,
    renamed keys, another architecture. `misfit_reason` is the hint if none does.
    """
    unexpected = report.unexpected_keys
    if misfit_reason == MERGE or report.recipe:
        return misfit_reason.replace("ADAPTER", "FILE")  # the adapter is the diagnosed file
    if torch_call := _find_parametrization_call(unexpected):
        return f"call {torch_call} on the model that saved it, and save it again"
    if torch_call := _find_parametrization_call(missing):
        return f"the file has plain weights: call {torch_call} on the new model, then load"
    tensors, slots = get_named_tensors(model.node), reference.target.slots
    file_shapes = {name: tensors[name].shape for name in unexpected if name in tensors}
    model_shapes = {name: shape for name in missing if (shape := slots[name].shape) is not None}
    for joined_shapes, part_shapes, template in (
        (model_shapes, file_shapes, "{joined} = torch.cat([{parts}])"),
        (file_shapes, model_shapes, "{parts} = {joined}.chunk({count})"),
    ):
        if join := _find_joined_tensor(joined_shapes, part_shapes):
            joined, parts = join
            code = template.format(
                joined=printable(joined), parts=", ".join(map(printable, parts)), count=len(parts)
            )
            return f"in code: {code}, in the order in which the model uses them"
    if find_average_prefix([*tensors]):
        return f"{ema_command(subject.checkpoint)} writes the averaged weights (EMA)"
    if report.proposed:
        command = f"ckptool match FILE --like {shell(reference.word)}"
        return f"{command} shows the proposed rules for the keys"
    if not report.fitting:
        return "no key matches: the file is for a different architecture"
    if misfit_reason or not missing:
        return misfit_reason
    missing_names = listed(summarize_names(missing, max_count=2))
    return f"load with strict=False: the model keeps its own {missing_names}"


def _find_parametrization_call(names: Collection[str]) -> str:
    """Return the torch call that makes weights plain again; "" if they are plain.

    The keys show it: `parametrizations.NAME.`, or two keys such as `weight_g` and `weight_v`.
    """
    known_names = set(names)
    for name in names:
        if (match := _PARAMETRIZED_KEY.search(name)) is not None:
            return f"torch.nn.utils.parametrize.remove_parametrizations(module, {match[1]!r})"
        for suffix, partner, function in _PARAMETRIZATIONS:
            base = name.removesuffix(suffix)
            if base != name and base + partner in known_names:
                last = base.rpartition(".")[2]
                return function.format(printable(repr(last)), printable(last))
    return ""


def _find_joined_tensor(
    joined_shapes: Mapping[str, Shape], part_shapes: Mapping[str, Shape]
) -> tuple[str, list[str]] | None:
    """Return a tensor that has the rows of several others next to it, and the names of these.

    For example `attn.qkv.weight` and `attn.q.weight`, `attn.k.weight`, `attn.v.weight`. The
    grandparent of the parts is the grandparent or the parent (`attn.in_proj_weight`) of the tensor.
    The last component of a part ends the name of the tensor, and the first axes add up. None if no
    tensor is joined.
    """
    parts_by_grandparent: dict[str, list[str]] = {}
    for part in part_shapes:
        grandparent = ".".join(part.split(".")[:-2])
        parts_by_grandparent.setdefault(grandparent, []).append(part)
    for name, shape in joined_shapes.items():
        parent = name.rpartition(".")[0]
        grandparent = parent.rpartition(".")[0]
        for path in (parent, grandparent):
            candidates = [
                part
                for part in parts_by_grandparent.get(path, ())[:_MAX_JOINED]
                if name.endswith(part.rpartition(".")[2])
                and len(shape) == len(part_shapes[part]) > 0
                and shape[1:] == part_shapes[part][1:]
            ]
            row_count = sum(part_shapes[part][0] or 0 for part in candidates)
            if len(candidates) > 1 and row_count == shape[0]:
                return name, candidates
    return None


def _check_renamed_keys(
    model: Section, report: MatchReport, fix: Steps | None
) -> Iterator[Complaint]:
    """Yield a complaint about keys that match the reference only after rules rename them.

    `fix` has the steps that make the file fit. It is empty if tensors are missing, which is another
    complaint; then the fix only renames.
    """
    new_by_old: dict[str, str] = {}
    texts = []
    for renaming in report.renamed:
        if renaming.kind == "known" and all(
            "parametrizations." in new for _, new in renaming.names
        ):
            continue  # torch itself loads the old form of weight_norm
        new_by_old.update(renaming.names)
        texts.append(printable(renaming.text))
    if not new_by_old:
        return
    kinds = {renaming.kind for renaming in report.renamed}
    rules = tuple(renaming.rule for renaming in report.renamed)
    if not fix:
        fix = (Rename(rules),) if all(rules) else None
    # `fix` may drop the training state; the removal of wrapper prefixes keeps it.
    bare_keys = map_to_bare_keys(model)
    is_only_stripped = report.fits and all(
        bare_keys.get(old) == new for old, new in new_by_old.items()
    )
    yield Complaint(
        "wrappers" if kinds == {"wrapper"} else "renamed",
        f"keys differ from the reference: {listed(texts, most=3)}",
        summarize_names(new_by_old),
        quote=quote("missing-key", printable([*new_by_old.values()][-1])),
        effect="with strict=False they are left out, without an error",
        fix=fix,
        resume=(Strip(),) if is_only_stripped else None,
    )


def _choose_without_mismatched(reference: Reference, report: MatchReport) -> tuple[Choice, ...]:
    """Return the conversion without the tensors that have other shapes, if all others match.

    For example without the head of a classifier for another number of classes. Empty if the file
    needs more to fit than leaving out these and unexpected tensors.
    """
    needed_options = dict(Allowance().judge(report).remedy.arguments)
    names = needed_options.get("allow_mismatched")
    can_leave_out = needed_options.keys() <= {"allow_mismatched", "allow_unexpected"}
    if not isinstance(names, tuple) or not can_leave_out:
        return ()
    unexpected = needed_options.get("allow_unexpected")
    fit_step = Fit(
        reference,
        allow_mismatched=names,
        allow_unexpected=unexpected if isinstance(unexpected, (bool, tuple)) else None,
    )
    code = f"ckptool.load_into(model, FILE, allow_missing={list(names)!r})"
    return (Choice((fit_step,), "fitting", code),)


def _check_shapes(
    report: MatchReport, misfit_reason: str, choices: tuple[Choice, ...]
) -> Iterator[Complaint]:
    """Yield a complaint about tensors with shapes that differ from the reference.

    A `misfit_reason` is its hint. `choices` is offered only if nothing better is known.
    """
    mismatches = report.mismatched
    if not mismatches:
        return
    first, names = mismatches[0], [mismatch.name for mismatch in mismatches]
    can_resize = any(
        "pos" in mismatch.name and len(mismatch.shape) == len(mismatch.wanted)
        for mismatch in mismatches
    )
    shown = (
        f"{mismatch.name} (file {list(mismatch.shape)}, model {list(mismatch.wanted)})"
        for mismatch in mismatches
    )
    resize = f"resize position embeddings ({_INTERPOLATE_COMMAND}), or " if can_resize else ""
    initialized = listed(summarize_names(names, max_count=2))
    yield Complaint(
        "size-mismatch",
        f"the shape of {counted(len(mismatches), 'tensor')} differs from the reference: "
        f"{listed(shown, most=3)}",
        summarize_names(names),
        hint=misfit_reason
        or f"{resize}delete them from the state dict and load with strict=False: "
        f"the model keeps its own {initialized}",
        quote=quote("size", printable(first.name), list(first.shape), list(first.wanted)),
        effect=f"strict=False does not skip it. {_EFFECT_HALF_LOADED}",
        choices=() if can_resize or misfit_reason else choices,
    )


def _check_dtypes(casts: Sequence[DtypeChange]) -> Iterator[Complaint]:
    """Yield complaints about tensors that torch would cast on loading."""
    truncating = [
        cast for cast in casts if is_floating(cast.before) and not is_floating(cast.after)
    ]
    other_casts = [cast for cast in casts if cast not in truncating]
    if truncating:
        yield Complaint(
            "cast-to-integer",
            f"{counted(len(truncating), 'floating-point tensor')} would load into integer or "
            f"boolean buffers: {_summarize_casts(truncating)}",
            summarize_names(cast.name for cast in truncating),
            hint="in code: state[name] = state[name].long(), if the values are integers",
            severity="misleads",
            effect="load_state_dict copies them without an error: 2.87 becomes 2, inf becomes "
            "the smallest integer, and as a boolean every value except 0 becomes True.",
        )
    if other_casts:
        yield Complaint(
            "dtype",
            f"the dtype of {counted(len(other_casts), 'tensor')} differs from the reference: "
            f"{_summarize_casts(other_casts)}",
            summarize_names(cast.name for cast in other_casts),
            hint=f"ckptool cast FILE --dtype {other_casts[0].after} --dry-run counts what "
            "overflows, underflows and loses precision",
            severity="note",
            effect="load_state_dict casts to the model's dtype without an error; values that are "
            "too large become inf (65,520 and more in float16).",
        )


def _summarize_casts(casts: Sequence[DtypeChange]) -> str:
    """Return `file float32, model int64`, once for each pair of dtypes."""
    return listed(
        dict.fromkeys(f"file {cast.before}, model {cast.after}" for cast in casts), most=4
    )


def check_training(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about optimizer state that would load for the wrong parameter, or none.

    Also about model weights of a schedule-free optimizer in train mode.
    """
    for section in subject.optimizers:
        if subject.models and has_training_weights(section):
            yield Complaint(
                "training-weights",
                "the optimizer is schedule-free and was saved in train mode, so the model has "
                "training weights",
                (_name_section(section),),
                hint=f"{ema_command(subject.checkpoint)} writes the weights for evaluation",
                severity="misleads",
                effect="load_state_dict loads them without an error, but they evaluate worse than "
                "those after optimizer.eval().",
            )
        for complaint in _check_optimizer(subject, section):
            # Fixed by extracting the model without it, if that model is known. The hints
            # are about loading weights, which a file without a model does not have.
            fix = (Take(model_only=True),) if subject.model is not None else None
            yield replace(complaint, fix=fix, hint=complaint.hint if subject.models else None)


def _check_optimizer(subject: Subject, section: Section) -> Iterator[Complaint]:
    """Yield complaints about the groups and states of one optimizer, and about its model.

    Nothing for the optimizer of another library. If one model is to be loaded, the optimizers of
    others (such as a discriminator) are not compared with their models.
    """
    if section.is_foreign:
        return
    if not section.node["param_groups"]:
        yield Complaint(
            "optimizer-groups",
            "the optimizer has no parameter groups",
            (f"{_name_section(section)}/param_groups",),
            hint=_HINT_WITHOUT_STATE,
            quote=quote("group-count"),
        )
        return
    group_keys = {key for group in list_groups(section) for key in group}
    unused = [key for key in section.node["state"] if key not in group_keys]
    if unused:
        yield Complaint(
            "optimizer-leftover",
            f"the optimizer has the state of {counted(len(unused), 'parameter')} that its groups "
            "do not have",
            summarize_names(f"{_name_section(section)}/state/{key}" for key in unused),
            hint=_HINT_WITHOUT_STATE,
            severity="misleads",
            effect="The optimizer loads it without an error and never uses it.",
        )
    model = find_model(section, subject.models, subject.optimizers)
    if model is not None and (subject.model is None or subject.model.holder is model.holder):
        yield from _check_optimizer_of_model(section, model)


def _guess_parameters(model: Section, tensors: dict[str, TensorRef]) -> dict[str, Shape]:
    """Return keys and shapes of the likely parameters, which a state dict does not mark.

    Integer tensors and known buffers are not parameters.
    """
    names = map_to_bare_keys(model)
    return {
        names.get(name, name): tensor.shape
        for name, tensor in tensors.items()
        if is_floating(tensor.dtype)
        and name.rpartition(".")[2] not in BUFFER_NAMES | INTEGER_BUFFERS
    }


def _name_section(section: Section) -> str:
    """Return the name of a section for a sentence."""
    return printable(section.name) or "the root"


def _check_optimizer_of_model(section: Section, model: Section) -> Iterator[Complaint]:
    """Yield a complaint if an optimizer state does not belong to this model.

    By the number of parameters, else by shapes, else by their order. The order is only compared if
    there is one group with as many parameters as the model has, and either no names or its names.
    """
    distinct_tensors = drop_ties(
        ((name,), value) for name, value in get_named_tensors(model.node).items()
    )
    tensors = {str(path[0]): tensor for path, tensor in distinct_tensors}
    shape_by_parameter = _guess_parameters(model, tensors)
    saved_order = [key for group in list_groups(section) for key in group]
    shape_by_state = find_shapes(section)
    unknown_shapes = Counter(shape_by_state.values()) - Counter(
        tensor.shape for tensor in tensors.values()
    )
    if len(saved_order) > len(tensors):
        text = f"the optimizer was saved for {counted(len(saved_order), 'parameter')}"
        yield _complain_of_optimizer_size(
            section, f"{text}, but the model has {counted(len(tensors), 'tensor')}"
        )
    elif unknown_shapes:
        states = counted(unknown_shapes.total(), "state")
        text = f"the optimizer has {states} with shapes that no tensor of the model has"
        yield _complain_of_optimizer_size(section, text)
    elif len(saved_order) == len(shape_by_parameter) and len(section.node["param_groups"]) == 1:
        saved_names = list_names(section)  # empty for most optimizers
        bare_names = map_to_bare_names(saved_names)
        names = [bare_names[name] for name in saved_names] or list(shape_by_parameter)
        if set(names) != set(shape_by_parameter):
            return
        misplaced = [
            position
            for position, (key, name) in enumerate(zip(saved_order, names, strict=True))
            if key in shape_by_state and shape_by_state[key] != shape_by_parameter[name]
        ]
        if misplaced:
            yield _complain_of_optimizer_order(misplaced, names)


def _complain_of_optimizer_size(section: Section, text: str) -> Complaint:
    """Return the complaint about an optimizer for another number of parameters or shapes."""
    return Complaint(
        "optimizer-size",
        text,
        (_name_section(section),),
        hint=_HINT_WITHOUT_STATE,
        quote=quote("group-size"),
        effect="or step() fails on a size",
    )


def _complain_of_optimizer_order(positions: list[int], names: Sequence[str]) -> Complaint:
    """Return the complaint about states that do not fit the parameters at the same positions.

    `names` are the model's parameters by position, `positions` those with a state of another shape.
    """
    return Complaint(
        "optimizer-order",
        "the optimizer lists its parameters in a different order from the model: "
        f"the shapes of {counted(len(positions), 'state')} differ from those of the parameters "
        "there",
        summarize_names(names[position] for position in positions),
        hint="build the optimizer with its parameters in the saved order, or load the weights "
        "without the optimizer",
        severity="misleads",
        effect="load_state_dict of the optimizer matches by position and checks no shapes: "
        "parameters get the moments of other parameters, and step() fails or, with equal shapes, "
        "uses them.",
    )
