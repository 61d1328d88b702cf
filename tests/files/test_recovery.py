"""What an edit that was cut short leaves is undone, and nothing else is ever touched."""

import copy
import errno
import os
import pickle
import random
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ckptool.errors import (
    CheckpointWarning,
    CorruptFile,
    FileBusy,
    FileMissing,
    UnreadableFile,
    UsageError,
    WriteDenied,
    WriteError,
)
from ckptool.files import local, recovery
from ckptool.files.atomic import open_atomic_output
from ckptool.files.editing import Edit, Patch
from ckptool.files.journal import Journal, open_locked, write_journal
from ckptool.files.local import open_source
from ckptool.files.recovery import Recovery, recover, recover_before_writing
from ckptool.files.system import copy_bytes
from ckptool.files.temporary import journal_path
from tests.files.faults import KILL, POWER, Loss, crash_at, crashes, needs_fork, torn
from tests.files.test_editing import OLD, PATCHES, apply, edited, recovered, rewritten

SIZE = len(OLD)
APPEND = Patch(SIZE, b"\0\1new tail" * 400)
HEAD = Patch(0, b"new head\0\2" * 150)
BOTH = [pytest.param(APPEND, id="append"), pytest.param(HEAD, id="head")]
same_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
needs_posix = pytest.mark.skipif(os.name != "posix", reason="POSIX")


@pytest.fixture
def path(memory_path):
    (memory_path / "files").mkdir()
    path = memory_path / "files" / "model.pth"
    path.write_bytes(OLD)
    return str(path)


def begun(path, patch, content=None, **facts):
    """A journal of an edit of the old file, which then has `content`; the inode stays."""
    rewrite(path, OLD)
    with open(path, "rb") as file:
        edit = replace(Edit.from_patch(file.fileno(), patch), **facts)
    write_journal(path, edit.to_journal())
    rewrite(path, OLD if content is None else content)
    return edit


def rewrite(path, content):
    with open(path, "r+b") as file:
        file.truncate()
        file.write(content)
        file.truncate()


def content(path):
    with open(path, "rb") as file:
        return file.read()


def beside(path):
    return sorted(set(os.listdir(os.path.dirname(path))) - {os.path.basename(path)})


def cut_at(patch, done):
    """The file after so many bytes of the edit."""
    return edited(Patch(patch.offset, patch.data[:done]))


@pytest.mark.parametrize("patch", BOTH)
def test_an_edit_that_broke_off_is_rolled_back(path, patch):
    for done in (1, 511, 512, 513, 700, 1499):
        edit = begun(path, patch, cut_at(patch, done))
        said = (
            "model.pth: rolled back to its 5,000 bytes from before the interrupted edit "
            f"of process {edit.pid}"
        )
        with pytest.warns(CheckpointWarning, match=said) as caught:
            source = open_source(path)
        assert source.read(0, source.size) == OLD, done
        source.close()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert (content(path), beside(path)) == (OLD, []), done


@pytest.mark.parametrize("patch", BOTH)
def test_an_edit_that_had_not_begun(path, patch):
    begun(path, patch)
    done = recover(path)
    assert done == Recovery(path, "rolled-back", done.text)
    assert (content(path), beside(path)) == (OLD, [])


@pytest.mark.parametrize("patch", BOTH)
def test_an_edit_that_was_all_there_is_kept(path, patch):
    edit = begun(path, patch, edited(patch))
    said = f"kept the interrupted edit of process {edit.pid}, which was complete"
    with pytest.warns(CheckpointWarning, match=said):
        open_source(path).close()
    assert (content(path), beside(path)) == (edited(patch), [])
    begun(path, patch, edited(patch))
    assert recover(path) == Recovery(path, "completed", said)


def test_nothing_to_recover(path):
    assert recover(path).action == "nothing"
    assert recover(path, discard=True).action == "nothing"
    assert recover(path).to_dict() == {
        "schema": "ckptool.recover/1",
        "file": path,
        "action": "nothing",
        "text": "nothing to recover",
    }


@same_file
@given(
    patch=st.sampled_from([APPEND, HEAD]),
    seed=st.integers(0, 1 << 32),
    done=st.integers(0, len(APPEND.data)),
)
def test_whatever_a_loss_of_power_leaves_is_rolled_back(path, patch, seed, done):
    state = torn(OLD, cut_at(patch, done), random.Random(seed))
    begun(path, patch, state)
    assert recover(path).action == ("completed" if state == edited(patch) else "rolled-back")
    assert content(path) in (OLD, edited(patch))
    assert not os.path.lexists(journal_path(path))


# --- files that the journal does not tell of


def other_content(path):
    rewrite(path, b"another checkpoint, copied over this one" * 200)


def other_of_the_same_length(path):
    rewrite(path, random.Random(1).randbytes(SIZE + 700))


def renamed_over(path):
    with open(path + ".other", "wb") as file:
        file.write(OLD)
    os.replace(path + ".other", path)


def appended_otherwise(path):
    rewrite(path, OLD + b"\0\1new names" * 60)


def begins_as_the_edit(path):
    rewrite(path, OLD + APPEND.data[:1024] + b"\0\1new names" * 60)


def longer_than_the_edit(path):
    rewrite(path, OLD + APPEND.data + b"more")


def shorter(path):
    rewrite(path, OLD[:-1])


def with_another_tail(path):
    rewrite(path, OLD[:-1] + b"\0" + APPEND.data[:700])


def empty(path):
    rewrite(path, b"")


OTHERS = [
    other_content, other_of_the_same_length, renamed_over, appended_otherwise, begins_as_the_edit,
    longer_than_the_edit, shorter, with_another_tail, empty,
]  # fmt: skip


def head_of_another(path):
    rewrite(path, b"another head, of the same length" * 20 + OLD[640:])


def head_edited_otherwise(path):
    rewrite(path, edited(Patch(0, b"new names " * 150)))


def head_cut_twice(path):
    mixed = HEAD.data[:100] + OLD[100:600] + HEAD.data[600:700] + OLD[700:]
    rewrite(path, mixed)


def head_broken_off_twice(path):
    rewrite(path, HEAD.data[:100] + OLD[100:512] + HEAD.data[512:600] + OLD[600:])


def head_the_other_way_round(path):
    rewrite(path, OLD[:100] + HEAD.data[100:512] + OLD[512:])


def longer(path):
    rewrite(path, cut_at(HEAD, 700) + b"more")


def another_end(path):
    rewrite(path, cut_at(HEAD, 700)[:-1] + b"\0")


HEADS = [
    other_content, renamed_over, head_of_another, head_edited_otherwise, head_cut_twice,
    head_broken_off_twice, head_the_other_way_round, longer, shorter, another_end, empty,
]  # fmt: skip


@pytest.mark.parametrize(("patch", "changes"), [(APPEND, OTHERS), (HEAD, HEADS)])
def test_a_file_of_other_content_is_never_touched(path, patch, changes):
    for change in changes:
        begun(path, patch)
        change(path)
        found, status, journal = content(path), os.stat(path), content(journal_path(path))
        for attempt in (open_source, recover, recover_before_writing):
            with pytest.raises(CorruptFile, match="belongs to other content") as caught:
                attempt(path)
            assert caught.value.file == path
            assert "nothing was changed" in caught.value.message
            assert caught.value.hint.endswith(f"ckptool recover --discard {path}")
        assert (content(path), content(journal_path(path))) == (found, journal)
        assert os.stat(path).st_mtime_ns == status.st_mtime_ns
        assert recover(path, discard=True).action == "discarded"
        assert (content(path), beside(path)) == (found, [])
        assert os.stat(path).st_mtime_ns == status.st_mtime_ns


@same_file
@given(patch=st.sampled_from([APPEND, HEAD]), data=st.data())
def test_a_byte_that_is_neither_old_nor_new_is_noticed(path, patch, data):
    done = data.draw(st.integers(1, len(patch.data)))
    place = patch.offset + data.draw(st.integers(0, done - 1))
    state = bytearray(cut_at(patch, done))
    state[place] = 0xFE  # in neither
    begun(path, patch, state)
    with pytest.raises(CorruptFile, match="other content"):
        recover(path)
    assert content(path) == state


@pytest.mark.parametrize("patch", BOTH)
def test_a_copy_of_a_cut_edit_is_rolled_back_where_that_is_asked_for(path, patch):
    cut = OLD[: patch.offset] + patch.data[:600] + OLD[patch.offset + 600 :]
    begun(path, patch, cut)
    shutil.copyfile(path, path + ".copy")
    os.replace(path + ".copy", path)
    for attempt in (open_source, recover):
        with pytest.raises(CorruptFile, match="copied or moved") as caught:
            attempt(path)
        assert caught.value.hint == f"roll back this copy: ckptool recover --force {path}"
    with open(path, "rb") as file:
        assert file.read() == cut
    assert recover(path, force=True).action == "rolled-back"
    with open(path, "rb") as file:
        assert file.read() == OLD
    assert os.listdir(os.path.dirname(path)) == ["model.pth"]


def test_force_touches_no_file_of_other_content(path):
    other = OLD[:-1] + b"!" + APPEND.data[:600]
    begun(path, APPEND, other)
    with pytest.raises(CorruptFile, match="belongs to other content"):
        recover(path, force=True)
    with open(path, "rb") as file:
        assert file.read() == other
    with pytest.raises(UsageError):
        recover(path, force=True, discard=True)


@pytest.mark.parametrize("patch", BOTH)
def test_the_old_file_copied_back(path, patch, tmp_path):
    shutil.copyfile(path, tmp_path / "backup.pth")
    begun(path, patch, cut_at(patch, 700))
    shutil.copyfile(tmp_path / "backup.pth", path)
    assert recovered(path) == OLD


def test_numbers_of_devices_change_with_a_restart(path):
    device = os.stat(path).st_dev
    begun(path, APPEND, cut_at(APPEND, 700), device=device + 1)
    with pytest.raises(CorruptFile, match="copied or moved"):
        recover(path)
    begun(path, APPEND, cut_at(APPEND, 700), device=device + 1, boot="before the restart")
    assert recover(path).action == "rolled-back"


def test_a_journal_that_tells_of_nothing_known(path):
    where = {"device": 1, "inode": 1, "size": 5, "offset": 5, "tail": ""}
    for kind, facts, blobs in [
        ("edit", {}, (b"", b"x")),
        ("edit", where | {"size": "x", "offset": 0}, (b"", b"x")),
        ("edit", where, (b"",)),
        ("edit", where, (b"x", b"x")),
        ("edit", where | {"offset": 4}, (b"x", b"x")),
        ("edit", where | {"offset": 0}, (b"x", b"xy")),
        ("edit", where | {"offset": -1}, (b"x", b"x")),
        ("dance", {}, ()),
    ]:
        write_journal(path, Journal(kind, facts, blobs))
        with pytest.raises(
            CorruptFile, match="the journal next to it was not written by this version of ckptool"
        ) as caught:
            open_source(path)
        assert caught.value.hint == f"ckptool recover --discard {path}"
        assert content(path) == OLD
        assert recover(path, discard=True).action == "discarded", (kind, facts)
        assert recovered(path) == OLD


# --- recoveries that are cut short


@needs_fork
@pytest.mark.parametrize("patch", PATCHES)
def test_a_recovery_that_ends_at_any_call_is_made_again(path, patch):
    """The states that a kill leaves; the recovery of each ends at each of its calls."""
    kills = crashes(lambda: apply(path, patch), rewritten(path))
    states = {content(path): kill for kill in kills if os.path.lexists(journal_path(path))}
    assert len(states) == 2 + (len(patch.data) > 1)
    for state, first in states.items():
        for crash in crashes(
            lambda: recovered(path),
            lambda state=state: begun(path, patch, state),
            (KILL, *POWER),
        ):
            assert recovered(path) == (OLD if state != edited(patch) else state), (
                first,
                crash,
            )


@needs_fork
@pytest.mark.parametrize("patch", BOTH)
def test_what_a_killed_edit_did_not_sync_is_synced_before_its_journal_goes(path, patch):
    def killed_then_recovered():
        with open(path, "rb") as file:
            write_journal(path, Edit.from_patch(file.fileno(), patch).to_journal())
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, patch.data, patch.offset)
        os.close(fd)
        recovered(path)

    seen = set()
    for crash in crashes(killed_then_recovered, rewritten(path), (KILL, *POWER)):
        found = recovered(path)
        assert found in (OLD, edited(patch)), crash
        assert found == edited(patch) or not crash.completed, crash
        seen.add(found)
    assert seen == {OLD, edited(patch)}


@needs_fork
@pytest.mark.parametrize("patch", BOTH)
def test_a_journal_that_is_removed_does_not_come_back(path, patch):
    """What is written to the file later, by whomever, would not be what it tells of."""

    def edit_then_overwrite():
        apply(path, patch)
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"somebody else", 0)
        os.fsync(fd)
        os.close(fd)

    number = 1
    while not (last := crash_at(edit_then_overwrite, rewritten(path), number)).completed:
        number += 1
    for loss in (Loss(names=True), Loss(names=True, data=True)):
        crash_at(edit_then_overwrite, rewritten(path), last.number, loss=loss)
        assert recovered(path).startswith(b"somebody else")


# --- files that cannot be set right


@pytest.fixture(params=["access", "undo"])
def refused(request, monkeypatch):
    """The system says in advance, or only when it comes to it, that nothing can be written."""

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    if request.param == "access":
        monkeypatch.setattr(os, "access", lambda name, mode: mode != os.W_OK)
    else:
        monkeypatch.setattr(Edit, "undo", refuse)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("patch", BOTH)
def test_what_cannot_be_undone_reads_as_it_was_before(path, patch):
    state = cut_at(patch, 700)
    edit = begun(path, patch, state)
    said = (
        f"model.pth: reading its 5,000 bytes from before the interrupted edit of process {edit.pid}"
    )
    with pytest.warns(CheckpointWarning, match=said + ", which cannot be restored here"):
        source = open_source(path)
    assert source.size == SIZE
    assert source.read(0, SIZE) == OLD
    for offset, length in ((0, 10), (690, 20), (1400, 200), (SIZE - 5, 5), (10, 0)):
        assert source.read(offset, length) == OLD[offset : offset + length]
        buffer = bytearray(length)
        source.read_into(offset, memoryview(buffer))
        assert buffer == OLD[offset : offset + length]
    source.check_unchanged()
    source.close()
    assert content(path) == state
    assert len(beside(path)) == 1


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("patch", BOTH)
def test_copies_by_the_kernel_and_by_pickle_see_the_same(path, patch, tmp_path):
    begun(path, patch, cut_at(patch, 700))
    with pytest.warns(CheckpointWarning, match="cannot be restored"):
        source = open_source(path)
    for other in (source, copy.copy(source), pickle.loads(pickle.dumps(source))):
        with open(tmp_path / "copy", "wb", buffering=0) as file:
            copy_bytes(other, 0, file.fileno(), 0, SIZE)
        assert content(tmp_path / "copy") == OLD
        other.check_unchanged()
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(UnreadableFile, match="changed while it was read"):
        source.check_unchanged()
    with pytest.raises(UnreadableFile, match="changed since it was opened"):
        copy.copy(source)
    source.close()


@pytest.mark.parametrize("patch", BOTH)
@pytest.mark.parametrize("all_there", [True, False])
def test_a_journal_that_cannot_be_removed_is_no_obstacle(path, patch, all_there, monkeypatch):
    monkeypatch.setattr(os, "access", lambda name, mode: mode != os.W_OK)
    state = edited(patch) if all_there else OLD
    begun(path, patch, state)
    source = open_source(path)
    assert source.read(0, source.size) == state
    source.close()
    assert len(beside(path)) == 1


def test_a_file_rolled_back_whose_journal_stays(path, monkeypatch):
    def refuse(target):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(recovery, "remove_journal", refuse)
    begun(path, APPEND, cut_at(APPEND, 700))
    with pytest.warns(CheckpointWarning, match="rolled back"):
        open_source(path).close()
    assert content(path) == OLD
    with pytest.raises(WriteDenied, match="Permission denied"):
        recover(path)
    monkeypatch.undo()
    assert recovered(path) == OLD


def test_recover_says_what_the_system_refuses(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    begun(path, APPEND, cut_at(APPEND, 700))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(WriteDenied, match="Read-only file system"):
        recover(path)
    monkeypatch.undo()
    assert recovered(path) == OLD


# --- others at work


class Pauses(list):
    """The pauses made while another has the lock, in which it does one thing more."""

    todo = staticmethod(lambda: None)

    def __call__(self, seconds):
        self.append(seconds)
        self.todo()


@pytest.fixture
def pauses(monkeypatch):
    made = Pauses()
    monkeypatch.setattr(recovery, "sleep", made)
    return made


@needs_posix
@pytest.mark.parametrize("attempt", [open_source, recover, recover_before_writing])
def test_a_file_that_is_being_edited(path, attempt, pauses):
    with open_locked(path):
        begun(path, APPEND, cut_at(APPEND, 700))
        with pytest.raises(FileBusy, match=f"is being edited by process {os.getpid()}"):
            attempt(path)
        assert 0.5 < sum(pauses) < 2
        assert content(path) == cut_at(APPEND, 700)
        with pytest.raises(FileBusy):
            recover(path, discard=True)
    assert recovered(path) == OLD


@needs_posix
def test_an_edit_that_ends_in_time_is_waited_for(path, pauses):
    begun(path, APPEND, cut_at(APPEND, 700))
    lock = open_locked(path)
    fd = lock.__enter__()

    def finish():
        os.pwrite(fd, APPEND.data, SIZE)
        os.unlink(journal_path(path))
        lock.__exit__(None, None, None)

    pauses.todo = finish
    source = open_source(path)
    assert source.read(0, source.size) == edited(APPEND)
    source.close()
    assert len(pauses) == 1


@needs_posix
def test_an_edit_that_is_about_to_begin_is_waited_for(path, pauses):
    unfinished = journal_path(path) + ".tmp"
    with open_locked(path):
        open(unfinished, "wb").close()
        with pytest.raises(FileBusy):
            open_source(path)
        assert os.path.exists(unfinished)
    assert recovered(path) == OLD


def test_a_file_that_is_not_being_edited_costs_no_lock(path, monkeypatch):
    monkeypatch.setattr(recovery, "open_locked", None)
    source = open_source(path)
    assert (source.path, source.read(0, SIZE)) == (path, OLD)
    source.close()


def test_a_file_that_changes_while_it_is_opened_is_opened_again(path, monkeypatch):
    edits = [lambda: rewrite(path, OLD + b"more")]

    def races(target):
        if edits:
            edits.pop()()
        return False

    monkeypatch.setattr(local, "has_journal", races)
    source = open_source(path)
    assert source.read(0, source.size) == OLD + b"more"
    source.check_unchanged()
    source.close()


# --- files that are replaced, missing, or of a set


@pytest.mark.parametrize("patch", BOTH)
def test_a_file_is_settled_before_it_is_replaced(path, patch):
    begun(path, patch, cut_at(patch, 700))
    seen = []

    def replaced():
        with open_atomic_output(path, 3, overwrite=True) as output:
            seen.append(content(path))
            output.write(b"new")

    with pytest.warns(CheckpointWarning, match="rolled back"):
        replaced()
    assert seen == [OLD]
    assert recovered(path) == b"new"


def test_a_file_that_the_journal_does_not_tell_of_is_not_replaced(path):
    begun(path, APPEND, b"another")
    with (
        pytest.raises(CorruptFile, match="other content"),
        open_atomic_output(path, 3, overwrite=True),
    ):
        pass
    assert content(path) == b"another"
    assert len(beside(path)) == 1


def test_a_file_that_is_gone_keeps_its_journal(path):
    """It may have been moved away for a moment, half edited."""
    begun(path, APPEND, cut_at(APPEND, 700))
    os.rename(path, path + ".moved")
    for attempt in (open_source, recover):
        with pytest.raises(FileMissing, match="no such file"):
            attempt(path)
    with pytest.raises(WriteError, match="the edited file is gone"), write_new(path):
        pass
    os.rename(path + ".moved", path)
    assert recovered(path) == OLD


def write_new(path):
    return open_atomic_output(path, 3)


def test_the_journal_of_a_file_that_is_gone_can_be_discarded(path):
    begun(path, APPEND)
    os.unlink(path)
    assert recover(path, discard=True).action == "discarded"
    assert os.listdir(os.path.dirname(path)) == []


def test_the_beginning_of_a_journal_is_no_obstacle_to_a_new_file(path):
    os.rename(path, journal_path(path) + ".tmp")
    with write_new(path) as output:
        output.write(b"new")
    assert recovered(path) == b"new"


@pytest.mark.parametrize("exists", [True, False])
def test_the_journal_of_a_set_is_for_the_set(path, exists, monkeypatch):
    """Whether the index is there already or is the last file to come."""
    os.unlink(path)
    write_journal(path, Journal("set", {"files": []}))
    settled_sets = []

    def recover_set(target, journal):
        settled_sets.append((target, journal.kind))
        rewrite_new(path)
        os.unlink(journal_path(target))

    monkeypatch.setattr(recovery, "recover_set", recover_set)
    if exists:
        rewrite_new(path)
    assert recovered(path) == b"index"
    write_journal(path, Journal("set", {"files": []}))
    assert recover(path).action == "completed"
    assert settled_sets == [(path, "set")] * 2


def rewrite_new(path):
    with open(path, "wb") as file:
        file.write(b"index")
