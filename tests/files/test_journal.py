"""A journal appears whole or not at all, beside the file that it is about, and says if not."""

import os
import stat

import pytest

from ckptool.errors import CorruptFile, FileDenied, UnreadableFile
from ckptool.files import journal as journals
from ckptool.files.journal import Journal, read_journal, remove_journal, write_journal
from ckptool.files.temporary import has_journal, journal_path

JOURNAL = Journal("edit", {"names": ["a", "\udcff"], "size": 1 << 60}, (b"", b"\n{}\0", bytes(9)))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(b"content")
    return str(path)


def test_what_is_written_is_read(target):
    assert read_journal(target) is None
    assert not has_journal(target)
    write_journal(target, JOURNAL)
    assert read_journal(target) == JOURNAL
    assert has_journal(target)
    assert JOURNAL.pid == os.getpid()
    assert sorted(os.listdir(os.path.dirname(target))) == [
        ".model.pth.ckptool-journal",
        "model.pth",
    ]


def test_a_journal_takes_the_place_of_another_and_goes(target):
    write_journal(target, JOURNAL)
    write_journal(target, Journal("set", {}))
    found = read_journal(target)
    assert (found.kind, found.blobs) == ("set", ())
    remove_journal(target)
    remove_journal(target)
    assert os.listdir(os.path.dirname(target)) == ["model.pth"]


@pytest.mark.parametrize("name", ["m" * 255, "é" * 127, "m" * 238, "m" * 237 + "é"])
def test_the_longest_names_have_journals_of_their_own(tmp_path, name):
    other = name[:-1] + ("n" if name[-1] == "m" else "e")
    for one in (name, other):
        write_journal(str(tmp_path / one), Journal("edit", {"name": one}))
    assert read_journal(str(tmp_path / name)).facts == {"name": name}
    assert read_journal(str(tmp_path / other)).facts == {"name": other}


def test_the_journal_lies_beside_what_a_link_leads_to(target, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest.pth"
    link.symlink_to(target)
    assert journal_path(str(link)) == journal_path(target)


def test_who_reads_the_file_reads_the_journal(target):
    os.chmod(target, 0o754)
    write_journal(target, JOURNAL)
    assert stat.S_IMODE(os.stat(journal_path(target)).st_mode) == 0o644


def test_every_damage_is_noticed(target):
    write_journal(target, JOURNAL)
    with open(journal_path(target), "rb") as file:
        whole = file.read()
    for position in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[position] ^= 1
        for content in (spoiled, whole[:position]):
            with open(journal_path(target), "wb") as file:
                file.write(content)
            with pytest.raises(
                CorruptFile, match="journal of an in-place edit cannot be used"
            ) as caught:
                read_journal(target)
            assert caught.value.file == journal_path(target)
            assert caught.value.hint == f"ckptool recover --discard {target}"


def test_a_journal_of_nobody_we_know(target):
    for line in [
        b"",
        b"[]",
        b"null",
        b'{"ckptool-journal": 2, "kind": "edit", "facts": {}, "blobs": [], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "blobs": [1], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "blobs": [-1], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "blobs": ["x"], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": 3, "blobs": [], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "blobs": [1e999], "pid": 1}',
        b'{"ckptool-journal": 1, "kind": "edit", "facts": {}, "blobs": [], "pid": 1}\nmore',
        b'{"ckptool-journal": ' + b"[" * 100_000,
    ]:
        line = line.replace(b'"pid": 1}', b'"pid": 1, "boot": ""}')
        content = line + b"\n" if b"\n" not in line else line
        with open(journal_path(target), "wb") as file:
            file.write(content + journals.hashlib.sha256(content).digest())
        with pytest.raises(CorruptFile):
            read_journal(target)


def test_a_journal_that_cannot_be_read(target, monkeypatch):
    os.mkdir(journal_path(target))
    with pytest.raises(UnreadableFile):
        read_journal(target)

    def refuse(path):
        raise FileDenied("permission denied", file=path)

    monkeypatch.setattr(journals, "FileSource", refuse)
    with pytest.raises(FileDenied, match="ckptool-journal"):
        read_journal(target)


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
def test_a_journal_that_cannot_be_written_leaves_nothing(target, monkeypatch, call):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space"):
        write_journal(target, JOURNAL)
    assert os.listdir(os.path.dirname(target)) == ["model.pth"]


def test_what_a_killed_process_began_is_replaced(target):
    with open(journal_path(target) + ".tmp", "wb") as file:
        file.write(b"half of it")
    assert has_journal(target)
    assert read_journal(target) is None
    write_journal(target, JOURNAL)
    assert read_journal(target) == JOURNAL
    assert len(os.listdir(os.path.dirname(target))) == 2
