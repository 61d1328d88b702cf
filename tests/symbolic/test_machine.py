"""The machine holds the same data as Python's own unpickler, protocol by protocol."""

import pickle
import pickletools
from collections import OrderedDict

import pytest
from hypothesis import given, strategies as st

from ckptool.core.model import ByteString, DeviceValue, Global, Opaque, OrderedMap, Size
from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.limits import Limits
from tests.symbolic.pickles import plain, read

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(trees)
def test_plain_data_is_what_python_reads(tree):
    for protocol in PROTOCOLS:
        data = pickle.dumps(tree, protocol)
        assert plain(read(data).root) == tree, protocol
        few_memo_entries = pickletools.optimize(data)
        assert plain(read(few_memo_entries).root) == tree, protocol


def test_what_is_shared_is_one_object():
    for protocol in PROTOCOLS:
        shared = [1]
        root = read(pickle.dumps({"a": shared, "b": shared}, protocol)).root
        assert root["a"] is root["b"], protocol


def test_a_list_that_holds_itself():
    for protocol in PROTOCOLS:
        loop: list = []
        loop.append(loop)
        root = read(pickle.dumps(loop, protocol)).root
        assert root[0] is root, protocol


def test_the_end_is_behind_the_first_stop_and_the_protocol_is_told():
    data = pickle.dumps([1], 4)
    found = read(data + b"trailing")
    assert (found.end, found.protocol) == (len(data), 4)


def test_an_ordered_dict_keeps_its_attributes_apart_from_its_methods():
    made = OrderedDict(a=1)
    made._metadata = {"": {"version": 1}}
    made.other = 5
    data = pickle.dumps(made, 2).replace(b"other", b"items")  # a file can set any attribute
    root = read(data).root
    assert isinstance(root, OrderedMap)
    assert list(root.items()) == [("a", 1)]
    assert root.metadata == {"": {"version": 1}}


def test_python_2_ordered_dicts_come_as_pairs():
    data = b"\x80\x02ccollections\nOrderedDict\n]](U\x01aK\x05ea\x85R."
    assert dict(read(data).root) == {"a": 5}


def test_python_2_strings_are_text_and_keep_their_bytes():
    raw = bytes([0xBE, 0xFF, 0x41])
    text = read(b"\x80\x02U\x03" + raw + b".").root
    assert text == raw.decode("latin-1")
    assert isinstance(text, ByteString)
    assert text.raw == raw
    assert read("\x80\x02U\x04ab".encode("latin-1") + "é".encode() + b".").root == "abé"
    assert read(b"S'it''s'\n.".replace(b"''", b"\\'")).root == "it's"


def test_python_2_names_are_shown_in_todays_spelling_and_kept():
    made = read(b"\x80\x02c__builtin__\nset\n](K\x01e\x85R.").root
    assert made.class_name == "builtins.set"
    assert made.func == Global("__builtin__", "set", "builtins.set")


def test_devices_sizes_and_dtypes_are_values():
    assert read(b"\x80\x02ctorch\ndevice\nX\x04\0\0\0cudaK\x01\x86R.").root == DeviceValue("cuda:1")
    size = read(b"\x80\x02ctorch\nSize\nK\x02K\x03\x86\x85R.").root
    assert size == (2, 3)
    assert isinstance(size, Size)
    assert read(b"\x80\x02ctorch\nfloat32\n.").root.class_name == "torch.dtype"


def test_unknown_calls_and_objects_stay_data():
    made = read(pickle.dumps(range(3), 2)).root
    assert isinstance(made, Opaque)
    assert (made.class_name, made.args) == ("builtins.range", (0, 3, 1))


def test_opcodes_that_weights_only_refuses_are_named():
    assert read(pickle.dumps(["a"], 2)).opcodes == ()
    assert "FRAME" in read(pickle.dumps(["a"], 4)).opcodes


def test_protocol_0_persistent_ids_are_the_repr_of_a_tuple():
    seen = []

    def load(pid):
        seen.append(pid)
        return Opaque(None, (pid,), maker="persid")

    read(
        b"P('storage', <class 'torch.FloatStorage'>, '948', 'cpu', 2, None)\n.",
        persistent_load=load,
    )
    read(b"P94\n.", persistent_load=load)
    assert seen == [("storage", Global("torch", "FloatStorage"), "948", "cpu", 2, None), "94"]


def test_damage_is_told_with_its_place():
    for data, said in [
        (b"", "the pickle is truncated"),
        (b"\x80\x02", "the pickle is truncated"),
        (b"\x80\x02]", "the pickle is truncated"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "the pickle is truncated"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02\xfe..", "no such opcode"),
        (b"\x80\x02..", "damaged at byte 2"),
        (b"\x80\x02a...", "cannot run"),
        (b"\x80\x02h\x05..", "cannot run"),
        (b"\x80\x02K\x01K\x02b..", "state is set on a int"),
        (b"\x80\x02}(K\x01u...", "a key without a value"),
        (b"\x80\x02}]K\x01s..", "a list is used as a dict key"),
        (b"\x80\x02cfoo\nBar\n)\x81]K\x01s.", "a list is used as a dict key"),
        (b"\x80\x02\x82\x01....", "extension registry"),
        (b"\x80\x05\x97....", "out-of-band"),
        (b"\x80\x02K\x01K\x02a...", "added to a int"),
        (b"\x80\x02K\x01(K\x02\x90...", "added to a int"),
        (b"\x80\x02K\x01K\x02\x93...", "name of a global"),
        (b"I1x\n....", "cannot run"),
        (b"S'abc\n....", "without quotes"),
    ]:
        with pytest.raises(CorruptFile, match=said) as caught:
            read(data)
        assert caught.value.file == "test.pkl", data
        is_cut = isinstance(caught.value, TruncatedFile)
        assert caught.value.hint == ("save, copy or download the file again" if is_cut else None), (
            data
        )


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (b"\x80\x02\x8b\xfa\x06\0\0" + b"\1" * 1786 + b".", Limits()),
        (b"L" + b"9" * 5000 + b"L\n.", Limits()),
        (b"I" + b"9" * 5000 + b"\n.", Limits()),
        (b"\x80\x02}" + b"K\x01" * 2 + b"\x86" + b"2\x86" * 40 + b"Ns.", Limits()),
        (pickle.dumps("x" * 100, 2), Limits(max_pickle_bytes=50)),
    ],
    ids=["LONG4", "LONG", "INT", "a key that doubles", "pickle length"],
)
def test_limits(data, limits):
    with pytest.raises(LimitExceeded):
        read(data, limits=limits)


def test_memo_indexes_far_ahead_cost_nothing():
    assert read(b"\x80\x02K\x05r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.").root == 5


def test_memo_indexes_in_any_order():
    data = b"\x80\x02(K\x07q\x050K\x08q\x000K\x09q\x010h\x05h\x00h\x01t."
    assert read(data).root == (7, 8, 9)
