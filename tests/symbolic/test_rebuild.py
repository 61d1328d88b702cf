"""Torch's rebuild functions: right arguments make tensors, wrong ones an error, never a crash."""

import io
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from ckptool.core.model import Opaque, Storage, StorageRef, TensorRef
from ckptool.errors import CheckpointError, LimitExceeded
from ckptool.files import ByteRange, MemorySource
from ckptool.symbolic import calls
from ckptool.symbolic.encoder import encode
from tests.symbolic.pickles import read

STORAGE = Storage("0", ByteRange(MemorySource(bytes(96), "test.pkl"), 0, 96), 96, "cuda:3")


def load_storage(pid):
    return StorageRef(STORAGE, "float32")


class Call:
    """Pickles as the call of a global with these arguments."""

    def __init__(self, qualified, *args):
        self.qualified, self.args = qualified, args


class Writer(pickle._Pickler):
    """A pickler that writes `Call`s and mentions of the storage."""

    def persistent_id(self, value):
        return ("storage",) if value is STORAGE else None

    def save(self, value, save_persistent_id=True):
        if not isinstance(value, Call):
            return super().save(value, save_persistent_id)
        module, _, name = value.qualified.rpartition(".")
        self.write(f"c{module}\n{name}\n".encode())
        self.save(value.args)
        self.write(b"R")
        return None


def machine_reads(value):
    out = io.BytesIO()
    Writer(out, 2).dump(value)
    return read(out.getvalue(), persistent_load=load_storage).root


def tensor(*size):
    stride = [1]
    for length in reversed(size[1:]):
        stride.insert(0, stride[0] * length)
    return Call(
        "torch._utils._rebuild_tensor_v2", STORAGE, 0, size, tuple(stride[: len(size)]), False, {}
    )


def test_the_plain_tensor_is_described_and_bounded_by_its_storage():
    ref = machine_reads(tensor(2, 3))
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.shape, ref.stride, ref.device) == ("float32", (2, 3), (3, 1), "cuda:3")
    with pytest.raises(CheckpointError, match="outside its storage"):
        machine_reads(tensor(5, 5))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (0, (2,), (1, 1)),
        (0, (2,), (-1,)),
        (0, (2**62, 2**62), (0, 0)),
        (2**70, (), ()),
        (0, (2.0,), (1,)),
        (0, ("2",), (1,)),
        (0, (True,), (1,)),
        (24, (1,), (1,)),
        (0, (2,), (2**64,)),
        (None, (2,), (1,)),
    ],
)
def test_places_that_cannot_be_are_refused(offset, size, stride):
    with pytest.raises(CheckpointError):
        machine_reads(Call("torch._utils._rebuild_tensor_v2", STORAGE, offset, size, stride, 0, {}))


def test_layers_are_kept_in_order_and_written_back():
    made = Call(
        "torch._utils._rebuild_parameter",
        Call("torch._utils._rebuild_parameter_with_state", tensor(2), False, {}, {"a": 1}),
        True,
        {},
    )
    ref = machine_reads(made)
    assert [layer.kind for layer in ref.wrapping] == ["parameter_state", "parameter"]
    again = read(encode(ref).data, persistent_load=load_storage).root
    assert [layer.kind for layer in again.wrapping] == ["parameter_state", "parameter"]
    assert (again.is_parameter, again.requires_grad, again.shape) == (True, True, (2,))


def test_a_parameter_of_torch_0_3_takes_its_state_by_build():
    data = (
        b"\x80\x02ctorch.nn.parameter\nParameter\nq\x01ctorch._utils\n_rebuild_tensor\n"
        b"(X\x01\0\0\0sQK\0K\x02\x85K\x01\x85tR\x85Rq\x02\x89\x89ccollections\nOrderedDict\n)R"
        b"\x87bh\x02\x86."
    )
    first, second = read(data, persistent_load=load_storage).root
    assert first is second
    assert (first.is_parameter, first.requires_grad) == (True, False)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.floats()
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("qualified", sorted(calls.RECOGNIZED))
@settings(max_examples=40)
@given(args=st.lists(junk | st.just(STORAGE) | st.just(tensor(2)), max_size=9))
def test_wrong_arguments_make_an_error_or_an_object(qualified, args):
    try:
        made = machine_reads(Call(qualified, *args))
    except CheckpointError:
        return
    assert (
        made is None
        or isinstance(made, (TensorRef, Opaque, dict, tuple, bytes, complex))
        or (type(made).__name__ in ("DeviceValue", "StorageRef", "Size"))
    )


def test_calls_nested_without_end_meet_a_limit():
    level = b"(ctorch._tensor\n_rebuild_from_type_v2\nN"
    data = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n" + level * 5000 + b"N" + b"Nt" * 5000
    with pytest.raises(LimitExceeded):
        read(data + b"R.")
