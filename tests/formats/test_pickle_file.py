import base64
import bz2
import collections
import gzip
import io
import lzma
import pickle
import struct
import zlib

import numpy
import pytest
import torch

import ckptool
from ckptool.core.model import Opaque, OrderedMap
from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded
from ckptool.formats.base import Probe
from ckptool.formats.pickle_file import PICKLE
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.contract import FormatContract
from tests.formats.legacy_streams import Called, stream
from tests.formats.zips import values


class TestContract(FormatContract):
    name = "pickle"
    sample = "streams/arrays_protocol2.pkl"


@pytest.fixture
def recognized(tmp_path):
    def look(data):
        path = tmp_path / "it.pkl"
        path.write_bytes(data)
        probe = Probe(path, DEFAULT_LIMITS)
        answer = PICKLE.recognize(probe)
        probe.close()
        return answer

    return look


@pytest.fixture
def read(tmp_path):
    opened = []

    def read_bytes(data, limits=DEFAULT_LIMITS):
        path = tmp_path / "it.pkl"
        path.write_bytes(data)
        probe = Probe(path, limits)
        opened.append(probe)
        assert PICKLE.recognize(probe)
        return PICKLE.read(probe)

    yield read_bytes
    for probe in opened:
        probe.close()


@pytest.mark.parametrize("protocol", range(6))
def test_a_dict_of_numpy_arrays(read, protocol):
    source = collections.OrderedDict(
        w=numpy.arange(6, dtype="float32").reshape(2, 3), step=3, name="net"
    )
    checkpoint = read(pickle.dumps(source, protocol))
    assert isinstance(checkpoint.root, OrderedMap)
    assert checkpoint.format == "pickle"
    assert checkpoint.root["w"].kind == "numpy"
    assert checkpoint.root["w"].shape == (2, 3)
    assert values(checkpoint.root["w"]) == [0, 1, 2, 3, 4, 5]
    assert (checkpoint.root["step"], checkpoint.root["name"]) == (3, "net")
    assert checkpoint.details.storage_bytes == 24


@pytest.mark.parametrize("protocol", range(6))
def test_tensors_that_pickle_itself_wrote(read, protocol):
    weight = torch.arange(6.0).reshape(2, 3)
    source = {"w": weight, "t": weight.t(), "n": torch.arange(3), "p": torch.nn.Parameter(weight)}
    checkpoint = read(pickle.dumps(source, protocol))
    for name, wanted in source.items():
        ref = checkpoint.root[name]
        assert (ref.shape, ref.stride) == (tuple(wanted.shape), wanted.stride())
        assert values(ref) == wanted.flatten().tolist()
    assert checkpoint.root["p"].is_parameter


class Estimator:
    def __init__(self):
        self.coef = numpy.ones(2, "float32")


def test_objects_are_data(read):
    checkpoint = read(pickle.dumps({"model": Estimator()}))
    model = checkpoint.root["model"]
    assert isinstance(model, Opaque)
    assert model.class_name.endswith("Estimator")
    assert [ref.shape for _, ref in checkpoint.tensors()] == [(2,)]


def test_a_persistent_id_of_someone_else_is_data(read):
    checkpoint = read(b"\x80\x02}X\x01\x00\x00\x00aX\x03\x00\x00\x00keyQs.")
    assert checkpoint.root["a"].class_name == "persistent id"


def test_what_follows_the_pickle_is_a_note(read):
    checkpoint = read(pickle.dumps({"a": 1}, 2) + b"12345")
    assert checkpoint.root == {"a": 1}
    assert checkpoint.details.dead_bytes == 5
    assert checkpoint.details.left_behind == ("5 bytes after the pickle (not read)",)
    one = read(pickle.dumps({"a": 1}, 2) + b"1")
    assert one.details.left_behind == ("1 byte after the pickle (not read)",)


def test_other_content_is_not_taken(recognized):
    for data in [
        b"", b"(c) 2020 The authors. All rights reserved.\n", b"(see README)\n.", b"[]",
        b"[section]\nkey = value\n", b"{}", b"I1\n.", b"N.", b"cos\nsystem\n.", b"cat\nfood\n",
        b"}{", b"((((((((((((((((", b"\x80\x01}.", b"\x80\x06}.", b"PK\x03\x04", b"text",
    ]:  # fmt: skip
        assert not recognized(data), data


def test_a_pickle_that_states_no_protocol_is_taken_if_it_reads_as_one(recognized):
    for data in [b"(dp0\n.", b"}.", b"(lp0\nI1\na.", b"].", b"(t."]:
        assert recognized(data), data


def test_nothing_of_it_runs(read, tmp_path):
    import os

    target = tmp_path / "ran"
    checkpoint = read(pickle.dumps({"a": Called(os.mkdir, str(target))}))
    assert isinstance(checkpoint.root["a"], Opaque)
    assert not target.exists()


def test_tensors_inside_tensors_are_bounded(read):
    data = stream([], [], [])
    for _ in range(2):
        data = stream([Called(torch.storage._load_from_bytes, data) for _ in range(99)], [], [])
    hostile = pickle.dumps([Called(torch.storage._load_from_bytes, data)] * 99)
    with pytest.raises(
        LimitExceeded, match="pickles in the pickle are nested too deeply or used too often"
    ):
        read(hostile)


def test_a_storage_in_a_pickle_that_lies_is_damage_of_the_file(tmp_path):
    inner = io.BytesIO()
    torch.save(torch.ones(3).storage(), inner, _use_new_zipfile_serialization=False)
    lying = inner.getvalue()[:-20] + struct.pack("<q", 9) + bytes(12)
    path = tmp_path / "it.pkl"
    path.write_bytes(pickle.dumps(Called(torch.storage._load_from_bytes, lying)))
    with pytest.raises(CorruptFile, match=r"it\.pkl: .*should have 3 elements"):
        ckptool.open(path)


JOBLIB = base64.b85decode(
    "fCQD-000000001el#Bs)l#CN<Z(?j|VlHlVZE$&CaA{*}Y-N;;5l(e&aCt#;a$$K_a$#_AWpb30lqrFfeUvDS"
    "2y=B}V{Bn_bCiq)Zgp*Nd6bL?Ze(F{a$$Ltla!1Fb7*03Wt2+;g_Mj1Z*pX1a+Hh#LzIjKWOR9OWt3<Lj0I$L"
    "d2nTvla!1CW;m3Ih=-I?lqgFBi~&59PEJlr|NsC0O8@`=|4RULlwynuVQg$~cVBI7VQ`d)j2musZE$&CVRCX|"
    "d0$~{X=iS2Wo~p|VtI6BbCgREbz%+w|NsC0|NsC0|NsC0000000000000000008hm000000000$b1n"
)
"""What joblib 1.6 wrote of `{"w": numpy.arange(3.0)}`."""


def squeezed(level):
    return lambda data: zlib.compress(data, level)


PACKS = [bytes, gzip.compress, bz2.compress, lzma.compress, squeezed(1), squeezed(3), squeezed(9)]


@pytest.mark.parametrize("pack", [*PACKS, lambda data: lzma.compress(data, lzma.FORMAT_ALONE)])
def test_a_file_of_joblib_is_named_with_its_way_out(tmp_path, pack):
    for first in [b"", b"."]:
        at = JOBLIB.index(b"ub") + 2
        (tmp_path / "a.joblib").write_bytes(pack(JOBLIB[:at] + first + JOBLIB[at:]))
        with pytest.raises(CheckpointError) as caught:
            ckptool.open(tmp_path / "a.joblib")
        assert "damaged" not in str(caught.value)
        assert "read it with joblib.load" in caught.value.hint


def test_a_pickle_that_joblib_wrote_without_arrays_is_read(tmp_path):
    (tmp_path / "a.joblib").write_bytes(pickle.dumps({"n": 1}, 4))
    assert ckptool.open(tmp_path / "a.joblib").root == {"n": 1}


def test_a_damaged_pickle_is_not_one_of_joblib(tmp_path):
    (tmp_path / "a.joblib").write_bytes(JOBLIB.replace(b"joblib.", b"joblob."))
    with pytest.raises(CorruptFile, match="damaged at byte"):
        ckptool.open(tmp_path / "a.joblib")


class OfPaddle:
    """What PaddlePaddle pickles of a LoDTensor (framework/io.py, `reduce_LoDTensor`)."""

    def __init__(self, array, text="data"):
        self.array, self.text = array, text

    def __reduce__(self):
        return eval, (self.text, {"data": self.array})


def test_arrays_that_paddle_pickles_by_a_call_are_tensors(tmp_path):
    tree = {"fc.weight": numpy.ones((2, 3), numpy.float32), "fc.bias": OfPaddle(numpy.arange(3.0))}
    path = tmp_path / "model.pdparams"
    path.write_bytes(pickle.dumps(tree, protocol=2))
    state = ckptool.load_state_dict(path)
    assert state["fc.bias"].tolist() == [0, 1, 2]
    assert list(state) == ["fc.weight", "fc.bias"]


def test_any_other_call_of_eval_stays_a_call(tmp_path):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"a": OfPaddle(numpy.ones(1), "print(1)"), "b": OfPaddle(1)}))
    with ckptool.open(path) as checkpoint:
        assert {type(one) for one in checkpoint.root.values()} == {Opaque}
