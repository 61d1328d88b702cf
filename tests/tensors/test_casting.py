"""Every pair of floating types beside torch's own cast, and what is counted beside exact rules."""

import math
import zlib
from dataclasses import replace

import pytest
import torch

from ckptool.core.model import Storage, TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files import ByteRange, MemorySource
from ckptool.tensors import casting
from ckptool.tensors.casting import FLOATS, Caster, Losses, is_exact

INF = math.inf
TOO_LARGE = {
    "float64": INF,
    "float32": (2 - 2.0**-24) * 2.0**127,
    "float16": 65520.0,
    "bfloat16": (2 - 2.0**-8) * 2.0**127,
    "float8_e4m3fn": math.nextafter(464.0, INF),
    "float8_e5m2": 61440.0,
    "float8_e4m3fnuz": 248.0,
    "float8_e5m2fnuz": 61440.0,
    "float8_e8m0fnu": 1.5 * 2.0**127,
}
"""From where on a finite number rounds to none: half a step beyond the largest, ties to even."""
HAVE_INF = {"float64", "float32", "float16", "bfloat16", "float8_e5m2"}


def storage_of(tensor, byteorder="little"):
    raw = tensor.flatten().view(torch.uint8).numpy()
    if byteorder == "big":
        raw = raw.view(f"u{tensor.element_size()}").byteswap()
    raw = raw.tobytes()
    return Storage(
        "0", ByteRange(MemorySource(raw, "m.pth"), 0, len(raw)), len(raw), "cpu", byteorder
    )


def ref(tensor, over):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRef(dtype, tuple(tensor.shape), tensor.stride(), 0, over, "cpu")


def cast(tensor, target, *, allow_overflow=True, views=None, byteorder="little"):
    """The caster and the storage that it makes."""
    over = storage_of(tensor, byteorder)
    source = str(tensor.dtype).removeprefix("torch.")
    caster = Caster(source, target, allow_overflow=allow_overflow, file="m.pth")
    return caster, caster.cast(over, views or [("w", ref(tensor, over))])


def patterns(name):
    """All values of a small type; of a large one random bits, and what lies at every boundary."""
    dtype, size = getattr(torch, name), BY_NAME[name].itemsize
    if size == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if size == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(size)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (5000,), generator=generator)
    usual = torch.randn(5000, dtype=torch.float64, generator=generator)
    edges = [
        sign * math.nextafter(value, toward)
        for limit in (*TOO_LARGE.values(), *(kind.largest for kind in FLOATS.values()),
                      *(2.0**kind.smallest_exponent for kind in FLOATS.values()),
                      *(2.0 ** (kind.smallest_exponent - 1) for kind in FLOATS.values()))
        for value in (limit,)
        for toward in (0.0, value, INF)
        for sign in (1, -1)
    ]  # fmt: skip
    edges += [0.0, -0.0, INF, -INF, math.nan, -math.nan]
    around = torch.tensor(edges, dtype=torch.float64)
    tiny = usual * 2.0 ** torch.randint(-160, 20, (5000,), generator=generator)
    return torch.cat([bits.view(dtype), usual.to(dtype), tiny.to(dtype), around.to(dtype)])


def expected_losses(source, target):
    """By the definitions, number by number in float64, which has all of them."""
    name = str(target.dtype).removeprefix("torch.")
    old, new = source.double(), target.double()
    finite = torch.isfinite(old)
    # Torch rounds float64 to float32 on the way: a hair below the limit may be infinite too.
    over = finite & ((old.abs() >= TOO_LARGE[name]) | ~torch.isfinite(new))
    if name not in HAVE_INF:
        over |= torch.isinf(old)
    if name == "float8_e8m0fnu":
        over |= old < 0
    rest = finite & ~over
    gone = rest & (old != 0) & (new == 0)
    changed = rest & ~gone & (old != new)
    largest = float(old[over].abs().max()) if over.any() else 0.0
    return Losses(old.numel(), int(over.sum()), int(gone.sum()), int(changed.sum()), largest)


@pytest.mark.parametrize("source", FLOATS)
def test_the_bits_are_torchs_and_the_counts_are_exact(source):
    values = patterns(source)
    for target in FLOATS.keys() - {source}:
        caster, made = cast(values, target)
        wanted = values.to(getattr(torch, target))
        assert made.data.read() == wanted.view(torch.uint8).numpy().tobytes(), target
        losses = expected_losses(values, wanted)
        assert caster.losses["w"] == losses, target
        changed = losses.overflow + losses.underflow + losses.precision
        assert is_exact(source, target) == (changed == 0), target


@pytest.mark.parametrize("source", FLOATS)
def test_big_endian_elements_are_turned_first(source):
    values = patterns(source)[:999]
    _, made = cast(values, "float32", byteorder="big")
    wanted = values.to(torch.float32).view(torch.uint8)
    assert made.data.read() == wanted.numpy().tobytes()


def test_any_offset_and_length_is_right(monkeypatch):
    monkeypatch.setattr(casting, "CHUNK", 7)
    values = torch.randn(40, dtype=torch.float64)
    _, made = cast(values, "float32")
    whole = values.float().view(torch.uint8).numpy().tobytes()
    for start in range(0, 160, 3):
        for stop in range(start, 161, 13):
            assert made.data.read(start, stop - start) == whole[start:stop]


def test_what_is_read_again_is_not_counted_again():
    caster, made = cast(torch.tensor([0.1, 1e6, 1e-9, 2.0]), "float16")
    for _ in range(2):
        assert list(made.data.iterate_blocks(3))
    assert caster.losses["w"] == Losses(4, 1, 1, 1, 1e6)


def test_elements_before_and_behind_all_tensors_are_cast_and_not_counted():
    values = torch.tensor([1e6, 0.1, 0.5, 0.3, 1e-9, 1e6])
    over = storage_of(values)
    caster = Caster("float32", "float16", allow_overflow=False)
    views = [
        ("first", TensorRef("float32", (2,), (1,), 1, over, "cpu")),
        ("both", TensorRef("float32", (2,), (2,), 2, over, "cpu")),
    ]
    made = caster.cast(over, views)
    assert made.data.read() == values.half().view(torch.uint8).numpy().tobytes()
    assert caster.losses == {"first": Losses(4, 0, 1, 2)}


def test_an_overflow_is_an_error_that_counts_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(casting, "CHUNK", 4)
    values = torch.ones(100)
    values[[2, 50, 99]] = torch.tensor([7e4, -INF, -1e7])
    _, made = cast(values, "float16", allow_overflow=False)
    with pytest.raises(NotRepresentable) as caught:
        list(made.data.iterate_blocks(8))
    assert "'w'" in caught.value.message
    assert "2 of 100 values" in caught.value.message
    assert "1e+07" in caught.value.message
    assert "--allow-overflow" in caught.value.hint
    assert "--keep w=float32" in caught.value.hint


def test_what_overflows():
    for value, target, over in [
        (65519.9, "float16", False),
        (65520.0, "float16", True),
        (INF, "float16", False),
        (464.0, "float8_e4m3fn", False),
        (464.1, "float8_e4m3fn", True),
        (1e6, "float8_e4m3fn", True),
        (INF, "float8_e4m3fn", True),
        (-1.0, "float8_e8m0fnu", True),
        (0.0, "float8_e8m0fnu", False),
        (math.nan, "float8_e8m0fnu", False),
    ]:
        _, made = cast(torch.tensor([value]), target, allow_overflow=False)
        if over:
            with pytest.raises(NotRepresentable):
                made.data.read()
        else:
            assert len(made.data.read()) == BY_NAME[target].itemsize, value


def test_the_hint_names_the_tensor_alone():
    values = torch.tensor([1e6])
    over = storage_of(values)
    caster = Caster("float32", "float16", allow_overflow=False)
    made = caster.cast(over, [("model/a[0].w", ref(values, over))])
    with pytest.raises(NotRepresentable) as caught:
        made.data.read()
    assert "--keep 'a[[]0].w=float32'" in caught.value.hint


def test_a_storage_without_bytes_stays_one():
    caster = Caster("float32", "bfloat16", allow_overflow=False)
    made = caster.cast(Storage("0", None, 40, "meta"), [])
    assert (made.data, made.nbytes, made.device) == (None, 20, "meta")


def test_torch_is_wanted_only_when_bytes_are():
    caster, _ = cast(torch.ones(3), "float16")
    assert not hasattr(caster._kernel_of_thread, "kernel")


@pytest.mark.parametrize("blocks", [None, 1000, 4 << 20])
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_bytes_that_are_not_those_that_the_file_states_are_refused(blocks, byteorder):
    over = storage_of(torch.arange(3 << (16 if blocks == 1000 else 20)).float(), byteorder)
    raw = over.data.read()
    for crc32, whole in ((zlib.crc32(raw), True), (zlib.crc32(raw) ^ 1, False)):
        stated = replace(over, crc32=crc32)
        caster = Caster("float32", "bfloat16", allow_overflow=False)
        made = caster.cast(stated, []).data
        if whole:
            assert len(b"".join(made.iterate_blocks(blocks or made.length))) == made.length
            assert made.read(5, 7) == made.read()[5:12]
        else:
            with pytest.raises(CorruptFile, match="storage '0' is damaged"):
                list(made.iterate_blocks(blocks or made.length))


def test_a_damaged_byte_is_told_before_the_overflow_that_it_makes():
    over = replace(storage_of(torch.tensor([1.0, 1e38])), crc32=1)
    caster = Caster("float32", "float16", allow_overflow=False)
    made = caster.cast(over, [("w", TensorRef("float32", (2,), (1,), 0, over, "cpu"))])
    with pytest.raises(CorruptFile):
        made.data.read()


def test_an_overflow_is_an_error_every_time():
    _, made = cast(torch.tensor([1e6]), "float16", allow_overflow=False)
    for _ in range(2):
        with pytest.raises(NotRepresentable):
            made.data.read()
