"""`ckptool.scan`: what honest files are, and what is read of them."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import io
import ipaddress
import json
import logging
import operator
import pathlib
import pickle
import random
import re
import string
import types
import uuid
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open

import ckptool
from ckptool.inspection.scan import scan
from tests.sources import PROJECT

FIXTURES = PROJECT / "fixtures"
UNREAD = ("dcp/zstd-2.13.0",)


def test_no_fixture_runs_anything_but_the_one_that_does():
    found = {}
    for path in ckptool.inspection.scan.find_files([FIXTURES]):
        one = scan(path)
        if not one.ok():
            found[path.removeprefix(f"{FIXTURES}/")] = one.verdict
    assert found.pop("wrong/malicious.pth") == "runs"
    assert all(path.startswith(UNREAD) for path in found)
    assert set(found.values()) == {"cannot tell"}


class Color(enum.Enum):
    RED = 1


class Grown(list):
    pass


class Failure(Exception):
    pass


def printed(first: int, *rest, last=3, **more) -> str: ...


HONEST = [
    Color.RED,
    Grown([1, 2]),
    Failure("x", 1),
    KeyError("x"),
    argparse.Namespace(a=1),
    collections.defaultdict(list, {1: [2]}),
    collections.deque([1], 3),
    collections.Counter("abc"),
    collections.OrderedDict(a=collections.OrderedDict()),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    datetime.timedelta(1),
    decimal.Decimal("1.5"),
    Fraction(1, 2),
    functools.partial(int, "7", base=8),
    operator.itemgetter(1, 2),
    pathlib.PurePosixPath("a/b"),
    range(3),
    iter([1, 2]),
    slice(1, 2),
    re.compile("a+"),
    uuid.UUID(int=1),
    {1, 2},
    frozenset({1}),
    bytearray(b"x"),
    b"bytes",
    1j,
    io.BytesIO(b"x"),
    io.StringIO("x"),
    collections.UserString("x"),
    string.Template("$x"),
    types.SimpleNamespace(a=1),
    random.Random(1),
    ipaddress.ip_address("::1"),
    logging.getLogger("x"),
    logging.makeLogRecord({"msg": "x"}),
    dataclasses.MISSING,
    torch.nn.Linear(2, 2),
    torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).weight,
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).state_dict(),
    torch.float16,
    torch.device("cuda:1"),
    torch.Generator(),
    inspect.signature(printed),
    torch.ones(2).numpy(),
    torch.ones(2).numpy()[0],
]


@pytest.mark.parametrize("protocol", range(6))
def test_what_python_pickles_runs_nothing(protocol, tmp_path):
    path = tmp_path / "a.pkl"
    for value in HONEST:
        if isinstance(value, io.IOBase) and protocol < 2:
            continue  # pickle refuses it
        path.write_bytes(pickle.dumps({"a": [value, value]}, protocol))
        found = scan(path)
        assert found.ok(), (value, found)


@pytest.mark.parametrize("legacy", [False, True])
def test_state_dicts_are_data(legacy, tmp_path):
    path = tmp_path / "a.pth"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    found = scan(path)
    assert (found.verdict, found.pickles) == ("data", 5 if legacy else 1)


def test_two_legacy_streams_in_one_file(tmp_path):
    path = tmp_path / "a.pth"
    with path.open("wb") as file:
        for value in ({"w": torch.ones(3)}, torch.nn.Linear(2, 2)):
            torch.save(value, file, _use_new_zipfile_serialization=False)
    found = scan(path)
    assert (found.verdict, found.pickles) == ("needs code", 10)


def test_paddles_arrays_need_code(tmp_path):
    path = tmp_path / "a.pdparams"
    array = pickle.dumps(torch.ones(2).numpy(), 2)[2:-1]
    path.write_bytes(
        b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x00data}X\x04\x00\x00\x00data" + array + b"s\x86R."
    )
    assert scan(path).verdict == "needs code"


def test_joblibs_arrays_are_passed_over(tmp_path):
    joblib = pytest.importorskip("joblib")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "a.joblib"
    values = {
        "a": numpy.arange(50.0),
        "b": numpy.array([{1: 2}], object),
        "c": numpy.zeros((2, 3), "f4"),
    }
    for compress in (0, 3, ("gzip", 3), ("bz2", 3), ("xz", 3)):
        joblib.dump([values, 1], path, compress=compress)
        found = scan(path)
        assert found.verdict == "needs code", found


def test_texts_are_no_pickles(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("", "hello\n", "comment\nfoo\n", "import os\n", "{}", "[1]", "N.", "(a)"):
        path.write_text(text)
        assert scan(path).verdict == "data", text


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ckptool.FileMissing):
        ckptool.scan(tmp_path / "no")


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"])
def test_the_length_of_a_safetensors_header_is_no_pickle(start, tmp_path):
    path = tmp_path / "model.safetensors"
    for third in range(2):
        length = int.from_bytes(start + bytes([third]), "little")
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
        path.write_bytes(length.to_bytes(8, "little") + header.ljust(length).encode() + bytes(8))
        assert safe_open(path, "pt").keys() == ["w"]
        assert (scan(path).verdict, scan(path).pickles) == ("data", 0)
        path.write_bytes(path.read_bytes()[:-1])  # opens as nothing
        assert scan(path).verdict == "cannot tell"


def test_a_safetensors_file_that_pickle_would_run_is_found(tmp_path):
    """The length and the header are one text for pickle; its calls are where the tensors are."""
    path, length = tmp_path / "model.safetensors", 0x560480
    payload = b"cos\nsystem\n(X\x02\x00\x00\x00lstR."
    header = {"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}
    text = json.dumps(header)[:-1].ljust(length - 2).encode() + b"\n}"
    path.write_bytes(length.to_bytes(8, "little") + text + payload)
    assert safe_open(path, "pt").keys() == ["w"]
    assert scan(path).verdict == "runs"


@pytest.mark.parametrize("kind", ["contiguous_format", "preserve_format", "channels_last"])
@pytest.mark.parametrize(("module", "verdict"), [("torch._utils", "data"), ("apex", "needs code")])
def test_a_memory_format_runs_nothing_by_whichever_module_it_is_named(
    kind, module, verdict, tmp_path
):
    """Protocol 4 names it by the first module, of those that are loaded, that has `torch`."""
    names = (f"\x8c{chr(len(name))}{name}" for name in (module, f"torch.{kind}"))
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x04" + "".join(names).encode("latin1") + b"\x93.")
    assert scan(path).verdict == verdict
    if verdict == "data":
        assert pickle.loads(path.read_bytes()) is getattr(torch, kind)
        path.write_bytes(path.read_bytes()[:-1] + b"\x8c\x01a\x86.")
        assert ckptool.load(path)[0] is getattr(torch, kind)
        ckptool.convert(path, tmp_path / "b.pth")
        assert torch.load(tmp_path / "b.pth", weights_only=False) == (getattr(torch, kind), "a")


NAMED = [
    b"cnumpy.random\n__RandomState_ctor\n(X\x07\x00\x00\x00MT19937tR.",
    b"cnumpy.random.mtrand\n__RandomState_ctor\n(tR.",
    b"cfastai.torch_core\n_fa_rebuild_tensor\n(cfastai.torch_core\nTensorBase\nK\x01)tR.",
    b"cfastai.torch_core\n_fa_rebuild_qtensor\n(cfastai.torch_core\nTensorBase\nK\x01)tR.",
    b"cfastai.torch_core\n_rebuild_from_type\n(ctorch._utils\n_rebuild_tensor_v2\n"
    b"cfastai.torch_core\nTensorBase\n(K\x01t}tR.",
    b"cfunctools\npartial\n(cpandas.core.internals.blocks\nnew_block\ntR"
    b"(cpandas.core.internals.blocks\nnew_block\n)}X\x04\x00\x00\x00ndimK\x02sNtb(K\x01K\x02tR.",
    b"cfunctools\npartial\n(cpandas.core.internals.blocks\nnew_block\nK\x01tR(K\x02tR.",
]


@pytest.mark.parametrize("data", NAMED, ids=range(len(NAMED)))
def test_constructors_of_known_libraries_need_code_and_run_nothing(data, tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02" + data)
    found = scan(path)
    assert (found.verdict, found.runs) == ("needs code", ())


OTHERS = [  # what looks like them, and calls something else
    b"cfastai.torch_core\n_rebuild_from_type\n(cos\nsystem\ncfastai.torch_core\nTensorBase\n"
    b"(X\x02\x00\x00\x00lst}tR.",
    b"cfunctools\npartial\n(cpandas.core.internals.blocks\nnew_block\ntR"
    b"(cos\nsystem\n(X\x02\x00\x00\x00lst}Ntb(tR.",
    b"cfunctools\npartial\n(cos\nsystem\nX\x02\x00\x00\x00lstR(tR.",
    b"cfunctools\npartial\n(cpandas.io.pickle\nread_pickle\nX\x01\x00\x00\x00atR(tR.",
    b"cfunctools\npartial\n(cfunctools\npartial\ncos\nsystem\ntR(X\x02\x00\x00\x00lstR.",
]


@pytest.mark.parametrize("data", OTHERS, ids=range(len(OTHERS)))
def test_a_function_in_the_place_of_a_constructor_runs(data, tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02" + data)
    assert scan(path).verdict == "runs"


def test_a_series_of_zips_is_scanned_without_a_note():
    for path in sorted(FIXTURES.glob("dcp/meshed-2.13.0/*.distcp")):
        found = scan(path)
        assert (found.verdict, found.notes) == ("data", ())
        assert found.pickles > 1
