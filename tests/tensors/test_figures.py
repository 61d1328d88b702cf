"""The figures of a chunk as Python and as TorchScript; tests/tensors/test_comparing.py has more."""

import math

import pytest
import torch

from ckptool.tensors import comparing
from ckptool.tensors.comparing import CHUNK, block, functions


@pytest.fixture
def fresh():
    functions.cache_clear()
    yield
    functions.cache_clear()


def of_block(function, x, y, *, special=False, pairs=False, rtol=0.1, dtype=torch.float32):
    a, b = torch.empty(64, dtype=dtype), torch.empty(64, dtype=dtype)
    return function(x, y, a, b, 0.0, rtol, 1e-33, pairs, special, True)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_compiled_functions_give_the_same(dtype, pairs, special):
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    if special:
        x[3], y[3], y[77], x[500] = math.nan, math.nan, math.inf, 0.0
    assert functions().block is not block
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"special": special, "pairs": pairs, "dtype": wide}
    for _ in range(4):  # the first times are watched, the next are made fast
        compiled = of_block(functions().block, x, y, **options)
        assert compiled == pytest.approx(of_block(block, x, y, **options), rel=1e-6)


@pytest.mark.usefixtures("fresh")
def test_without_torchscript_they_are_taken_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.jit, "script", None)
    assert functions() == (comparing.block, comparing.figures)


def test_what_is_not_finite_is_lost_unless_looked_for():
    x, y = torch.ones(9), torch.full((9,), 2.0)
    for bad in (math.nan, math.inf, 1e30, 1e-30):
        x[:] = 1.0
        x[4] = bad
        lost = of_block(block, x, y)[11]
        assert (lost > 0) == (bad != 1e-30)
    assert of_block(block, torch.full((9,), 1e-30), y)[11] > 0
    assert of_block(block, torch.zeros(9), torch.zeros(9))[11] == 0.0


def test_torch_divides_no_chunk_among_threads():
    assert CHUNK < 1 << 15
    assert CHUNK % 2 == 0  # the parts of complex numbers stay together
