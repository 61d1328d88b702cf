"""What samples come out of which data: datasets, tables in text files, columns of a CSV."""

import collections
import csv
import io
import re
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptool
from ckptool.errors import FileDenied, FileMissing, TrainingError, UsageError
from ckptool.trainer import TrainConfig, TrainData, Trainer
from ckptool.trainer.data import collate, load_batches, make_data, read_table, split_rows
from tests.trainer.runs import BytesDone, assert_same_run, config, run

Pair = collections.namedtuple("Pair", "inputs targets")


def batch(samples, rows=(0, 1), dtype=torch.float32):
    return collate(samples, rows, dtype)


def test_tensors_are_stacked_in_the_order_of_the_rows():
    x = torch.arange(12.0).view(6, 2)
    for dataset in (TensorDataset(x, x + 1), list(zip(x, x + 1, strict=True))):
        inputs, targets = batch(dataset, [4, 0, 5])
        assert torch.equal(inputs, x[[4, 0, 5]])
        assert torch.equal(targets, x[[4, 0, 5]] + 1)


def test_numbers_arrays_tuples_and_dicts_become_tensors_of_the_runs_type():
    numpy = pytest.importorskip("numpy")
    sample = {"x": numpy.ones(2), "pair": (torch.zeros(3, dtype=torch.float16), 1)}, 0.5
    inputs, targets = batch([sample, sample], dtype=torch.float64)
    assert [inputs["x"].dtype, inputs["pair"][0].dtype, targets.dtype] == [torch.float64] * 3
    assert inputs["pair"][1].dtype == torch.int64  # a number of something stays whole
    assert inputs["x"].shape == (2, 2)


def test_a_dict_is_given_to_both_model_and_loss():
    inputs, targets = batch([{"x": torch.ones(2), "y": 1.0}] * 2)
    assert list(inputs) == list(targets) == ["x", "y"]


@pytest.mark.parametrize("pair", [[1.0, 2.0], Pair(1.0, 2.0)], ids=["list", "namedtuple"])
def test_a_pair_may_be_any_sequence(pair):
    assert [one.tolist() for one in batch([pair, pair])] == [[1.0, 1.0], [2.0, 2.0]]


UNLIKE = {
    "no pair": ([torch.ones(2)] * 2, "sample 0 of the dataset is a Tensor, expected a pair"),
    "three": ([(1, 2, 3)] * 2, "sample 0 of the dataset is a tuple, expected a pair"),
    "nothing": ([None, None], "sample 0 of the dataset is None, expected a pair"),
    "ragged": ([(torch.ones(2), 0), (torch.ones(3), 0)], "samples 0, 1 of the dataset cannot be"),
    "other keys": ([({"a": 1}, 0), ({"b": 1}, 0)], "samples 0, 1 of the dataset cannot be"),
    "other lengths": ([((1, 2), 0), ((1,), 0)], "samples 0, 1 of the dataset cannot be stacked"),
    "objects": ([(object(), 0)] * 2, "samples 0, 1 of the dataset cannot be stacked"),
}


def test_samples_that_make_no_batch_are_told():
    for samples, told in UNLIKE.values():
        with pytest.raises(TrainingError) as caught:
            batch(samples)
        assert told in str(caught.value), samples
        assert "\n" not in str(caught.value), samples


def test_of_many_samples_the_first_are_named():
    ragged = [(torch.ones(size), 0) for size in range(9)]
    with pytest.raises(TrainingError, match="samples 8, 7, 6, 5, and 2 more of the dataset"):
        batch(ragged, [8, 7, 6, 5, 4, 3])


class Regression(nn.Module):
    """Takes dicts, and gives them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, batch):
        return {"y": self.fc(batch["x"])}


def test_a_trainer_takes_dicts_and_a_loss_of_ones_own(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    samples = [{"x": one, "y": one.sum().item()} for one in x]

    def loss(outputs, batch):
        return nn.functional.l1_loss(outputs["y"].squeeze(1), batch["y"])

    chosen = config(tmp_path, epochs=20, batch_size=8, lr=0.1)
    result = Trainer(chosen, model=Regression(), data=samples, loss=loss).fit()
    assert result.step == 100
    assert result.best < 0.3


def test_data_without_a_loss_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no loss"):
        Trainer(config(tmp_path), data=[(torch.ones(1), torch.ones(1))]).fit()


NO_DATA = {
    "empty": ([], "the training dataset is empty"),
    "an iterator": (iter([(1, 2)]), "a list_iterator is not a map-style dataset"),
    "a loader": (DataLoader([(1, 2)]), "a DataLoader is not a map-style dataset"),
}


@pytest.mark.parametrize(("samples", "told"), NO_DATA.values(), ids=NO_DATA)
def test_what_is_no_dataset_is_told(samples, told):
    with pytest.raises(TrainingError, match=told):
        TrainData(samples, None, "mse_loss")


def test_a_validation_set_is_a_dataset_too_and_may_be_empty():
    with pytest.raises(TrainingError, match="not a map-style dataset"):
        TrainData([(1, 2)], iter([]), "mse_loss")
    assert TrainData([(1, 2)], [], "mse_loss").validation == []


@pytest.mark.parametrize("loss", ["mse", "__name__", 3])
def test_a_loss_that_there_is_not_is_told(loss):
    with pytest.raises(UsageError, match=f"loss {loss!r} is not a function"):
        assert TrainData([(1, 2)], None, loss).mean_loss


def test_a_loss_that_is_given_takes_the_place_of_that_of_the_data(tmp_path):
    chosen = config(tmp_path, max_steps=1, overwrite=True)
    given = make_data(chosen)
    one, other = BytesDone(), BytesDone()
    Trainer(chosen, data=given, observer=one).fit()
    Trainer(chosen, data=given, loss="l1_loss", observer=other).fit()
    assert one.of("Stepped")[0].loss > 2 * other.of("Stepped")[0].loss


@pytest.mark.parametrize("samples", [1, 5, 22, 1797])
def test_a_split_has_every_row_once(samples):
    learned, held = split_rows(samples, 3)
    assert len(learned) == samples * 4 // 5
    assert sorted([*learned.tolist(), *held.tolist()]) == list(range(samples))
    assert torch.equal(split_rows(samples, 3)[0], learned)


@pytest.mark.parametrize("word", ["random", "friedman"])
def test_generated_data_follow_from_the_seed_alone(word):
    first, again, other = (
        make_data(TrainConfig(out="-", data=word, seed=seed, dtype="float64")) for seed in (1, 1, 2)
    )
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])
    half = make_data(TrainConfig(out="-", data=word, seed=1))
    assert torch.equal(half.train.tensors[0], first.train.tensors[0].float())
    assert isinstance(first, TrainData)


def test_random_data_are_those_of_the_tutorial():
    found = make_data(TrainConfig(out="-", data="random"))
    assert found.train.tensors[0].shape == (100, 5)
    assert found.train.tensors[1].shape == (100, 2)
    assert abs(found.train.tensors[0].mean().item()) < 0.15
    assert abs(found.train.tensors[0].std().item() - 1) < 0.15


def test_friedmans_function_is_what_its_paper_says():
    found = make_data(TrainConfig(out="-", dtype="float64"))
    x, y = found.train.tensors[0], found.train.tensors[1].squeeze(1)
    signal = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2
    noise = y - signal - 10 * x[:, 3] - 5 * x[:, 4]
    assert abs(noise.mean().item()) < 0.15
    assert abs(noise.std().item() - 1) < 0.15
    assert len(found.validation) == 100


def test_digits_are_images_of_8_x_8():
    pytest.importorskip("sklearn")
    found = make_data(TrainConfig(out="-", data="digits"))
    assert found.train.tensors[0].shape == (1437, 1, 8, 8)
    assert found.train.tensors[0].dtype == torch.float32
    assert (found.train.tensors[0].min().item(), found.train.tensors[0].max().item()) == (0, 1)
    assert found.train.tensors[1].dtype == torch.int64
    assert sorted(set(found.validation.tensors[1].tolist())) == list(range(10))
    assert found.inputs == (1, 8, 8)
    assert found.outputs == 10


def test_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TrainingError, match="scikit-learn") as caught:
        make_data(TrainConfig(out="-", data="digits"))
    assert caught.value.hint == "pip install scikit-learn"


class Noisy:
    """Draws at random; what is not a number cannot be stacked."""

    def __init__(self, samples=10, *, broken=-1):
        self.samples, self.broken = samples, broken

    def __len__(self):
        return self.samples

    def __getitem__(self, at):
        if at == self.broken:
            return torch.zeros(2), torch.zeros(1)
        return torch.full((3,), float(at)) + torch.rand(3), torch.zeros(1)


def seen(first, *, workers, rows=((0, 1), (2,), (), (3, 4))):
    return list(
        load_batches(
            Noisy(), rows[first:], torch.float32, workers=workers, seed=7 + first, is_pinned=False
        )
    )


def test_workers_prepare_the_batches_in_their_order_whichever_is_asked():
    state = torch.get_rng_state()
    whole = seen(0, workers=2)
    assert torch.equal(torch.get_rng_state(), state)
    for one, two, own in zip(whole, seen(0, workers=1), seen(0, workers=0), strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[0].long(), own[0].long())
    for one, two in zip(whole[2:], seen(2, workers=2), strict=True):
        assert torch.equal(one[0], two[0])


def test_a_run_with_workers_goes_on_as_if_it_had_not_been_cut(tmp_path):
    options = {"given": TrainData(Noisy(22), Noisy(6), "mse_loss", (3,)), "workers": 2}
    run(tmp_path / "whole", **options)
    run(tmp_path / "cut", max_steps=4, **options)
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_what_is_wrong_with_a_sample_comes_back_from_a_worker(tmp_path):
    given = TrainData(Noisy(broken=4), None, "mse_loss")
    with pytest.raises(TrainingError, match="of the dataset cannot be stacked") as caught:
        run(tmp_path, given=given, workers=1)
    assert caught.value.hint == "give every sample the same shapes and types"


OWN = """
import torch
from ckptool.trainer import TrainData

rows = torch.utils.data.TensorDataset(torch.eye(5), torch.ones(5, 1))
def pair(): return rows, rows
def whole(): return TrainData(rows, None, "l1_loss", (5,), 1)
def loss(outputs, targets): return ((outputs - targets) ** 2).mean()
def none(): return 5
"""


def test_data_and_loss_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    whole = make_data(TrainConfig(out="-", data="own_data:whole"))
    assert (whole.loss, whole.inputs) == ("l1_loss", (5,))
    for word in ("mse_loss", "own_data:loss"):
        pair = make_data(TrainConfig(out="-", data="own_data:pair", loss=word))
        assert len(pair.validation) == 5
        assert pair.mean_loss(torch.zeros(2, 1), torch.ones(2, 1)).item() == 1
    assert len(make_data(TrainConfig(out="-", data="own_data:rows", loss="mse_loss")).train) == 5
    with pytest.raises(UsageError, match="returns a dataset without a loss"):
        make_data(TrainConfig(out="-", data="own_data:pair"))
    with pytest.raises(UsageError, match="own_data:none returns an int, expected data"):
        make_data(TrainConfig(out="-", data="own_data:none"))


def test_a_loss_by_its_word_takes_the_place_of_that_of_the_data(tmp_path):
    data = TrainData(Noisy(), None, "mse_loss", (3,))
    assert Trainer(config(tmp_path, loss="l1_loss"), data=data)._resolve_data().loss == "l1_loss"


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
    return make_data(TrainConfig(out="-", data=f"csv:{path}", **{"dtype": "float64", **options}))


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


def test_the_part_to_learn_from_is_standardized_with_its_own_statistics(write):
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
    "one column": (
        {"a": range(9)},
        None,
        "has only one column, 'a', so there is nothing to predict",
    ),
    "too few rows": (
        {"a": range(4), "b": range(4)},
        None,
        "has 4 rows of numbers, expected at least 5",
    ),
    "one row": ({"a": [1], "b": [2]}, None, "has 1 row of numbers, expected at least 5"),
    "another name": (columns(), "zz", "has no column 'zz'; its columns: x, y, z"),
    "many columns": (
        {f"c{n:02}": range(9) for n in range(20)},
        "zz",
        "its columns: c00, c01, c02, c03, c04, c05, c06, c07, and 12 more",
    ),
    "large numbers": (
        {"a": [1e308, -1e308] * 5, "b": range(10)},
        None,
        "column 'a' cannot be standardized",
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
    assert caught.value.hint == "use --target price"


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


@pytest.fixture
def table(tmp_path):
    """Reads bytes, or text in UTF-8, as a file."""

    def read(content):
        path = tmp_path / "rows.csv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_table(str(path))

    return read


NUMBERS = [[1.0, 2.5], [3.0, -4.0]]
READ = {
    "names": ("a,b\n1,2.5\n3,-4\n", ("a", "b")),
    "no names": ("1,2.5\n3,-4\n", ("1", "2")),
    "no last line end": ("a,b\n1,2.5\n3,-4", ("a", "b")),
    "crlf": ("a,b\r\n1,2.5\r\n3,-4\r\n", ("a", "b")),
    "old mac": ("a,b\r1,2.5\r3,-4\r", ("a", "b")),
    "byte order mark": ("\ufeffa,b\n1,2.5\n3,-4\n", ("a", "b")),
    "byte order mark before numbers": ("\ufeff1,2.5\n3,-4\n", ("1", "2")),
    "semicolons": ("a;b\n1;2.5\n3;-4\n", ("a", "b")),
    "tabs": ("a\tb\n1\t2.5\n3\t-4\n", ("a", "b")),
    "quotes": ('"a","b"\n"1","2.5"\n"3","-4"\n', ("a", "b")),
    "blanks": (" a, b\n 1,  2.5\n3 ,-4 \n", ("a", "b")),
    "quotes after blanks": ('"a", "b"\n1, "2.5"\n3, "-4"\n', ("a", "b")),
    "blank lines": ("\n \na,b\n\n1,2.5\n  \n3,-4\n\n\n", ("a", "b")),
    "exponents": ("a,b\n1e0,25e-1\n+3.,-.4E1\n", ("a", "b")),
    "a delimiter in a name": ('"a, m",b\n1,2.5\n3,-4\n', ("a, m", "b")),
    "another delimiter in a name": ("a; m,b\n1,2.5\n3,-4\n", ("a; m", "b")),
    "a line end in a name": ('"a\nm",b\n1,2.5\n3,-4\n', ("a\nm", "b")),
    "an index without a name": (",b\n1,2.5\n3,-4\n", ("1", "b")),
    "years among the names": ("2019,b\n1,2.5\n3,-4\n", ("2019", "b")),
    "letters of the world": ("größe,高さ\n1,2.5\n3,-4\n", ("größe", "高さ")),
}


def test_what_people_write_is_read(table):
    for what, (content, columns) in READ.items():
        names, values = table(content)
        assert names == columns, what
        assert values.dtype == torch.float64, what
        assert values.tolist() == NUMBERS, what


def test_of_one_line_the_delimiter_is_seen_too(table):
    assert table("1;2;3\n")[1].tolist() == [[1, 2, 3]]


NO_TABLES = {
    "text": ("a,b\n1,2\n3,x\n", "line 3: 'x' in column 'b' is not a finite number"),
    "text in the first line": ("1.5,x\n3,4\n", "line 1: 'x' in column '2' is not a finite number"),
    "a hole": ("a,b\n1,\n", "line 2: '' in column 'b' is not"),
    "a hole in the first line": ("1,,3\n1,2,3\n", "line 1: '' in column '2' is not"),
    "a hole of blanks": ("a,b\n  ,2\n", "line 2: '' in column 'a' is not"),
    "a line of delimiters": ("a,b\n1,2\n,\n", "line 3: '' in column 'a' is not"),
    "nan": ("a,b\n1,nan\n", "line 2: 'nan' in column 'b' is not a finite number"),
    "infinity": ("a,b\n-inf,1\n", "line 2: '-inf' in column 'a'"),
    "beyond floats": ("a,b\n1e999,1\n", "line 2: '1e999' in column 'a'"),
    "an underscore": ("a,b\n1_000,1\n", "line 2: '1_000' in column 'a'"),
    "a long text": (f"a,b\n{'x' * 99},1\n", f"'{'x' * 40}...' in column 'a' is not"),
    "a short line": ("a,b\n1,2\n3\n", "line 3: has 1 cell, expected 2"),
    "a long line": ("a,b\n1,2\n3,4,5\n", "line 3: has 3 cells, expected 2"),
    "a short line after semicolons": ("a;b\n1\n", "line 2: has 1 cell, expected 2"),
    "two names": ("a,b,a\n1,2,3\n", "line 1: two columns have the name 'a'"),
    "a number as a name": ("2,,3\nx,1,1\n", "line 1: '' in column '2' is not"),
    "no row": ("a,b\n", "the file has no rows after the header"),
    "nothing": ("", "the file has no rows"),
    "blank lines alone": ("\n \n", "the file has no rows"),
    "an open quote": ('a,b\n1,"2\n', "line 2: unexpected end of data"),
    "a quote that goes on": ('a,b\n"1"2,3\n', "line 2: ',' expected after '\"'"),
    "not utf-8": (b"a,b\n1,2\n3,caf\xe9\n", "is not UTF-8"),
    "a name that is not": (b"a,caf\xe9\n1,2\n", "is not UTF-8"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), "is not UTF-8"),
    "a cell without end": ("x" * 200_000, "line 1: field larger than field limit"),
    "a late cell without end": (
        f"a,b\n1,2\n1,{'2' * 200_000}\n",
        "line 3: field larger than field limit",
    ),
    "after a quoted line end": ('"a\nm",b\n1,2\n3,x\n', "line 4: 'x' in column 'b'"),
    "after blank lines": ("\n\na,b\n\n1,x\n", "line 5: 'x' in column 'b'"),
}


def test_what_is_no_table_of_numbers_is_told_with_its_place(table, tmp_path):
    for content, told in NO_TABLES.values():
        with pytest.raises(TrainingError, match=re.escape(told)) as caught:
            table(content)
        assert str(caught.value).startswith(f"{tmp_path / 'rows.csv'}: "), told


def test_a_decimal_comma_is_told_as_such(table):
    with pytest.raises(TrainingError, match="'1,5' in column 'a' is not") as caught:
        table("a;b\n1,5;2\n")
    assert caught.value.hint.startswith("write numbers such as 1.5 in every cell")


def test_control_characters_are_not_passed_on(table):
    with pytest.raises(TrainingError) as caught:
        table("a\x1b[31m,b\nx\x1b[2J,1\n")
    assert str(caught.value).isprintable()


def test_a_file_that_is_not_there_or_a_folder_is_told(tmp_path):
    with pytest.raises(FileMissing, match="no such file"):
        read_table(str(tmp_path / "none.csv"))
    with pytest.raises(FileDenied, match="cannot be read"):
        read_table(str(tmp_path))


@given(st.binary() | st.text("0123456789.,;-e\t\n\r\"' x").map(str.encode))
def test_whatever_is_in_a_file_it_is_a_table_or_told(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    path.write_bytes(content)
    with suppress(TrainingError):
        names, values = read_table(str(path))
        assert values.isfinite().all()
        assert len(set(names)) == values.shape[1]


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.data(), st.sampled_from(",;\t"), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_what_csv_writes_is_read(tmp_path_factory, data, delimiter, has_names, end):
    width = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.lists(finite, min_size=width, max_size=width), min_size=1))
    text = io.StringIO()
    quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
    names = [f"name {number}" for number in range(width)]
    writer.writerows([names, *rows] if has_names else rows)
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    path.write_bytes(text.getvalue().encode())
    columns, values = read_table(str(path))
    assert values.tolist() == rows
    assert not has_names or columns == tuple(names)
