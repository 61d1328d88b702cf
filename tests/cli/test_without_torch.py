"""Nothing on the command line needs torch, nor imports it where it is there."""

import json

import pytest
import torch

from tests.cli.conftest import Done
from tests.files.faults import needs_fork

pytestmark = needs_fork

EACH_IN_A_FORK = """
import json, os, sys

sys.path.insert(0, os.path.abspath("shadow"))
try:
    import torch
except ImportError as error:
    assert "must not be imported" in str(error)
from ckptool.cli import main

codes = []
for at, words in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        for number, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(f"{at}.{name}", os.O_CREAT | os.O_WRONLY), number)
        code = main(words)
        assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
        sys.exit(code)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(codes))
"""


@pytest.fixture
def torchless(process, tmp_path):
    """Run commands of `ckptool`, each where importing torch, numpy or safetensors is an error."""
    for name in ("torch", "numpy", "safetensors"):
        (tmp_path / "shadow" / name).mkdir(parents=True)
        raising = 'raise ImportError("torch must not be imported here")\n'
        (tmp_path / "shadow" / name / "__init__.py").write_text(raising)

    def run(*commands):
        done = process(json.dumps(commands), code=("-c", EACH_IN_A_FORK))
        assert done.code == 0, done.err
        said = [
            [(tmp_path / f"{at}.{name}").read_text() for name in ("out", "err")]
            for at in range(len(commands))
        ]
        return [Done(code, *both) for code, both in zip(done.document, said, strict=True)]

    return run


def test_commands_run_without_torch(torchless, model):
    commands = (
        ["--help"],
        ["list", "--help"],
        ["list", "model.pth"],
        ["list", "--json", "--hash", "model.pth"],
        ["list", "--tree", "model.pth"],
        ["info", "model.pth"],
        ["show", "model.pth", "module.fc.weight"],
        ["verify", "model.pth"],
        ["verify", "--values", "--manifest", "sums.json", "model.pth", "model.pth"],
        ["diff", "model.pth", "model.pth", "--structure"],
        ["diff", "model.pth", "model.pth", "--quick"],
        ["diff", "model.pth", "model.pth"],
        ["match", "model.pth", "--like", "model.pth"],
        ["report", "--no-values", "-o", "one.html", "model.pth"],
        ["report", "--no-values", "-o", "two.html", "model.pth", "model.pth"],
        ["strip-module", "model.pth"],
        ["add-module", "model.pth"],
        ["remap", "--to", "cpu", "model.pth"],
        ["rename", "--prefix", "module=net", "model.pth"],
        ["extract", "--model-only", "model.pth"],
        ["convert", "model.pth", "out.safetensors"],
        ["convert", "model.pth", "weights.pth", "--model-only", "--to", "cuda:0"],
        ["convert", "model.pth", "out.pth", "--like", "model.pth"],
        ["train", "--help"],
    )
    for words, done in zip(commands, torchless(*commands), strict=True):
        assert done.code == 0, (words, done.err)


def test_ties_and_extra_states_are_told_by_the_files_alone(torchless, tmp_path):
    tied = torch.ones(3)
    reference = {"a": tied, "b": tied, "m._extra_state": 1, "m.w": torch.ones(2)}
    state = {"a": torch.ones(3), "b": torch.zeros(3), "m._extra_state": slice(3), "m.w": tied}
    torch.save(reference, tmp_path / "r.pth")
    torch.save({f"net.{name}": value for name, value in state.items()}, tmp_path / "f.pth")
    done, refused = torchless(
        ["match", "f.pth", "--like", "r.pth"], ["convert", "f.pth", "o.pth", "--like", "r.pth"]
    )
    assert refused.code == 2
    assert (done.code, done.err) == (1, "")
    assert "| UNTIED" in done.out
    assert "contains an object of" in done.out


def test_a_diagnosis_is_made_without_torch(torchless, model):
    doctor = ["doctor", "model.pth"]
    *alone, beside = torchless(doctor, [*doctor, "--quick"], [*doctor, "--like", "model.pth"])
    for done in alone:
        assert (done.code, done.err) == (1, "")
        assert "1. error: " in done.out
    assert (beside.code, beside.err) == (0, "")
    assert "1. note: " in beside.out  # its wrappers are the reference's own


def test_wrong_usage_of_train_is_told_without_torch(torchless):
    usage = {
        ("--out", "run", "--batch-size", "0"): "--batch-size 0 must be at least 1",
        ("--out", "run", "--batch-size", "many"): "'--batch-size': 'many' is not a valid integer",
        ("--out", "run", "--nproc", "2"): "--nproc 2 needs --strategy ddp",
        ("--out", "run", "--gpus", "one"): "'one' is not a GPU number",
        ("--epochs", "2"): "Missing option '--out'",
        ("--out", "run"): "torch",  # what is right, but what it needs is not there
    }
    for said, done in zip(
        usage.values(), torchless(*(["train", *words] for words in usage)), strict=True
    ):
        assert (done.code, done.out) == (2, "")
        assert said in done.err
        assert "a bug in ckptool" not in done.err


def test_help_imports_no_verb_and_a_header_question_imports_little(process, model):
    code = (
        "import sys\n"
        "from ckptool.cli import main\n"
        "main(['--help'])\n"
        "verbs = [name for name in sys.modules if name.endswith(('_verb', '_verbs'))]\n"
        "heavy = {'tabulate', 'zipfile', 'pathlib', 'ckptool.formats'} & set(sys.modules)\n"
        "assert not verbs and not heavy, (verbs, heavy)\n"
        "main(['list', '--help'])\n"
        "heavy = {'tabulate', 'zipfile', 'tarfile', 'subprocess', 'asyncio', 'logging'}\n"
        "for verb in ('list', 'info', 'strip-module'):\n"
        "    assert main([verb, '--json', 'model.pth']) == 0\n"
        "    assert not heavy & set(sys.modules), (verb, heavy & set(sys.modules))\n"
    )
    done = process(code=("-c", code))
    assert done.code == 0, done.err
