"""Which names and contents make a file of a folder a checkpoint."""

import gzip
import pickle
import zlib

import pytest

from ckptool.inspection.discovery import should_be_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
PAGE = b"\n<!doctype HTML><title>Sign in</title>"
RANDOM = bytes(range(256))
ANSWER = b'{"error": "Repository not found"}'
CTRANSLATE2 = b"\x06\0\0\0\x10\0TransformerSpec\0" + RANDOM


def should_be(path, data):
    path.write_bytes(data)
    return should_be_checkpoint(str(path))


def test_names_that_only_checkpoints_have(tmp_path):
    for name in (
        "a.pth", "a.PT", "a.ckpt", "a.pth.tar", "model.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.fp16.bin",
        "diffusion_pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.bin",
        "optimizer_1.bin", "scheduler.bin", "random_states_0.pkl",
    ):  # fmt: skip
        assert should_be_checkpoint(str(tmp_path / name)), name


def test_other_names(tmp_path):
    for name in ("pytorch_model", "model.h5", "notes.txt", ".bin", "a" + "_a" * 100):
        assert not should_be(tmp_path / name, b""), name
    assert not should_be_checkpoint(str(tmp_path / "gone.bin"))


def test_what_no_program_writes_under_any_name(tmp_path):
    for name in ("a.bin", "vectors.pkl", "tokenizer.bin", "model.pickle"):
        for data in (b"", POINTER, PAGE, b"<?xml version='1.0'?><Error/>"):
            assert should_be(tmp_path / name, data), (name, data)


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
        assert should_be(tmp_path / name, data) is told, name


def test_the_files_of_other_programs(tmp_path):
    for data in (RANDOM, CTRANSLATE2, zlib.compress(RANDOM), pickle.dumps([1])):
        assert not should_be(tmp_path / "model.bin", data), data
