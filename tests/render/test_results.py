"""What a result of the library is as text: its page on the command line, and a line as its repr."""

import html
import inspect
import re

import pytest
import torch

import ckptool
from ckptool._lazy import Result
from ckptool.cli import main
from ckptool.core.model import Global, Opaque
from ckptool.render import _TEXTS, format_line, format_page
from tests.inspection.handmade import checkpoint, floats, tensor

EVIL = "\x1b]0;owned\x07\u202e\n" + "x" * 5000
FACTS = "torch-zip, 2 tensors, 264 B, module., cpu"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two checkpoints in the current folder, one epoch apart."""
    monkeypatch.chdir(tmp_path)
    for epoch in (1, 2):
        state = {
            "module.fc.weight": torch.full((8, 8), float(epoch)),
            "module.fc.bias": torch.ones(2),
        }
        torch.save({"state_dict": state, "epoch": epoch}, f"{epoch}.pth")
    return ("1.pth", "2.pth")


RESULTS = {
    "open": (lambda a, b: ckptool.open(a), f"<Checkpoint 1.pth: {FACTS}>", ["info", "1.pth"]),
    "info": (lambda a, b: ckptool.info(a), f"<Info 1.pth: {FACTS}>", ["info", "1.pth"]),
    "list": (
        lambda a, b: ckptool.list_tensors(a),
        "<Listing 1.pth: 2 tensors, 66 elements, 264 B; 1 value>",
        ["list", "1.pth"],
    ),
    "diff": (
        lambda a, b: ckptool.diff(a, b),
        "<Diff 1.pth 2.pth: 2 of 3 common entries differ; 1 equal>",
        ["diff", "1.pth", "2.pth"],
    ),
    "stats": (
        lambda a, b: ckptool.stats(a),
        "<Stats 1.pth: 2 tensors, 66 elements, 0 zeros, norm 8.124>",
        ["stats", "1.pth"],
    ),
    "verify": (
        lambda a, b: ckptool.verify(a),
        r"<Verdict 1.pth: ok \(.* records, .* KiB, CRC-32\)>",
        ["verify", "1.pth"],
    ),
    "scan": (lambda a, b: ckptool.scan(a), r"<Scan 1.pth: data \(1 pickle\)>", ["scan", "1.pth"]),
    "doctor": (
        lambda a, b: ckptool.doctor(a, devices="cpu"),
        "<Diagnosis 1.pth: torch.load opens it; 1 warning>|<Diagnosis 1.pth does not load .*>",
        ["doctor", "1.pth", "--devices", "cpu"],
    ),
    "match": (
        lambda a, b: ckptool.match(a, b)[1],
        r"<MatchReport 1.pth fits 2.pth: all 2 tensors match \(100% of the parameters\)>",
        ["match", "1.pth", "--like", "2.pth"],
    ),
    "recover": (
        lambda a, b: ckptool.recover(a),
        "<Recovery 1.pth: nothing to recover>",
        ["recover", "1.pth"],
    ),
    "convert": (
        lambda a, b: ckptool.convert(a, "out.pth", overwrite=True),
        r"<Receipt wrote out.pth \(torch-zip, 2 tensors, .* KiB\)>",
        ["convert", "1.pth", "-o", "out.pth", "--force"],
    ),
    "report": (
        lambda a, b: ckptool.report(a, "out.html", values=False, overwrite=True),
        r"<PageReceipt wrote out.html \(2 tensors, .* KiB\)>",
        ["report", "1.pth", "--no-values", "-o", "out.html", "--force"],
    ),
}  # fmt: skip
"""By command: the call, the repr of its result, and the arguments that print the same."""


@pytest.mark.parametrize("command", RESULTS)
def test_a_result_is_a_line_as_its_repr_and_prints_as_the_command_line_prints_it(
    command, files, capsys
):
    call, short, arguments = RESULTS[command]
    found = call(*files)
    assert re.fullmatch(short, repr(found))
    capsys.readouterr()
    main(arguments)
    printed = "".join(capsys.readouterr())
    assert printed.startswith(str(found))
    assert command == "match" or printed == str(found) + "\n"


def test_what_is_in_a_checkpoint_is_a_line_too(files):
    with ckptool.open("1.pth") as opened:
        weight = opened["state_dict"]["module.fc.weight"]
        assert repr(weight) == str(weight) == "<TensorRef float32 [8, 8] on cpu>"
        assert repr(weight.storage) == "<Storage 0: 256 B on cpu>"
        assert [repr(part) for part in opened.sections] == [
            "<Section state_dict: state_dict, 2 entries>",
            "<Section (other): values, 1 entry>",
        ]
    assert repr(Opaque(Global("argparse", "Namespace"))) == "<Opaque argparse.Namespace object>"


def test_the_line_of_what_cannot_be_walked_says_why():
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert re.fullmatch("<Checkpoint .*nest.*>", repr(checkpoint(deep)))


def test_a_line_is_short_and_safe_whatever_the_file_says():
    for make in [
        lambda: checkpoint({"a": tensor(floats(1.0, device=EVIL), [1])}),
        lambda: checkpoint({EVIL: tensor(floats(1.0), [1])}).sections[0],
        lambda: tensor(floats(1.0, device=EVIL, key=EVIL), [1]),
        lambda: tensor(floats(1.0, device=EVIL, key=EVIL), [1]).storage,
        lambda: Opaque(Global(EVIL, EVIL), (EVIL,)),
        lambda: ckptool.Recovery(EVIL, "nothing", EVIL),
        lambda: ckptool.Receipt(EVIL, EVIL, 3, 1),
        lambda: ckptool.MatchReport(file=EVIL, model=EVIL),
    ]:  # fmt: skip
        found = repr(make())
        assert found.isprintable(), make
        assert len(found) < 1000, make


def test_every_class_has_a_line_and_its_functions_exist():
    classes = {one.__name__: one for one in Result.__subclasses__()}
    assert {name for name in ckptool.__all__ if name in classes} <= set(_TEXTS)
    for name, (room, *functions) in _TEXTS.items():
        module = __import__(f"ckptool.render.{room}", fromlist=["x"])
        assert all(inspect.isfunction(getattr(module, one)) for one in functions if one), name


def test_a_subclass_is_told_as_what_it_is_made_of(files):
    class Own(type(ckptool.list_tensors("1.pth"))):
        __slots__ = ()

    found = Own("own", "torch-zip", (), (), ())
    assert format_line(found) == "<Listing own: 0 tensors, 0 elements, 0 B>"
    assert format_page(found) == "0 tensors, 0 elements, 0 B"


def test_a_notebook_gets_the_page_with_hostile_names_escaped(tmp_path):
    evil = "<script>alert(1)</script>&.weight"
    for at in (1, 2):
        torch.save({evil: torch.full((2,), float(at))}, tmp_path / f"{at}.pth")
    one, two = tmp_path / "1.pth", tmp_path / "2.pth"
    shown = {
        "open": ckptool.open(one),
        "info": ckptool.info(one),
        "list": ckptool.list_tensors(one),
        "diff": ckptool.diff(one, two),
        "stats": ckptool.stats(one),
        "match": ckptool.match(torch.nn.Linear(2, 2), one)[1],
    }
    for name, result in shown.items():
        made = result._repr_html_()
        assert made.startswith("<pre>"), name
        assert html.unescape(made) == f"<pre>{result}</pre>"
        assert re.findall(r"<[^>]*>", made) == ["<pre>", "</pre>"]
        if name not in ("open", "info"):  # which name no tensors
            assert "&lt;script&gt;" in made, name
