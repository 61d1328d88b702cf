"""Calls that make arrays and numbers of other libraries, as what stands for them here."""

import pickle
import sys
import types

import numpy as np
import pytest
import torch

import ckptool
from ckptool.core.model import Global, Opaque, TensorRef
from ckptool.symbolic.encoder import encode
from tests.symbolic.pickles import read

JAX = ("jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array")
RECONSTRUCT = Global("numpy.core.multiarray", "_reconstruct")


@pytest.fixture(params=JAX)
def array_of(request, monkeypatch):
    """A class that pickles an array as JAX does, of either age."""
    home, _, name = request.param.rpartition(".")

    def made(function, args, state, aval):
        found = function(*args)
        found.__setstate__(state)
        return found

    made.__name__ = made.__qualname__ = name
    made.__module__ = home
    for at in ("jax", "jax._src", home):
        monkeypatch.setitem(sys.modules, at, types.ModuleType(at))
    setattr(sys.modules[home], name, made)

    class Array:
        def __init__(self, array):
            self.array = array

        def __reduce__(self):
            return made, (*self.array.__reduce__(), {"weak_type": False})

    return Array


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype="f4").reshape(2, 3), np.asfortranarray(np.eye(2, 3, dtype="i8"))]
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_an_array_of_jax_is_one_of_numpy(tmp_path, array_of, array, protocol):
    file = tmp_path / "in.pkl"
    file.write_bytes(pickle.dumps({"dense": [array_of(array)]}, protocol))
    with ckptool.open(file) as source:
        ((path, tensor),) = source.tensors()
        assert (path, tensor.kind) == (("dense", 0), "numpy")
        assert np.array_equal(tensor.torch().numpy(), array)
        source.save(tmp_path / "same.pth")
        source.then(ckptool.Plain()).save(tmp_path / "plain.pth")
    same = torch.load(tmp_path / "same.pth", weights_only=False)["dense"][0]
    assert np.array_equal(same, array)
    assert same.flags.f_contiguous == array.flags.f_contiguous
    plain = torch.load(tmp_path / "plain.pth", weights_only=True)["dense"][0]
    assert torch.equal(plain, torch.from_numpy(array))
    assert ckptool.scan(file).verdict == "needs code"


@pytest.mark.parametrize(
    ("name", "function", "dtype", "kind"),
    [
        (JAX[0], RECONSTRUCT, "bfloat16", TensorRef),
        (JAX[0], RECONSTRUCT, "int4", Opaque),
        (JAX[0], Global("os", "system"), "bfloat16", Opaque),
        ("jax.other", RECONSTRUCT, "bfloat16", Opaque),
    ],
)
def test_what_is_no_array_stays_an_object(name, function, dtype, kind):
    """The dtype is a class of `ml_dtypes`."""
    element = Opaque(Global("numpy", "dtype"), (Global("ml_dtypes", dtype), False, True))
    state = (1, (2,), element, False, b"\0\0\x80?")
    args = (function, (Global("numpy", "ndarray"), (0,), b"b"), state, {})
    made = read(encode(Opaque(Global(*name.rsplit(".", 1)), args)).data).root
    assert isinstance(made, kind)
    if isinstance(made, TensorRef):
        assert made.torch().tolist() == [0.0, 1.0]
