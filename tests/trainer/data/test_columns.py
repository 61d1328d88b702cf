"""A column of a CSV, predicted from the others."""

import pytest
import torch

import ckptool
from ckptool.errors import TrainingError
from ckptool.trainer import TrainConfig, Trainer
from ckptool.trainer.data import data_of
from tests.trainer.runs import config


@pytest.fixture
def write(tmp_path):
    """Writes columns of numbers, by name; the path."""

    def write(**columns):
        path = tmp_path / "rows.csv"
        rows = [columns, *zip(*columns.values(), strict=True)]
        path.write_text("".join(f"{','.join(map(str, row))}\n" for row in rows))
        return path

    return write


def columns(samples=20):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, samples, generator=generator, dtype=torch.float64) * 9 + 4).tolist()
    return {"x": x, "y": y, "z": [1000 + 3 * a - b for a, b in zip(x, y, strict=True)]}


def data(path, **options):
    return data_of(TrainConfig(out="-", data=f"csv:{path}", **{"dtype": "float64", **options}))


def raw(rows, mean, std):
    return torch.round(rows * torch.tensor(std) + torch.tensor(mean), decimals=6)


def test_the_last_column_is_predicted_or_the_one_that_is_named(write):
    path = write(**columns())
    last, named = data(path), data(path, target="x")
    assert (last.statistics["columns"], last.statistics["target"]) == (["x", "y"], "z")
    assert (named.statistics["columns"], named.statistics["target"]) == (["y", "z"], "x")
    assert last.inputs == (2,)
    assert last.outputs == 1
    assert tuple(last.train.tensors[0].shape) == (16, 2)
    assert tuple(last.validation.tensors[1].shape) == (4, 1)
    assert last.loss == "mse_loss"


def test_every_row_is_in_one_of_the_parts_and_the_seed_says_in_which(write):
    given = columns()
    path = write(**given)
    wanted = sorted(zip(given["x"], given["y"], strict=True))
    parts = {}
    for seed in (0, 1):
        found = data(path, seed=seed)
        mean, std = (
            torch.tensor(found.statistics[name], dtype=torch.float64) for name in ("mean", "std")
        )
        parts[seed] = [part.tensors[0] * std + mean for part in (found.train, found.validation)]
        rows = torch.tensor(sorted(torch.cat(parts[seed]).tolist()), dtype=torch.float64)
        torch.testing.assert_close(rows, torch.tensor(wanted, dtype=torch.float64))
    assert not torch.allclose(parts[0][1], parts[1][1])
    assert torch.equal(data(path).train.tensors[0], data(path, seed=0).train.tensors[0])


def test_the_part_to_learn_from_is_standardised_with_its_own_statistics(write):
    found = data(write(**columns()))
    for values in (found.train.tensors[0], found.train.tensors[1]):
        torch.testing.assert_close(values.mean(0), torch.zeros_like(values[0]))
        torch.testing.assert_close(values.std(0, correction=0), torch.ones_like(values[0]))
    assert abs(found.validation.tensors[0].mean().item()) > 1e-6
    learned = found.train.tensors[1] * found.statistics["target_std"]
    assert learned.add(found.statistics["target_mean"]).min() > 900


def test_a_constant_column_is_zero_and_divides_by_nothing(write):
    found = data(write(c=[0.1] * 20, **columns()))
    assert found.train.tensors[0][:, 0].tolist() == [0.0] * 16
    assert found.validation.tensors[0][:, 0].tolist() == [0.0] * 4
    assert found.statistics["std"][0] == 1.0
    assert found.statistics["mean"][0] == 0.1


def test_a_constant_target_is_zero_too(write):
    found = data(write(**{**columns(), "z": [7] * 20}))
    assert found.train.tensors[1].tolist() == [[0.0]] * 16


def test_a_column_may_be_named_by_its_number_where_there_are_no_names(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{row},{row * row % 7}\n" for row in range(10)))
    assert data(path, target="1").statistics["target"] == "1"


REFUSED = {
    "one column": ({"a": range(9)}, None, "has only one column, 'a': nothing to predict it from"),
    "too few rows": (
        {"a": range(4), "b": range(4)},
        None,
        "has 4 rows of numbers; training and validation need 5",
    ),
    "one row": ({"a": [1], "b": [2]}, None, "has 1 row of numbers; training and validation need 5"),
    "another name": (columns(), "zz", "has no column 'zz'; its columns: x, y, z"),
    "many columns": (
        {f"c{n:02}": range(9) for n in range(20)},
        "zz",
        "its columns: c00, c01, c02, c03, c04, c05, c06, c07, and 12 more",
    ),
    "large numbers": (
        {"a": [1e308, -1e308] * 5, "b": range(10)},
        None,
        "the numbers in column 'a' are too large",
    ),
}


@pytest.mark.parametrize(("given", "target", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_learned_from_is_told(write, given, target, told):
    path = write(**given)
    with pytest.raises(TrainingError) as caught:
        data(path, target=target)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_name_that_is_almost_right_is_proposed(write):
    with pytest.raises(TrainingError) as caught:
        data(write(price=range(9), size=range(9)), target="prices")
    assert caught.value.hint == "--target price"


def test_the_checkpoint_holds_what_turns_outputs_into_the_files_numbers(write, tmp_path):
    given = columns(100)
    out = tmp_path / "run"
    options = {"model": "linear", "epochs": 60, "lr": 0.05, "dtype": "float64"}
    result = Trainer(config(out, data=f"csv:{write(**given)}", **options)).fit()
    assert result.best < 1e-3  # of the target's variance
    held = ckptool.load(out / "last.pth")
    how, weights = held["data"], held["state_dict"]
    x = torch.tensor([given["x"], given["y"]], dtype=torch.float64).T
    x = (x - torch.tensor(how["mean"])) / torch.tensor(how["std"])
    y = x @ weights["1.weight"].T + weights["1.bias"]
    y = y.squeeze(1) * how["target_std"] + how["target_mean"]
    torch.testing.assert_close(y, torch.tensor(given["z"], dtype=torch.float64), rtol=0, atol=2)
