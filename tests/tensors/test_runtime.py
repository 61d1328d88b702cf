"""Attributes from a file never replace what a class has."""

from collections import OrderedDict

import pytest

from ckptool.errors import CheckpointWarning
from ckptool.tensors import require_torch, set_attributes
from ckptool.tensors.runtime import called


def test_attributes_are_set_unless_the_class_has_them():
    made = OrderedDict(a=1)
    given = {"_metadata": 1, "keys": 2, "__class__": dict, 3: 4, "__reduce__": 5}
    with pytest.warns(CheckpointWarning, match="the root is .* keys, __class__, 3, __reduce__:"):
        set_attributes(made, given, "the root")
    assert vars(made) == {"_metadata": 1}
    assert list(made.keys()) == ["a"]
    assert type(made) is OrderedDict


def test_torch_is_there():
    assert require_torch() is None


@pytest.mark.parametrize(
    ("name", "shown"), [("fc.weight", "tensor 'fc.weight'"), ("", "the tensor")]
)
def test_how_a_tensor_is_called(name, shown):
    assert called(name) == shown


def test_a_name_cannot_reach_the_terminal():
    assert "\x1b" not in called("a\x1b[2Jb")
