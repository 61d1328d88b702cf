"""The figures of a difference beside torch's own in float64, for every pair of types."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from ckptool.core.model import TensorRef
from ckptool.errors import UnsupportedFormat, UsageError
from ckptool.tensors import comparing
from ckptool.tensors.comparing import COMPARED, Comparer, Difference
from tests.tensors.refs import storage, tensor

SINGLE = ["float32", "float16", "bfloat16"]
DOUBLE = ["float64", "complex32", "complex64", "complex128"]
EIGHT = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
WHOLE = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
INF, NAN = math.inf, math.nan


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def raw(values):
    """The bytes of a tensor's elements, in row-major order."""
    plain = values.resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).numpy().tobytes()


def ref(values, byteorder="little"):
    """A contiguous tensor in a file of that byte order."""
    data, unit = raw(values), values.element_size() // (2 if values.is_complex() else 1)
    if byteorder == "big":
        data = b"".join(data[at : at + unit][::-1] for at in range(0, len(data), unit))
    return tensor(data, name_of(values.dtype), tuple(values.shape), byteorder=byteorder)


def view(values):
    """The same view of the same storage, flags and all."""
    base = torch.empty(0, dtype=values.dtype).set_(values.untyped_storage())
    flags = [flag for flag in ("conj", "neg") if getattr(values, f"is_{flag}")()]
    return TensorRef(
        name_of(values.dtype),
        tuple(values.shape),
        values.stride(),
        values.storage_offset(),
        storage(raw(base)),
        "cpu",
        flags=tuple(flags),
    )


def compare(a, b, **options):
    return Comparer(**options).compare(ref(a), ref(b))


def wide(values):
    return values.to(torch.complex128 if values.is_complex() else torch.float64).flatten()


def expected(a, b, close=None, equal_nan=False):
    """By the definitions, in float64."""
    x, y = wide(a), wide(b)
    both = x.isnan() & y.isnan()
    differ = (x != y) & ~(both if equal_nan else torch.zeros_like(both))
    finite = x.isfinite() & y.isfinite()
    odd = (x.isnan(), y.isnan(), x.isinf() & ~x.isnan(), y.isinf() & ~y.isnan())
    counts = [int(flags.sum()) for flags in odd]
    x, y = x[finite], y[finite]
    gap = (x - y).abs()
    ratios = torch.nan_to_num(gap / y.abs(), 0.0, INF)
    length = float(x.norm()) * float(y.norm())
    appeared = bool((differ & ~both & ~finite).any())
    return Difference(
        a.numel(),
        int(differ.sum()),
        close,
        relative_norm(x, y, appeared),
        float(gap.max()) if len(gap) else None,
        float(gap.mean()) if len(gap) else None,
        float(ratios.max()) if len(gap) else None,
        float(gap.square().mean().sqrt()) if len(gap) else None,
        float((x * y.conj()).sum().real) / length if length else None,
        *counts,
    )


def relative_norm(x, y, appeared):
    """Of the finite elements, in float64; `appeared`: others are not finite on one side only."""
    if appeared or not len(x):
        return NAN if appeared else None
    gap, length = float((x - y).norm()), float(x.norm())
    return gap / length if length else INF if gap else 0.0


def assert_same(found, wanted, precision):
    for name in ("elements", "mismatched", "close", "nan_a", "nan_b", "inf_a", "inf_b"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("rel_norm", "max_abs", "mean_abs", "max_rel", "rmse"):
        figure = getattr(wanted, name)
        near = None if figure is None else pytest.approx(figure, rel=precision, nan_ok=True)
        assert getattr(found, name) == near, name
    if wanted.cosine is None:
        assert found.cosine is None
    else:
        assert found.cosine == pytest.approx(wanted.cosine, rel=0, abs=precision)


def numbers(dtype, seed, count=5000):
    """Random numbers of some magnitudes; of integers, all of their bits."""
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(seed)
    if dtype in WHOLE:
        size = torch.empty((), dtype=kind).element_size()
        bits = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
        return bits.remainder(2).to(kind) if dtype == "bool" else bits.view(kind)
    complex_ = dtype.startswith("complex")
    made = torch.randn(count * (1 + complex_), generator=generator, dtype=torch.float64)
    made *= 2.0 ** torch.randint(-6, 7, made.shape, generator=generator)
    if complex_:
        return torch.view_as_complex(made.view(-1, 2)).to(torch.complex64).to(kind)
    return made.abs().to(kind) if dtype == "float8_e8m0fnu" else made.to(kind)


def precision_of(*dtypes):
    return 1e-6 if set(dtypes) <= {*SINGLE, *EIGHT} else 1e-12


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("a", sorted(COMPARED))
def test_every_pair_of_types(a):
    for seed, b in enumerate(sorted(COMPARED)):
        x, y = numbers(a, 2 * seed), numbers(b, 2 * seed + 1)
        assert_same(compare(x, y), expected(x, y), precision_of(a, b))


def test_all_types_that_are_numbers_are_compared():
    assert {*SINGLE, *DOUBLE, *EIGHT, *WHOLE} == COMPARED


def test_huge_and_tiny_numbers():
    for dtype, scale in product(
        [*SINGLE, "float64", "complex64", "complex128"], [1e-30, 1e-19, 1.0, 1e19, 1e30]
    ):
        if dtype == "float16":
            scale = {1e-30: 2.0**-24, 1e-19: 2.0**-14, 1.0: 1.0}.get(scale, 100.0)
        x, y = numbers(dtype, 1) * scale, numbers(dtype, 2) * scale
        assert_same(compare(x, y), expected(x, y), precision_of(dtype))
        near = x + y / 1000
        assert_same(compare(near, x), expected(near, x), precision_of(dtype))


def test_differences_beyond_their_type():
    largest = torch.finfo(torch.float32).max
    found = compare(torch.tensor([largest, 1.0]), torch.tensor([-largest, 1.0]))
    assert found.max_abs == found.max_rel * largest == 2 * largest
    assert found.cosine == pytest.approx(-1)
    most = torch.finfo(torch.float64).max
    x = torch.tensor([most, 1.0], dtype=torch.float64)
    found = compare(x, x.neg().clamp(max=1.0))
    assert (found.max_abs, found.rmse, found.cosine) == (INF, INF, None)


def test_rounding_does_not_add_up_where_all_elements_are_alike():
    for value in [0.1, 0.7, 1 / 3, 1e-3]:
        x, y = torch.full((100_000,), 1 + value), torch.full((100_000,), value)
        assert_same(compare(x, y), expected(x, y), 1e-6)


def test_a_ratio_of_the_smallest_numbers_is_not_overlooked_for_a_lesser_one_before_it():
    count = comparing.CHUNK
    y = torch.cat([torch.ones(count), torch.full((2,), 500_000 * 2.0**-149), torch.ones(2)])
    x = y.clone()
    x[0], x[count], x[-1] = 1 + 10 * 2.0**-23, 500_001 * 2.0**-149, 1 + 2.0**-23
    assert_same(compare(x, y), expected(x, y), 1e-6)


def test_lengths_that_are_far_apart():
    for factor in [1e-6, 0.1, 3.0, 1e6]:
        x = numbers("float32", 1)
        y = (x + numbers("float32", 2)) * factor
        assert_same(compare(x, y), expected(x, y), 1e-6)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, 65504.0, INF, -INF, NAN]


def test_what_is_not_finite():
    for equal_nan, dtype in product([False, True], ["float16", "bfloat16", "float32", "float64"]):
        pairs = torch.tensor(list(product(SPECIAL, repeat=2)), dtype=getattr(torch, dtype))
        a, b = pairs[:, 0].clone(), pairs[:, 1].clone()
        found = compare(a, b, equal_nan=equal_nan, atol=0.25)
        close = torch.allclose(a, b, rtol=0, atol=0.25, equal_nan=equal_nan)
        assert_same(found, expected(a, b, close, equal_nan), precision_of(dtype))


def test_complex_numbers_that_are_not_finite():
    for equal_nan, dtype in product([False, True], ["complex64", "complex128"]):
        parts = torch.tensor(list(product([0.0, 1.5, -INF, NAN], repeat=4)), dtype=torch.float64)
        every = torch.view_as_complex(parts.view(-1, 2, 2)).to(getattr(torch, dtype))
        a, b = every[:, 0].clone(), every[:, 1].clone()
        found = compare(a, b, equal_nan=equal_nan, atol=0.25)
        close = torch.allclose(a, b, rtol=0, atol=0.25, equal_nan=equal_nan)
        assert_same(found, expected(a, b, close, equal_nan), precision_of(dtype))


def test_nothing_finite_has_no_figures():
    found = compare(torch.tensor([NAN, INF, 1.0]), torch.tensor([1.0, INF, -INF]), rtol=1.0)
    assert_same(found, Difference(3, 2, False, NAN, *[None] * 5, 1, 0, 1, 2), 0)
    assert found.share == 2 / 3


def test_what_is_not_finite_in_both_alike_leaves_the_norm():
    mask = torch.tensor([-INF, NAN, 3.0, 4.0])
    changed = mask + torch.tensor([0, 0, 0, 0.5])
    assert compare(mask, changed).rel_norm == 0.1
    assert math.isnan(compare(mask, mask.flip(0)).rel_norm)
    assert compare(mask[:2], mask[:2]).rel_norm is None


def test_a_complex_number_that_is_both_is_nan():
    x = torch.tensor([complex(INF, NAN), complex(NAN, INF), complex(INF, 1), complex(1, 1)])
    found = compare(x, torch.ones_like(x))
    assert (found.nan_a, found.inf_a, found.nan_b, found.inf_b) == (2, 1, 0, 0)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int64"])
def test_many_chunks(dtype, special, monkeypatch):
    monkeypatch.setattr(comparing, "CHUNK", 256)
    x, y = numbers(dtype, 1, 23_456), numbers(dtype, 2, 23_456)
    y[20_000:] = x[20_000:]
    if dtype != "int64":
        x[5000:9000], y[5000:9000] = 0, 0
        x[12_000:13_000] *= 1e-30 if special else 1
    if special and dtype != "int64":
        x[::3000], y[1::4000], y[22_000] = NAN, INF, NAN
    alone = compare(x, y)
    assert_same(alone, expected(x, y), precision_of(dtype))
    monkeypatch.setattr(comparing, "BLOCK", 5 * comparing.CHUNK)
    assert compare(x, y) == alone  # threads add up in the same order


VIEWS = [
    lambda base: base.transpose(0, 1),
    lambda base: base.permute(2, 0, 1),
    lambda base: base[:, ::2],
    lambda base: base[3:, 1],
    lambda base: base[:1].expand(4, -1, -1),
    lambda base: base.as_strided((3, 4), (0, 2), 5),
    lambda base: base[3, 2, 1],
    lambda base: base[:0, 0],
    torch._neg_view,
]


def test_views():
    for make, dtype in product(VIEWS, ["float32", "bfloat16", "int64"]):
        x, y = (numbers(dtype, seed, 2400).view(40, 30, 2) for seed in (1, 2))
        if make is torch._neg_view and dtype == "int64":
            continue
        a, b = make(x), make(y)
        wanted = expected(a, b)
        for one, other in ((view(a), view(b)), (view(a), ref(b)), (ref(a), view(b))):
            assert_same(Comparer().compare(one, other), wanted, precision_of(dtype))


def test_views_of_one_shape_in_another_order():
    x, y = numbers("float32", 1, 1200).view(30, 40), numbers("float32", 2, 1200).view(40, 30).t()
    found = Comparer().compare(view(x), view(y))
    assert_same(found, expected(x, y), 1e-6)


def test_conjugated_numbers():
    x, y = numbers("complex64", 1), numbers("complex64", 2)
    for a, b in product((x, x.conj()), (y, y.conj())):
        assert_same(Comparer().compare(view(a), view(b)), expected(a, b), 1e-6)


def test_big_endian_files():
    for dtype in ["float16", "float32", "complex64", "int64", "bool"]:
        x, y = numbers(dtype, 1), numbers(dtype, 2)
        for one, other in product(("little", "big"), repeat=2):
            found = Comparer().compare(ref(x, one), ref(y, other))
            assert_same(found, expected(x, y), precision_of(dtype))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_no_elements(shape):
    nothing = torch.zeros(shape)
    found = compare(nothing, nothing, atol=0.1)
    assert found == Difference(0, 0, True, *[None] * 6, 0, 0, 0, 0)
    assert found.share == 0.0
    assert compare(nothing, nothing).close is None


def test_a_single_number():
    found = compare(torch.tensor(3.0), torch.tensor(2.0))
    assert found == Difference(1, 1, None, 1 / 3, 1.0, 1.0, 0.5, 1.0, 1.0, 0, 0, 0, 0)


def test_zeros():
    zero, some = torch.zeros(3), torch.tensor([0.0, 1.0, 0.0])
    assert compare(zero, -zero) == Difference(3, 0, None, *[0.0] * 5, None, 0, 0, 0, 0)
    assert compare(some, zero).max_rel == INF
    assert compare(zero, some).max_rel == 1.0
    assert compare(zero, some).cosine is None
    assert (compare(zero, some).rel_norm, compare(some, zero).rel_norm) == (INF, 1.0)


def test_integers_beyond_float64():
    edge = torch.tensor([2**53, 2**62, -(2**63), 2**63 - 1, 7])
    found = compare(edge, edge + torch.tensor([1, 1, 1, -1, 0]), atol=1.0)
    assert (found.mismatched, found.max_abs, found.mean_abs, found.close) == (4, 1.0, 0.8, True)
    assert compare(edge[2:3], edge[3:4]).max_abs == 2.0**64
    assert compare(edge, edge + 1, atol=0.5).close is False


def test_integers_of_two_types():
    large = torch.tensor([2**64 - 1, 2**63, 5], dtype=torch.uint64)
    signed = torch.tensor([-1, -(2**63), 5])
    found = compare(large, signed)
    assert (found.mismatched, found.max_abs) == (2, 2.0**64)
    near = torch.tensor([2**64 - 2, 2**63 + 1, 5], dtype=torch.uint64)
    found = compare(large, near)
    assert (found.mismatched, found.max_abs, found.mean_abs) == (2, 1.0, 2 / 3)
    assert compare(torch.tensor([2**53 + 1]), torch.tensor([7], dtype=torch.int32)).max_abs == (
        2**53 - 6
    )


NUMBER = st.sampled_from([0.0, -0.0, 0.1, 1.0, -1.0, 1.1, 0.9, 2.0**-24, 1e-8, 5e4, INF, NAN])
NEAR = st.floats(-2, 2, width=32) | st.floats(width=32)


@given(
    values=st.lists(st.tuples(NUMBER | NEAR, NUMBER | NEAR), min_size=1, max_size=6),
    factor=st.sampled_from([0.0, 1e-8, 1e-3, 0.1, 1.0]),
    atol=st.sampled_from([None, 0.0, 1e-8, 0.1, 1.0, 1e6, INF]),
    rtol=st.sampled_from([None, 0.0, 1e-5, 0.1, 1.0, 1e31]),
    equal_nan=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64", "complex64"]),
)
def test_close_is_what_torch_calls_close(values, factor, atol, rtol, equal_nan, dtype):
    kind = getattr(torch, dtype)
    b = torch.tensor([other for _, other in values], dtype=torch.float64)
    a = torch.tensor([one for one, _ in values], dtype=torch.float64)
    a, b = torch.where(a.isfinite(), b + a * factor, a).to(kind), b.to(kind)
    found = compare(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan).close
    if atol is None and rtol is None:
        assert found is None
    else:
        assert found == torch.allclose(a, b, rtol or 0.0, atol or 0.0, equal_nan)


@given(
    values=st.lists(st.tuples(st.integers(-99, 99), st.integers(-9, 9)), min_size=1, max_size=6),
    atol=st.sampled_from([0.0, 1.0, 5.0, 0.5]),
    rtol=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    dtype=st.sampled_from(["int8", "int32", "int64"]),
)
def test_close_integers(values, atol, rtol, dtype):
    b = torch.tensor([value for value, _ in values])
    a = b + torch.tensor([gap for _, gap in values])
    a, b = a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype))
    found = compare(a, b, atol=atol, rtol=rtol).close
    assert found == torch.allclose(a, b, rtol, atol)


def test_types_that_differ_are_close_in_the_wider():
    for dtypes in [("float16", "float32"), ("bfloat16", "float16")]:
        x, y = (torch.tensor([1.0, 0.1]).to(getattr(torch, dtype)) for dtype in dtypes)
        for atol in (0.0, 1e-6, 1e-4, 1e-2):
            assert compare(x, y, atol=atol).close == torch.allclose(
                x.float(), y.float(), 0, atol
            ), dtypes


@pytest.mark.parametrize("bad", [{"atol": -1.0}, {"rtol": NAN}])
def test_a_tolerance_is_a_number_from_0_on(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        Comparer(**bad)


@pytest.mark.parametrize("dtype", ["bits8", "float4_e2m1fn_x2", "qint8"])
def test_elements_that_are_no_numbers(dtype):
    some = tensor(b"ab", dtype, (2,))
    with pytest.raises(UnsupportedFormat, match=dtype):
        Comparer().compare(some, some)


def test_all_bytes_are_told(monkeypatch):
    monkeypatch.setattr(comparing, "CHUNK", 100)
    done = []
    Comparer().compare(ref(torch.zeros(950)), ref(torch.ones(950)), done.append)
    assert sum(done) == 3800
    assert min(done) > 0
