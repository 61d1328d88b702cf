"""A full disk, a folder or a file that is not ours: the old files stay, and nothing beside them."""

import os
import subprocess
import sys

import pytest

from tests.files.faults import needs_fork
from tests.sources import PROJECT
from tests.writing.kinds import KINDS, MATERIALS, materials, provide
from tests.writing.refusals import denied, on_small_disk, under_limits

pytestmark = needs_fork

GROWING = [name for name in KINDS if name != "recover"]
"""The kinds that need room."""
LIGHT = [name for name in GROWING if not KINDS[name].computed]
"""Those of them that need no torch."""


def check_refused(refused, word):
    """No error and the new files, or an error in one sentence and older ones; nothing beside."""
    assert refused.state is not None, refused
    assert refused.left == [], refused
    assert (refused.state == -1) is (refused.said == ""), refused
    assert refused.said.startswith(word) or not refused.said, refused
    assert "\n" not in refused.said, refused


@pytest.mark.parametrize("name", LIGHT)
def test_a_limit_of_bytes(name, folder, light):
    """RLIMIT_FSIZE: found before a byte is written, or after any number of them."""
    for found_early in (True, False):
        found = light(under_limits, name, folder, found_early)
        for refused in found:
            check_refused(refused, "NoSpace: ")
        assert found[0].said, found_early


@pytest.mark.parametrize("name", sorted({*GROWING} - {*LIGHT}))
def test_a_limit_of_bytes_where_they_are_computed(name, folder):
    provide(MATERIALS or materials())
    for refused in under_limits(name, folder, False):
        check_refused(refused, "NoSpace: ")


@pytest.mark.parametrize("promised", [False, True], ids=["known", "found-out"])
def test_a_small_disk(promised, memory_path, light):
    """Told at once, or, where the disk claims to have room, when it comes to it."""
    found = light(on_small_disk, LIGHT, memory_path, promised)
    if found is None:
        pytest.skip("nothing may be mounted here")
    for name in LIGHT:
        for refused in found[name]:
            check_refused(refused, "NoSpace: ")
        assert found[name][0].said, name


@pytest.mark.parametrize("name", [name for name in LIGHT if "cut-short" not in name])
def test_a_folder_that_is_not_ours(name, folder, light):
    refused = light(denied, name, folder, False)
    check_refused(refused, "WriteDenied: ")
    assert refused.said


@pytest.mark.parametrize("name", ["edit-strip", "edit-header", "replaced-zip", "shards-replaced"])
def test_a_file_that_is_not_ours(name, folder, light):
    """It is not edited; another may take its place, as `mv` has it."""
    refused = light(denied, name, folder, True)
    check_refused(refused, "WriteDenied: ")
    assert bool(refused.said) is KINDS[name].edits


def limit():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["strip-module", "--in-place", "model.pth"], "model.pth"),
        (["strip-module", "model.pth"], "model.stripped.pth"),
        (["convert", "model.pth", "out.safetensors"], "out.safetensors"),
        (["cast", "model.pth", "--dtype", "bf16", "--in-place"], "model.pth"),
    ],
)
def test_the_command_line(arguments, named, tmp_path):
    provide(MATERIALS or materials())
    (tmp_path / "model.pth").write_bytes(MATERIALS["zip"])
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"ckptool: {named}: cannot be written (File too large)",
        "hint: raise the file size limit: ulimit -f",
    ]
    assert os.listdir(tmp_path) == ["model.pth"]
    assert (tmp_path / "model.pth").read_bytes() == MATERIALS["zip"]
