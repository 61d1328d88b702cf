import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import subprocess
import zipfile

import pytest
import torch

from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.formats import open_checkpoint
from ckptool.formats.base import Probe
from ckptool.formats.identify import FOLDER_KINDS, MAGICS, ZIP_KINDS, unrecognized_error
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.zips import tarred


def explained(path):
    probe = Probe(path, DEFAULT_LIMITS)
    try:
        error = unrecognized_error(probe)
    finally:
        probe.close()
    assert str(error).startswith(f"{path} is ")
    assert "\n" not in str(error)
    return error


@pytest.fixture
def content(tmp_path):
    def explain_content(data, name="model.pth"):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return explained(path)

    return explain_content


@pytest.fixture
def folder(tmp_path):
    def explain_folder(*names):
        path = tmp_path / "run 1"
        path.mkdir(exist_ok=True)
        for name in names:
            target = path / name
            if name.endswith("/"):
                target.mkdir(parents=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(b"x")
        return explained(path)

    return explain_folder


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def is_a(error, kind, *words):
    assert type(error) is kind
    for word in words:
        assert word in str(error)
    return True


# Nothing, or too little


def test_an_empty_file(content):
    error = content(b"")
    assert is_a(error, TruncatedFile, "empty")
    assert "repeat it" in error.hint


@pytest.mark.parametrize("head", [b"P", b"PK\x03", b"GG", b"\x89HD"])
def test_a_file_cut_in_its_mark(content, head):
    assert is_a(content(head), TruncatedFile, f"truncated after {len(head)} byte")


def test_zeros(content):
    assert is_a(content(bytes(3000)), NotACheckpoint, "begins with zeros")
    assert is_a(content(bytes(3000) + b"x"), NotACheckpoint, "begins with zeros")


def test_bytes_of_no_known_kind(content):
    error = content(bytes(range(200, 256)) * 20)
    assert is_a(error, NotACheckpoint, "c8 c9 ca cb cc cd ce cf")
    assert error.hint.startswith("file ")


# Text


POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 87064576
"""


def test_a_git_lfs_pointer(content):
    error = content(POINTER, "my model.pth")
    assert is_a(error, NotACheckpoint, "git-lfs pointer", "(the real file is 83.0 MiB)")
    assert "lfs pull --include '**/my model.pth'" in error.hint
    assert is_a(content(POINTER.replace("size 87064576", "")), NotACheckpoint, "git-lfs pointer")
    assert "'**/a?1???.pth'" in content(POINTER, "a[1],*.pth").hint


QUOTA = (
    "<!DOCTYPE html><html><head><title>Google Drive - Quota exceeded</title></head>"
    "<body>Sorry, you can't view or download this file at this time.</body></html>"
)


def test_a_text(content):
    for text, words in [
        (
            "<!DOCTYPE html><title>404 - Not\n Found &amp; more</title>",
            "'404 - Not Found & more'",
        ),
        ("\n\n  <html lang='en'>", "an HTML page, not the file itself"),
        ("\ufeff<!doctype HTML>", "an HTML page"),
        ("<head><title>x", "an HTML page"),
        ("<?xml version='1.0'?><!DOCTYPE html PUBLIC ''><html>", "an HTML page"),
        (QUOTA, "an HTML page ('Google Drive - Quota exceeded'), not the file itself"),
        (
            "<!DOCTYPE html><title>Google Drive - Virus scan warning</title>",
            "an HTML page ('Google Drive - Virus scan warning'), not the file itself",
        ),
        ("<html><title>Bandwidth quota</title>", "an HTML page ('Bandwidth quota')"),
        ("<!DOCTYPE html><title>\x1b[31mred\x07</title>", r"'\x1b[31mred\x07'"),
        ("<html>" + "<title" * 10_000, "an HTML page"),
        (
            "<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
            "an error message of a server: 'AccessDenied'",
        ),
        ("<svg>", "an XML document"),
        ('{"error": "Repository not found"}', "error message of a server: 'Repository not found'"),
        ('{"message": "Bad credentials"}', "error message of a server: 'Bad credentials'"),
        ('{"error": {"code": 404}}', "error message of a server"),
        ('{"architectures": ["Bert"], "hidden_size": 768}', "a model's configuration"),
        ('{"b": 1, "a": 2}', "keys 'b', 'a'"),
        ("[1, 2]", "a JSON document"),
        ("{" * 5000, "begins like JSON but is not JSON"),
        ("[" * 200_000, "begins like JSON but is not JSON"),
        ("[" + "1" * 5000 + "]", "begins like JSON but is not JSON"),
        ("outs:\n- md5: 6ae\n  size: 3\n  path: model.pth\n", "a DVC pointer"),
        ("import torch\n", "a Python script"),
        ("#!/usr/bin/env python\n", "a Python script"),
        ("Not Found", "begins with 'Not Found'"),
        ("\x1b]0;title\x07 hello there, this is a text of some length", r"'\x1b]0;title\x07"),
        ("Zugriff verweigert für alle\n", "begins with 'Zugriff verweigert für alle'"),
        (" \n\t ", "white space"),
    ]:
        error = content(text)
        assert is_a(error, NotACheckpoint, words)
        assert error.hint


def test_a_page_in_other_encodings(content):
    page = "<!DOCTYPE html><title>Ошибка: файл не найден</title>"
    assert is_a(content(page.encode("cp1251")), NotACheckpoint, "an HTML page")
    assert is_a(content(page.encode("utf-16")), NotACheckpoint, "Ошибка")


def test_an_index_of_shards_is_no_shard(content):
    error = content(json.dumps({"metadata": {}, "weight_map": {"a": "b.bin"}}), "x.index.json")
    assert is_a(error, NotACheckpoint, "an index of shards, not a shard")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model_checkpoint_path: "model.ckpt-3"\n', "TensorFlow"),
        ("global_step1000", "latest step ('global_step1000')"),
        ("1000\n", "latest step ('1000')"),
    ],
)
def test_a_note_that_belongs_to_a_checkpoint(content, text, words):
    error = content(text, "latest")
    assert is_a(error, UnsupportedFormat, words)
    if "TensorFlow" in words:
        assert error.hint == f"give the folder: ckptool list {os.path.dirname(error.file)}"


# Binary files


def test_a_file_is_told_by_its_magic(content):
    for row in [row for row in MAGICS if not row.is_pattern]:
        tail = b"" if row.offset < 0 else bytes(range(256)) * 9
        data = b"\x01" * (row.offset % 64) + row.magic + tail
        error = content(data, "a file.pth")
        assert is_a(error, row.kind, row.what)
        assert "{" not in error.hint


def test_a_real_gzip_says_how_to_unpack_it(content, tmp_path):
    error = content(gzip.compress(b"data"), "a file.pth")
    assert is_a(error, NotACheckpoint, "compressed with gzip")
    path, target = f"'{tmp_path}/a file.pth'", f"'{tmp_path}/a file.pth.unpacked'"
    assert error.hint == f"gzip -dc {path} > {target} && ckptool list {target}"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_what_unpacks_writes_over_nothing(content, tmp_path, pack):
    (tmp_path / "model.pth").write_bytes(b"mine")
    inner = tarred({"model.pth": b"theirs" * 5000})
    hints = [content(raw, "x y.tar.gz").hint for raw in (pack(inner), inner)]
    assert hints[0] == hints[1]
    subprocess.run(hints[0].removeprefix("unpack it: "), shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "model.pth").read_bytes() == b"mine"
    assert (tmp_path / "x y.tar.gz.unpacked/model.pth").read_bytes() == b"theirs" * 5000
    assert "x y.tar.gz-2.unpacked'" in content(pack(inner), "x y.tar.gz").hint
    single = content(pack(b"a checkpoint"), "model.pth.tar.gz").hint
    subprocess.run(single.partition(" && ")[0], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "model.pth.tar.gz.unpacked").read_bytes() == b"a checkpoint"


def test_what_is_packed_by_other_means_is_a_tar_by_its_name(content):
    zstd = b"\x28\xb5\x2f\xfd" + bytes(40)
    assert " && tar -xf " in content(zstd, "x.tar.zst").hint
    assert " && tar -xf " not in content(zstd, "x.pth.tar.zst").hint


def test_a_log_as_tensorboard_writes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", 1.0)
    (log,) = tmp_path.iterdir()
    assert is_a(explained(log), NotACheckpoint, "a TensorBoard log")


def test_the_parts_of_a_tensorflow_checkpoint(content, tmp_path):
    table = bytes(range(128, 228)) + bytes.fromhex("57fb808b247547db")
    error = content(b"\0\0" + table, "model")
    words = "a TensorFlow version 1 checkpoint", "or an index with another name"
    assert is_a(error, UnsupportedFormat, *words)
    noise = bytes(range(128, 256)) * 4
    error = content(noise, "other.data-00000-of-00001")
    words = "the data of a TensorFlow checkpoint with a missing or truncated index"
    assert is_a(error, UnsupportedFormat, words)
    assert error.hint == "copy other.index as well"
    (tmp_path / "m.index").touch()
    error = content(b"\x0a\x86\x08\x12\xdf" + noise, "m.meta")
    assert is_a(error, UnsupportedFormat, "the graph of a TensorFlow checkpoint")
    assert error.hint == f"give its index: ckptool list {tmp_path / 'm.index'}"


def test_protocol_buffers(content):
    assert is_a(content(b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\xff"), UnsupportedFormat, "ONNX")
    error = content(b"\x08\x03\x3a\x80\x01\xff\xfe")
    assert is_a(error, UnsupportedFormat, "ONNX")
    assert "onnx.load" in error.hint
    assert "numpy.savez" in error.hint
    core_ml = b"\x08\x01\x12\x20\x0a\x1e\x0a\x05image\xff\xfe" + bytes(40)
    assert is_a(content(core_ml), UnsupportedFormat, "Core ML")
    saved_model = b"\x08\x01\x12\xc8\x9c\x04\x0a\x80\x12\xff\xfe" + bytes(40)
    assert is_a(content(saved_model), UnsupportedFormat, "SavedModel")


# Archives


ARCHIVES = {
    "a Keras model (.keras)": ["metadata.json", "config.json", "model.weights.npz"],
    "a torch.package archive": ["pkg/.data/extern_modules", "pkg/.data/version"],
    "what a failed torch.save left behind: it has no data.pkl": [
        "m/version",
        "m/byteorder",
        "m/.data/serialization_id",
    ],
}


def test_a_zip_is_told_by_its_names(content):
    for row in ZIP_KINDS:
        error = content(zipped(**dict.fromkeys(ARCHIVES[row.what], b"x")))
        assert is_a(error, row.kind, row.what)
        assert error.hint


def test_other_zips_say_what_they_hold(content):
    images = zipped(**{f"img/{number}.png": b"x" for number in range(9)})
    error = content(images)
    assert is_a(error, NotACheckpoint, "'img/0.png'", "and 5 more")
    error = content(zipped(**{"readme.md": b"", "out/model.pth": b""}))
    assert is_a(error, NotACheckpoint, "with a checkpoint inside")
    assert " -d " in error.hint  # into a folder of its own, over nothing that is there
    assert error.hint.endswith(".unpacked/out/model.pth")
    error = content(zipped(**{"out/archive/data.pkl": b"", "out/archive/data/0": b""}))
    assert error.hint.endswith(".unpacked/out/archive")
    assert is_a(content(zipped()), NotACheckpoint, "other files: nothing")
    assert is_a(content(zipped(**{"\x1b[31m": b""})), NotACheckpoint, r"'\x1b[31m'")


def is_refused(path, data, kind, *words):
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    return is_a(caught.value, kind, *words)


def test_a_damaged_zip(tmp_path):
    whole = zipped(a=b"x" * 100)
    path = tmp_path / "model.pth"
    assert is_refused(path, whole[:90], TruncatedFile, "its end is missing")
    assert is_refused(path, whole[:-40] + whole[-20:], TruncatedFile, "its end is missing")
    broken = whole.replace(b"PK\x01\x02", b"PK\x09\x02")
    assert is_refused(path, broken, CorruptFile, "the zip directory is damaged")


def test_a_tar(content, tmp_path):
    error = content(tarred({"run/model.pth": b"x", "run/log": b""}))
    assert is_a(error, NotACheckpoint, "a tar archive with 'run/model.pth', 'run/log'")
    folder = f"{tmp_path}/model.pth.unpacked"
    unpacking = f"mkdir {folder} && tar -xf {tmp_path}/model.pth -C {folder}"
    assert error.hint == f"unpack it: {unpacking}"
    error = content(tarred({"./model_config.yaml": b"x", "./model_weights.ckpt": b"x"}))
    assert is_a(error, UnsupportedFormat, "a NeMo model")
    weights = "./model_weights.ckpt"
    assert error.hint == f"{unpacking} {weights} && ckptool list {folder}/{weights}"
    cut = tarred({"a": b"x" * 9000}, mtime=0)[:5000]
    words = "tar member 'a': cannot read 9,000 bytes", "4,512 bytes too early"
    assert is_refused(tmp_path / "cut", cut, TruncatedFile, *words)


def test_a_link_of_composer_names_the_checkpoint(tmp_path):
    (tmp_path / "latest-rank0.pt.symlink").write_text("my run/ep0-ba10/ep0-ba10-rank0.pt")
    with pytest.raises(UnsupportedFormat, match="a link file of Composer") as caught:
        open_checkpoint(tmp_path / "latest-rank0.pt.symlink")
    assert caught.value.hint == "open that file: ckptool list 'my run/ep0-ba10/ep0-ba10-rank0.pt'"


# Folders


FOLDERS = {
    0: ["__0_0.distcp", "__1_0.distcp"],
    1: ["latest", "zero_to_fp32.py", "global_step10/"],
    2: ["zero_to_fp32.py", "latest"],
    3: ["zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    4: ["latest_checkpointed_iteration.txt", "iter_0001000/"],
    5: ["iter_0001000/"],
    6: ["mp_rank_00/", "mp_rank_01_003/"],
    7: ["_CHECKPOINT_METADATA", "default/"],
    8: ["saved_model.pb", "variables/"],
    9: ["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"],
    10: ["tensor_0.pt", "tensor_1.pt"],
    11: ["model-00001-of-00001.safetensors", "model.safetensors.index.json"],
    12: ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
    13: ["optimizer_0/", "pytorch_model_fsdp_0/", "rng_state_0.pth", "trainer_state.json"],
    14: ["sharded/"],
    15: ["checkpoint_0.pt", "checkpoint_1.pt", "metadata.pkl"],
    16: ["checkpoint_last-model_part-0-shard0.pt", "checkpoint_last-model_part-0-shard1.pt"],
    17: ["rank0.pt", "rank1.pt"],
}


def test_a_folder_is_told_by_its_names(folder, tmp_path):
    for number, row in enumerate(FOLDER_KINDS):
        error = folder(*FOLDERS[number])
        assert is_a(error, UnsupportedFormat, row.what)
        assert "{" not in error.hint
        shutil.rmtree(tmp_path / "run 1")


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_a_folder_of_jax_under_its_other_names(folder, name):
    error = folder(name, "d/", "ocdbt.process_0/")
    assert is_a(error, UnsupportedFormat, "an Orbax checkpoint (JAX)")
    assert "StandardCheckpointer().restore" in error.hint
    assert "flax.serialization.to_bytes" in error.hint


def test_a_pipeline_names_its_parts(folder, tmp_path):
    error = folder(
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.json",
        "vae/diffusion_pytorch_model.bin",
    )
    assert is_a(error, UnsupportedFormat, "with weights in 'text_encoder', 'unet', 'vae'")
    assert error.hint == f"give one of them: ckptool list '{tmp_path}/run 1/text_encoder'"


def test_the_hints_for_folders_are_commands(folder, tmp_path):
    path = tmp_path / "run 1"
    error = folder("model-00001-of-00002.safetensors")
    assert error.hint.endswith(f"ckptool list '{path}/model-00001-of-00002.safetensors'")


def test_a_folder_whose_writing_was_stopped(folder):
    names = (f".model.safetensors.index.json.ckptool-{12 * '0'}-00001.part", ".m.ckptool-lock")
    assert is_a(folder(*names), NotACheckpoint, "ckptool did not finish writing")


def test_a_folder_that_holds_checkpoints(folder, tmp_path):
    path = tmp_path / "run 1"
    assert is_a(folder(), NotACheckpoint, "an empty folder")
    assert is_a(folder("log.txt", "images/"), NotACheckpoint, "it contains 'images', 'log.txt'")
    torch.save({}, path / "best.pth")
    error = folder()
    assert is_a(error, NotACheckpoint, "the checkpoint 'best.pth' inside")
    assert error.hint == f"ckptool list '{path}/best.pth'"
    torch.save({}, path / "last.pth", _use_new_zipfile_serialization=False)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    error = folder()
    assert is_a(error, NotACheckpoint, "'best.pth', 'last.pth', 'model.safetensors'")


def test_every_answer_is_an_error_of_ours(content):
    for seed in range(64):
        assert isinstance(content(bytes([seed * 4 + 1]) * (seed + 1)), CheckpointError)


def test_what_a_failed_save_of_torch_s_leaves(tmp_path):
    given = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save({"c": given, "r": torch.view_as_real(given)}, tmp_path / "f.pth")
    with pytest.raises(TruncatedFile, match=r"what a failed torch\.save left behind") as caught:
        open_checkpoint(tmp_path / "f.pth")
    assert caught.value.hint.startswith("save it again")
