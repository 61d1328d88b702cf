import pickle
import struct
import tarfile
from functools import partial

import pytest
import torch

import ckptool
from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.formats.base import Probe
from ckptool.formats.torch_tar import TORCH_TAR, is_tar, read_members
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.contract import FormatContract
from tests.formats.legacy_streams import Pid, dumps
from tests.formats.zips import read as read_as, tarred, values


class TestContract(FormatContract):
    name = "torch-tar"
    sample = "streams/torch_0.1.tar"


FLOATS = (10, "cpu", torch.FloatStorage), 6, struct.pack("<6f", *range(6))
LONGS = (11, "cuda:2", torch.LongStorage), 2, struct.pack("<2q", 7, 8)


def geometry(shape, stride, offset):
    parts = [struct.pack("<i4x", len(shape)), struct.pack(f"<{len(shape)}q", *shape)]
    parts += [struct.pack(f"<{len(stride)}q", *stride), struct.pack("<q", offset)]
    return b"".join(parts)


def storages(entries, views=(), count=None):
    parts = [pickle.dumps(len(entries) if count is None else count, 2)]
    for record, numel, data in entries:
        parts += [pickle.dumps(record, 2), struct.pack("<q", numel), data]
    return b"".join([*parts, pickle.dumps(list(views), 2)])


def tensors(entries, count=None):
    parts = [pickle.dumps(len(entries) if count is None else count, 2)]
    for record, shape, stride, offset in entries:
        parts += [pickle.dumps(record, 2), geometry(shape, stride, offset)]
    return b"".join(parts)


TENSORS = [
    ((20, 10, torch.FloatTensor), (2, 3), (3, 1), 0),
    ((21, 10, torch.FloatTensor), (3,), (2,), 1),
    ((22, 11, torch.LongTensor), (2,), (1,), 0),
]
TREE = {"w": Pid(), "column": Pid(), "n": Pid(), "again": Pid(), "epoch": 3}
for name, key in {"w": "20", "column": "21", "n": "22", "again": "20"}.items():
    TREE[name].pid = key


def members(**changed):
    usual = {
        "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2),
        "pickle": dumps(TREE),
        "tensors": tensors(TENSORS),
        "storages": storages([FLOATS, LONGS]),
    }
    return {**usual, **changed}


read = partial(read_as, TORCH_TAR)


def test_a_tar_reads_as_torch_reads_it(file):
    path = file(tarred(members()))
    expected = torch.load(path, weights_only=False, map_location="cpu")
    with read(path) as checkpoint:
        root = checkpoint.root
        assert root["epoch"] == expected["epoch"] == 3
        for name in ("w", "column", "n"):
            assert root[name].shape == tuple(expected[name].shape)
            assert root[name].stride == expected[name].stride()
            assert values(root[name]) == expected[name].flatten().tolist()
        assert root["again"] is root["w"]
        assert root["column"].storage is root["w"].storage
        assert checkpoint.devices == {"cpu": 3, "cuda:2": 1}
        assert checkpoint.details.storage_bytes == 40
        assert checkpoint.format == "torch-tar"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_kind_of_tar(file, form):
    with read(file(tarred(members(), form, mtime=0))) as checkpoint:
        assert values(checkpoint.root["n"]) == [7, 8]


def test_a_view_is_the_part_of_the_storage_that_it_looks_at(file):
    views = [(12, 10, 2, 3)]
    over_view = [((20, 12, torch.FloatTensor), (2,), (2,), 0)]
    parts = members(
        storages=storages([FLOATS], views), tensors=tensors(over_view), pickle=dumps([TREE["w"]])
    )
    path = file(tarred(parts))
    expected = torch.load(path, weights_only=False)
    with read(path) as checkpoint:
        assert values(checkpoint.root[0]) == expected[0].tolist() == [2, 4]
        assert checkpoint.root[0].storage.nbytes == 12


def test_a_storage_may_be_referred_to_and_a_class_with_its_source(file):
    cls = Pid()
    cls.pid = (torch.nn.Linear, "linear.py", "class Linear: ...")
    storage = Pid()
    storage.pid = "10"
    with read(file(tarred(members(pickle=dumps([storage, cls]))))) as checkpoint:
        found, module = checkpoint.root
        assert found.dtype == "float32"
        assert found.storage.key == "10"
        assert module.qualified == "torch.nn.modules.linear.Linear"
        assert "source code of torch.nn.modules.linear.Linear" in checkpoint.details.left_behind[0]


def test_the_first_tar_had_no_locations(file):
    entry = (10, torch.FloatStorage), *FLOATS[1:]
    parts = members(
        storages=storages([entry]), tensors=tensors(TENSORS[:1]), pickle=dumps([TREE["w"]])
    )
    with read(file(tarred(parts))) as checkpoint:
        assert checkpoint.devices == {"cpu": 1}


def test_another_tar_is_not_taken(file):
    probe = Probe(file(tarred({"a.txt": b"a", "pickle": b"b"})), DEFAULT_LIMITS)
    assert not TORCH_TAR.recognize(probe)
    probe.close()


# Damage


def odd_pid(pid):
    odd = Pid()
    odd.pid = pid
    return dumps([odd])


OVER = ((20, 10, torch.FloatTensor), (2, 3), (3, 1), 1)
MANY = ((20, 10, torch.FloatTensor), (1,) * 65, (1,) * 65, 0)


def test_a_member_that_breaks_a_rule_is_damage(file):
    for changed, words in [
        ({"storages": storages([FLOATS], count=-1)}, "has -1 as a number of entries"),
        ({"storages": storages([FLOATS], count=1 << 60)}, "number of entries"),
        ({"storages": storages([FLOATS], count="1")}, "has '1' as a number of entries"),
        ({"storages": storages([FLOATS, FLOATS])}, "a key that is used twice"),
        ({"storages": storages([(("10", "cpu", torch.FloatStorage), *FLOATS[1:])])}, "key"),
        ({"storages": storages([((10, 5, torch.FloatStorage), *FLOATS[1:])])}, "device"),
        ({"storages": storages([((10, "cpu", torch.nn.Linear), *FLOATS[1:])])}, "Linear"),
        ({"storages": storages([(10, *FLOATS[1:])])}, "key"),
        (
            {"storages": storages([(FLOATS[0], -6, FLOATS[2])])},
            "member 'storages': cannot read -24 bytes",
        ),
        (
            {"storages": storages([(FLOATS[0], 1 << 62, FLOATS[2])])},
            "member 'storages': .* of a range of",
        ),
        ({"storages": storages([FLOATS, LONGS], [(12, 10, 4, 3)])}, "view 12"),
        ({"storages": storages([FLOATS, LONGS], [(12, 10, -1, 3)])}, "view"),
        ({"storages": storages([FLOATS, LONGS], [(12, 99, 0, 3)])}, "view"),
        ({"storages": storages([FLOATS, LONGS], [7])}, "view"),
        ({"tensors": tensors([OVER])}, "outside its storage"),
        ({"tensors": tensors([MANY])}, "65 dimensions"),
        ({"tensors": tensors([((20, 99, 0), (1,), (1,), 0)])}, "storage that is missing"),
        ({"tensors": tensors([("20", (1,), (1,), 0)])}, "without a key"),
        ({"tensors": tensors(TENSORS, count=4)}, "is truncated"),
        ({"tensors": b""}, "is truncated"),
        ({"pickle": odd_pid("99")}, "neither a tensor nor a storage"),
        ({"pickle": odd_pid("x" * 1000)}, "neither a tensor nor a storage"),
        ({"pickle": odd_pid(2.5)}, "neither a tensor nor a storage"),
        ({"pickle": b"\x80\x02}q\0"}, "is truncated"),
    ]:
        path = file(tarred(members(**changed)))
        with pytest.raises(CorruptFile, match=words) as error:
            ckptool.open(path)
        assert str(path) in str(error.value)


def spans(data, file):
    probe = Probe(file(data), DEFAULT_LIMITS)
    found = read_members(probe.source, DEFAULT_LIMITS)
    probe.close()
    return found


# The members


def test_names_sizes_and_order_are_those_that_tarfile_wrote(file):
    named = {"a": b"", "b/" + "long" * 40: b"x" * 513, "ö": b"yy"}
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        assert {name: data.length for name, data in spans(tarred(named, form), file).items()} == {
            name: len(data) for name, data in named.items()
        }


def test_a_split_name_of_ustar(file):
    name = "d" * 90 + "/" + "f" * 90
    assert list(spans(tarred({name: b"1"}, tarfile.USTAR_FORMAT, 0), file)) == [name]


def header(name=b"a", size=b"00000000000\0", kind=b"0"):
    block = bytearray(512)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_a_size_in_base_256(file):
    data = header(size=b"\x80" + (3).to_bytes(11, "big")) + b"abc"
    assert spans(data, file)["a"].length == 3


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (header(size=b"00000002000\0") + bytes(100), TruncatedFile, "924 bytes too early"),
        (header(size=b"\x80" + b"\xff" * 11), TruncatedFile, "bytes too early"),
        (header(size=b"\xff" * 12), CorruptFile, "no size"),
        (header(size=b"9999"), CorruptFile, "no size"),
        (header() + b"x" * 512, CorruptFile, "no member header at offset 512"),
        (header(kind=b"x", size=b"00010000000\0") + bytes(8 << 20), LimitExceeded, "header takes"),
        (header() * 6, LimitExceeded, "more than 5 members"),
    ],
)
def test_headers_that_lie(tmp_path, data, kind, words):
    path = tmp_path / "hostile.tar"
    path.write_bytes(data)
    probe = Probe(path, Limits(max_records=5))
    assert is_tar(probe.head)
    with pytest.raises(kind, match=words):
        read_members(probe.source, probe.limits)
    probe.close()


@pytest.mark.parametrize(
    "records", [b"abc", b"0 path=x\n", b"99 path=b\n", b"9 size=-1\n", b"9" * 30 + b" path=x\n"]
)
def test_pax_records_that_are_none_change_nothing_that_counts(tmp_path, records):
    path = tmp_path / "hostile.tar"
    size = b"%011o\0" % len(records)
    block = records + bytes(512 - len(records))
    path.write_bytes(header(kind=b"x", size=size) + block + header(size=b"00000000001\0") + b"1")
    probe = Probe(path, DEFAULT_LIMITS)
    (found,) = read_members(probe.source, probe.limits).values()
    assert found.length == 1
    probe.close()


@pytest.mark.parametrize("records", [[b"11 path=xx\n"] * 3000, [b"1" * 60_000] * 20])
def test_pax_records_cost_what_their_bytes_cost(records, tmp_path):
    path = tmp_path / "hostile.tar"
    blocks = [
        header(kind=b"x", size=b"%011o\0" % len(one)) + one.ljust(-(-len(one) // 512) * 512, b"\0")
        for one in records
    ]
    path.write_bytes(b"".join(blocks) + header(size=b"00000000001\0") + b"1")
    probe = Probe(path, DEFAULT_LIMITS)
    (found,) = read_members(probe.source, probe.limits).values()
    assert found.length == 1
    probe.close()
