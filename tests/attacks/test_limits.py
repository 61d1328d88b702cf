"""Each limit, exceeded by a file that is otherwise in order."""

import dataclasses
import pickle

import pytest

import ckptool
from ckptool.inspection import list_tensors
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.attacks.test_pickle_attacks import doubling
from tests.conftest import FIXTURES
from tests.symbolic.test_rebuild import machine_reads, tensor

NET = FIXTURES / "torch-2.13.0" / "dp_full.pth"

# Limit -> a value too small, and a real file that asks for more.
TOO_SMALL = {
    "max_pickle_bytes": (100, NET),
    "max_header_bytes": (100, FIXTURES / "safetensors" / "dtypes.safetensors"),
    "max_json_bytes": (10, FIXTURES / "torchscript" / "exported.pt2"),
    "max_code_bytes": (10, FIXTURES / "torchscript" / "scripted.pt"),
    "max_records": (3, NET),
    "max_depth": (2, NET),
    "max_inflation": (1, FIXTURES / "archives" / "deflated.pth"),
    "max_dimensions": (1, FIXTURES / "safetensors" / "dtypes.safetensors"),
    "max_integer_bytes": (4, FIXTURES / "values" / "plain.pth"),
    "max_key_parts": (2, FIXTURES / "values" / "keys.pth"),
    "max_repeats": (0, "doubling"),
    "max_nested_pickles": (0, FIXTURES / "streams" / "tensors_protocol2.pkl"),
    "max_repeated_bytes": (0, FIXTURES / "tensors" / "views.pth"),
}


def read_all(path, limits):
    with ckptool.open(path, limits=limits) as checkpoint:
        list_tensors(checkpoint, hash=True, limits=limits)


def test_every_limit_is_here():
    assert set(TOO_SMALL) == {field.name for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_limit_that_is_too_small_stops_the_reader(name, tmp_path):
    value, path = TOO_SMALL[name]
    if path == "doubling":  # no real checkpoint mentions its containers that often
        path = tmp_path / "doubling.pkl"
        path.write_bytes(doubling(8))
    read_all(path, DEFAULT_LIMITS)
    with pytest.raises(ckptool.LimitExceeded):
        read_all(path, dataclasses.replace(DEFAULT_LIMITS, **{name: value}))


def test_sixty_five_dimensions_are_too_many():
    with pytest.raises(ckptool.LimitExceeded, match="65 dimensions"):
        machine_reads(tensor(*[1] * 65))


def test_the_limits_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_LIMITS.max_depth = 10**9
    assert pickle.loads(pickle.dumps(DEFAULT_LIMITS)) == DEFAULT_LIMITS
