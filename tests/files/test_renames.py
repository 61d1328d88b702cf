"""A set whose write was cut short is finished by the next that opens it, or left as it is found."""

import errno
import os

import pytest

from ckptool.errors import CheckpointWarning, CorruptFile, TargetExists, WriteDenied
from ckptool.files.journal import Journal, write_journal
from ckptool.files.local import open_source
from ckptool.files.recovery import recover
from ckptool.files.renames import recover_set
from tests.files.sets import FEWER, INDEX, NEW, OLD, content, killed, lay, needs_posix, write


@pytest.fixture
def scenes(tmp_path):
    """A folder for each number of renames before the kill, empty or with the old set in it."""

    def made(before):
        for number in range(len(NEW)):
            folder = tmp_path / f"{len(os.listdir(tmp_path))}"
            folder.mkdir()
            yield number, lay(folder, before)

    return made


@needs_posix
def test_whoever_opens_the_index_finishes_a_killed_write(scenes):
    for renamed, folder in scenes({}):
        killed(folder, NEW, renamed)
        with pytest.warns(CheckpointWarning, match=f"{INDEX}: finished an interrupted write"):
            source = open_source(folder / INDEX)
        assert source.read(0, source.size) == NEW[INDEX]
        source.close()
        assert content(folder) == NEW, renamed


@needs_posix
def test_recover_finishes_a_killed_write(scenes):
    for renamed, folder in scenes(OLD):
        killed(folder, NEW, renamed, overwrite=True)
        assert recover(folder / INDEX).action == "completed", renamed
        assert content(folder) == OLD | NEW, renamed
        assert recover(folder / INDEX).action == "nothing", renamed


@needs_posix
def test_a_journal_can_be_discarded(old):
    killed(old, NEW, 1, overwrite=True)
    (old / "model-2.bin").write_bytes(b"mine")
    with pytest.raises(CorruptFile, match=r"model-2\.bin was changed or removed"):
        recover(old / INDEX)
    assert recover(old / INDEX, discard=True).action == "discarded"
    left = content(old)
    assert {name: left[name] for name in OLD} == OLD | {
        "model-1.bin": NEW["model-1.bin"],
        "model-2.bin": b"mine",
    }
    write(old, FEWER, overwrite=True)
    assert content(old) == OLD | {"model-2.bin": b"mine"} | FEWER


@needs_posix
def test_the_next_write_finishes_a_killed_one_first(scenes):
    for renamed, folder in scenes({}):
        killed(folder, NEW, renamed)
        with (
            pytest.warns(CheckpointWarning, match=f"{INDEX}: finished an interrupted write"),
            pytest.raises(TargetExists),
        ):
            write(folder, FEWER)
        assert content(folder) == NEW, renamed
        write(folder, FEWER, overwrite=True)
        assert content(folder) == NEW | FEWER, renamed


@needs_posix
def test_a_killed_write_is_finished_by_a_link_to_the_index(old, tmp_path_factory):
    journal = killed(old, NEW, 2, overwrite=True)
    link = tmp_path_factory.mktemp("links") / "latest.json"
    link.symlink_to(old / INDEX)
    recover_set(link, journal)
    assert content(old) == OLD | NEW


@needs_posix
def test_what_was_settled_meanwhile_is_left_alone(old):
    journal = killed(old, NEW, 2, overwrite=True)
    recover_set(old / INDEX, journal)
    write(old, FEWER, overwrite=True)
    recover_set(old / INDEX, journal)
    assert content(old) == OLD | NEW | FEWER


def rewrite(path):
    """Other content under the same name, as a copy over it leaves."""
    path.write_bytes(b"something else")


def replace_by_another(path):
    rewrite(path.with_name("other"))
    path.with_name("other").replace(path)


def remove(path):
    path.unlink()


@needs_posix
@pytest.mark.parametrize("change", [rewrite, replace_by_another])
def test_a_file_of_somebody_else_is_never_touched(scenes, change):
    for name in NEW:
        for renamed, folder in scenes(OLD):
            journal = killed(folder, NEW, renamed, overwrite=True)
            change(folder / name)
            before = content(folder)
            with pytest.raises(CorruptFile, match=f"{name} was changed or removed") as caught:
                recover_set(folder / INDEX, journal)
            assert caught.value.file == str(folder / INDEX)
            assert caught.value.hint == f"ckptool recover --discard {folder / INDEX}"
            assert content(folder) == before, (name, renamed)


@needs_posix
def test_a_finished_file_that_is_gone(scenes):
    for number, folder in scenes(OLD):
        journal = killed(folder, NEW, 0, overwrite=True)
        (temporary,) = folder.glob(f".*-{number + 1:05}.part")
        temporary.unlink()
        with pytest.raises(CorruptFile, match=f"{list(NEW)[number]} was changed or removed"):
            recover_set(folder / INDEX, journal)
        assert {name: (folder / name).read_bytes() for name in OLD} == OLD, number


@needs_posix
def test_an_old_file_that_was_removed_is_no_obstacle(old):
    journal = killed(old, NEW, 1, overwrite=True)
    (old / "model-2.bin").unlink()
    recover_set(old / INDEX, journal)
    assert content(old) == OLD | NEW


def facts(**changes):
    """What a journal says of one file, spoilt."""
    name = f".{INDEX}.ckptool-0123456789ab-00001.part"
    return {"temporary": name, "name": "a", "inode": 1, "size": 1, "replaces": None} | changes


def test_a_journal_of_nobody_we_know(old):
    for kind, said in [
        ("edit", {"files": []}),
        ("set", {}),
        ("set", {"files": 3}),
        ("set", {"files": ["a"]}),
        ("set", {"files": [{}]}),
        ("set", {"files": [facts(inode="x")]}),
        ("set", {"files": [facts(size=None)]}),
        ("set", {"files": [facts(replaces=3)]}),
        *(
            ("set", {"files": [facts(name=name)]})
            for name in ("../a", "/etc/passwd", "..", "", "a\0")
        ),
        ("set", {"files": [facts(temporary="model-1.bin")]}),
        ("set", {"files": [facts(temporary=f"../{facts()['temporary']}")]}),
    ]:
        journal = Journal(kind, said)
        write_journal(str(old / INDEX), journal)
        before = content(old)
        with pytest.raises(CorruptFile, match="not written by this version") as caught:
            recover_set(old / INDEX, journal)
        assert caught.value.hint == f"ckptool recover --discard {old / INDEX}"
        with pytest.raises(CorruptFile):
            write(old, NEW, overwrite=True)
        assert content(old) == before, said


@needs_posix
def test_a_folder_in_which_nothing_can_be_renamed(old, monkeypatch):
    journal = killed(old, NEW, 2, overwrite=True)
    before = content(old)

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteDenied, match="was interrupted and cannot be finished here") as caught:
        recover_set(old / INDEX, journal)
    assert "recover" in caught.value.hint
    assert content(old) == before
