"""The report: what of a model is loaded, counted; slots of a file's section; all of it as JSON."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from ckptool.core.model import Global, Opaque, OrderedMap, TensorRef, Wrapping
from ckptool.core.sections import find_sections
from ckptool.matching import (
    EXTRA,
    Ambiguity,
    DtypeChange,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Overlap,
    Renaming,
    Slot,
    slots_of,
)
from ckptool.matching.report import count_loaded, fits, is_exact_cast, list_casts
from tests.trees import module, scalar, storage, tensor


def test_an_empty_report_fits_and_covers_all():
    assert MatchReport().fits
    assert MatchReport().coverage == 1.0


def test_every_field_is_in_the_document():
    report = MatchReport(
        file="a.pth",
        model="Net",
        missing_keys=["a"],
        unexpected_keys=["b"],
        mismatched=(Mismatch("c", "m.c", (None, 2), (3,)),),
        renamed=(Renaming("prefix", "m. taken off", (("m.c", "c"),)),),
        cast=(DtypeChange("d", "d", "float32", "float16", True, "1 of 2 overflow"),),
        tied=(("e", "f"),),
        untied=(("g", "h"),),
        overlapping=(Overlap(("j", "k"), "j"),),
        ambiguous=(Ambiguity(("b",), ("a", "i"), ("^b=>a",)),),
        left_out=(("n_averaged", "a counter"),),
        kept=(("bn.num_batches_tracked", "a counter"),),
        loaded=1,
        parameters=4,
        optimizer=OptimizerReport("names", 1, 2, ("it has two groups",)),
        notes=("one",),
    )
    document = report.to_dict()
    assert json.loads(json.dumps(document)) == document
    fields = {*MatchReport.__dataclass_fields__} - {"accepted"}
    assert set(document) == {"schema", "fits", "coverage", *fields}
    assert document["schema"] == "ckptool.match/1"
    assert (document["fits"], document["coverage"]) == (False, 0.25)
    assert document["renamed"][0]["rule"] is None
    assert document["mismatched"] == [
        {"name": "c", "own": "m.c", "shape": [None, 2], "wanted": [3]}
    ]
    assert document["optimizer"]["problems"] == ["it has two groups"]


def parameter(*shape, tie=None):
    return Slot(shape, "float32", "parameter", tie)


def test_ties_count_once_and_as_loaded_where_one_of_them_is():
    want = {"a": parameter(4, 4, tie=1), "b": parameter(4, 4, tie=1), "c": parameter(10)}
    assert count_loaded(want, {"c"}, ()) == {
        "loaded": 10,
        "parameters": 26,
        "fitting": 1,
        "names": 3,
    }
    assert count_loaded(want, {"b", "c"}, ())["loaded"] == 26


def test_buffers_count_as_names_alone_where_there_are_parameters():
    want = {"w": parameter(2), "mean": Slot((5,), "float32", "buffer"), "_extra_state": EXTRA}
    assert count_loaded(want, {"mean"}, ()) == {
        "loaded": 0,
        "parameters": 2,
        "fitting": 1,
        "names": 3,
    }
    del want["w"]
    assert count_loaded(want, {"mean"}, ())["loaded"] == 5


def test_what_is_kept_is_not_asked_for():
    want = {"w": parameter(2), "v": parameter(3)}
    assert count_loaded(want, {"w"}, {"v"}) == {
        "loaded": 2,
        "parameters": 2,
        "fitting": 1,
        "names": 1,
    }


def test_names_count_where_nothing_has_elements():
    want = {"a": parameter(0), "b": parameter(0)}
    assert count_loaded(want, {"a"}, ())["loaded"] == 1


def test_a_cast_is_lossy_by_what_the_types_hold():
    have = {"a": Slot((1,), "float16"), "b": Slot((1,), "float64"), "c": Slot((1,), "float32")}
    want = {name: Slot((1,), "float32") for name in "abc"}
    assert [
        (one.name, one.lossy) for one in list_casts({name: name for name in want}, have, want)
    ] == [
        ("a", False),
        ("b", True),
    ]


def only(root):
    return slots_of(find_sections(root)[0])


def parameter_ref(*shape):
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
        parameters={"w": parameter_ref(2)},
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


torch = pytest.importorskip("torch")

REAL = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
KNOWN = [*REAL, "uint16", "uint32", "uint64", "float8_e8m0fnu", "complex64", "complex128"]


def telling(dtype):
    """Numbers of a type that others may not hold."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.tensor([False, True])
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        return torch.tensor([limits.min, -1 % 128, 0, 1, 3, limits.max // 2 + 1, limits.max]).to(
            kind
        )
    if kind.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(kind)
    limits = torch.finfo(kind)
    wide = torch.tensor(
        [
            *(limits.max, limits.min, limits.tiny, limits.smallest_normal, 0, 1, 1 + limits.eps),
            *(math.inf, -math.inf, math.nan),
        ],
        dtype=torch.float64,
    )
    tiny = (
        torch.zeros(1, dtype=kind).view(
            {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
        )
        + 1
    )
    return torch.cat([wide.to(kind), tiny.view(kind)])


def test_a_type_holds_another_where_torch_gives_every_number_back():
    for narrow, wide in itertools.product(REAL, REAL):
        numbers = telling(narrow)
        there = numbers.to(getattr(torch, wide))
        same = (numbers.double() == there.double()) | (
            numbers.double().isnan() & there.double().isnan()
        )
        back = there.tolist() == numbers.tolist() or numbers.is_floating_point()
        assert is_exact_cast(wide, narrow) == (back and bool(same.all())), (wide, narrow)


def test_every_type_holds_itself():
    assert [dtype for dtype in KNOWN if not is_exact_cast(dtype, dtype)] == []


def test_other_types():
    for wide, narrow, does in (
        ("complex64", "float32", True),
        ("complex64", "float64", False),
        ("complex128", "complex64", True),
        ("complex64", "complex128", False),
        ("float32", "complex64", False),
        ("complex64", "int8", True),
        ("uint64", "int64", False),
        ("int64", "uint32", True),
        ("float32", "float8_e8m0fnu", True),
        ("float8_e8m0fnu", "bool", False),
        ("float8_e5m2fnuz", "float8_e5m2", False),
        ("float32", "qint8", False),
        ("qint8", "int8", False),
        ("float32", "unheard_of", False),
    ):
        assert is_exact_cast(wide, narrow) is does, (wide, narrow)
