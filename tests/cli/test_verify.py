"""`ckptool verify`: lines, exit codes, JSON, tables."""

import json
import math
import struct

import pytest
import torch

from tests.formats.shards import write_set


@pytest.fixture
def damaged(model):
    data = bytearray(model.read_bytes())
    weight = torch.load(model)["state_dict"]["module.fc.bias"][3].item()
    data[data.index(struct.pack("<f", weight))] ^= 1
    path = model.with_name("damaged.pth")
    path.write_bytes(data)
    return path


def test_a_file_that_is_fine(ckptool, model):
    done = ckptool("verify", model)
    assert done.code == 0
    assert done.out.startswith(f"{model}: ok (")
    assert done.out.endswith("KiB, CRC-32)\n")
    assert done.err == ""


def test_a_file_that_is_not(ckptool, damaged):
    done = ckptool("verify", damaged)
    assert done.code == 1
    first, second = done.out.splitlines()
    assert first == f"{damaged}: 1 problem"
    assert second.startswith("  model/data/")
    assert second.endswith("affects state_dict/module.fc.bias")


def test_several_files_a_line_each_and_one_for_all(ckptool, model, damaged, tmp_path):
    write_set(tmp_path / "set", {"a.safetensors": {"w": torch.ones(2)}})
    done = ckptool("verify", model, damaged, tmp_path / "set")
    assert done.code == 1
    lines = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert lines[2].endswith("(1 shard, 1 tensor, 164 B, no checksums in this format)")
    assert lines[-1] == "3 files: 2 ok, 1 with 1 problem"


def test_errors_are_told_and_the_others_looked_at_all_the_same(ckptool, model, damaged, tmp_path):
    done = ckptool("verify", tmp_path / "nothing.pth", damaged, model)
    assert done.code == 2
    assert done.err == f"ckptool: {tmp_path / 'nothing.pth'}: no such file\n"
    assert done.out.splitlines()[-1] == "3 files: 1 ok, 1 with 1 problem, 1 not read"


def test_a_file_that_may_not_be_read_keeps_no_other_from_being_looked_at(
    ckptool, model, tmp_path, forbidden
):
    secret = tmp_path / "secret.pth"
    secret.write_bytes(model.read_bytes())
    forbidden(secret)
    done = ckptool("verify", secret, model)
    assert done.code == 2
    assert f"{secret}: permission denied" in done.err
    assert done.out.startswith(f"{model}: ok")
    assert done.out.splitlines()[-1] == "2 files: 1 ok, 1 not read"


def test_what_is_no_checkpoint_is_said_with_what_helps(ckptool, tmp_path):
    (tmp_path / "model.pth").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    done = ckptool("verify", tmp_path / "model.pth")
    assert done.code == 1
    assert "  it is a git-lfs pointer" in done.out
    assert " lfs pull " in done.out


def test_notes_go_to_stderr(ckptool, fixtures):
    path = fixtures / "archives/extra_record.pth"
    done = ckptool("verify", path)
    assert (done.code, len(done.out.splitlines())) == (0, 1)
    assert done.err == (
        f"note: {path}: record 'data/99' is not used by the pickle\n"
        f"note: {path}: record 'notes.txt' is not part of a checkpoint\n"
    )
    assert ckptool("verify", "-q", path).err == ""


def test_values(ckptool, tmp_path):
    torch.save({"w": torch.tensor([1.0, math.nan])}, tmp_path / "model.pth")
    assert ckptool("verify", tmp_path / "model.pth").code == 0
    done = ckptool("verify", "--values", tmp_path / "model.pth")
    assert (done.code, done.out.splitlines()[1]) == (1, "  w: 1 of 2 elements is NaN")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
    assert "CRC-32, no NaN, no Inf)" in ckptool("verify", "--values", tmp_path / "model.pth").out


def test_a_manifest(ckptool, model, damaged, tmp_path):
    sums = tmp_path / "sums.json"
    done = ckptool("verify", damaged, "--manifest", sums)
    assert done.code == 1
    assert "did not write" in done.err
    assert not sums.exists()
    done = ckptool("verify", model, "--manifest", sums)
    assert done.code == 0
    assert done.err.startswith(f"wrote {sums} (SHA-256 of 9 tensors in 1 file)")
    done = ckptool("verify", model, "--manifest", sums)
    assert (done.code, "SHA-256 matches the manifest" in done.out) == (0, True)
    done = ckptool("verify", damaged, "--manifest", sums)
    assert done.code == 1
    assert "  state_dict/module.fc.bias: content differs from the manifest" in done.out
    document = json.loads(sums.read_text())
    document["files"].append({"file": "gone.pth", "tensors": []})
    sums.write_text(json.dumps(document))
    done = ckptool("verify", model, "--manifest", sums)
    assert done.code == 1
    assert f"{sums}: 1 problem\n  gone.pth: the manifest lists it, but it is missing" in done.out
    before = model.read_bytes()
    done = ckptool("verify", model, "--manifest", model)
    assert (done.code, model.read_bytes()) == (2, before)


def test_why_a_manifest_was_not_written(ckptool, model, damaged, tmp_path):
    sums = tmp_path / "sums.json"
    done = ckptool("verify", "--json", model, tmp_path / "gone.pth", "--manifest", sums)
    assert f"did not write {sums}: some files could not be read" in done.err
    assert done.document["manifest"]["reason"] == "error"
    done = ckptool("verify", "--json", damaged, tmp_path / "gone.pth", "--manifest", sums)
    assert f"did not write {sums}: some files have problems" in done.err
    assert done.document["manifest"]["reason"] == "problem"
    assert not sums.exists()


def test_tensors_without_a_hash_are_told_when_a_manifest_is_written(ckptool, tmp_path):
    path, sums = tmp_path / "model.pth", tmp_path / "sums.json"
    torch.save({"a": torch.ones(2), "s": torch.eye(2).to_sparse()}, path)
    done = ckptool("verify", "--json", path, "--manifest", sums)
    assert "2 tensors in 1 file; 1 without a hash because they are sparse" in done.err
    assert done.document["manifest"]["unhashed"] == 1


def test_json(ckptool, model, damaged, tmp_path):
    document = ckptool("verify", "--json", model).document
    assert (document["schema"], document["ok"]) == ("ckptool.verify/1", True)
    (file,) = document["files"]
    assert file["problems"] == []
    assert file["records"] == file["records_checked"]
    assert (document["errors"], document["manifest"]) == ([], None)
    done = ckptool("verify", "--json", damaged, tmp_path / "nothing.pth")
    assert (done.code, done.document["ok"]) == (2, False)
    assert done.document["files"][0]["problems"][0]["kind"] == "checksum"
    assert done.document["errors"][0]["file"].endswith("nothing.pth")


def test_a_table(ckptool, model, damaged, tmp_path):
    done = ckptool("verify", "--fmt", "csv", model, damaged, tmp_path / "nothing.pth")
    assert done.code == 2
    head, *rows = done.out.splitlines()
    assert head.startswith("file,verdict,place")
    assert [row.split(",")[1] for row in rows] == ["ok", "checksum", "error"]


def test_many_problems_are_cut_short(ckptool, tmp_path):
    torch.save({f"w{n}": torch.tensor([math.nan]) for n in range(50)}, tmp_path / "model.pth")
    done = ckptool("verify", "--values", tmp_path / "model.pth")
    assert done.out.splitlines()[-1] == "  and 10 problems more (--json lists all)"
    assert (
        len(
            ckptool("verify", "--values", "--json", tmp_path / "model.pth").document["files"][0][
                "problems"
            ]
        )
        == 50
    )


def test_no_path_is_wrong_usage(ckptool):
    assert ckptool("verify").code == 2
