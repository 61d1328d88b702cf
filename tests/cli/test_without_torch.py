"""Nothing on the command line needs torch, nor imports it where it is there."""

import sys

import pytest
import torch

REFUSING = 'raise ImportError("torch must not be imported here")\n'


@pytest.fixture
def torchless(process, tmp_path):
    """Run `ckptool` where importing torch, numpy or safetensors is an error."""
    shadow = tmp_path / "shadow"
    for name in ("torch", "numpy", "safetensors"):
        (shadow / name).mkdir(parents=True)
        (shadow / name / "__init__.py").write_text(REFUSING)

    def run(*arguments):
        code = (
            "import sys\n"
            f"sys.path.insert(0, {str(shadow)!r})\n"
            "from ckptool.cli import main\n"
            "code = main()\n"
            "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
            "sys.exit(code)\n"
        )
        return process(*arguments, code=("-c", code))

    return run


def test_the_shadow_works(process, tmp_path, torchless):
    done = process(
        code=("-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'shadow')!r}); import torch")
    )
    assert "must not be imported" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list", "--help"],
        ["list", "MODEL"],
        ["list", "--json", "--hash", "MODEL"],
        ["list", "--tree", "MODEL"],
        ["info", "MODEL"],
        ["show", "MODEL", "module.fc.weight"],
        ["verify", "MODEL"],
        ["verify", "--values", "--manifest", "sums.json", "MODEL", "MODEL"],
        ["diff", "MODEL", "MODEL", "--structure"],
        ["diff", "MODEL", "MODEL", "--quick"],
        ["diff", "MODEL", "MODEL"],
        ["match", "MODEL", "--like", "MODEL"],
        ["report", "--no-values", "-o", "out.html", "MODEL"],
        ["report", "--no-values", "-o", "out.html", "MODEL", "MODEL"],
        ["strip-module", "MODEL"],
        ["add-module", "MODEL"],
        ["remap", "--to", "cpu", "MODEL"],
        ["rename", "--prefix", "module=net", "MODEL"],
        ["extract", "--model-only", "MODEL"],
        ["convert", "MODEL", "out.safetensors"],
        ["convert", "MODEL", "out.pth", "--model-only", "--to", "cuda:0"],
        ["convert", "MODEL", "out.pth", "--like", "MODEL"],
        ["train", "--help"],
    ],
    ids=" ".join,
)
def test_a_command_runs_without_torch(torchless, model, arguments):
    done = torchless(*(model if word == "MODEL" else word for word in arguments))
    assert done.code == 0, done.err


def test_ties_and_extra_states_are_told_by_the_files_alone(torchless, tmp_path):
    tied = torch.ones(3)
    reference = {"a": tied, "b": tied, "m._extra_state": 1, "m.w": torch.ones(2)}
    state = {"a": torch.ones(3), "b": torch.zeros(3), "m._extra_state": slice(3), "m.w": tied}
    torch.save(reference, tmp_path / "r.pth")
    torch.save({f"net.{name}": value for name, value in state.items()}, tmp_path / "f.pth")
    done = torchless("match", "f.pth", "--like", "r.pth")
    assert (done.code, done.err) == (1, "")
    assert "| UNTIED" in done.out
    assert "holds an object of" in done.out
    assert torchless("convert", "f.pth", "o.pth", "--like", "r.pth").code == 2


@pytest.mark.parametrize("more", [[], ["--quick"], ["--like", "MODEL"]], ids=" ".join)
def test_a_diagnosis_is_made_without_torch(torchless, model, more):
    done = torchless("doctor", model, *(model if word == "MODEL" else word for word in more))
    fits = more[:1] == ["--like"]  # its wrappers are the reference's own
    assert (done.code, done.err) == (0 if fits else 1, "")
    assert ("1. note: " if fits else "1. error: ") in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "run", "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["--out", "run", "--batch-size", "many"], "'--batch-size': 'many' is not a valid integer"),
        (["--out", "run", "--nproc", "2"], "--nproc 2 needs --strategy ddp"),
        (["--out", "run", "--gpus", "one"], "'one' is not the number of a GPU"),
        (["--epochs", "2"], "Missing option '--out'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_of_train_is_told_without_torch(torchless, arguments, said):
    done = torchless("train", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_help_imports_no_verb(process):
    code = (
        "import sys\n"
        "from ckptool.cli import main\n"
        "main(['--help'])\n"
        "verbs = [name for name in sys.modules if name.endswith('_verb')]\n"
        "heavy = {'tabulate', 'zipfile', 'pathlib', 'ckptool.formats'} & set(sys.modules)\n"
        "assert not verbs and not heavy, (verbs, heavy)\n"
    )
    done = process(code=("-c", code))
    assert done.code == 0, done.err


@pytest.mark.parametrize("verb", ["list", "info", "strip-module"])
def test_a_header_question_imports_little(process, model, verb):
    code = (
        "import sys\n"
        "from ckptool.cli import main\n"
        f"main([{verb!r}, '--json', sys.argv[1]])\n"
        "heavy = {'tabulate', 'zipfile', 'tarfile', 'subprocess', 'asyncio', 'logging'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = process(model, code=("-c", code))
    assert done.code == 0, done.err


def test_python_dash_m(process):
    done = process("--version")
    assert done.code == 0
    assert done.out.startswith("ckptool ")
    assert sys.version_info >= (3, 10)


def test_training_says_what_it_needs(torchless, tmp_path):
    done = torchless("train", "--out", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert "torch" in done.err
    assert "a bug in ckptool" not in done.err
