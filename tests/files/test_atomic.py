"""A target is whole or as it was: disks that fill, folders that refuse, processes that die."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest

from ckptool.errors import (
    FileBusy,
    NoSpace,
    TargetExists,
    TruncatedFile,
    WriteDenied,
    WriteError,
)
from ckptool.files import atomic, system
from ckptool.files.atomic import open_atomic_output
from ckptool.files.journal import Journal, open_locked, write_journal
from ckptool.files.system import lock, remove_unlocked
from tests.files.sets import needs_posix, needs_refusals

OLD, NEW = b"the old content", b"something else altogether"


def write(path, content=NEW, size=None, **options):
    with open_atomic_output(path, len(content) if size is None else size, **options) as output:
        output.write(content)


def run_child(code, *arguments):
    """A process that runs `code` with the helpers of this module's imports."""
    head = "import os, sys\nfrom ckptool.files.atomic import open_atomic_output\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(OLD)
    return path


def untouched(path):
    return path.read_bytes() == OLD and os.listdir(path.parent) == [path.name]


def test_a_new_file_appears_with_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "model.pth")
    finally:
        os.umask(before)
    assert (tmp_path / "model.pth").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["model.pth"]
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "model.pth").stat().st_mode) == 0o640


@needs_posix
def test_a_new_file_takes_the_mode_that_is_asked_for_and_hands_it_on_when_replaced(tmp_path):
    path = tmp_path / "model.pth"
    write(path, OLD, mode=0o604)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    write(path, overwrite=True, mode=0o777)
    assert path.read_bytes() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


@pytest.fixture
def foreign(old, monkeypatch):
    """The owner and the group, both of others, that the old file seems to have."""
    status = os.stat(old)
    fields = list(status)
    fields[stat.ST_UID], fields[stat.ST_GID] = status.st_uid + 1, status.st_gid + 2
    monkeypatch.setattr(atomic, "refuse_target", lambda *_, **__: os.stat_result(fields))
    return fields[stat.ST_UID], fields[stat.ST_GID]


@needs_posix
def test_a_file_that_is_replaced_hands_on_owner_and_group(old, foreign, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "chown", lambda path, user, group: calls.append((path, user, group)))
    write(old, overwrite=True)
    (temporary,) = {path for path, *_ in calls}
    user, group = foreign
    assert os.path.dirname(temporary) == str(old.parent)
    assert temporary != str(old)
    assert [call[1:] for call in calls] == [(-1, group), (user, -1)]
    assert old.read_bytes() == NEW


@needs_posix
def test_an_owner_that_cannot_be_kept_is_no_error(old, foreign, monkeypatch):
    def refuse(path, user, group):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    write(old, overwrite=True)
    assert old.read_bytes() == NEW
    assert os.listdir(old.parent) == [old.name]


@needs_posix
def test_an_own_file_is_not_handed_over(old, monkeypatch):
    monkeypatch.setattr(os, "chown", None)
    write(old, overwrite=True)
    assert old.read_bytes() == NEW


@needs_posix
def test_nobody_else_can_read_it_before_it_is_finished(tmp_path):
    with open_atomic_output(tmp_path / "model.pth", 1, mode=0o644) as output:
        (name,) = os.listdir(tmp_path)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert name.startswith(".model.pth.")
        output.write(b"x")
    assert os.listdir(tmp_path) == ["model.pth"]


def test_an_existing_target_is_refused(old):
    with pytest.raises(TargetExists, match="already exists") as caught:
        write(old)
    assert "overwrite=True" in caught.value.hint
    assert untouched(old)


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path):
    path = tmp_path / "model.pth"

    def race():
        with open_atomic_output(path, len(NEW)) as output:
            output.write(NEW)
            path.write_bytes(OLD)

    with pytest.raises(TargetExists):
        race()
    assert untouched(path)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_is_no_target(tmp_path, overwrite):
    with pytest.raises(TargetExists, match="is a folder"):
        write(tmp_path, overwrite=overwrite)


@needs_posix
def test_a_device_is_no_target():
    with pytest.raises(WriteDenied, match="not a regular file"):
        write("/dev/null", overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, TruncatedFile])
def test_an_error_in_the_middle_removes_the_temporary_file(old, error):
    def fail():
        with open_atomic_output(old, 100, overwrite=True) as output:
            output.write(NEW)
            raise error("stop")

    with pytest.raises(error):
        fail()
    assert untouched(old)


@pytest.mark.parametrize("size", [len(NEW) - 1, len(NEW) + 1])
def test_more_or_fewer_bytes_than_planned_are_an_error(old, size):
    with pytest.raises(WriteError, match="expected"):
        write(old, size=size, overwrite=True)
    assert untouched(old)


def test_folders_are_made_and_removed_again_after_an_error(tmp_path):
    path = tmp_path / "a" / "b" / "model.pth"
    with pytest.raises(WriteError):
        write(path, size=1)
    assert os.listdir(tmp_path) == []
    write(path)
    assert path.read_bytes() == NEW


def test_a_file_in_place_of_a_folder(old):
    with pytest.raises(WriteError, match="cannot be written"):
        write(old / "model.pth")
    assert untouched(old)


@needs_posix
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "real.pth").write_bytes(OLD)
    link = tmp_path / "link.pth"
    link.symlink_to("elsewhere/real.pth")
    write(link, overwrite=True)
    assert link.is_symlink()
    assert (folder / "real.pth").read_bytes() == NEW
    assert os.listdir(folder) == ["real.pth"]


@needs_posix
def test_a_link_that_leads_nowhere_makes_its_target_and_a_circle_none(tmp_path):
    (tmp_path / "link.pth").symlink_to("real.pth")
    write(tmp_path / "link.pth")
    assert (tmp_path / "real.pth").read_bytes() == NEW
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(WriteError, match="cannot be written"):
        write(tmp_path / "a", overwrite=True)


def test_a_name_as_long_as_a_name_can_be(tmp_path):
    write(tmp_path / ("m" * 251 + ".pth"))
    write(tmp_path / ("é" * 120 + ".pth"))
    assert len(os.listdir(tmp_path)) == 2


def test_more_than_the_disk_has_is_refused_first(old):
    free = shutil.disk_usage(old.parent).free
    with pytest.raises(NoSpace, match="bytes, but the disk has") as caught:
        write(old, size=10 * free, overwrite=True)
    assert caught.value.file == str(old)
    assert untouched(old)


@needs_posix
def test_a_disk_that_refuses_is_found_before_a_byte_is_written(old):
    done = run_child(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        from ckptool.errors import NoSpace
        try:
            with open_atomic_output(sys.argv[1], 1 << 20, overwrite=True) as output:
                print("opened")
        except NoSpace as error:
            print("refused:", error)
        """,
        old,
    )
    assert done.stdout == f"refused: {old}: cannot be written (File too large)\n", done.stderr
    assert untouched(old)


@needs_posix
def test_a_disk_that_fills_while_writing(old):
    done = run_child(
        """
        import resource
        from ckptool.errors import NoSpace
        try:
            with open_atomic_output(sys.argv[1], 1 << 20, overwrite=True) as output:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                output.write(bytes(1 << 20))
        except NoSpace as error:
            print("refused")
        """,
        old,
    )
    assert done.stdout == "refused\n", done.stderr
    assert untouched(old)


@needs_posix
def test_a_kill_in_the_middle_leaves_the_old_file(old):
    done = run_child(
        """
        import signal
        def progress(done, total):
            print(done, total, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        size = 128 << 20
        with open_atomic_output(sys.argv[1], size, overwrite=True, progress=progress) as output:
            for _ in range(32):
                output.write(bytes(4 << 20))
        """,
        old,
    )
    assert done.returncode == -9
    assert done.stdout.split() == [str(64 << 20), str(128 << 20)]
    assert old.read_bytes() == OLD
    (left,) = set(os.listdir(old.parent)) - {old.name}
    assert left.startswith(".model.pth.")


DEBRIS = ".model.pth.ckptool-0123456789ab.tmp"


@needs_posix
def test_the_debris_of_a_killed_run_is_removed_by_the_next(old):
    killed = """
        import signal
        with open_atomic_output(sys.argv[1], 1 << 20, overwrite=True) as output:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    assert run_child(killed, old).returncode == -9
    assert len(os.listdir(old.parent)) == 2
    write(old, overwrite=True)
    assert old.read_bytes() == NEW
    assert os.listdir(old.parent) == [old.name]


@needs_posix
@pytest.mark.parametrize("name", ["model.pth", "new.pth"])
def test_a_run_is_told_of_a_run_that_is_still_writing(old, name):
    path = old.parent / name
    with open_atomic_output(path, len(NEW), overwrite=True) as output:
        with pytest.raises(FileBusy, match=rf"{name}: is being .* by process {os.getpid()}"):
            write(path, b"the other run", overwrite=True)
        output.write(NEW)
    assert path.read_bytes() == NEW
    assert sorted(os.listdir(old.parent)) == sorted({old.name, name})


@needs_posix
def test_a_file_that_is_replaced_is_not_edited_meanwhile(old):
    with open_atomic_output(old, len(NEW), overwrite=True) as output:
        with pytest.raises(FileBusy, match=f"edited by process {os.getpid()}"), open_locked(old):
            pass
        output.write(NEW)


@needs_posix
def test_an_edit_that_is_cut_short_once_the_target_is_settled(old, monkeypatch):
    monkeypatch.setattr(
        atomic, "recover_before_writing", lambda _: write_journal(str(old), Journal("edit", {}))
    )
    with pytest.raises(WriteError, match="an in-place edit was interrupted"):
        write(old, overwrite=True)
    assert old.read_bytes() == OLD


@pytest.mark.parametrize(
    "name", ["model.pth.tmp", f"{DEBRIS}.bak", DEBRIS.replace("model", "other"), f"x{DEBRIS}"]
)
def test_a_file_of_any_other_name_is_no_debris(old, name):
    (old.parent / name).write_bytes(OLD)
    write(old, overwrite=True)
    assert sorted(os.listdir(old.parent)) == sorted([name, old.name])


@needs_posix
def test_a_link_that_looks_like_debris_is_left_alone(old):
    (old.parent / DEBRIS).symlink_to("elsewhere")
    write(old, overwrite=True)
    assert (old.parent / DEBRIS).is_symlink()


@needs_posix
def test_a_file_that_is_taken_for_debris_before_it_is_locked(old, monkeypatch):
    takers = [remove_unlocked]

    def locks(fd):
        if takers:
            (name,) = set(os.listdir(old.parent)) - {old.name}
            takers.pop()(str(old.parent / name))
        lock(fd)

    monkeypatch.setattr(atomic, "lock", locks)
    write(old, overwrite=True)
    assert not takers
    assert old.read_bytes() == NEW


@needs_posix
def test_a_file_system_without_locks(old, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    (old.parent / DEBRIS).write_bytes(OLD)
    monkeypatch.setattr(system.fcntl, "flock", refuse)
    write(old, overwrite=True)
    assert old.read_bytes() == NEW
    assert sorted(os.listdir(old.parent)) == sorted([DEBRIS, old.name])


@needs_posix
@needs_refusals
def test_a_folder_that_refuses(old):
    old.parent.chmod(0o555)
    try:
        with pytest.raises(WriteDenied, match="Permission denied"):
            write(old, overwrite=True)
    finally:
        old.parent.chmod(0o755)
    assert untouched(old)
