"""What samples come out of which dataset, and which data a word means."""

import collections
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer import TrainConfig, TrainData, Trainer
from ckptool.trainer.data import collated, data_of, prepared, split
from tests.trainer.runs import Told, assert_same_run, config, run

Pair = collections.namedtuple("Pair", "inputs targets")


def batch(samples, rows=(0, 1), dtype=torch.float32):
    return collated(samples, rows, dtype)


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
    "no pair": ([torch.ones(2)] * 2, "sample 0 of the dataset is a Tensor, not a pair"),
    "three": ([(1, 2, 3)] * 2, "sample 0 of the dataset is a tuple, not a pair"),
    "nothing": ([None, None], "sample 0 of the dataset is None, not a pair"),
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
    "empty": ([], "the training dataset has no sample"),
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
    given = data_of(chosen)
    one, other = Told(), Told()
    Trainer(chosen, data=given, observer=one).fit()
    Trainer(chosen, data=given, loss="l1_loss", observer=other).fit()
    assert one.of("Stepped")[0].loss > 2 * other.of("Stepped")[0].loss


@pytest.mark.parametrize("samples", [1, 5, 22, 1797])
def test_a_split_has_every_row_once(samples):
    learned, held = split(samples, 3)
    assert len(learned) == samples * 4 // 5
    assert sorted([*learned.tolist(), *held.tolist()]) == list(range(samples))
    assert torch.equal(split(samples, 3)[0], learned)


@pytest.mark.parametrize("word", ["random", "friedman"])
def test_generated_data_follow_from_the_seed_alone(word):
    first, again, other = (
        data_of(TrainConfig(out="-", data=word, seed=seed, dtype="float64")) for seed in (1, 1, 2)
    )
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])
    half = data_of(TrainConfig(out="-", data=word, seed=1))
    assert torch.equal(half.train.tensors[0], first.train.tensors[0].float())
    assert isinstance(first, TrainData)


def test_random_data_are_those_of_the_tutorial():
    found = data_of(TrainConfig(out="-", data="random"))
    assert found.train.tensors[0].shape == (100, 5)
    assert found.train.tensors[1].shape == (100, 2)
    assert abs(found.train.tensors[0].mean().item()) < 0.15
    assert abs(found.train.tensors[0].std().item() - 1) < 0.15


def test_friedmans_function_is_what_its_paper_says():
    found = data_of(TrainConfig(out="-", dtype="float64"))
    x, y = found.train.tensors[0], found.train.tensors[1].squeeze(1)
    signal = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2
    noise = y - signal - 10 * x[:, 3] - 5 * x[:, 4]
    assert abs(noise.mean().item()) < 0.15
    assert abs(noise.std().item() - 1) < 0.15
    assert len(found.validation) == 100


def test_digits_are_images_of_8_x_8():
    pytest.importorskip("sklearn")
    found = data_of(TrainConfig(out="-", data="digits"))
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
        data_of(TrainConfig(out="-", data="digits"))
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
        prepared(
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
    whole = data_of(TrainConfig(out="-", data="own_data:whole"))
    assert (whole.loss, whole.inputs) == ("l1_loss", (5,))
    for word in ("mse_loss", "own_data:loss"):
        pair = data_of(TrainConfig(out="-", data="own_data:pair", loss=word))
        assert len(pair.validation) == 5
        assert pair.mean_loss(torch.zeros(2, 1), torch.ones(2, 1)).item() == 1
    assert len(data_of(TrainConfig(out="-", data="own_data:rows", loss="mse_loss")).train) == 5
    with pytest.raises(UsageError, match="gives a dataset without a loss"):
        data_of(TrainConfig(out="-", data="own_data:pair"))
    with pytest.raises(UsageError, match="own_data:none gives an int, not data"):
        data_of(TrainConfig(out="-", data="own_data:none"))


def test_a_loss_by_its_word_takes_the_place_of_that_of_the_data(tmp_path):
    data = TrainData(Noisy(), None, "mse_loss", (3,))
    assert Trainer(config(tmp_path, loss="l1_loss"), data=data)._data_given().loss == "l1_loss"
