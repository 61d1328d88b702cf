"""The user's own code that builds a model."""

import re
import sys

import pytest
import torch

from ckptool.cli.like import build_model, resolve_reference
from ckptool.errors import FileMissing, UsageError
from ckptool.factories import HINT
from ckptool.loading.plan import describe_like

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()

class Box:
    small = Net(2)

made = []
wide = Net(16)
weights = wide.state_dict()
number = 3

def build():
    made.append(torch.get_default_device() if hasattr(torch, "get_default_device") else None)
    return Net()

def reading():
    net = Net()
    net.fc.weight.sum().item()
    return net

def loud():
    print("building")
    return Net()

def broken():
    raise ValueError("no data\\nhere")

def leaving():
    raise SystemExit(2)

class Odd(BaseException):
    pass

def odd():
    raise Odd("on purpose")

def generating():
    raise GeneratorExit

def stopping():
    raise KeyboardInterrupt

def nothing():
    return None

def __getattr__(name):
    if name == "lazy":
        raise Odd("too late")
    raise AttributeError(f"module has no attribute {name!r}")
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with a module of the user's."""
    name = f"net_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_class_is_built_on_the_meta_device(home):
    net = build_model(f"{home}:Net")
    assert {value.device.type for value in net.state_dict().values()} == {"meta"}
    assert describe_like(net).label == "Net"
    assert describe_like(net).slots["fc.weight"].shape == (8, 4)


def test_a_function_is_called_once_where_that_works(home):
    assert type(build_model(f"{home}:build")).__name__ == "Net"
    assert len(sys.modules[home].made) == 1


def test_what_needs_numbers_is_built_as_it_is(home):
    assert build_model(f"{home}:reading").fc.weight.device.type == "cpu"


@pytest.mark.parametrize(("name", "width"), [("wide", 16), ("Box.small", 2)])
def test_a_model_that_is_there_is_taken(home, name, width):
    assert describe_like(resolve_reference(f"{home}:{name}")).slots["fc.bias"].shape == (width,)


def test_a_state_dict_that_is_there_is_taken(home):
    assert build_model(f"{home}:weights") is sys.modules[home].weights


def test_what_the_code_prints_is_no_result(home, capsys):
    build_model(f"{home}:loud")
    assert capsys.readouterr().out == ""


def test_the_path_is_as_it_was(home):
    before = list(sys.path)
    build_model(f"{home}:Net")
    assert sys.path == before


def test_what_goes_wrong_in_it_is_one_sentence(home):
    for name, said in (
        ("broken", "raised ValueError: no data here"),
        ("leaving", "raised SystemExit: 2"),
        ("Needy", "raised TypeError: .*width"),
        ("odd", "raised Odd: on purpose"),
        ("generating", "raised GeneratorExit"),
        ("lazy", "raised Odd: too late"),
        ("nothing", "returned None, expected a model"),
        ("number", "is an int, expected a model or a callable"),
        ("Gone", "has no attribute 'Gone'"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            build_model(f"{home}:{name}")
        assert "\n" not in str(caught.value)
        assert caught.value.hint


def test_where_it_went_wrong_is_told(home):
    """Of what the code itself raised; how a factory is called is no line of it."""
    for name, hint in (
        ("broken", rf"see {home}\.py, line \d+"),
        ("Needy", re.escape(HINT)),
    ):
        with pytest.raises(UsageError) as caught:
            build_model(f"{home}:{name}")
        assert re.fullmatch(hint, caught.value.hint)


def test_ctrl_c_in_it_is_ctrl_c(home):
    with pytest.raises(KeyboardInterrupt):
        build_model(f"{home}:stopping")


def test_a_module_that_is_not_there_or_is_a_file_name(home):
    with pytest.raises(UsageError, match="importing gone_away raised ModuleNotFound") as caught:
        build_model("gone_away:Net")
    assert caught.value.hint.startswith("put the module in this folder, on PYTHONPATH")
    with pytest.raises(UsageError) as caught:
        build_model(f"{home}.py:Net")
    assert caught.value.hint == f"write {home}:..., without .py"


def test_a_file_of_that_name_wins(home, tmp_path):
    torch.save({"w.x": torch.ones(2)}, tmp_path / "net:Net")
    assert resolve_reference("net:Net") == "net:Net"
    assert list(describe_like("net:Net").slots) == ["w.x"]


def test_other_words_are_files_and_where_there_is_none_both_forms_are_told():
    for word in ("model.pth", "a:b/c", "./net:Net", "net:", ":Net", "a b:c", "C:\\x"):
        with pytest.raises(FileMissing) as caught:
            resolve_reference(word)
        assert "module:factory" in caught.value.hint


def test_the_library_takes_no_such_word(home):
    with pytest.raises(FileMissing):
        describe_like(f"{home}:Net")
    assert home not in sys.modules


def test_a_script_and_a_name_that_it_has_not_come_with_the_names_that_are_meant(home, tmp_path):
    (tmp_path / "net.py").write_text("def build(): pass\n")
    script = tmp_path / "net.py"
    with pytest.raises(UsageError, match="is a Python script") as caught:
        resolve_reference(str(script))
    assert caught.value.hint.startswith("give net:factory; ")
    with pytest.raises(UsageError) as caught:
        build_model(f"{home}:Gone")
    assert caught.value.hint.startswith("use Net, Needy, Box")
