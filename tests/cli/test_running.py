"""What goes wrong becomes one sentence, a hint and an exit code; what goes right is quiet."""

import gc
import os
import signal
import subprocess
import sys
import threading

import click
import pytest

from ckptool.cli import list_verb, main
from ckptool.errors import CheckpointError, TruncatedFile
from tests.sources import PROJECT


@pytest.fixture
def failing(monkeypatch, ckptool):
    """Run `list` where opening the file raises this."""

    def run(error):
        def fail(_):
            raise error

        monkeypatch.setattr(list_verb, "open_checkpoint", fail)
        return ckptool("list", "model.pth")

    return run


def test_an_error_is_a_sentence_and_a_hint(failing):
    done = failing(CheckpointError("is broken", file="model.pth", hint="mend it"))
    assert (done.code, done.out) == (2, "")
    assert done.err == "ckptool: model.pth: is broken\nhint: mend it\n"


def test_a_truncated_file_is_no_interruption(failing):
    # TruncatedFile is an EOFError, which click would take for Ctrl-D.
    done = failing(TruncatedFile("ends too early"))
    assert done.code == 2
    assert done.err == "ckptool: ends too early\nhint: save, copy or download the file again\n"


def test_any_error_is_a_sentence_and_no_traceback(failing):
    for error, words in (
        (MemoryError(), "not enough memory"),
        (RecursionError(), "nested too deeply"),
        (OSError(28, "No space left on device", "out.pth"), "out.pth: No space left on device"),
        (OSError("odd"), "odd"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (CheckpointError("name \x1b[31m\ud800"), "name \\x1b[31m\\ud800"),
    ):
        done = failing(error)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
        assert "Traceback" not in done.err
        assert all(line.isprintable() for line in done.err.splitlines())


def test_a_fault_of_ours_says_so(failing):
    assert "CKPTOOL_DEBUG=1" in failing(ZeroDivisionError()).err


def test_the_traceback_is_there_for_those_who_ask(failing, monkeypatch):
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    done = failing(CheckpointError("is broken"))
    assert "Traceback" in done.err
    assert "\nckptool: is broken\n" in done.err  # the last line but that of requests
    assert done.code == 2


@pytest.mark.parametrize(
    ("started", "program"),
    [
        ("/x/ckptool/__main__.py", "python -m ckptool"),
        ("my env/ckptool", "'my env/ckptool'"),
    ],
)
def test_a_hint_names_the_program_as_the_shell_finds_it(
    failing, monkeypatch, tmp_path, started, program
):
    error = CheckpointError(
        "is broken", hint="ckptool list x.pth, ckptool --help: ckptool/ is none"
    )
    hint = "ckptool: is broken\nhint: {0} list x.pth, {0} --help: ckptool/ is none\n"
    monkeypatch.setattr("sys.argv", [started])
    (tmp_path / "ckptool").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert failing(error).err == hint.format("ckptool")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert failing(error).err == hint.format(program)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interruption_is_130(failing, error):
    assert failing(error).code == 130


def test_wrong_usage_is_2_with_a_way_on(ckptool):
    for arguments, words in (
        (["lst", "x"], "did you mean 'list'?"),
        (["strip"], "did you mean 'strip-module'?"),
        (["inspect"], "Missing argument 'FILE'"),
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["list"], "Missing argument 'FILE'"),
        (["list", "--jsn", "x"], "--json"),
        (["list", "a", "b"], "unexpected extra argument"),
        (["convert", "a", "b", "--ties", "maybe"], "'keep', 'copy'"),
        (["remap", "a"], "exactly one of --to, --map and --visible-devices"),
        (["remap", "a", "--to", "cpu", "--map", "a=b"], "exactly one of"),
        (["remap", "a", "--map", "cuda"], "not a rule A=B"),
        (["remap", "a", "--map", "a=b", "--map", "a=c"], "'a' has two rules"),
        (["remap", "a", "--visible-devices", "one"], "not a list such as 0,1"),
        (["strip-module", "a", "-o", "b", "--in-place"], "cannot be combined"),
        (["strip-module", "a", "--levels", "0"], "0 is not in the range"),
        (["--frob"], "--frob"),
    ):
        done = ckptool(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err.startswith("ckptool: ")
        assert words in done.err
        assert "hint: " in done.err


def test_no_command_prints_the_help(ckptool):
    done = ckptool()
    assert done.code == 0
    assert "Inspect:" in done.out


def test_head_ends_a_long_list_quietly(model):
    script = (
        f'"{sys.executable}" -m ckptool list --json "{model}" | head -1; echo ${{PIPESTATUS[0]}}'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert (done.stdout, done.stderr) == ("{\n0\n", "")


@pytest.mark.parametrize("verb", ["diff", "verify", "doctor"])
def test_what_was_found_is_the_exit_code_though_nobody_reads(process, ckptool, model, verb):
    broken = model.with_name("broken.pth")
    content = bytearray(model.read_bytes())
    content[content.index(b"storages" if b"storages" in content else b"conv1")] ^= 1
    broken.write_bytes(content if verb != "diff" else model.read_bytes())
    files = [broken]
    if verb == "diff":
        files = [model, "/dev/null"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process(verb, *files, stdout=writing)
    finally:
        os.close(writing)
    assert done.code == ckptool(verb, *files).code != 0


INTERRUPTED = "ckptool: interrupted; no file is left half-written\n"
SWALLOWED = """
import os, signal, sys
from ckptool.cli import list_verb, main
opened = list_verb.open_checkpoint

def swallow(path):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    THEN
    return opened(path)

list_verb.open_checkpoint = swallow
sys.exit(main())
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("pass", 130),
        ("raise ImportError('half a module')", 130),
        ("os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_ctrl_c_that_is_swallowed_is_not_forgotten_and_a_second_kills(process, model, then, code):
    done = process("list", model, code=("-c", SWALLOWED.replace("THEN", then)))
    assert (done.code, done.err) == (code, INTERRUPTED if code == 130 else "")


IN_AN_IMPORT = """
import os, signal, sys
from ckptool.cli import list_verb, main

def importing(path):
    import slow
    raise AssertionError("the import went on")

list_verb.open_checkpoint = importing
sys.exit(main())
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_an_import(process, model, name, code):
    module = f"import os, signal\nos.kill(os.getpid(), signal.{name})\n"
    (model.parent / "slow.py").write_text(module)
    done = process("list", model, code=("-c", IN_AN_IMPORT), PYTHONPATH=f"{PROJECT}:{model.parent}")
    assert (done.code, done.out, done.err) == (code, "", INTERRUPTED if code == 130 else "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_is_130_and_one_line(process, model):
    code = (
        "import os, signal, sys\n"
        "from ckptool.cli import list_verb, main\n"
        f"list_verb.open_checkpoint = lambda _: os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "sys.exit(main())\n"
    )
    done = process("list", model, code=("-c", code))
    assert (done.code, done.out, done.err) == (130, "", INTERRUPTED)


ENDED_IN_THE_MIDDLE = """
import os, signal, sys
from ckptool.cli import main
from ckptool.files import atomic

def step(self):
    assert any(name.endswith(".tmp") for name in os.listdir("."))
    for _ in range(2):  # the second finds the run at its cleaning up
        os.kill(os.getpid(), NUMBER)

atomic.FileOutput._advance = step
sys.exit(main())
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_in_the_middle_of_a_write_leaves_the_folder_as_it_was(process, model, name, code):
    before = model.read_bytes()
    script = ENDED_IN_THE_MIDDLE.replace("NUMBER", f"signal.{name}")
    done = process("compact", model.name, "--in-place", "--force", code=("-c", script))
    assert (done.code, done.out, done.err) == (code, "", INTERRUPTED if code == 130 else "")
    assert os.listdir(model.parent) == [model.name]
    assert model.read_bytes() == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
def test_a_signal_that_is_ignored_stays_ignored(process, model):
    script = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)" + ENDED_IN_THE_MIDDLE
    script = script.replace("NUMBER", "signal.SIGHUP")
    done = process("strip-module", model.name, "--in-place", "--force", "-q", code=("-c", script))
    assert (done.code, done.err) == (0, "")


def test_the_handlers_and_the_garbage_collector_are_as_they_were(ckptool, model):
    assert gc.isenabled()
    numbers = [getattr(signal, name, signal.SIGTERM) for name in ("SIGTERM", "SIGHUP", "SIGINT")]
    before = [signal.getsignal(number) for number in numbers]
    ckptool("list", model)
    assert [signal.getsignal(number) for number in numbers] == before
    assert gc.isenabled()


def test_a_thread_that_is_not_the_main_one_can_run_it(model, capsys):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(["list", str(model)])))
    thread.start()
    thread.join()
    assert codes == [0]
    assert "conv1" in capsys.readouterr().out


def test_names_that_the_terminal_cannot_encode_are_escaped(process, tmp_path):
    import torch

    torch.save({"层": torch.ones(1)}, tmp_path / "m.pth")
    done = process("list", "m.pth", PYTHONIOENCODING="ascii")
    assert done.code == 0
    assert "\\u5c42" in done.out


def test_main_takes_the_words_of_the_process_when_given_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ckptool", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("ckptool ")


def test_the_shell_can_ask_for_completions(process):
    done = process(_CKPTOOL_COMPLETE="bash_complete", COMP_WORDS="ckptool str", COMP_CWORD="1")
    assert "strip-module" in done.out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence(process, model):
    with open("/dev/full", "w") as full:
        done = process("list", model, stdout=full)
    assert (done.code, done.err) == (2, "ckptool: standard output: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_messages_that_nobody_gets_are_no_error(model, tmp_path):
    words = [sys.executable, "-m", "ckptool", "strip-module", model, "-o", tmp_path / "o.pth"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stderr=full, check=False, env=environment)
    assert done.returncode == 0
    assert (tmp_path / "o.pth").exists()


def test_where_the_users_own_code_fails_is_told(ckptool, tmp_path, monkeypatch):
    lines = (
        "import torch",
        "class Net(torch.nn.Linear):",
        "    def forward(self, given):",
        "        if given.shape[0] == 2:",
        "            raise ValueError('no batch of two')",
        "        return super().forward(given)",
        "def net():",
        "    return Net(10, 1)",
    )
    (tmp_path / "one_by_one.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    words = ("--data", "friedman", "--model", "one_by_one:net", "--batch-size", 398)
    done = ckptool("train", "--out", "run", *words, "--device", "cpu", "-q")
    place = tmp_path / "one_by_one.py"
    assert done.err.startswith(f"ckptool: the code at {place}:5 raised ValueError: no batch of two")
    assert "bug in ckptool" not in done.err
