"""Figures of tensors beside what torch computes in float64."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from ckptool.core.model import Global, Storage, TensorRef
from ckptool.errors import CorruptFile, TruncatedFile, UsageError
from ckptool.files import ByteRange, FileSource, InflatedSource
from ckptool.tensors import statistics
from ckptool.tensors.statistics import Histogram, Measurer, find_obstacle
from ckptool.tensors.storages import use_one_thread
from tests.tensors import samples
from tests.tensors.refs import composed, tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

FLOATS = ["float64", "float32", "float16", "bfloat16"]
SMALL_FLOATS = [
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
COMPLEX = ["complex64", "complex128", "complex32"]


def name_of(made):
    return str(made.dtype).removeprefix("torch.")


def raw(made):
    return made.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def reference(made, **more):
    return tensor(raw(made), name_of(made), tuple(made.shape), **more)


def values(dtype, count, seed=0):
    """Numbers of any type, about normal, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, dtype=torch.float64, generator=generator) * 30 + 5
    wide[:: 1 + count // 3] = 0
    if dtype == "bool":
        return wide > 0
    if dtype.startswith("complex"):
        parts = torch.stack([wide, wide.flip(0)], 1)
        return torch.view_as_complex(parts).to(getattr(torch, dtype))
    if dtype.startswith("u") or dtype == "float8_e8m0fnu":
        wide = wide.abs()
    return wide.to(getattr(torch, dtype))


def wide(made):
    """The elements that count, in float64: magnitudes of complex numbers."""
    flat = made.flatten()
    if made.is_complex():
        return flat.to(torch.complex128).abs()
    return flat.double()


def assert_as_torch(found, made, bins=16):
    """Whether the figures are torch's, of the finite elements."""
    every = wide(made)
    finite = every[every.isfinite()]
    assert found.elements == made.numel()
    assert (found.nan, found.infinite) == (int(every.isnan().sum()), int(every.isinf().sum()))
    assert found.zeros == int((every == 0).sum())
    if not finite.numel():
        assert found.histogram is None
        assert (found.minimum, found.maximum, found.mean, found.std) == (None,) * 4
        assert found.norm == 0
        return
    assert (found.minimum, found.maximum) == (finite.min().item(), finite.max().item())
    exact = 1e-12 if made.dtype in (torch.float64, torch.complex128) else 1e-6
    spread = float(finite.std(correction=0))
    mean = math.fsum(finite.tolist()) / finite.numel()
    assert found.mean == pytest.approx(mean, rel=exact, abs=exact * spread)
    assert found.std == pytest.approx(spread, rel=max(exact, 1e-11), abs=exact * abs(mean))
    assert found.norm == pytest.approx(float(finite.norm()), rel=exact)
    assert_histogram(found.histogram, finite, bins)


def assert_histogram(drawn, finite, bins):
    assert (drawn.low, drawn.high) == (finite.min().item(), finite.max().item())
    assert len(drawn.counts) == bins
    assert sum(drawn.counts) == finite.numel()
    if drawn.low != drawn.high:
        width = (drawn.high - drawn.low) / bins
        places = ((finite - drawn.low) / width).long().clamp(max=bins - 1)
        assert drawn.counts == tuple(torch.bincount(places, minlength=bins).tolist())


def test_every_type_that_is_a_number():
    for dtype, count in product(FLOATS + SMALL_FLOATS + INTEGERS + COMPLEX, [1, 2, 1000]):
        made = values(dtype, count)
        assert_as_torch(Measurer().measure(reference(made)), made)


@pytest.mark.parametrize("dtype", [*FLOATS, "int16", "uint8", "complex64", "int64", "uint64"])
def test_several_chunks(dtype, monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 5000)
    made = values(dtype, 7 * statistics.CHUNK + 5)
    alone = Measurer().measure(reference(made))
    assert_as_torch(alone, made)
    monkeypatch.setattr(statistics, "BLOCK", 2 * statistics.CHUNK)
    assert Measurer().measure(reference(made)) == alone  # threads add up in the same order


def test_nan_and_infinities_are_counted_and_left_out():
    for dtype in [*FLOATS, "float8_e5m2", "complex64", "complex128"]:
        made = values(dtype, 500)
        made[[3, 77, 200]] = torch.tensor([math.nan, math.inf, -math.inf]).to(made.dtype)
        assert_as_torch(Measurer().measure(reference(made)), made)


def test_a_complex_number_with_a_nan_part_is_nan_whatever_the_other_is():
    made = torch.tensor([complex(math.inf, math.nan), complex(1, math.inf), 3 + 4j])
    found = Measurer().measure(reference(made))
    assert (found.nan, found.infinite, found.maximum) == (1, 1, 5.0)


def test_nothing_finite_has_no_range():
    for dtype in ["float32", "float16"]:
        made = torch.tensor([math.nan, math.inf], dtype=getattr(torch, dtype))
        assert_as_torch(Measurer().measure(reference(made)), made)


def test_no_elements_at_all():
    found = Measurer().measure(tensor(b"", "float32", (0, 3)))
    assert (found.elements, found.minimum, found.norm, found.histogram) == (0, None, 0.0, None)


def test_equal_elements_are_in_the_middle_bin_as_torch_has_it():
    for dtype in ["float32", "int8", "int64", "bool"]:
        made = torch.ones(40, dtype=getattr(torch, dtype))
        found = Measurer(8).measure(reference(made))
        assert (found.minimum, found.maximum, found.mean, found.std) == (1, 1, 1.0, 0.0), dtype
        assert found.norm == pytest.approx(math.sqrt(40)), dtype
        assert found.histogram == Histogram(
            1, 1, tuple(torch.histc(torch.ones(40), 8).int().tolist())
        ), dtype


def test_a_small_spread_around_a_large_mean():
    made = torch.full((90_000,), 1e6, dtype=torch.float64)
    made[0::3] += 1e-3
    made[1::3] -= 1e-3
    found = Measurer().measure(reference(made))
    assert found.std == pytest.approx(1e-3 * math.sqrt(2 / 3), rel=1e-6)


def test_a_large_mean_that_changes_on_the_way():
    made = torch.cat([torch.zeros(40_000), torch.full((40_000,), 1e6)]).double()
    assert_as_torch(Measurer().measure(reference(made)), made)


def test_integers_beyond_the_digits_of_a_float_are_exact():
    for dtype in ["int64", "uint64"]:
        low = (1 << 63 if dtype == "uint64" else 1 << 60) + 1
        data = b"".join((low + more).to_bytes(8, "little") for more in (0, 1, 2, 2))
        found = Measurer(3).measure(tensor(data, dtype, (4,)))
        assert (found.minimum, found.maximum) == (low, low + 2), dtype
        assert found.std == pytest.approx(math.sqrt(0.6875)), dtype
        assert found.histogram == Histogram(low, low + 2, (1, 1, 2)), dtype


def test_integers_over_the_whole_range():
    for dtype, ends in [("int64", (-(1 << 63), (1 << 63) - 1)), ("uint64", (0, (1 << 64) - 1))]:
        data = b"".join(end.to_bytes(8, "little", signed=dtype == "int64") for end in ends)
        found = Measurer(2).measure(tensor(data, dtype, (2,)))
        assert (found.minimum, found.maximum) == ends, dtype
        assert found.histogram.counts == (1, 1), dtype
        assert found.std == pytest.approx(2.0**63), dtype
        assert found.mean == pytest.approx(sum(ends) / 2, abs=1e3), dtype


def test_bytes_that_are_no_bool_count_as_true():
    found = Measurer().measure(tensor(b"\0\1\2\xff", "bool", (4,)))
    assert (found.minimum, found.maximum, found.zeros, found.mean) == (0, 1, 1, 0.75)


def test_the_bins_that_are_asked_for():
    for bins in [1, 2, 10, 300]:
        made = values("float32", 5000)
        assert_as_torch(Measurer(bins).measure(reference(made)), made, bins)


def test_what_lies_on_an_edge_is_in_the_bin_that_begins_there():
    made = torch.arange(0, 11).double()
    assert Measurer(10).measure(reference(made)).histogram.counts == (1,) * 9 + (2,)


def test_no_bins_is_an_error():
    with pytest.raises(UsageError, match="0 bins"):
        Measurer(0)


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(NUMBERS, max_size=40), st.integers(1, 9), st.integers(1, 20))
def test_wherever_chunks_end(numbers, chunk, bins):
    made = torch.tensor(numbers, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CHUNK", chunk)
        assert_as_torch(Measurer(bins).measure(reference(made)), made, bins)


@given(
    st.lists(st.integers(0, 65535), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from(["float16", "bfloat16", "int16", "uint16", "uint8", "float8_e4m3fn"]),
)
def test_all_patterns_of_small_types(patterns, piece, dtype):
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    data = b"".join((one % (1 << 8 * size)).to_bytes(size, "little") for one in patterns)
    made = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CHUNK", piece)
        found = Measurer(7).measure(tensor(data, dtype, (len(patterns),)))
    assert_as_torch(found, made, 7)


def test_big_endian_bytes():
    for dtype in ["float32", "bfloat16", "complex64", "int64", "uint16"]:
        made = values(dtype, 300)
        unit = made.element_size() // (2 if made.is_complex() else 1)
        data = raw(made)
        turned = b"".join(data[at : at + unit][::-1] for at in range(0, len(data), unit))
        found = Measurer().measure(tensor(turned, dtype, (300,), byteorder="big"))
        assert_as_torch(found, made)


def test_views():
    for dtype in ["float32", "float16", "uint8"]:
        base = values(dtype, 6000).reshape(60, 100)
        views = [base.t(), base[:, 3], base[::7, 1::3], base[5], base[:0], base[2:9, 10:20]]
        for view in views:
            place = {"stride": view.stride(), "offset": view.storage_offset()}
            found = Measurer().measure(tensor(raw(base), dtype, tuple(view.shape), **place))
            assert_as_torch(found, view)


def test_conjugated_and_negated_views():
    made = samples.flagged()
    for name, flags in (("conj", ("conj",)), ("neg", ("neg",))):
        base = made[name].resolve_conj().resolve_neg()
        undone = base.conj().resolve_conj() if name == "conj" else -base
        found = Measurer().measure(reference(undone, flags=flags))
        assert_as_torch(found, base)


def test_repeated_elements_are_read_once():
    told = []
    base = torch.tensor([1.0, 0.0, math.nan])
    huge = tensor(raw(base), "float32", (1 << 40, 3), stride=(0, 1))
    found = Measurer().measure(huge, told.append)
    assert (found.elements, found.zeros, found.nan) == (3 << 40, 1 << 40, 1 << 40)
    assert (found.mean, found.std) == (0.5, 0.5)
    assert found.norm == pytest.approx(2.0**20)
    assert sum(found.histogram.counts) == 2 << 40
    assert sum(told) == huge.nbytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "float64"])
def test_all_bytes_are_told_of_once(dtype, monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 1000)
    told = []
    ref = reference(values(dtype, 12_345))
    Measurer().measure(ref, told.append)
    assert sum(told) == ref.nbytes
    assert min(told) > 0


def test_torch_has_as_many_threads_afterwards_as_before():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        Measurer().measure(reference(values("float32", 50_000)))
        with pytest.raises(UsageError):
            Measurer().measure(tensor(bytes(40), "bits8", (40,)))
        assert torch.get_num_threads() == 3
        first, second = use_one_thread(), use_one_thread()
        for step in (first.__enter__, second.__enter__):
            step()
        first.__exit__(None, None, None)  # of another thread, which began before
        assert torch.get_num_threads() == 1
        second.__exit__(None, None, None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_file_that_ends_too_early_is_an_error(monkeypatch, tmp_path):
    path = tmp_path / "elements"
    path.write_bytes(bytes(40_000))
    monkeypatch.setattr(statistics, "CHUNK", 1000)
    source = FileSource(path)
    storage = Storage("0", ByteRange(source, 0, 40_000), 40_000)
    path.write_bytes(bytes(20_000))
    with pytest.raises(TruncatedFile):
        Measurer().measure(TensorRef("float32", (10_000,), (1,), 0, storage, "cpu"))
    source.close()


def test_damaged_compressed_bytes_are_an_error():
    packed = tensor(b"\xff" * 50, "uint8", (50,)).storage.data
    source = InflatedSource(packed, 4000)
    storage = Storage("0", ByteRange(source, 0, 4000), 4000)
    with pytest.raises(CorruptFile):
        Measurer().measure(TensorRef("float32", (1000,), (1,), 0, storage, "cpu"))


def test_what_has_no_figures_says_why():
    for ref, why in [
        (tensor(b"ab", "quint4x2", (4,)), "share a byte"),
        (tensor(b"ab", "float4_e2m1fn_x2", (2,)), "share a byte"),
        (tensor(b"ab", "bits8", (2,)), "are not numbers"),
        (tensor(b"ab", "qint8", (2,), kind="quantized"), "not a plain array"),
        (composed("sparse_coo", (2, 3), {}), "not a plain array"),
        (composed("nested", (2, None), {}), "not a plain array"),
        (
            composed("subclass", (2, 3), {"type": Global("net", "DTensor")}),
            "distributed over ranks",
        ),
        (composed("subclass", (2, 3), {}), "not a plain array"),
        (TensorRef("float32", (2,), (1,), 0, None, "meta", kind="meta"), "meta device"),
    ]:
        assert why in find_obstacle(ref), ref
        with pytest.raises(UsageError, match=why):
            Measurer().measure(ref)


def test_one_measurer_for_many_tensors_of_many_types():
    measurer = Measurer()
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX] * 2:
        for count in (3, 700):
            made = values(dtype, count, seed=count)
            assert_as_torch(measurer.measure(reference(made)), made)
