"""Which files are told of though nothing in them is a checkpoint."""

import gzip
import pickle
import zlib

import pytest

from ckptool.inspection.searching import should_be_one

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
PAGE = b"\n<!doctype HTML><title>Sign in</title>"
RANDOM = bytes(range(256))
ANSWER = b'{"error": "Repository not found"}'
CTRANSLATE2 = b"\x06\0\0\0\x10\0TransformerSpec\0" + RANDOM


@pytest.mark.parametrize(
    "name",
    [
        "a.pth", "a.PT", "a.ckpt", "a.pth.tar", "model.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.fp16.bin",
        "diffusion_pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.bin",
        "optimizer_1.bin", "scheduler.bin", "random_states_0.pkl",
    ],
)  # fmt: skip
def test_names_that_only_checkpoints_have(name, tmp_path):
    assert should_be_one(str(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["pytorch_model", "model.h5", "notes.txt", ".bin", "a" + "_a" * 100]
)
def test_other_names(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    assert not should_be_one(str(tmp_path / name))


@pytest.mark.parametrize("data", [b"", POINTER, PAGE, b"<?xml version='1.0'?><Error/>"])
@pytest.mark.parametrize("name", ["a.bin", "vectors.pkl", "tokenizer.bin", "model.pickle"])
def test_what_no_program_writes_under_any_name(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert should_be_one(str(tmp_path / name))


@pytest.mark.parametrize("data", [bytes(5000), gzip.compress(RANDOM), ANSWER, b"404: Not Found"])
def test_what_other_programs_may_write_under_other_names(data, tmp_path):
    for name, told in (
        ("model.bin", True),
        ("best_weights.pkl", True),
        ("ema-state-10.bin", True),
        ("corpus.bin", False),
        ("networks.bin", False),
        ("tokenizer.model.bin", False),
        ("ggml-model-q4_0.bin", False),
    ):
        (tmp_path / name).write_bytes(data)
        assert should_be_one(str(tmp_path / name)) is told, name


@pytest.mark.parametrize("data", [RANDOM, CTRANSLATE2, zlib.compress(RANDOM), pickle.dumps([1])])
def test_the_files_of_other_programs(data, tmp_path):
    (tmp_path / "model.bin").write_bytes(data)
    assert not should_be_one(str(tmp_path / "model.bin"))


def test_what_cannot_be_read(tmp_path):
    assert not should_be_one(str(tmp_path / "gone.bin"))
