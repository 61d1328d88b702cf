"""What a file's section is for matching."""

from __future__ import annotations

from ckptool.matching import EXTRA, Slot, slots_of
from ckptool.matching.report import fits
from ckptool.model import Global, Opaque, OrderedMap, TensorRef, Wrapping
from ckptool.statedict import sections
from tests.trees import module, scalar, storage, tensor


def only(root):
    return slots_of(sections(root)[0])


def parameter(*shape):
    return tensor(*shape, wrapping=(Wrapping("parameter"),))


def test_tensors_have_shape_and_dtype_in_the_order_of_the_file():
    slots = only(OrderedMap(b=tensor(2, 3), a=tensor(4, dtype="int64")))
    assert list(slots.items()) == [("b", Slot((2, 3), "float32")), ("a", Slot((4,), "int64"))]


def test_names_of_one_tensor_are_tied_and_views_are_not():
    over = storage(64)
    both = tensor(2, 2, over=over)
    slots = only(
        OrderedMap(a=both, b=tensor(2, 2, over=over), c=tensor(4, over=over), d=tensor(2, 2))
    )
    assert slots["a"].tie == slots["b"].tie is not None
    assert slots["c"].tie is slots["d"].tie is None


def test_one_tensor_without_storage_under_two_names_is_tied():
    sparse = TensorRef("float32", (2, 2), (), 0, None, "cpu", kind="sparse_coo")
    other = TensorRef("float32", (2, 2), (), 0, None, "cpu", kind="sparse_coo")
    slots = only(OrderedMap(a=sparse, b=sparse, c=other))
    assert slots["a"].tie == slots["b"].tie is not None
    assert slots["c"].tie is None


def test_entries_of_modules_that_are_no_tensors_are_extra():
    root = OrderedMap({"fc.w": tensor(), "fc.dtype": Opaque(Global("a", "B"), ()), "fc._x": 1})
    root["fc._extra_state"] = {"scale": 2}
    root["epoch"] = 3
    root.attributes["_metadata"] = OrderedMap({"": {"version": 1}, "fc": {"version": 1}})
    slots = only(root)
    assert [name for name, slot in slots.items() if slot.kind == "extra"] == [
        "fc.dtype", "fc._x", "fc._extra_state",
    ]  # fmt: skip
    assert "epoch" not in slots


def test_a_pickled_module_tells_its_parameters_from_its_buffers():
    net = module(
        parameters={"w": parameter(2)},
        buffers={"count": scalar()},
        _non_persistent_buffers_set=set(),
    )
    kinds = {name: slot.kind for name, slot in only(net).items()}
    assert kinds == {"w": "parameter", "count": "buffer"}


def test_an_extra_state_is_one_whatever_it_is():
    root = OrderedMap({"fc.w": tensor(), "fc._extra_state": tensor(2), "_extra_state": tensor(3)})
    assert only(root) == {
        "fc.w": Slot((2,), "float32"),
        "fc._extra_state": EXTRA,
        "_extra_state": EXTRA,
    }


def test_a_scalar_takes_one_number_and_an_unknown_shape_anything():
    assert fits(Slot((1,)), Slot(()))
    assert not fits(Slot(()), Slot((1,)))
    assert fits(Slot((2, 2)), Slot(None))
    assert fits(Slot(None), Slot((2,)))
    assert not fits(Slot((3,)), Slot((2,)))


def test_what_is_no_tensor_fits_where_none_is_asked_for():
    tensor, lazy = Slot((2,)), Slot(kind="parameter")
    assert all(fits(found, EXTRA) for found in (tensor, lazy, EXTRA))
    assert fits(EXTRA, lazy)
    assert not fits(EXTRA, tensor)


def test_elements_are_counted_and_one_where_they_are_not_known():
    assert [Slot((2, 3)).elements, Slot(()).elements, Slot(None).elements] == [6, 1, 1]
