"""What goes wrong with a set leaves the old files and nothing beside them; one writes at a time."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from ckptool.errors import CheckpointWarning, FileBusy, WriteDenied, WriteError
from ckptool.files import journal, local, recovery, renames, system
from ckptool.files.atomic import atomic_set
from ckptool.files.beside import has_journal, journal_path
from ckptool.files.editing import Edit, Patch
from ckptool.files.journal import read_journal, write_journal
from ckptool.files.renames import settle_set
from tests.files.sets import FEWER, INDEX, NEW, OLD, content, lay, needs_posix, run_child, write

# Errors and interruptions: no debris, old files as they were.


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, OSError])
def test_an_error_leaves_the_old_set(old, error):
    def stop(*_):
        raise error("stop")

    def interrupted(at):
        sizes = {str(old / name): len(data) for name, data in NEW.items()}
        with atomic_set(old / INDEX, sizes, overwrite=True, check=stop) as output_of:
            for name, data in NEW.items():
                with output_of(old / name) as output:
                    output.write(data)
                    if at == "inside":
                        stop()
                if at == "between":
                    stop()

    for at in ("between", "inside", "check"):
        with pytest.raises(WriteError if error is OSError else error):
            interrupted(at)
        assert content(old) == OLD, at


def test_more_or_fewer_bytes_than_announced(old):
    for change in (-1, 1):
        sizes = {str(old / name): len(data) for name, data in NEW.items()}
        sizes[str(old / "model-2.bin")] += change
        with pytest.raises(WriteError, match="planned") as caught:
            write(old, NEW, sizes, overwrite=True)
        assert caught.value.file == str(old / "model-2.bin")
        assert content(old) == OLD, change


def test_a_file_that_was_announced_and_not_written(old):
    sizes = {str(old / name): len(data) for name, data in NEW.items()}
    with pytest.raises(WriteError, match="announced and not written") as caught:
        write(old, {name: NEW[name] for name in list(NEW)[1:]}, sizes, overwrite=True)
    assert caught.value.file == str(old / "model-1.bin")
    assert content(old) == OLD


@needs_posix
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk(old, when):
    """What is full before is found before a byte is written."""
    done = run_child(
        """
        import resource
        def fill(*_):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        folder, when = sys.argv[1:]
        new = NEW | {"model-2.bin": bytes(5000)}
        progress = fill
        if when == "before":
            fill()
            progress = print
        try:
            write(folder, new, overwrite=True, progress=progress)
        except NoSpace as error:
            print(error)
        """,
        old,
        when,
    )
    assert done.stdout == f"{old / 'model-2.bin'}: cannot be written (File too large)\n", (
        done.stderr
    )
    assert content(old) == OLD


@needs_posix
@pytest.mark.parametrize("number", range(len(NEW)))
@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_a_rename_that_is_refused_or_interrupted(old, monkeypatch, number, error):
    """Taken back while no old file is gone; afterwards, finished if the system lets us."""
    replace, calls = os.replace, []

    def interrupted(source, target):
        if source.endswith(".part"):
            calls.append(target)
            if len(calls) == number + 1:
                raise error(errno.EPERM, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(WriteDenied if error is PermissionError else error):
        write(old, NEW, overwrite=True)
    assert content(old) == (OLD if number == 0 else OLD | NEW)


@needs_posix
@pytest.mark.parametrize("number", range(len(NEW)))
def test_a_first_write_that_is_refused_leaves_nothing(tmp_path, monkeypatch, number):
    replace, refused = os.replace, os.path.join(tmp_path, list(NEW)[number])

    def refuse(source, target):
        if target == refused:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteDenied):
        write(tmp_path, NEW)
    assert content(tmp_path) == {}


@needs_posix
def test_a_rename_that_is_refused_for_good_leaves_the_journal(old, monkeypatch):
    replace = os.replace

    def refuse(source, target):
        if target == str(old / "model-2.bin"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(WriteDenied):
            write(old, NEW, overwrite=True)
    assert has_journal(str(old / INDEX))
    settle_set(old / INDEX, read_journal(str(old / INDEX)))
    assert content(old) == OLD | NEW


@pytest.mark.parametrize("call", ["write_journal", "sync_folder"])
def test_a_journal_that_cannot_be_written(old, monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(renames, call, refuse)
    with pytest.raises(WriteError, match="Input/output error"):
        write(old, NEW, overwrite=True)
    assert content(old) == OLD


def test_a_journal_that_cannot_be_removed_is_removed_by_the_next(old, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(renames, "remove_journal", refuse)
        write(old, NEW, overwrite=True)
    assert has_journal(str(old / INDEX))
    settle_set(str(old / INDEX), read_journal(str(old / INDEX)))
    assert content(old) == OLD | NEW


def test_a_journal_goes_after_the_renames_are_on_the_disk(old, monkeypatch):
    """The system may keep an unlink and lose the rename before it, if nothing comes between."""
    calls = []

    def noted(name, call):
        def wrapped(*arguments):
            calls.append(name)
            return call(*arguments)

        return wrapped

    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    for name in ("sync_folder", "write_journal", "remove_journal"):
        monkeypatch.setattr(renames, name, noted(name, getattr(renames, name)))
    write(old, FEWER, overwrite=True)
    assert calls == [
        "sync_folder",
        *("write_journal", "replace"),
        *("replace", "replace", "sync_folder"),
        "remove_journal",
    ]


# What a kill leaves.


@needs_posix
def test_an_edit_of_a_shard_that_was_cut_short_is_forgotten(old):
    """Its journal would be about a file that is there no more."""
    shard = str(old / "model-1.bin")
    with open(shard, "rb") as file:
        edit = Edit.of(file.fileno(), Patch(len(OLD["model-1.bin"]), b" and more"))
    write_journal(shard, edit.to_journal())
    with pytest.warns(CheckpointWarning, match=r"model-1\.bin: rolled back"):
        write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW


@needs_posix
def test_the_debris_of_a_killed_run_is_removed_by_the_next(old):
    done = run_child(
        """
        import signal
        write(sys.argv[1], NEW, overwrite=True, check=lambda: os.kill(os.getpid(), signal.SIGKILL))
        """,
        old,
    )
    assert done.returncode == -9
    assert len(os.listdir(old)) == len(OLD) + len(NEW) + 1
    with open(journal_path(str(old / INDEX)) + ".tmp", "wb") as file:
        file.write(b"the beginning of one")
    write(old, FEWER, overwrite=True)
    assert content(old) == OLD | FEWER


def test_a_file_of_any_other_name_is_no_debris(old):
    mine = dict.fromkeys(
        (
            f".{INDEX}.ckptool-0123456789ab.part",
            f".{INDEX}.ckptool-0123456789ab-00001.part.bak",
            ".other.index.json.ckptool-0123456789ab-00001.part",
            f".{INDEX}.ckptool-0123456789ab-00001.tmp",
        ),
        b"mine",
    )
    lay(old, mine)
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW | mine


# Two at once.


@needs_posix
def test_the_second_writer_is_refused(old):
    sizes = {str(old / name): len(data) for name, data in NEW.items()}
    with atomic_set(old / INDEX, sizes, overwrite=True) as output_of:
        with pytest.raises(
            FileBusy, match=f"(?m)by process {os.getpid()}, which is this one$"
        ) as caught:
            write(old, FEWER, overwrite=True)
        assert caught.value.file == str(old / INDEX)
        done = run_child("write(sys.argv[1], FEWER, overwrite=True)", old)
        assert f"FileBusy: {old / INDEX}: is being written" in done.stderr
        for name, data in NEW.items():
            with output_of(old / name) as output:
                output.write(data)
    assert content(old) == OLD | NEW


@needs_posix
def test_a_reader_does_not_take_a_living_writer_for_dead(old, monkeypatch):
    replace, refused = os.replace, []

    def read_meanwhile(source, target):
        if source.endswith(".part"):
            with pytest.raises(FileBusy, match=f"process {os.getpid()}") as caught:
                settle_set(old / INDEX, read_journal(str(old / INDEX)))
            refused.append(caught)
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    write(old, NEW, overwrite=True)
    assert len(refused) == len(NEW)
    assert content(old) == OLD | NEW


@needs_posix
def test_many_writers_leave_one_set(tmp_path):
    code = """
        which = sys.argv[2]
        for turn in range(15):
            data = f"{which} {turn}".encode()
            contents = {name: data for name in NEW}
            try:
                write(sys.argv[1], contents, overwrite=True)
            except FileBusy:
                pass
        """
    head = "import os, sys\nfrom ckptool.errors import *\nfrom tests.files.sets import *\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), str(tmp_path)]
    running = [subprocess.Popen([*command, which]) for which in "ab"]
    assert [process.wait() for process in running] == [0, 0]
    assert content(tmp_path).keys() == NEW.keys()
    assert len(set(content(tmp_path).values())) == 1


@needs_posix
@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_that_is_removed_before_it_is_taken(old, monkeypatch, taken):
    """It is worth nothing: another one may have been made, and taken, meanwhile."""
    lock, late, others = old / f".{INDEX}.ckptool-lock", [os.unlink], []

    def try_lock(fd):
        if late:
            late.pop()(lock)
            if taken:
                others.append(open(lock, "wb"))  # noqa: SIM115
                system.lock(others[0].fileno())
        return system.try_lock(fd)

    monkeypatch.setattr(journal, "try_lock", try_lock)
    if taken:
        with pytest.raises(FileBusy):
            write(old, NEW, overwrite=True)
        others[0].close()
        assert content(old) == OLD | {lock.name: b""}
    else:
        write(old, NEW, overwrite=True)
        assert content(old) == OLD | NEW


@needs_posix
def test_a_reader_leaves_the_journal_that_is_being_written(old, monkeypatch):
    """Half written, it looks like what a kill leaves; the lock on the index tells."""
    monkeypatch.setattr(recovery, "_PAUSES", ())
    replace, readers = os.replace, [local.open_source]

    def read_meanwhile(source, target):
        if target == journal_path(str(old / INDEX)):
            with pytest.raises(FileBusy):
                readers.pop()(old / INDEX)
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    write(old, NEW, overwrite=True)
    assert not readers
    assert content(old) == OLD | NEW


def test_a_system_without_locks_keeps_what_may_be_anothers(old, monkeypatch):
    monkeypatch.setattr(journal, "try_lock", lambda _: None)
    debris = f".{INDEX}.ckptool-0123456789ab-00001.part"
    (old / debris).write_bytes(b"whose?")
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW | {debris: b"whose?"}


@needs_posix
def test_the_lock_of_another_user_is_still_seen(old, monkeypatch):
    lock, system_open = str(old / f".{INDEX}.ckptool-lock"), os.open

    def opened(path, flags, *mode):
        if path == lock and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return system_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(WriteDenied):
        write(old, NEW, overwrite=True)
    with open(lock, "wb") as file:
        system.lock(file.fileno())
        with pytest.raises(FileBusy):
            write(old, NEW, overwrite=True)
    assert content(old) == OLD | {f".{INDEX}.ckptool-lock": b""}
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW
