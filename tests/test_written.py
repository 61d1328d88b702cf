"""Every fixture, written again, is the same checkpoint: to torch, by every way it has to load."""

import json
import warnings

import pytest
import torch

import ckptool
from ckptool.errors import NotRepresentable
from ckptool.inspection.listing import list_tensors
from ckptool.transforms import extract_state_dict
from tests.test_fixtures import FIXTURES, ORACLES, every_fixture, judge

REMADE = ("storage",)
"""Fields of a listing that another file may number otherwise."""


def listing(checkpoint):
    document = json.loads(json.dumps(list_tensors(checkpoint, hash=True).to_dict()))
    groups = {}
    for row in document["tensors"]:
        row["storage"] = groups.setdefault(row["storage"], len(groups))
    return {part: document[part] for part in ("tensors", "values", "objects")}


def save(checkpoint, path, format):
    """Write it, or skip what the format cannot hold by its nature."""
    try:
        return checkpoint.save(path, format=format)
    except NotRepresentable as error:
        pytest.skip(str(error))


def described(path):
    """What torch reads from a file, without what only names the storages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = judge().describe(*judge().read(path))
    for row in found["tensors"]:
        row.pop("storage", None)
    return found


def read_by_torch(path):
    """What torch reads from a fixture; None where this torch does not read it."""
    try:
        return described(path)
    except Exception:
        return None


@every_fixture
@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy"])
def test_written_again_it_is_the_same_to_ckptool_and_to_torch(name, format, tmp_path):
    with ckptool.open(FIXTURES / name) as checkpoint:
        save(checkpoint, tmp_path / "out.pth", format)
        wanted = listing(checkpoint)
    with ckptool.open(tmp_path / "out.pth") as again:
        assert again.format == format
        assert listing(again) == wanted
    by_torch = read_by_torch(FIXTURES / name)
    if by_torch is not None:
        assert described(tmp_path / "out.pth") == by_torch


def test_torch_reads_nearly_every_fixture():
    unread = [name for name in ORACLES if read_by_torch(FIXTURES / name) is None]
    assert len(unread) < len(ORACLES) / 2


def offsets(tree, path=(), entered=frozenset()):
    """Path -> offset that torch computed for each tensor on the meta device."""
    if isinstance(tree, torch.Tensor) and tree.layout == torch.strided:
        offset = getattr(tree.untyped_storage(), "_checkpoint_offset", None)
        return {} if offset is None else {path: offset}
    if not isinstance(tree, (dict, list, tuple)) or id(tree) in entered:
        return {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    inside = entered | {id(tree)}
    found = (offsets(item, (*path, name), inside) for name, item in items)
    return {key: at for part in found for key, at in part.items()}


@every_fixture
def test_safe_mapped_and_meta_loads_agree(name, tmp_path):
    """`weights_only=True`, `mmap=True`, and the offsets that `map_location="meta"` computes."""
    out = tmp_path / "out.pth"
    with ckptool.open(FIXTURES / name) as checkpoint:
        receipt = save(checkpoint, out, "torch-zip")
        if receipt.blockers:
            pytest.skip(f"objects remain: {receipt.blockers[0]}")
        refs = {path: ref for path, ref in checkpoint.tensors() if ref.kind == "strided"}
        held = {id(ref.storage): ref.storage.data.read() for ref in refs.values() if ref.storage}
        kinds = {ref.kind for _, ref in checkpoint.tensors()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(out, weights_only=True, mmap=True, map_location="cpu")
        if kinds & {"quantized", "nested"}:
            pytest.skip("torch cannot make quantized and nested tensors on the meta device")
        computed = offsets(torch.load(out, weights_only=True, map_location="meta"))
    raw = out.read_bytes()
    for path, offset in computed.items():
        storage = refs[path].storage if path in refs else None
        if storage is not None and storage.byteorder == "little":
            assert raw[offset : offset + storage.nbytes] == held[id(storage)]


@every_fixture
def test_to_safetensors_and_back(name, tmp_path):
    """The one state dict survives the way there and back, ties, `_metadata` and all."""
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pth"
    with ckptool.open(FIXTURES / name) as checkpoint:
        try:
            alone = extract_state_dict(checkpoint)
        except ckptool.NotFound:
            pytest.skip("not one state dict")
        try:
            alone.save(there)
        except NotRepresentable as error:
            pytest.skip(str(error))
        # What lies deeper is in a module's extra state, which is not a tensor of the state dict.
        wanted = [row for row in listing(alone)["tensors"] if len(row["path"]) == 1]
        metadata = alone.root.metadata
    receipt = ckptool.convert(there, back)
    assert receipt.format == "torch-zip"
    with ckptool.open(back) as again:
        rows = listing(again)["tensors"]
        assert again.root.metadata == metadata
    for row, want in zip(rows, wanted, strict=True):
        kept = ("path", "dtype", "shape", "sha256")
        assert {field: row[field] for field in kept} == {field: want[field] for field in kept}
