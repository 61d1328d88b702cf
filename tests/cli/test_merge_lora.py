"""`ckptool merge-lora` on the command line."""

from safetensors.torch import load_file

from tests.conftest import FIXTURES

LORA = FIXTURES / "lora"
BASE = LORA / "base.safetensors"


def test_it_says_what_was_changed_by_what(ckptool, tmp_path):
    target = tmp_path / "merged.safetensors"
    done = ckptool("merge-lora", BASE, LORA / "plain", "-o", target, "--scale", "2", "--json")
    assert done.code == 0, done.err
    assert f"2 weights changed by {LORA / 'plain'}" in done.err
    assert "times 3" in done.err
    assert done.document["verified"]
    assert load_file(target).keys() == load_file(BASE).keys()


def test_shards_are_written_and_read(ckptool, tmp_path):
    first, second = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
    shards = ("--max-shard-size", "400B")
    assert ckptool("merge-lora", BASE, LORA / "plain", "-o", first, *shards).code == 0
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists()
    assert ckptool("merge-lora", index, LORA / "conv", "-o", second).code == 0


def test_a_dry_run_writes_nothing_and_wrong_usage_is_told(ckptool, tmp_path):
    target = tmp_path / "merged.pth"
    done = ckptool("merge-lora", BASE, LORA / "plain", "-o", target, "--dry-run")
    assert done.code == 0
    assert not target.exists()
    assert "'-o' / '--output'" in ckptool("merge-lora", BASE, LORA / "plain").err
    done = ckptool("merge-lora", BASE, LORA / "plain", "-o", target, "--scale", "1,2")
    assert done.code == 2
    assert "scale takes one finite number" in done.err
    assert ckptool("merge-lora", BASE, BASE, "-o", target).code == 2
