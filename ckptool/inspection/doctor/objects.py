"""Complaints about what `weights_only=True` refuses: objects, whole modules, numpy's names."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.inspection.doctor.complaint import Complaint, Found, Need, names_of
from ckptool.inspection.doctor.patient import Patient
from ckptool.model import Opaque
from ckptool.modules import is_module
from ckptool.paths import name_of
from ckptool.transforms.refusals import class_of, refusals
from ckptool.words import listed, printable

__all__ = ["objects"]

_NUMPY2 = "numpy._core."
_GATHER = "gather the full tensors where it was trained, and save those"
_EVERYWHERE = ("torch", "builtins", "collections", "numpy")
"""Packages whose classes are found wherever a file is loaded."""
_SHARDED = ("DTensor", "ShardedTensor")


def objects(patient: Patient) -> Iterator[Found]:
    """What of the tree `torch.load` refuses, or can only make where certain classes are."""
    refused = list(refusals(patient.checkpoint.root))
    modules = [(name_of(path), node) for path, node in refused if is_module(node)]
    others = [(name_of(path), class_of(node)) for path, node in refused if not is_module(node)]
    if modules:
        yield _module(patient, modules)
    if others:
        yield _objects(others)
    elif not modules:
        yield from _unexplained(patient)
    yield from _unread(patient)
    yield from _numpy(patient)


def _module(patient: Patient, modules: list[tuple[str, Opaque]]) -> Found:
    """Models that were pickled whole."""
    names = dict.fromkeys(class_of(node) for _, node in modules)
    first = next(iter(names))
    known = [*names, *patient.blocked]
    own = next((one for one in known if one.partition(".")[0] not in _EVERYWHERE), None)
    complaint = Complaint(
        "module",
        "fails",
        f"the model itself was pickled, not its state_dict: {listed(names)}",
        names_of(name or "the root" for name, _ in modules),
        f"torch.load says: Weights only load failed. ... Unsupported global: GLOBAL "
        f"{printable(first)}; {_absent(own) if own else 'weights_only=False runs what it says'}",
    )
    alone = patient.model is not None and patient.model.kind == "module"
    return Found(complaint, (Need("select") if alone else Need("plain"),))


def _absent(name: str) -> str:
    """What `weights_only=False` says where the program of a class is not."""
    home, _, own = name.rpartition(".")
    return (
        f"with weights_only=False, where {printable(name)} is not: ModuleNotFoundError: No module "
        f"named '{printable(home.partition('.')[0])}', or Can't get attribute '{printable(own)}'"
    )


def _objects(others: list[tuple[str, str]]) -> Found:
    """Objects of classes that are not allowed, by path and class."""
    classes = list(dict.fromkeys(kind for _, kind in others))
    distributed = any(kind.rpartition(".")[2] in _SHARDED for kind in classes)
    complaint = Complaint(
        "objects",
        "fails",
        f"it holds objects that weights_only=True refuses: {listed(classes)}",
        names_of((f"{name or 'the root'} ({kind})" for name, kind in others), most=20),
        "torch.load says: Weights only load failed. ... Unsupported global: GLOBAL "
        f"{printable(classes[0])} was not an allowed global by default. weights_only=False, which "
        "it proposes, runs whatever the file says",
        remedy=_GATHER if distributed else "",
    )
    return Found(complaint, (Need("plain"),))


def _unexplained(patient: Patient) -> Iterator[Found]:
    """What blocks without being an object that could be named."""
    names = patient.blocked
    if names:
        complaint = Complaint(
            "objects",
            "fails",
            f"weights_only=True refuses what the pickle names: {listed(names)}",
            (),
            f"torch.load says: Weights only load failed. ... Unsupported global: GLOBAL {names[0]}",
        )
        yield Found(complaint, (Need("plain"),))


def _unread(patient: Patient) -> Iterator[Found]:
    """Submodules whose weights are nowhere under a name."""
    texts = [text for section in patient.models for text in section.unread]
    if texts:
        yield Found(
            Complaint(
                "unread",
                "misleads",
                "a state dict made of the pickled model would lack weights",
                names_of(texts),
                "a class with a __getstate__ of its own (torch's quantised layers) keeps them in a "
                "form that only it reads; load_state_dict then says: Missing key(s) in state_dict",
                remedy="load it with torch.load(weights_only=False) where its classes are, and "
                "save model.state_dict()",
            )
        )


def _numpy(patient: Patient) -> Iterator[Found]:
    """Names that numpy before 2 does not have."""
    names = [name for name in patient.checkpoint.details.globals if name.startswith(_NUMPY2)]
    if names:
        complaint = Complaint(
            "numpy",
            "note",
            f"numpy 2 pickled something in it ({listed(names)})",
            (),
            "torch.load(weights_only=False) where numpy is older says: ModuleNotFoundError: No "
            "module named 'numpy._core'",
        )
        yield Found(complaint, (Need("plain"),))
