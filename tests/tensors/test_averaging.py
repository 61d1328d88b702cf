"""The mean of runs of elements beside torch's own."""

from itertools import product

import pytest
import torch

from ckptool.core.model import Storage, TensorRef
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files import ByteRange, MemorySource
from ckptool.tensors import averaging, casting
from ckptool.tensors.averaging import Averager, ElementBuffer, Elements, run_of_tensor

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "complex128",
]  # fmt: skip


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def elements(tensor, byteorder="little"):
    data, size = raw(tensor), tensor.element_size()
    if byteorder == "big":
        unit = size // 2 if tensor.is_complex() else size
        data = b"".join(data[at : at + unit][::-1] for at in range(0, len(data), unit))
    name = str(tensor.dtype).removeprefix("torch.")
    return Elements(name, ByteRange(MemorySource(data, "m"), 0, len(data)), byteorder)


def mean(tensors, dtype, **options):
    like = Storage("0", None, 0, "cpu")
    runs = [elements(tensor, **options) for tensor in tensors]
    return Averager().average(runs, like, dtype)


def judged(tensors, dtype):
    """Torch's mean in their order: `mean` of a stack begins with 0.0, and so has no -0.0."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    every = [tensor.to(wide) for tensor in tensors]
    total = sum(every[1:], start=every[0])
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts /= len(every)
    return total.to(getattr(torch, dtype))


def values(dtype, seed, count=1000):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    made = torch.randn(count, dtype=wide, generator=generator)
    scale = 2.0 ** torch.randint(-6, 7, (count,), generator=generator)
    return (made * scale).to(getattr(torch, dtype))


def test_the_bits_are_those_of_torchs_mean():
    for dtype, count in product(DTYPES, [2, 3, 7]):
        tensors = [values(dtype, seed) for seed in range(count)]
        assert mean(tensors, dtype).data.read() == raw(judged(tensors, dtype)), (dtype, count)


def test_big_endian_files():
    for dtype in ["float32", "bfloat16", "complex64"]:
        tensors = [values(dtype, seed) for seed in range(2)]
        assert mean(tensors, dtype, byteorder="big").data.read() == raw(judged(tensors, dtype)), (
            dtype
        )


def test_types_may_differ_and_nan_goes_through():
    tensors = [values("float32", 1, 9), values("bfloat16", 2, 9), values("float64", 3, 9)]
    tensors[1][4] = torch.nan
    tensors[2][5] = torch.inf
    made = mean(tensors, "float32").data.read()
    assert made == raw(judged(tensors, "float32"))


def test_a_mean_of_large_numbers_does_not_overflow():
    tensors = [torch.full((3,), torch.finfo(torch.float32).max) for _ in range(4)]
    assert mean(tensors, "float32").data.read() == raw(tensors[0])


def test_any_offset_and_length_is_right(monkeypatch):
    for module in (averaging, casting):
        monkeypatch.setattr(module, "CHUNK", 7)
    tensors = [values("float32", seed, 40) for seed in range(3)]
    made, whole = mean(tensors, "float32"), raw(judged(tensors, "float32"))
    for start in range(0, 160, 3):
        for stop in range(start, 161, 13):
            assert made.data.read(start, stop - start) == whole[start:stop]


def test_the_elements_of_a_view_are_in_row_major_order():
    for view in [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:, ::2],
        lambda tensor: tensor[1:2].expand(5, 8),
        lambda tensor: torch._neg_view(tensor),
    ]:
        tensor = torch.randn(6, 8)
        seen = view(tensor)
        data = raw(tensor)
        over = Storage("0", ByteRange(MemorySource(data, "m"), 0, len(data)), len(data))
        flags = ("neg",) if seen.is_neg() else ()
        ref = TensorRef(
            "float32",
            tuple(seen.shape),
            seen.stride(),
            seen.storage_offset(),
            over,
            "cpu",
            flags=flags,
        )
        wanted, found = seen.resolve_neg().flatten(), run_of_tensor(ref)
        buffer = ElementBuffer("float32", seen.numel())
        assert torch.equal(buffer.read(found, 0, seen.numel()), wanted), view
        for start in (20, 3, 9, 9, 0):  # forwards and back
            assert torch.equal(buffer.read(found, start, 4), wanted[start : start + 4]), view


@pytest.mark.parametrize(("dtype", "seen_as"), [("complex64", None), ("complex64", torch.float32)])
def test_elements_that_are_conjugated_lazily(dtype, seen_as):
    tensor = values(dtype, 1, 9)
    run = elements(tensor)
    flagged = Elements(run.dtype, run.data, flags=("conj", "neg"))
    found = ElementBuffer(dtype, 9, seen_as=seen_as).read(flagged, 0, 9)
    wanted = tensor.conj().resolve_conj().neg()
    assert torch.equal(found, wanted if seen_as is None else torch.view_as_real(wanted).flatten())


def test_the_mean_of_the_same_is_the_same():
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        ends = [0.0, -0.0, 1.0, -1.0]
        if not kind.is_complex:
            ends += [torch.finfo(kind).max, torch.finfo(kind).min, torch.finfo(kind).tiny]
        tensor = torch.tensor(ends, dtype=torch.complex128 if kind.is_complex else torch.float64)
        tensor = tensor.to(kind)
        for count in (2, 4):
            assert mean([tensor] * count, dtype).data.read() == raw(tensor), dtype


def test_a_mean_that_does_not_fit_is_refused():
    for value, dtype, fits in [
        (65519.0, "float16", True), (1e6, "float16", False), (1e6, "float8_e4m3fn", False),
        (464.0, "float8_e4m3fn", True), (float("inf"), "float16", True),
        (-2.0, "float8_e8m0fnu", False),
    ]:  # fmt: skip
        small = torch.tensor([0.0, 1.0]).to(getattr(torch, dtype))
        runs = [elements(small), elements(torch.tensor([2 * value - float(small[0]), 1.0]))]
        made = Averager().average(runs, Storage("0", None, 0, "cpu"), dtype, "some.weight")
        if fits:
            assert len(made.data.read()) == 2 * small.element_size(), value
        else:
            with pytest.raises(NotRepresentable, match=r"some\.weight") as caught:
                made.data.read()
            assert "cast FIRST" in caught.value.hint, value


def test_a_source_that_is_damaged_is_refused():
    run = elements(torch.ones(9))
    held = Storage("7", run.data, 36, "cpu", crc32=1)
    runs = [elements(torch.ones(4)), Elements("float32", run.data.slice(0, 16), storage=held)]
    with pytest.raises(CorruptFile, match="'7'"):
        Averager().average(runs, held, "float32").data.read()
