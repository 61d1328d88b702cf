"""Which model a word means."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer import TrainConfig, TrainData, Trainer
from ckptool.trainer.data import make_data
from ckptool.trainer.models import make_model
from tests.trainer.runs import config


def data(*inputs, outputs=1):
    x = torch.zeros(4, *inputs)
    return TrainData(TensorDataset(x, torch.zeros(4, outputs)), None, "mse_loss", inputs, outputs)


def model(word, given):
    return make_model(TrainConfig(out="-", model=word), given)


def shapes(module):
    return [list(one.shape) for one in module.parameters()]


def test_a_linear_model_is_one_layer():
    assert shapes(model("linear", data(5, outputs=2))) == [[2, 5], [2]]


@pytest.mark.parametrize("word", ["mlp", "mlp:16,32"])
def test_an_mlp_is_that_of_the_tutorial_of_thirteen_features(word):
    found = model(word, data(13))
    assert shapes(found) == [[16, 13], [16], [32, 16], [32], [1, 32], [1]]
    assert [type(one) for one in found] == [
        nn.Flatten,
        *[nn.Linear, nn.ReLU] * 2,
        nn.Linear,
    ]


def test_images_are_taken_by_every_model():
    images = data(1, 8, 8, outputs=10)
    for word in ("linear", "mlp:7", "cnn"):
        found = model(word, images)
        assert found(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
        assert not list(found.buffers())  # no batch norm, whose figures depend on the share


def test_a_cnn_takes_images_of_any_size():
    assert model("cnn", data(3, 5, 11, outputs=2))(torch.zeros(4, 3, 5, 11)).shape == (4, 2)


@pytest.mark.parametrize("inputs", [(13,), (8, 8), (1, 3, 8)])
def test_a_cnn_takes_images_alone(inputs):
    with pytest.raises(UsageError, match="model cnn needs images"):
        model("cnn", data(*inputs))


@pytest.mark.parametrize("word", ["linear", "mlp:3", "cnn"])
def test_of_data_of_unknown_shape_no_model_is_made(word):
    with pytest.raises(UsageError, match="the shape of the data, which is unknown") as caught:
        model(word, data())
    assert caught.value.hint.startswith("use Trainer(model=...)")


def test_widths_that_no_machine_holds_are_told():
    with pytest.raises(UsageError, match="layers of 999999, 999999 do not fit in memory"):
        model("mlp:999999,999999", data(5))


def test_a_cnn_learns_the_digits(tmp_path):
    pytest.importorskip("sklearn")
    trainer = Trainer(config(tmp_path, data="digits", model="cnn", epochs=2))
    assert trainer.fit().best < 0.4  # 2.3 by chance


NET = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=4, outputs=1):
        super().__init__(nn.Linear(10, width), nn.Dropout(0.5), nn.Linear(width, outputs))

class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 1)

    def forward(self, x):
        raise ValueError("not\\ntoday")

class Two(Net):
    def forward(self, x):
        return super().forward(x), x

class Box:
    small = Net(2)

def build():
    print("building")
    return Net()

def wide():
    return Net(outputs=3)

def needy(width):
    return Net(width)

def nothing():
    return None

def weights():
    return Net().state_dict()

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module `own_net` in the working directory; makes the model that a word names."""
    (tmp_path / "own_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)

    def make(name, **options):
        config = TrainConfig(out="run", model=f"own_net:{name}", device="cpu", **options)
        return make_model(config, make_data(config))

    return make


@pytest.mark.parametrize("name", ["Net", "build", "Box.small", "Lazy"])
def test_a_model_of_the_users_code_may_be_a_class_a_function_or_a_module(own, name):
    found = own(name, dtype="float64")
    assert found.training
    assert {one.dtype for one in found.parameters()} == {torch.float64}
    assert found(torch.zeros(3, 10, dtype=torch.float64)).shape == (3, 1)


def test_what_the_users_code_prints_is_no_output_of_ours(own, capsys):
    own("build")
    assert capsys.readouterr().out == ""


def test_trying_it_uses_up_nothing_that_is_random(own):
    own("Net")  # importing the module makes a model, too
    torch.manual_seed(0)
    own("Net")
    tried = torch.rand(1)
    torch.manual_seed(0)
    sizes = (10, 4), (4, 1)
    for size in sizes:
        nn.Linear(*size)
    assert torch.equal(tried, torch.rand(1))


WRONG = {
    "Gone": (UsageError, "has no attribute 'Gone'"),
    "number": (UsageError, "own_net:number returns an int, expected a model"),
    "needy": (UsageError, "own_net:needy raised TypeError: needy() missing 1 required"),
    "nothing": (UsageError, "own_net:nothing returns None, expected a model"),
    "weights": (UsageError, "own_net:weights returns an OrderedDict, expected a model"),
    "Moody": (TrainingError, "does not accept a batch of (1, 10): ValueError: not today"),
    "wide": (
        TrainingError,
        "returns (1, 3) for a batch of (1, 10), but --data friedman needs (1, 1)",
    ),
    "Two": (TrainingError, "returns a tuple for a batch of (1, 10)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_none_or_does_not_take_the_data_is_told_at_once(own, name):
    kind, told = WRONG[name]
    with pytest.raises(kind, match=re.escape(told)):
        own(name)


def test_a_module_that_is_not_there_is_told(own):
    with pytest.raises(UsageError, match="importing gone_net raised ModuleNotFoundError"):
        make_model(TrainConfig(out="-", model="gone_net:Net"), data(10))


def test_a_run_trains_a_model_of_the_users_code(own, tmp_path):
    Trainer(config("run", model="own_net:Net", epochs=1, save="unwrapped")).fit()
    held = torch.load("run/last.pth", weights_only=True)
    own("Net").load_state_dict(held["state_dict_model"])
