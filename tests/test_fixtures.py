"""Every checkpoint in `fixtures/` reads as torch reads it: `NAME.oracle.json` is the judge.

`fixtures/README.md` tells the form of an oracle.
"""

import importlib.util
import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import list_tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"
ORACLES = {
    str(path.relative_to(FIXTURES)).removesuffix(".oracle.json"): path
    for path in sorted(FIXTURES.rglob("*.oracle.json"))
}

every_fixture = pytest.mark.parametrize("name", ORACLES)


@cache
def oracle_of(name):
    return json.loads(ORACLES[name].read_text())


@cache
def listing_of(name):
    with open_checkpoint(FIXTURES / name) as checkpoint:
        return list_tensors(checkpoint, hash=True).to_dict()


def below(path, tops):
    return any(len(top) < len(path) and path[: len(top)] == top for top in tops)


def listed(name):
    """Path -> row of every tensor that the oracle should have, in order."""
    oracle, rows = oracle_of(name), listing_of(name)["tensors"]
    beside = {tuple(path) for path, kind in oracle["objects"] if kind == "numpy.ndarray"}
    if oracle.get("torchscript") and not marks_buffers(name):
        known = {tuple(row["path"]) for row in oracle["tensors"]}
        beside |= {tuple(row["path"]) for row in rows} - known
    found = {tuple(row["path"]): row for row in rows}
    assert len(found) == len(rows)
    return {path: row for path, row in found.items() if path not in beside}


def marks_buffers(name):
    """Whether a TorchScript archive tells buffers from other tensors; 1.2 to 1.4 do not."""
    with zipfile.ZipFile(FIXTURES / name) as archive:
        return any(b"__buffers__" in archive.read(info) for info in archive.infolist())


def test_there_is_something_to_hold_against():
    assert len(ORACLES) > 200
    assert all((FIXTURES / name).exists() for name in ORACLES)
    assert not [name for name in ORACLES if "error" in oracle_of(name)]


def names_are_torchs_in_torchs_order(name):
    assert list(listed(name)) == [tuple(row["path"]) for row in oracle_of(name)["tensors"]]


def every_tensor_is_what_torch_reads(name):
    rows = listed(name)
    for want in oracle_of(name)["tensors"]:
        got = rows[tuple(want["path"])]
        fields = ("dtype", "shape", "device", "sha256", "kind", "stride", "requires_grad")
        expected = {field: want[field] for field in fields if field in want}
        if expected.get("kind") == "numpy":
            del expected["device"]  # numpy has none
        if "sha256" not in want:
            expected["sha256"] = None
        shown = {field: as_json(got[field]) for field in expected}
        assert {"path": want["path"], **shown} == {"path": want["path"], **expected}


def as_json(value):
    return list(value) if isinstance(value, tuple) else value


def tensors_share_a_storage_where_torch_says_so(name):
    rows, wanted = listed(name), oracle_of(name)["tensors"]
    numbered = [row for row in wanted if row.get("storage") is not None]
    pairs = {(row["storage"], rows[tuple(row["path"])]["storage"]) for row in numbered}
    assert len({ours for _, ours in pairs}) == len(pairs) == len({theirs for theirs, _ in pairs})


def every_value_is_listed_in_order(name):
    oracle = oracle_of(name)
    wanted = [(tuple(path), kind, value) for path, kind, value in oracle["values"]]
    known = {path for path, _, _ in wanted}
    tops = [tuple(path) for path, _ in oracle["objects"]]
    rows = [(tuple(r["path"]), r["type"], r["value"]) for r in listing_of(name)["values"]]
    # What an object holds may be listed too: torch's view of it ends at the object.
    assert [row for row in rows if row[0] in known or not below(row[0], tops)] == wanted


def every_object_is_listed_in_order(name):
    document, oracle = listing_of(name), oracle_of(name)
    wanted = [(tuple(path), kind) for path, kind in oracle["objects"]]
    arrays = [tuple(row["path"]) for row in document["tensors"] if row["kind"] == "numpy"]
    rows = [(tuple(row["path"]), row["class"]) for row in document["objects"]]
    tops = [path for path, _ in wanted]
    shown = [row for row in rows if not below(row[0], tops)]
    assert shown == [row for row in wanted if row[0] not in arrays]
    assert all(kind == "numpy.ndarray" for path, kind in wanted if path in arrays)


def pickled_modules_are_told_from_dicts(name):
    modules = [tuple(path) for path in oracle_of(name)["modules"]]
    with open_checkpoint(FIXTURES / name) as checkpoint:
        sections = [section for section in checkpoint.sections if section.kind == "module"]
    assert [section.path for section in sections] == modules


@cache
def judge():
    """The module that wrote the oracles."""
    path = FIXTURES / "make" / "oracle.py"
    spec = importlib.util.spec_from_file_location("fixtures_oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def every_tensor_can_be_made(name):
    wanted = {tuple(row["path"]): row for row in oracle_of(name)["tensors"]}
    with open_checkpoint(FIXTURES / name) as checkpoint:
        refs = [ref for _, ref in checkpoint.tensors()]
        paths = [tuple(row["path"]) for row in listing_of(name)["tensors"]]
        for path, ref in zip(paths, refs, strict=True):
            want = wanted.get(path, {})
            if "local" in want:
                want, ref = want["local"], ref.local
            elif want.get("kind") == "subclass" and "sha256" not in want:
                assert ref.local is None  # this process held no part of it
            if "parts" in want:
                tensor = ref.torch()
                assert judge().shape_of(tensor) == want["shape"]
                assert judge().hashed(judge().components(tensor)) == want["parts"]
            elif "sha256" in want:
                tensor = ref.torch()
                assert list(tensor.shape) == want["shape"]
                assert judge().sha256(tensor) == want["sha256"]


@every_fixture
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantized and sparse tensors
def test_it_reads_as_torch_reads_it(name):
    names_are_torchs_in_torchs_order(name)
    every_tensor_is_what_torch_reads(name)
    tensors_share_a_storage_where_torch_says_so(name)
    every_value_is_listed_in_order(name)
    every_object_is_listed_in_order(name)
    pickled_modules_are_told_from_dicts(name)
    every_tensor_can_be_made(name)


@pytest.mark.parametrize(
    "name",
    [
        "torch-2.13.0/dp_full_cuda3.pth",
        "torch-1.0.1-python2/values.pth",
        "archives/unzipped",
        "values/keys.pth",
    ],
)
def test_the_command_prints_the_listing_of_the_library(name):
    command = [sys.executable, "-m", "ckptool", "list", "--json", "--hash", str(FIXTURES / name)]
    run = subprocess.run(command, capture_output=True, check=True)
    document = json.loads(run.stdout)
    assert {**document, "file": ""} == {**json.loads(json.dumps(listing_of(name))), "file": ""}
