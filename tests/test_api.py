"""The public functions that combine rooms, and what `import ckptool` and `help` show of them."""

import pydoc
import subprocess
import sys

import pytest
import torch

import ckptool

MOST_LINES = 600
"""Of `help(ckptool)`: what one reads."""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "model.pth"
    torch.save({"module.fc.weight": torch.ones(2, 2), "module.fc.bias": torch.zeros(2)}, found)
    return found


CHANGES = {
    "strip_module": (lambda it: ckptool.strip_module(it), ["fc.weight", "fc.bias"], "cpu"),
    "add_module": (
        lambda it: ckptool.add_module(it, wrapper="_orig_mod"),
        ["_orig_mod.module.fc.weight", "_orig_mod.module.fc.bias"],
        "cpu",
    ),
    "rename": (
        lambda it: ckptool.rename(it, prefixes=["module.fc=head"]),
        ["head.weight", "head.bias"],
        "cpu",
    ),
    "remap": (
        lambda it: ckptool.remap(it, {"cpu": "cuda:1"}),
        ["module.fc.weight", "module.fc.bias"],
        "cuda:1",
    ),
}


@pytest.mark.parametrize("kind", [str, lambda path: path, ckptool.open])
@pytest.mark.parametrize("name", CHANGES)
def test_a_path_is_changed_as_an_open_checkpoint_is(path, name, kind):
    change, names, device = CHANGES[name]
    with change(kind(path)) as changed:
        assert isinstance(changed, ckptool.Checkpoint)
        assert list(changed.by_name) == names
        assert list(changed.devices) == [device]
        assert bytes(changed[names[0]].read()) == torch.ones(2, 2).numpy().tobytes()


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "remap"])
def test_a_dict_is_changed_in_memory(path, name):
    change, names, _ = CHANGES[name]
    state = torch.load(path)
    made = change(state)
    assert isinstance(made, dict)
    assert list(made) == names
    assert next(iter(made.values())) is state["module.fc.weight"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which files are open")
def test_a_file_is_closed_where_the_change_is_refused(path):
    code = (
        "import os, sys, ckptool\n"
        "try: ckptool.strip_module(sys.argv[1], at='nowhere')\n"
        "except ckptool.NotFound:\n"
        "    held = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "    print(os.path.realpath(sys.argv[1]) in held)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_the_help_is_what_one_reads():
    lines = pydoc.render_doc(ckptool, renderer=pydoc.plaintext).splitlines()
    assert len(lines) <= MOST_LINES


def test_a_class_is_in_its_module_and_here():
    for home in (ckptool.results, ckptool.errors):
        for name in home.__all__:
            if name[0].isupper():
                assert getattr(ckptool, name) is getattr(home, name)
                assert isinstance(getattr(home, name), type)
    with pytest.raises(AttributeError, match="Nothing"):
        ckptool.Nothing  # noqa: B018
