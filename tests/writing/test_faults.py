"""Wherever a write of any kind ends, there is the old file or the new one, and torch reads it."""

import pytest
import torch
from safetensors.torch import load_file

from tests.files.faults import KILL, Loss, needs_fork
from tests.formats.shards import loaded as load_shards
from tests.writing.kinds import KINDS, MATERIALS, ends, materials, provide, tensors
from tests.writing.meetings import disturbances

POWER = (KILL, Loss(names=True, data=True))
POWER_KINDS = (
    "edit-strip", "edit-header", "recover", "rewrite-compact", "replaced-zip", "shards-replaced",
)  # fmt: skip
"""Those at which the power fails as well: one for each way in which files get their content."""
SUMMED = ("new-from-safetensors", "merged-replaced")
"""Those whose checksums have to be computed, so that the bytes go through Python."""

every_kind = pytest.mark.parametrize("name", KINDS)


def loaded(path):
    """The tensors that torch reads from a file, or from the shards of an index, by name."""
    if path.name.endswith(".json"):
        return load_shards(path)
    head = path.read_bytes()[:9]
    if head.endswith(b"{"):
        return load_file(path)
    ways = [{}, {"mmap": True}] if head.startswith(b"PK") else [{}]
    found = [torch.load(path, map_location="cpu", weights_only=True, **way) for way in ways]
    states = [tree.get("state_dict", tree) for tree in found]
    assert same_tensors(states[0], states[-1])
    return states[0]


def same_tensors(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].equal(other[name]) for name in one
    )


def where(name, light):
    """What calls a function: in the other process, unless torch must come along."""
    if KINDS[name].computed:
        provide(MATERIALS or materials())
        return lambda function, *arguments: function(*arguments)
    return light


@needs_fork
@every_kind
def test_what_each_kind_makes(name, folder):
    """What the tests below take for right, torch reads."""
    kind = KINDS[name]
    provide(MATERIALS or materials())
    kind.lay(folder)
    kind.run(folder)
    before = [tensors(), tensors(1)] if name == "average" else [tensors()]
    wanted = {kind.names(key): kind.values(*(one[key] for one in before)) for key in before[0]}
    assert same_tensors(loaded(folder / kind.target), wanted)


@needs_fork
@every_kind
def test_the_end_of_the_process_at_any_call(name, folder, light):
    """The files are those of a whole write or of none, byte for byte, once ckptool has opened them.

    Sources are among them. The next write, or the opening itself after an edit in place, leaves
    nothing beside them.
    """
    found, states = where(name, light)(ends, name, folder, POWER if name in POWER_KINDS else [KILL])
    for end in found:
        assert end.state is not None, end.crash
        assert end.state == states - 1 or not end.crash.completed, end.crash
        assert end.left == [], end.crash
    assert {end.state for end in found} == set(range(states))
    if not (KINDS[name].edits or KINDS[name].computed or name in SUMMED):
        assert {"copy_file_range", "sendfile"} & {end.crash.call for end in found if end.crash.half}


DISTURBED = [
    ("new-zip", "model.pth"),
    ("new-safetensors", "model.pth"),
    ("new-from-legacy", "model.pth"),
    ("shards-new", "model.pth"),
    ("merged", "model-00002-of-00002.safetensors"),
    ("cast", "model.pth"),
    ("average", "other.pth"),
]


@needs_fork
@pytest.mark.parametrize("change", ["append", "overwrite", "shorten"])
@pytest.mark.parametrize(("name", "source"), DISTURBED)
def test_a_source_that_changes_while_it_is_read(name, source, change, folder, light):
    """It is noticed, and nothing is kept; or all that was needed of it had been read before."""
    found = where(name, light)(disturbances, name, change, source, folder)
    for one in found:
        assert one.kept if one.said else one.right, one
        assert one.left == [], one
    assert found[0].said.startswith(("UnreadableFile: ", "TruncatedFile: ")), found[0]
    assert found[-1].said == ""


@needs_fork
@pytest.mark.parametrize("change", ["append", "overwrite", "shorten"])
@pytest.mark.parametrize("name", ["edit-strip", "edit-header", "rewrite-legacy", "cast-in-place"])
def test_a_file_that_changes_before_it_is_changed_in_place(name, change, folder, light):
    """What the other program wrote stays."""
    kind = KINDS[name]
    found = where(name, light)(disturbances, name, change, kind.target, folder)
    calls = [one.call for one in found]
    begun = calls.index("unlink" if kind.edits else "replace")
    for one in found[:begun]:
        assert one.said.startswith(("UnreadableFile: ", "TruncatedFile: ")), one
        assert one.left == [], one
