"""`save`: the format it chooses, what it refuses, and what is there after any failure."""

import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.errors import (
    CorruptFile,
    NoSpace,
    NotRepresentable,
    TargetExists,
    TruncatedFile,
    UsageError,
    WriteDenied,
    WriteError,
)
from ckptool.formats import WRITABLE, load_format, open_checkpoint, shard_format_of
from ckptool.writing import Receipt, choose_format, save

ONE_FILE = [
    name for name in WRITABLE if not (shard_format_of(name) or load_format(name).index_name)
]

TENSORS = {"w": torch.arange(50_000.0), "b": torch.ones(3)}
OLD = b"the old content"
needs_posix = pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and signals")


@pytest.fixture
def checkpoint(tmp_path):
    torch.save(TENSORS, tmp_path / "model.pth")
    with open_checkpoint(tmp_path / "model.pth") as opened:
        yield opened


def loads(path):
    found = load_file(path) if str(path).endswith("safetensors") else torch.load(path)
    return found.keys() == TENSORS.keys() and all(found[k].equal(TENSORS[k]) for k in TENSORS)


def files(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    "name", ["out.pth", "out.bin", "out", "out.safetensors", "OUT.SAFETENSORS"]
)
def test_the_ending_decides_the_format(checkpoint, tmp_path, name):
    receipt = save(checkpoint, tmp_path / name)
    assert receipt.format == ("safetensors" if "safetensors" in name.lower() else "torch-zip")
    assert receipt.size == os.path.getsize(tmp_path / name)
    if name != "OUT.SAFETENSORS":
        assert loads(tmp_path / name)


def test_the_format_asked_for_overrides_the_ending(checkpoint, tmp_path):
    save(checkpoint, tmp_path / "out.pth", format="safetensors")
    with open_checkpoint(tmp_path / "out.pth") as found:
        assert found.format == "safetensors"
    save(checkpoint, tmp_path / "out.safetensors", format="torch-legacy")
    with open_checkpoint(tmp_path / "out.safetensors") as found:
        assert found.format == "torch-legacy"


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("torch-zip", "x.pth", "torch-zip"),
        ("torch-legacy", "x.pth", "torch-legacy"),
        ("torch-legacy", "x.safetensors", "safetensors"),
        ("safetensors", "x.pth", "torch-zip"),
        ("safetensors", "x", "torch-zip"),
        ("torch-tar", "x.pth", "torch-zip"),
        ("torchscript", "x.pt", "torch-zip"),
        ("pickle", "x.pkl", "torch-zip"),
    ],
)
def test_a_format_that_is_written_is_kept(checkpoint, source, path, expected):
    assert choose_format(replace(checkpoint, format=source), path) == expected


@pytest.mark.parametrize("name", ["out.onnx", "out.NPZ", "out.gguf", "out.pt2"])
def test_no_torch_file_gets_the_ending_of_another_format_unasked(checkpoint, tmp_path, name):
    for size in (None, "5GB"):
        with pytest.raises(UsageError, match="files, which ckptool does not write") as caught:
            save(checkpoint, tmp_path / name, max_shard_size=size)
        assert "--format" in caught.value.hint
    assert not (tmp_path / name).exists()
    assert save(checkpoint, tmp_path / name, format="torch-zip").format == "torch-zip"


def test_an_unknown_format(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="safetensors"):
        save(checkpoint, tmp_path / "out", format="zip")


def test_the_receipt(checkpoint, tmp_path):
    out = tmp_path / "a" / "out.safetensors"
    done = checkpoint.with_root(
        checkpoint.root, Change("tidy", "all of it"), Change("left-out", "x")
    )
    receipt = save(done, out)
    assert receipt == Receipt(
        path=str(out),
        format="safetensors",
        size=os.path.getsize(out),
        tensors=2,
        source=checkpoint.path,
        changes=(
            Change("format", "converted torch-zip to safetensors"),
            Change("tidy", "all of it"),
        ),
        left_out=("x",),
        notes=(f"created the folder {tmp_path / 'a'}",),
        written=receipt.size,
    )


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
def test_a_result_is_read_back_where_that_is_wanted(checkpoint, tmp_path, name):
    assert save(checkpoint, tmp_path / name, verify=True).verified
    assert loads(tmp_path / name)


def test_a_result_that_reads_back_wrong_is_not_kept(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "out.pth").write_bytes(OLD)

    def forgetful(output, data):
        return output.write(bytes(data.length))

    monkeypatch.setattr("ckptool.files.atomic.FileOutput.copy", forgetful)
    with pytest.raises(WriteError, match="verification failed"):
        save(checkpoint, tmp_path / "out.pth", overwrite=True, verify=True)
    assert (tmp_path / "out.pth").read_bytes() == OLD
    assert files(tmp_path) == ["model.pth", "out.pth"]


def test_a_dry_run_plans_and_writes_nothing(checkpoint, tmp_path):
    planned = save(checkpoint, tmp_path / "out.pth", dry_run=True)
    assert planned.dry_run
    assert files(tmp_path) == ["model.pth"]
    assert save(checkpoint, tmp_path / "out.pth").size == planned.size


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_existing_target_is_refused(checkpoint, tmp_path, dry_run):
    (tmp_path / "out.pth").write_bytes(OLD)
    with pytest.raises(TargetExists, match="already exists") as caught:
        save(checkpoint, tmp_path / "out.pth", dry_run=dry_run)
    assert "overwrite=True" in caught.value.hint
    assert (tmp_path / "out.pth").read_bytes() == OLD
    save(checkpoint, tmp_path / "out.pth", overwrite=True)
    assert loads(tmp_path / "out.pth")


@pytest.mark.parametrize("way", ["same", "dotted", "symlink", "hardlink"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_the_source_is_no_target(checkpoint, tmp_path, way, overwrite):
    source, path = tmp_path / "model.pth", tmp_path / "other.pth"
    before = source.read_bytes()
    if way == "same":
        path = source
    elif way == "dotted":
        path = f"{tmp_path}/./model.pth"
    elif way == "symlink":
        path.symlink_to(source)
    else:
        os.link(source, path)
    with pytest.raises(TargetExists, match="is the source itself") as caught:
        save(checkpoint, path, overwrite=overwrite)
    assert "--in-place" in caught.value.hint
    assert source.read_bytes() == before


@needs_posix
def test_in_place_a_new_file_takes_the_place_of_the_source(tmp_path):
    torch.save(TENSORS, tmp_path / "model.pth")
    (tmp_path / "model.pth").chmod(0o640)
    with open_checkpoint(tmp_path / "model.pth") as checkpoint:
        changed = checkpoint.with_root({"renamed": checkpoint["w"]})
        save(changed, tmp_path / "model.pth", in_place=True)
        assert checkpoint["w"].read() == TENSORS["w"].numpy().tobytes()
    assert torch.load(tmp_path / "model.pth")["renamed"].equal(TENSORS["w"])
    assert (tmp_path / "model.pth").stat().st_mode & 0o777 == 0o640
    assert files(tmp_path) == ["model.pth"]


@pytest.mark.parametrize("format", ["torch-zip", "safetensors"])
def test_in_place_the_names_are_changed_where_the_file_lies(tmp_path, format):
    path = tmp_path / "model"
    with open_checkpoint(saved(tmp_path / "first.pth")) as first:
        save(first, path, format=format)
    inode, size = path.stat().st_ino, path.stat().st_size
    with open_checkpoint(path) as checkpoint:
        shorter = checkpoint.with_root({"v": checkpoint["w"], "b": checkpoint["b"]})
        receipt = save(shorter, path, in_place=True, verify=True)
    assert receipt.edited
    assert receipt.verified
    assert receipt.written < 4096 < size
    assert (receipt.size, path.stat().st_ino) == (path.stat().st_size, inode)
    with open_checkpoint(path) as found:
        assert found["v"].read() == TENSORS["w"].numpy().tobytes()
    assert files(tmp_path) == ["first.pth", "model"]


def saved(path):
    torch.save(TENSORS, path)
    return path


def test_in_place_what_is_asked_for_is_written_anew(checkpoint, tmp_path):
    path = tmp_path / "model.pth"
    renamed = checkpoint.with_root({"v": checkpoint["w"]})
    receipt = save(renamed, path, in_place=True, rewrite=True)
    assert not receipt.edited
    assert list(torch.load(path)) == ["v"]


def test_a_file_is_edited_in_place_twice_by_the_same_checkpoint(checkpoint, tmp_path):
    path = tmp_path / "model.pth"
    for name in ("v", "u"):
        assert save(checkpoint.with_root({name: checkpoint["w"]}), path, in_place=True).edited
        assert list(torch.load(path)) == [name]
    assert checkpoint["w"].read() == TENSORS["w"].numpy().tobytes()


def test_in_place_a_file_that_holds_it_already_is_left_alone(checkpoint, tmp_path):
    before = (tmp_path / "model.pth").stat()
    receipt = save(checkpoint.strip_module(), tmp_path / "model.pth", in_place=True)
    assert (receipt.written, receipt.size, receipt.tensors) == (0, before.st_size, 2)
    assert (tmp_path / "model.pth").stat() == before


@pytest.mark.parametrize("format", ONE_FILE)
def test_in_place_a_file_that_is_left_alone_is_verified_all_the_same(tmp_path, format):
    with open_checkpoint(saved(tmp_path / "first.pth")) as first:
        save(first, tmp_path / "model", format=format)
    told = []
    with open_checkpoint(tmp_path / "model") as checkpoint:
        receipt = save(
            checkpoint,
            tmp_path / "model",
            in_place=True,
            verify=True,
            progress=lambda *now: told.append(now),
        )
    assert receipt.verified
    assert told[-1] == (4 * (50_000 + 3),) * 2


def test_in_place_damage_to_a_file_that_is_left_alone_is_told(checkpoint, tmp_path):
    content, at = (tmp_path / "model.pth").read_bytes(), checkpoint["w"].data.offset
    (tmp_path / "damaged.pth").write_bytes(content[:at] + b"!" + content[at + 1 :])
    with (
        open_checkpoint(tmp_path / "damaged.pth") as damaged,
        pytest.raises(CorruptFile, match="is damaged"),
    ):
        save(damaged, tmp_path / "damaged.pth", in_place=True, verify=True)


@pytest.mark.parametrize("change", [Checkpoint.strip_module, Checkpoint.add_module])
def test_in_place_a_big_endian_file_is_verified_as_it_lies(fixtures, tmp_path, change):
    path = shutil.copy(fixtures / "archives" / "big_endian.pth", tmp_path)
    with open_checkpoint(path) as checkpoint:
        receipt = save(change(checkpoint), path, in_place=True, verify=True)
    assert receipt.verified
    assert receipt.written < receipt.size


@needs_posix
def test_in_place_a_file_of_several_names_is_written_anew(checkpoint, tmp_path):
    os.link(tmp_path / "model.pth", tmp_path / "other.pth")
    renamed = checkpoint.with_root({"v": checkpoint["w"]})
    assert not save(renamed, tmp_path / "model.pth", in_place=True).edited
    assert loads(tmp_path / "other.pth")


def test_an_edit_that_reads_back_wrong_is_taken_back(checkpoint, tmp_path, monkeypatch):
    before = (tmp_path / "model.pth").read_bytes()

    def wrong(*_):
        raise WriteError("verification failed")

    monkeypatch.setattr(sys.modules["ckptool.writing.job"], "verify", wrong)
    with pytest.raises(WriteError, match="verification failed"):
        save(
            checkpoint.with_root({"v": checkpoint["w"]}),
            tmp_path / "model.pth",
            in_place=True,
            verify=True,
        )
    assert (tmp_path / "model.pth").read_bytes() == before
    assert files(tmp_path) == ["model.pth"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin", "out.safetensors.index.json"])
def test_shards_and_their_index_are_written_and_read_as_one(checkpoint, tmp_path, name):
    receipt = save(checkpoint, tmp_path / "new" / name, max_shard_size="150kB", verify=True)
    written = {path: os.path.getsize(path) for path, _ in receipt.files}
    assert written == dict(receipt.files)
    assert receipt.size == receipt.written == sum(written.values())
    assert receipt.verified
    index = receipt.files[-1][0]
    assert index.endswith(".index.json")
    with open_checkpoint(index) as found:
        assert found.format == receipt.format
        for key, tensor in TENSORS.items():
            assert found[key].read() == tensor.numpy().tobytes()


def test_shards_in_the_way_are_refused_before_anything_is_written(checkpoint, tmp_path):
    (tmp_path / "out-00002-of-00002.safetensors").write_bytes(OLD)
    with pytest.raises(TargetExists, match="00002-of-00002"):
        save(checkpoint, tmp_path / "out.safetensors", max_shard_size=150_000)
    assert files(tmp_path) == ["model.pth", "out-00002-of-00002.safetensors"]
    save(checkpoint, tmp_path / "out.safetensors", max_shard_size=150_000, overwrite=True)
    assert len(files(tmp_path)) == 4


def test_a_shard_that_reads_back_wrong_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def forgetful(output, data):
        return output.write(bytes(data.length))

    monkeypatch.setattr("ckptool.files.atomic.FileOutput.copy", forgetful)
    with pytest.raises(WriteError, match="verification failed"):
        save(checkpoint, tmp_path / "out.safetensors", max_shard_size=150_000, verify=True)
    assert files(tmp_path) == ["model.pth"]


def test_what_fits_in_one_shard_is_one_file(checkpoint, tmp_path):
    receipt = save(checkpoint, tmp_path / "out.safetensors", max_shard_size="5GB")
    assert (receipt.files, receipt.format) == ((), "safetensors")
    assert files(tmp_path) == ["model.pth", "out.safetensors"]


def test_a_dry_run_of_shards_names_them(checkpoint, tmp_path):
    receipt = save(checkpoint, tmp_path / "out.bin", max_shard_size=150_000, dry_run=True)
    assert [os.path.basename(path) for path, _ in receipt.files] == [
        "out-00001-of-00002.bin",
        "out-00002-of-00002.bin",
        "out.bin.index.json",
    ]
    assert files(tmp_path) == ["model.pth"]


@needs_posix
def test_a_new_file_has_the_permissions_of_its_source(tmp_path):
    torch.save(TENSORS, tmp_path / "model.pth")
    (tmp_path / "model.pth").chmod(0o604)
    with open_checkpoint(tmp_path / "model.pth") as checkpoint:
        save(checkpoint, tmp_path / "out.pth")
    assert (tmp_path / "out.pth").stat().st_mode & 0o777 == 0o604


def test_a_folder_is_no_target(checkpoint, tmp_path):
    with pytest.raises(TargetExists, match="is a folder"):
        save(checkpoint, tmp_path, overwrite=True)


@needs_posix
def test_a_device_is_no_target(checkpoint):
    with pytest.raises(WriteDenied, match="not a regular file"):
        save(checkpoint, "/dev/null", overwrite=True)


def test_what_transforms_left_out_counts(checkpoint, tmp_path):
    changed = checkpoint.with_root(checkpoint.root, Change("left-out", "the optimizer", 3))
    receipt = save(changed, tmp_path / "out.pth")
    assert receipt.left_out == ("the optimizer",)
    with pytest.raises(
        NotRepresentable,
        match="torch-zip cannot store everything; left out would be: the optimizer",
    ):
        save(changed, tmp_path / "strict.pth", strict=True)
    assert not (tmp_path / "strict.pth").exists()


def test_other_changes_are_nothing_left_out(checkpoint, tmp_path):
    changed = checkpoint.with_root(checkpoint.root, Change("strip", "stripped", 3))
    assert save(changed, tmp_path / "out.pth", strict=True).left_out == ()


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
def test_a_source_that_becomes_shorter(checkpoint, tmp_path, name):
    (tmp_path / name).write_bytes(OLD)
    os.truncate(tmp_path / "model.pth", 100_000)
    with pytest.raises(TruncatedFile, match=r"model\.pth.*ended at 100,000"):
        save(checkpoint, tmp_path / name, overwrite=True)
    assert (tmp_path / name).read_bytes() == OLD
    assert files(tmp_path) == ["model.pth", name]


def test_progress_is_told_all_in_the_end(checkpoint, tmp_path):
    told = []
    receipt = save(checkpoint, tmp_path / "out.pth", progress=lambda *now: told.append(now))
    assert told[-1] == (receipt.size, receipt.size)


def test_an_interrupt_leaves_nothing_behind(checkpoint, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(checkpoint, tmp_path / "new" / "out.pth", progress=interrupt)
    assert files(tmp_path) == ["model.pth"]


def test_a_checkpoint_that_has_been_closed(tmp_path):
    torch.save(TENSORS, tmp_path / "model.pth")
    with open_checkpoint(tmp_path / "model.pth") as checkpoint:
        pass
    with pytest.raises(UsageError, match="closed"):
        save(checkpoint, tmp_path / "out.pth")
    assert files(tmp_path) == ["model.pth"]


def run_child(code, *arguments):
    """A process that saves, with a limit or a signal of its own."""
    head = """
        import os, resource, signal, sys
        from ckptool.errors import NoSpace
        from ckptool.formats import WRITABLE, load_format, open_checkpoint
        from ckptool.writing import save
    """
    code = textwrap.dedent(head) + textwrap.dedent(code)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_posix
def test_no_space_is_found_before_a_byte_is_written(checkpoint, tmp_path):
    (tmp_path / "out.pth").write_bytes(OLD)
    done = run_child(
        """
        checkpoint = open_checkpoint(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        told = []
        try:
            save(checkpoint, sys.argv[2], overwrite=True, progress=lambda *now: told.append(now))
        except NoSpace as error:
            print(told, error)
        """,
        tmp_path / "model.pth",
        tmp_path / "out.pth",
    )
    assert done.stdout == f"[] {tmp_path / 'out.pth'}: cannot be written (File too large)\n"
    assert (tmp_path / "out.pth").read_bytes() == OLD
    assert files(tmp_path) == ["model.pth", "out.pth"]


@needs_posix
def test_a_kill_leaves_the_old_file(checkpoint, tmp_path):
    (tmp_path / "out.pth").write_bytes(OLD)
    done = run_child(
        """
        def kill(done, total):
            os.kill(os.getpid(), signal.SIGKILL)
        save(open_checkpoint(sys.argv[1]), sys.argv[2], overwrite=True, progress=kill)
        """,
        tmp_path / "model.pth",
        tmp_path / "out.pth",
    )
    assert done.returncode == -9, done.stderr
    assert (tmp_path / "out.pth").read_bytes() == OLD


def test_more_than_the_disk_can_hold(tmp_path):
    """A tensor of strides 0 has more elements than there are disks."""
    torch.save({"huge": torch.ones(1).expand(1 << 50)}, tmp_path / "model.pth")
    with open_checkpoint(tmp_path / "model.pth") as checkpoint, pytest.raises(NoSpace):
        save(checkpoint, tmp_path / "out.safetensors")
    assert files(tmp_path) == ["model.pth"]


def test_what_no_rewrite_carries_over_is_named(fixtures, tmp_path):
    """TorchScript's program, a source text, header entries: left out, an error with `strict`."""
    with open_checkpoint(fixtures / "torch-2.13.0" / "scripted.pt") as script:
        receipt = save(script, tmp_path / "weights.pth")
        assert any("program" in text for text in receipt.left_out)
        with pytest.raises(NotRepresentable, match="program"):
            save(script, tmp_path / "strict.pth", strict=True)
    with open_checkpoint(fixtures / "safetensors" / "dtypes.safetensors") as headed:
        assert any("note" in text for text in headed.details.header)
        out = save(headed, tmp_path / "same.safetensors")
        assert not any("header" in text for text in out.left_out)
    with open_checkpoint(tmp_path / "same.safetensors") as again:
        assert again.details.header == headed.details.header


def test_in_place_nothing_goes_without_being_asked_for(fixtures, tmp_path):
    """A TorchScript archive would lose program, a file of two streams the second."""
    for name in ("torch-2.13.0/scripted.pt", "streams/several.pth"):
        path = tmp_path / "file.pt"
        before = (fixtures / name).read_bytes()
        path.write_bytes(before)
        with open_checkpoint(path) as checkpoint:
            with pytest.raises(
                NotRepresentable,
                match="file would lose data: ",
            ):
                save(checkpoint, path, in_place=True, rewrite=True)
            assert path.read_bytes() == before
            assert save(checkpoint, path, in_place=True, rewrite=True, overwrite=True).left_out


def test_a_section_goes_to_safetensors_whatever_verb_asks(fixtures, tmp_path):
    with open_checkpoint(fixtures / "torch-2.13.0" / "dp_full.pth") as checkpoint:
        receipt = save(checkpoint.strip_module(), tmp_path / "out.safetensors")
    assert "optim_dict (optimizer, 18 tensors)" in receipt.left_out
    assert "conv1.weight" in load_file(tmp_path / "out.safetensors")


@pytest.mark.parametrize("name", ["", "folder/"])
def test_targets_that_are_no_file_to_write_are_refused(fixtures, tmp_path, name):
    file = fixtures / "torch-2.13.0" / "dp.pth"
    with open_checkpoint(file) as checkpoint, pytest.raises(UsageError):
        save(checkpoint, f"{tmp_path}/{name}" if name else "")
    assert not list(tmp_path.iterdir())


def test_a_program_goes_to_safetensors_as_its_state_dict_would(fixtures, tmp_path):
    """Detached, as `state_dict()` detaches: nothing is left out but the program itself."""
    with open_checkpoint(fixtures / "torch-2.13.0" / "scripted.pt") as script:
        receipt = save(script, tmp_path / "out.safetensors")
    assert receipt.left_out
    assert not any("Parameter" in text or "requires_grad" in text for text in receipt.left_out)


def test_a_dash_is_no_name_of_standard_output(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="ckptool cannot write to standard output"):
        save(checkpoint, "-")
    assert save(checkpoint, "./-").path == "./-"
