"""Checkpoints written to addresses: whole or not at all, the index of a set last."""

import os

import pytest

import ckptool
from ckptool.errors import (
    CheckpointError,
    CheckpointWarning,
    TargetExists,
    UsageError,
    WriteError,
)
from tests.servers import simple_storage

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def model(fixtures):
    return fixtures / "torch-2.13.0" / "dp_full_cuda3.pth"


@pytest.fixture
def weights(model, tmp_path):
    ckptool.convert(model, tmp_path / "weights.safetensors", ckptool.Take(model_only=True))
    return tmp_path / "weights.safetensors"


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with simple_storage() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3")
        system.mkdir("bucket")
        yield system


def names(system, folder=""):
    return sorted(os.path.basename(one) for one in system.find(folder))


def test_a_file_is_written_as_on_this_disk(model, memory, tmp_path):
    for name in ("x.safetensors", "x.pth"):
        receipt = ckptool.convert(model, f"memory://run/{name}", ckptool.Take(model_only=True))
        ckptool.convert(model, tmp_path / name, ckptool.Take(model_only=True))
        assert memory.cat(f"/run/{name}") == (tmp_path / name).read_bytes()
        assert (receipt.path, receipt.verified) == (f"memory://run/{name}", False)


def test_a_set_is_written_with_its_index_last(model, weights, memory):
    index = "memory://run/model.safetensors.index.json"
    receipt = ckptool.convert(model, index, ckptool.Take(model_only=True), max_shard_size="600")
    assert names(memory) == sorted(os.path.basename(path) for path, _ in receipt.files)
    assert len(receipt.files) > 2
    times = {one["name"]: one["created"] for one in memory.find("/run", detail=True).values()}
    assert max(times, key=times.__getitem__) == "/run/model.safetensors.index.json"
    assert ckptool.diff(weights, index).identical


def test_what_is_there_is_replaced_where_that_is_asked_for_alone(model, memory):
    ckptool.convert(model, "memory://run/x.pth")
    before = memory.cat("/run/x.pth")
    with pytest.raises(TargetExists, match="already exists"):
        ckptool.convert(model, "memory://run/x.pth", ckptool.Take(model_only=True))
    assert memory.cat("/run/x.pth") == before
    ckptool.convert(model, "memory://run/x.pth", ckptool.Take(model_only=True), overwrite=True)
    assert memory.cat("/run/x.pth") != before
    with pytest.raises(TargetExists, match="is a folder"):
        ckptool.convert(model, "memory://run", overwrite=True)
    with pytest.raises(TargetExists, match="is the source itself"):
        ckptool.convert("memory://run/x.pth", "memory://run/x.pth", overwrite=True)
    with (
        ckptool.open("memory://run/x.pth") as checkpoint,
        pytest.raises(UsageError, match="is remote, and remote files cannot be edited in place"),
    ):
        checkpoint.save("memory://run/x.pth", in_place=True)
    with pytest.raises(UsageError, match="not read back"):
        ckptool.convert(model, "memory://run/y.pth", verify=True)


def interrupted(at):
    def progress(done, total):
        if done >= at * total:
            raise KeyboardInterrupt

    return progress


def test_an_upload_that_ends_early_leaves_nothing(model, memory):
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(model, "memory://run/x.pth", progress=interrupted(1))
    assert names(memory) == []
    ckptool.convert(model, "memory://run/x.pth")


def test_of_a_set_that_ends_early_what_is_there_is_named(model, memory):
    index = "memory://run/model.safetensors.index.json"
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(CheckpointWarning, match=r"was not written; .* are there: memory://.*-00001-"),
    ):
        ckptool.convert(
            model,
            index,
            ckptool.Take(model_only=True),
            max_shard_size="600",
            progress=interrupted(0.5),
        )
    left = names(memory)
    assert left
    assert "model.safetensors.index.json" not in left


def test_what_a_file_system_refuses_is_a_sentence(model, memory, monkeypatch):
    def refuse(*words, **options):
        raise RuntimeError("no room in the cloud")

    monkeypatch.setattr(type(memory), "_open", refuse)
    with pytest.raises(WriteError, match="cannot be written: RuntimeError, no room in the cloud"):
        ckptool.convert(model, "memory://run/x.pth")


def test_s3_is_read_written_and_listed(model, weights, s3, tmp_path):
    address = "s3://bucket/run/model.safetensors.index.json"
    ckptool.convert(model, address, ckptool.Take(model_only=True), max_shard_size="600")
    ckptool.convert(address, tmp_path / "back.pth")
    assert ckptool.diff(weights, tmp_path / "back.pth").identical
    assert ckptool.list_tensors("s3://bucket/run").tensors
    with pytest.raises(TargetExists):
        ckptool.convert(model, address, ckptool.Take(model_only=True), max_shard_size="600")
    with pytest.raises(CheckpointError, match="no such file"):
        ckptool.list_tensors("s3://bucket/run/nothing.pth")
    with pytest.raises(WriteError):
        ckptool.convert(model, "s3://nobucket/x.pth")


def test_an_upload_to_s3_that_ends_early_leaves_no_object_and_no_parts(s3, tmp_path):
    import numpy

    rng = numpy.random.default_rng(0)
    numpy.savez(tmp_path / "large.npz", a=rng.bytes(8 << 20), b=rng.random(3 << 20))
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(tmp_path / "large.npz", "s3://bucket/cut/x.pth", progress=interrupted(1))
    s3.invalidate_cache()
    assert names(s3, "bucket/cut") == []
    assert s3.list_multipart_uploads("bucket") == []
    ckptool.convert(tmp_path / "large.npz", "s3://bucket/cut/x.pth")  # of two parts
    assert ckptool.diff(tmp_path / "large.npz", "s3://bucket/cut/x.pth").identical
