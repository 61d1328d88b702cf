"""What every command that writes a checkpoint does, whatever it changes.

Only kinds of things are compared here: exit codes, JSON, files and their bytes. What a command
changes, and the sentences about it, are tests of its own.
"""

import errno
import json
import os
import shutil
import signal
import struct
from dataclasses import dataclass

import pytest
import torch

from ckptool.cli.group import VERBS
from ckptool.files import atomic
from tests.cli.conftest import unheard
from tests.files.faults import needs_fork


@dataclass(frozen=True)
class Writer:
    """A command that writes."""

    name: str
    options: tuple[str, ...] = ()
    word: str = ""
    """What its result next to the source is called; without one it needs a target."""
    others: tuple[str, ...] = ()
    """Files that it reads besides the source."""

    def words(self, source, *more):
        """Return the command line; a target is the last of `more`, behind `-o`."""
        return [self.name, *map(str, (source, *self.others)), *self.options, *map(str, more)]


WRITERS = [
    Writer("strip-module", word="stripped"),
    Writer("add-module", word="wrapped"),
    Writer("rename", ("--prefix", "module=net"), "renamed"),
    Writer("remap", ("--to", "cuda:1"), "cuda1"),
    Writer("cast", ("--dtype", "float16"), "float16"),
    Writer("extract", ("--model-only",), "extracted"),
    Writer("compact", word="compact"),
    Writer("average", others=("other.pth",)),
    Writer("merge-lora", others=("adapter.safetensors",)),
    Writer("convert"),
]
BESIDE = [one for one in WRITERS if one.word]
FOLDER = {"model.pth", "other.pth", "adapter.safetensors"}
NAMES = ["a b.pth", 'it\'s "it".pth', "modèle 层.pth", "a$b;c&d.pth"]
every = pytest.mark.parametrize("verb", WRITERS, ids=lambda one: one.name)
beside = pytest.mark.parametrize("verb", BESIDE, ids=lambda one: one.name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a DataParallel checkpoint, another one, and an adapter for both."""
    from safetensors.torch import save_file

    where = tmp_path / "in"
    where.mkdir()
    monkeypatch.chdir(where)
    for at, name in enumerate(("model.pth", "other.pth")):
        whole = torch.arange(5000.0) + at  # of which 600 elements are used
        state = {"module.fc.weight": whole[:600].view(30, 20), "module.fc.bias": torch.ones(30)}
        torch.save({"epoch": 7, "state_dict": state}, where / name)
    halves = {
        "module.fc.lora_A.weight": torch.ones(1, 20),
        "module.fc.lora_B.weight": torch.ones(30, 1),
    }
    save_file(halves, where / "adapter.safetensors", {"lora_adapter_metadata": '{"lora_alpha": 2}'})
    return where


def flat(node, path=()):
    """Return the leaves of what torch loads, tensors as their types, devices and values."""
    if isinstance(node, dict):
        return {at: one for key in node for at, one in flat(node[key], (*path, key)).items()}
    if isinstance(node, torch.Tensor):
        return {path: (node.dtype, node.is_meta, None if node.is_meta else node.tolist())}
    return {path: node}


def loaded(path):
    return flat(torch.load(path, "cpu", weights_only=True))


def held(folder):
    """Return every file below a folder with its bytes, links by where they lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def test_the_table_has_every_command_that_writes_a_checkpoint():
    changing = VERBS["Change"]
    assert {one.name for one in WRITERS} == set(changing) - {"recover"}


@beside
def test_the_result_is_next_to_the_source(ckptool, folder, verb):
    before = held(folder)
    done = ckptool(*verb.words("model.pth"))
    assert (done.code, done.out) == (0, "")
    made = f"model.{verb.word}.pth"
    assert held(folder).keys() - before.keys() == {made}
    assert made in done.err
    assert held(folder).items() >= before.items()
    assert loaded(made)


@every
def test_the_result_is_where_o_says_in_a_folder_that_is_made(ckptool, folder, tmp_path, verb):
    before, target = held(folder), tmp_path / "deep" / "er" / "out.pth"
    done = ckptool(*verb.words("model.pth", "-o", target))
    assert (done.code, done.out) == (0, "")
    assert str(target) in done.err
    assert held(folder) == before
    assert os.listdir(target.parent) == ["out.pth"]
    assert loaded(target)
    if verb.word:
        assert ckptool(*verb.words("model.pth")).code == 0
        assert loaded(f"model.{verb.word}.pth") == loaded(target)
    else:
        refused = ckptool(*verb.words("model.pth"))
        assert (refused.code, refused.out) == (2, "")


@every
def test_a_target_that_exists_is_replaced_with_force_alone(ckptool, folder, verb):
    (folder / "out.pth").write_bytes(b"old")
    before = held(folder)
    for more in ((), ("--dry-run",), ("--json",)):
        done = ckptool(*verb.words("model.pth", *more, "-o", "out.pth"))
        assert (done.code, done.out) == (2, "")
        assert "out.pth" in done.err
        assert "--force" in done.err
        assert held(folder) == before
    assert ckptool(*verb.words("model.pth", "--force", "-o", "out.pth")).code == 0
    assert ckptool(*verb.words("model.pth", "-o", "new.pth")).code == 0
    assert (folder / "out.pth").read_bytes() == (folder / "new.pth").read_bytes()


@every
def test_a_source_is_no_target(ckptool, folder, verb):
    before = held(folder)
    for source in ("model.pth", *verb.others):
        assert ckptool(*verb.words("model.pth", "--force", "-o", source)).code == 2
        assert held(folder) == before


@every
def test_a_source_is_no_target_behind_a_folder_that_is_missing(ckptool, folder, verb):
    before = held(folder)
    words = verb.words("model.pth", "--force", "-o", "./missing/../model.pth")
    assert ckptool(*words).code == 2
    assert held(folder) == before


@every
def test_in_place_the_file_becomes_the_result(ckptool, folder, verb):
    before = held(folder)
    if not verb.word:  # which makes one file of several, or of another format
        code = ckptool(*verb.words("model.pth", "--in-place")).code
        assert code == (0 if verb.name == "convert" else 2)  # which has nothing to change here
        assert held(folder) == before
        return
    assert ckptool(*verb.words("model.pth")).code == 0
    for more in ((), ("--force",)):
        both = ckptool(*verb.words("model.pth", "--in-place", *more, "-o", "other name.pth"))
        assert both.code == 2
    # extract asks for --force: what it leaves out is lost.
    assert ckptool(*verb.words("model.pth", "--in-place", "--force")).code == 0
    made = f"model.{verb.word}.pth"
    assert held(folder).keys() == before.keys() | {made}
    assert loaded("model.pth") == loaded(made)
    assert ckptool("verify", "model.pth").code == 0


@beside
@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_a_link_is_edited_in_place_only_with_force(ckptool, folder, verb, make):
    make("model.pth", "link.pth")
    before = held(folder)
    done = ckptool(*verb.words("link.pth", "--in-place"))
    assert (done.code, "--force" in done.err) == (2, True)
    assert held(folder) == before
    assert ckptool(*verb.words("link.pth", "--in-place", "--force")).code == 0
    assert os.path.islink("link.pth") == (make is os.symlink)
    assert ckptool(*verb.words("other.pth", "-q")).code == 0
    assert loaded("link.pth").keys() == loaded(f"other.{verb.word}.pth").keys()


@every
def test_the_file_that_a_link_names_is_the_target(ckptool, folder, verb):
    os.mkdir("far")
    os.symlink("far/real.pth", "out.pth")
    assert ckptool(*verb.words("model.pth", "--force", "-o", "out.pth")).code == 0
    assert os.readlink("out.pth") == "far/real.pth"
    assert loaded("far/real.pth")


@every
def test_a_dry_run_has_the_same_receipt_and_writes_nothing(ckptool, folder, verb):
    before = held(folder)
    told = ckptool(*verb.words("model.pth", "--dry-run", "--json", "-o", "out.pth"))
    assert told.code == 0
    assert held(folder) == before
    done = ckptool(*verb.words("model.pth", "--json", "-o", "out.pth"))
    said, real = told.document, done.document
    assert (said.pop("dry_run"), real.pop("dry_run")) == (True, False)
    for receipt in (said, real):  # what computing alone knows, and how it was checked
        receipt.pop("verified")
        receipt.pop("outcomes")
    if verb.name == "cast":  # which says that it computed nothing
        assert said.pop("changes")[:-1] == real.pop("changes")
    assert said == real


@every
def test_json_is_one_receipt_and_quiet_says_nothing(ckptool, folder, verb):
    done = ckptool(*verb.words("model.pth", "--json", "-o", "a.pth"))
    receipt = json.loads(done.out, parse_constant=pytest.fail)
    assert receipt["schema"] == "ckptool.receipt/1"
    assert (receipt["source"], receipt["file"]) == ("model.pth", "a.pth")
    assert (receipt["format"], receipt["dry_run"]) == ("torch-zip", False)
    assert receipt["size"] == os.path.getsize("a.pth")
    quiet = ckptool(*verb.words("model.pth", "-q", "-o", "b.pth"))
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    with open("a.pth", "rb") as one, open("b.pth", "rb") as other:
        assert one.read() == other.read()


@every
def test_a_file_that_cannot_be_read_is_named(ckptool, folder, forbidden, verb):
    missing = ckptool(*verb.words("none.pth", "-o", "out.pth"))
    assert (missing.code, missing.out) == (2, "")
    assert "none.pth" in missing.err
    with_json = ckptool(*verb.words("none.pth", "--json", "-q", "-o", "out.pth"))
    assert (with_json.code, with_json.out) == (2, "")
    assert "none.pth" in with_json.err
    forbidden("model.pth")
    denied = ckptool(*verb.words("model.pth", "-o", "out.pth"))
    assert (denied.code, denied.out) == (2, "")
    assert "model.pth" in denied.err
    assert set(os.listdir()) == FOLDER


@every
def test_a_target_where_no_file_can_be_is_named(ckptool, folder, verb):
    before = held(folder)
    done = ckptool(*verb.words("model.pth", "-o", "other.pth/out.pth"))
    assert (done.code, done.out) == (2, "")
    assert "other.pth" in done.err
    assert "unexpected" not in done.err
    assert held(folder) == before


@every
@pytest.mark.parametrize("size", [0, 3, 700, -1], ids=["empty", "mark", "half", "end"])
def test_a_file_that_was_cut_is_refused_by_name(ckptool, folder, verb, size):
    (folder / "model.pth").write_bytes((folder / "model.pth").read_bytes()[:size])
    done = ckptool(*verb.words("model.pth", "-o", "out.pth"))
    assert (done.code, done.out) == (2, "")
    assert "model.pth" in done.err
    assert "unexpected" not in done.err
    assert set(os.listdir()) == FOLDER


@every
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_flipped_bit_of_a_tensor_is_refused_or_stays_known(ckptool, folder, verb, target):
    """Another format, or a computed tensor, has no old checksum; a copied record keeps its own."""
    content = bytearray((folder / "model.pth").read_bytes())
    at = content.index(torch.tensor([7.0, 8.0]).numpy().tobytes())
    content[at] ^= 1
    (folder / "model.pth").write_bytes(content)
    done = ckptool(*verb.words("model.pth", "-o", target))
    if done.code == 0:
        assert target == "out.pth"
        assert ckptool("verify", target).code == 1
    else:
        assert (done.code, "model.pth" in done.err) == (2, True)
        assert set(os.listdir()) == FOLDER


def cut(content):
    return content[: len(content) // 2]


def no_end(content):
    return content[:-1]


def longer(content):
    return content + b"junk"


def other_pickle(content):
    at = content.index(b"module.fc.bias")
    return content[:at] + b"m\0dule" + content[at + 6 :]


def other_directory(content):
    """Return the bytes with another size of a record in the directory at the end of the zip."""
    at = content.rindex(b"PK\1\2", 0, content.rindex(b"data/0")) + 24
    return content[:at] + struct.pack("<I", 12_345) + content[at + 4 :]


def other_tensor(content):
    at = content.index(torch.tensor([7.0, 8.0]).numpy().tobytes())
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@beside
@pytest.mark.parametrize(
    "damage",
    [cut, no_end, longer, other_pickle, other_directory, other_tensor],
    ids=lambda one: one.__name__,
)
def test_a_damaged_file_is_refused_in_place_or_the_damage_stays_known(
    ckptool, folder, verb, damage
):
    """What is refused keeps its bytes; what is edited has no tensor whose damage is hidden."""
    content = damage((folder / "model.pth").read_bytes())
    (folder / "model.pth").write_bytes(content)
    done = ckptool(*verb.words("model.pth", "--in-place", "--force"))
    assert "unexpected" not in done.err
    if done.code != 0:
        assert (done.code, "model.pth" in done.err) == (2, True)
        assert (folder / "model.pth").read_bytes() == content
    elif damage is not longer:  # which harms no tensor
        assert ckptool("verify", "model.pth").code == 1
    assert set(os.listdir()) == FOLDER


@every
def test_a_full_disk_leaves_nothing(ckptool, folder, monkeypatch, verb):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = held(folder)
    for call in ("posix_fallocate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            done = ckptool(*verb.words("model.pth", "-o", "out.pth"))
        assert (done.code, done.out) == (2, "")
        assert os.strerror(errno.ENOSPC) in done.err
        assert held(folder) == before


@every
def test_ctrl_c_in_the_middle_leaves_nothing(ckptool, folder, monkeypatch, verb):
    def interrupted(_):
        assert any(name.endswith(".tmp") for name in os.listdir())
        raise KeyboardInterrupt

    before = held(folder)
    monkeypatch.setattr(atomic.FileOutput, "_advance", interrupted)
    done = ckptool(*verb.words("model.pth", "-o", "out.pth"))
    assert (done.code, done.out) == (130, "")
    assert held(folder) == before


@every
@needs_fork
def test_a_kill_in_the_middle_leaves_what_the_next_run_clears(ckptool, folder, monkeypatch, verb):
    before, child = held(folder), os.fork()
    if not child:
        atomic.FileOutput._advance = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        ckptool(*verb.words("model.pth", "-o", "out.pth"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not os.path.exists("out.pth")
    assert held(folder).items() >= before.items()
    assert ckptool(*verb.words("model.pth", "-o", "out.pth")).code == 0
    assert held(folder).keys() == before.keys() | {"out.pth"}


@needs_fork
def test_it_does_its_work_though_nobody_listens(folder):
    for shell, way in (("EACH >&- 2>&- </dev/null", "-q"), ("EACH | true", "--json")):
        commands = [verb.words("model.pth", way, "-o", f"{verb.name}{way}.pth") for verb in WRITERS]
        assert unheard(commands, shell)[0] == [0] * len(WRITERS)
    for verb in WRITERS:
        assert loaded(f"{verb.name}-q.pth") == loaded(f"{verb.name}--json.pth")


@every
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_file_will_do(ckptool, folder, verb, name):
    shutil.copy("model.pth", name)
    done = ckptool(*verb.words(name, "-o", f"new {name}"))
    assert done.code == 0
    assert loaded(f"new {name}")
    again = ckptool(*verb.words(name, "-o", f"new {name}"))
    assert again.code == 2
    if verb.word:
        assert ckptool(*verb.words(name)).code == 0
        assert loaded(f"{name[:-4]}.{verb.word}.pth")


@every
def test_a_name_with_a_leading_dash(ckptool, folder, verb):
    shutil.copy("model.pth", "-x.pth")
    assert ckptool(*verb.words("-x.pth", "-o", "out.pth")).code == 2
    assert ckptool(*verb.words("./-x.pth", "-o", "out.pth")).code == 0
    behind = [*verb.options, "-o", "out2.pth", "--", "-x.pth", *verb.others]
    assert ckptool(verb.name, *behind).code == 0
    assert loaded("out.pth") == loaded("out2.pth")
