"""Each limit, exceeded by a file that is otherwise in order."""

import dataclasses
import pickle
import random
import zipfile

import pytest

import ckptool
from ckptool.inspection.listing import list_tensors
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
    "max_header_inflation": (1, "bomb"),
    "max_large_keys": (3, "colliding"),
    "max_dimensions": (1, FIXTURES / "safetensors" / "dtypes.safetensors"),
    "max_integer_bytes": (4, FIXTURES / "values" / "plain.pth"),
    "max_key_parts": (2, FIXTURES / "values" / "keys.pth"),
    "max_repeats": (0, "doubling"),
    "max_nested_pickles": (0, FIXTURES / "streams" / "tensors_protocol2.pkl"),
    "max_repeated_bytes": (0, FIXTURES / "tensors" / "views.pth"),
}


def deflated(path, payload):
    """A torch zip whose pickle is compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3\n")


def colliding(count):
    """A dict whose keys all have the hash 0."""
    return {(2**61 - 1) * factor: None for factor in range(count)}


MADE = {
    "doubling": lambda path: path.write_bytes(doubling(8)),
    "bomb": lambda path: deflated(path, pickle.dumps([random.random() for _ in range(20_000)], 2)),
    "colliding": lambda path: path.write_bytes(
        pickle.dumps({(2**61 - 1) * n: n for n in range(9)})
    ),
}


def read_all(path, limits):
    with ckptool.open(path, limits=limits) as checkpoint:
        list_tensors(checkpoint, hash=True, limits=limits)


def test_every_limit_is_here():
    of_addresses = {"max_far_shards"}  # in tests/test_remote.py
    assert set(TOO_SMALL) | of_addresses == {field.name for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_limit_that_is_too_small_stops_the_reader(name, tmp_path):
    value, path = TOO_SMALL[name]
    if path in MADE:  # what no real checkpoint does
        path = tmp_path / "made"
        MADE[TOO_SMALL[name][1]](path)
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


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x02" + b"]" * 3_000_000 + b"a" * 2_999_999 + b".",
        b"\x80\x02](" + b"N" * 900_000 + b"e.",
    ],
    ids=["lists", "values"],
)
def test_a_small_file_cannot_become_a_large_tree(payload, tmp_path):
    deflated(tmp_path / "bomb.pth", payload)
    assert (tmp_path / "bomb.pth").stat().st_size < 10_000
    with pytest.raises(ckptool.LimitExceeded, match="inflates to"):
        ckptool.open(tmp_path / "bomb.pth")


class Derived(dict):
    """Pickled as an object in which items are set."""


@pytest.mark.parametrize("kind", [dict, Derived])
def test_colliding_keys_meet_a_limit_before_they_cost_time(kind, tmp_path):
    (tmp_path / "keys.pkl").write_bytes(pickle.dumps(kind(colliding(12_000)), 2))
    with pytest.raises(ckptool.LimitExceeded, match="chosen to collide"):
        ckptool.open(tmp_path / "keys.pkl")


def test_calls_of_calls_are_followed_without_recursion(tmp_path):
    chain = b"\x80\x02cfoo\nBar\n" + b")R" * 5000 + b"."
    (tmp_path / "chain.pkl").write_bytes(chain)
    with ckptool.open(tmp_path / "chain.pkl") as checkpoint:
        assert [row.class_name for row in list_tensors(checkpoint).objects] == ["object"]
        checkpoint.save(tmp_path / "again.pth")


def test_containers_shared_as_real_files_share_them_are_read(tmp_path):
    columns = list(range(1000))
    (tmp_path / "rows.pkl").write_bytes(pickle.dumps([{"columns": columns} for _ in range(300)], 2))
    with ckptool.open(tmp_path / "rows.pkl") as checkpoint:
        assert len(list_tensors(checkpoint).values) == 300_000
