"""The mean of checkpoints, with torch as the judge."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import CorruptFile, NotFound, NotRepresentable, TargetExists, UsageError
from ckptool.formats import open_checkpoint
from ckptool.transforms import average
from ckptool.writing import save


@contextmanager
def opened(folder, *roots):
    """Checkpoints of these objects."""
    with ExitStack() as stack:
        found = []
        for at, root in enumerate(roots):
            torch.save(root, folder / f"{at}.pth")
            found.append(stack.enter_context(open_checkpoint(folder / f"{at}.pth")))
        yield found


def mean_of(folder, *roots, **options):
    """What torch loads of the mean, and what was told."""
    with opened(folder, *roots) as found:
        made = average(found, **options)
        receipt = save(made, folder / "mean.pth", overwrite=True)
    return torch.load(folder / "mean.pth", weights_only=False), made, receipt


def texts(made, kind):
    return [change.text for change in made.changes if change.kind == kind]


def judged(*tensors):
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([one.to(wide) for one in tensors]).mean(0).to(tensors[0].dtype)


class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(3)
        self.fc = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4).bfloat16()
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.fc.weight


@pytest.mark.parametrize("count", [2, 3])
def test_every_floating_tensor_is_the_mean_and_the_rest_is_the_firsts(tmp_path, count):
    nets = [Net(seed) for seed in range(count)]
    states = [net.state_dict() for net in nets]
    roots = [
        {"epoch": at, "model": state, "optimizer": torch.optim.Adam(net.parameters()).state_dict(),
         "rng": torch.get_rng_state()}
        for at, (net, state) in enumerate(zip(nets, states, strict=True))
    ]  # fmt: skip
    loaded, made, receipt = mean_of(tmp_path, *roots)
    assert list(loaded) == ["epoch", "model", "rng"]
    assert loaded["epoch"] == 0
    assert list(loaded["model"]) == list(states[0])
    assert loaded["model"]._metadata == states[0]._metadata
    for name, tensor in loaded["model"].items():
        every = [state[name] for state in states]
        wanted = judged(*every) if tensor.is_floating_point() else every[0]
        assert torch.equal(tensor, wanted)
        assert tensor.dtype == every[0].dtype
        assert tensor.stride() == every[0].stride()
    assert loaded["model"]["tied.weight"].data_ptr() == loaded["model"]["fc.weight"].data_ptr()
    assert texts(made, "left-out") == ["the optimizer optimizer"]
    assert texts(made, "average")[0] == f"the mean of {count} files: 12 tensors in model"
    assert receipt.verified
    Net(9).load_state_dict(loaded["model"])


def test_parameters_stay_parameters(tmp_path):
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.note = {"scale": 1}
    loaded, _, _ = mean_of(tmp_path, *({"w": one} for one in parameters))
    assert isinstance(loaded["w"], torch.nn.Parameter)
    assert loaded["w"].requires_grad
    assert loaded["w"].note == {"scale": 1}
    assert torch.equal(loaded["w"], judged(*parameters))


def test_pickled_modules_are_averaged_too(tmp_path):
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    loaded, _, _ = mean_of(tmp_path, *nets)
    assert torch.equal(loaded.weight, judged(*(net.weight for net in nets)))


def test_views_of_one_storage_get_memory_of_their_own(tmp_path):
    def root(seed):
        flat = torch.randn(20, generator=torch.Generator().manual_seed(seed))
        return {"flat": flat, "w": flat[4:12].view(2, 4), "odd": flat[1::2], "b": flat[12:]}

    roots = [root(seed) for seed in range(3)]
    loaded, made, _ = mean_of(tmp_path, *roots)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, judged(*(one[name] for one in roots)))
    pointers = {tensor.untyped_storage().data_ptr() for tensor in loaded.values()}
    assert len(pointers) == 4
    assert texts(made, "warning") == ["no longer share memory: flat, w, odd, b"]


def test_a_tie_that_one_file_has_not_comes_apart_with_a_warning(tmp_path):
    shared = torch.randn(3)
    roots = [{"a": shared, "b": shared.detach()}, {"a": torch.randn(3), "b": torch.randn(3)}]
    loaded, made, _ = mean_of(tmp_path, *roots)
    for name in "ab":
        assert torch.equal(loaded[name], judged(roots[0][name], roots[1][name]))
    assert texts(made, "warning") == ["no longer share memory: a, b"]


def test_files_may_lay_a_tensor_out_differently(tmp_path):
    one, two = torch.randn(4, 6), torch.randn(4, 6)
    layouts = {
        "columns": lambda tensor: tensor.t().contiguous().t(),
        "plain": lambda tensor: tensor,
        "holes": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    }
    for first in layouts.values():
        for second in layouts.values():
            roots = {"w": first(one)}, {"w": second(two)}
            loaded, _, _ = mean_of(tmp_path, *roots)
            assert torch.equal(loaded["w"], judged(one, two))
            if first is not layouts["holes"]:
                assert loaded["w"].stride() == roots[0]["w"].stride()


def test_types_may_differ_and_the_firsts_is_kept(tmp_path):
    roots = (
        {"w": torch.randn(5).half(), "v": torch.randn(2)},
        {"w": torch.randn(5), "v": torch.randn(2)},
    )
    loaded, made, _ = mean_of(tmp_path, *roots)
    assert torch.equal(loaded["w"], judged(roots[0]["w"], roots[1]["w"]))
    assert loaded["w"].dtype == torch.float16
    assert texts(made, "warning") == [
        "dtypes differ between the files, rounded to that of the first: w"
    ]


def test_complex_numbers_scalars_and_empty_tensors(tmp_path):
    def root(seed):
        torch.manual_seed(seed)
        return {"z": torch.randn(3, dtype=torch.complex64), "w": torch.randn(2, 2),
                "s": torch.randn(()), "none": torch.zeros(0, 3)}  # fmt: skip

    roots = root(1), root(2)
    loaded, _, _ = mean_of(tmp_path, *roots)
    for name in roots[0]:
        assert torch.equal(loaded[name], judged(roots[0][name], roots[1][name]))


def test_integers_must_agree_unless_the_firsts_are_wanted(tmp_path):
    roots = [{"w": torch.ones(2), "n": torch.tensor([at])} for at in (1, 1, 2)]
    with opened(tmp_path, *roots) as found, pytest.raises(UsageError, match="'n'") as caught:
        average(found)
    assert caught.value.file.endswith("2.pth")
    assert "0.pth" in caught.value.message
    assert "--ints first" in caught.value.hint
    other = {"w": torch.ones(2), "n": torch.ones(1)}
    with (
        opened(tmp_path, roots[0], other) as found,
        pytest.raises(UsageError, match="float32") as c,
    ):
        average(found)
    assert c.value.hint is None
    loaded, made, _ = mean_of(tmp_path, *roots, ints="first")
    assert loaded["n"].tolist() == [1]
    assert texts(made, "keep")[0].startswith("1 integer tensor: those of ")
    loaded, made, _ = mean_of(tmp_path, *roots[:2])
    assert "1 integer tensor: equal in all files" in texts(made, "keep")


@pytest.mark.parametrize(
    ("second", "error", "said"),
    [
        ({"w": torch.ones(2)}, NotFound, "only"),
        ({"w": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}, NotFound, "only"),
        ({"w": torch.ones(3), "b": torch.ones(1)}, UsageError, r"'w' has the shape \[3\]"),
        ({"w": torch.ones(2).int(), "b": torch.ones(1)}, UsageError, "'w' is int32 here"),
        ({"w": torch.ones(2).to_sparse(), "b": torch.ones(1)}, UsageError, "sparse_coo tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, second, error, said):
    first = {"w": torch.ones(2), "b": torch.ones(1)}
    with opened(tmp_path, first, second) as found, pytest.raises(error, match=said) as caught:
        average(found)
    assert caught.value.file.endswith("1.pth")


def test_names_that_differ_by_wrappers_are_the_same_and_stay_as_in_the_first(tmp_path):
    nets = [torch.nn.Linear(2, 2) for _ in range(3)]
    bare, *wrapped = [net.state_dict() for net in nets]
    wrapped = [{f"module.{name}": value for name, value in one.items()} for one in wrapped]
    wanted = (nets[0].weight + nets[1].weight + nets[2].weight) / 3
    for roots, name in (((bare, *wrapped), "weight"), ((*wrapped, bare), "module.weight")):
        with opened(tmp_path, *roots) as found:
            save(average(found), tmp_path / "mean.pth", overwrite=True)
        assert torch.allclose(torch.load(tmp_path / "mean.pth")[name], wanted)
    both = {**bare, "module.weight": bare["weight"]}
    with opened(tmp_path, both, wrapped[0]) as found, pytest.raises(NotFound):
        average(found)


def test_arrays_and_single_files_have_no_mean(tmp_path):
    root = {"w": torch.ones(2), "array": np.ones(2, dtype=np.float32)}
    with opened(tmp_path, root, root) as found:
        with pytest.raises(UsageError, match="numpy array") as caught:
            average(found)
        assert "--plain" in caught.value.hint
        with pytest.raises(UsageError, match="two"):
            average(found[:1])
        with pytest.raises(UsageError, match="'same' or 'first'"):
            average(found, ints="last")


def test_several_state_dicts_are_matched_by_name_and_one_by_key(tmp_path):
    def root(value, **more):
        return {"model": {"w.a": torch.full((2,), value)},
                "ema": {"w.a": torch.full((2,), 10 * value)}, **more}  # fmt: skip

    loaded, _, _ = mean_of(tmp_path, root(1.0), root(3.0))
    assert loaded["model"]["w.a"].tolist() == [2.0, 2.0]
    assert loaded["ema"]["w.a"].tolist() == [20.0, 20.0]
    loaded, made, _ = mean_of(tmp_path, root(1.0), {"w.a": torch.full((2,), 5.0)}, key="ema")
    assert loaded["w.a"].tolist() == [7.5, 7.5]
    assert any("model" in text for text in texts(made, "left-out"))
    third = root(3.0, extra={"v.a": torch.ones(1, 1)})
    with opened(tmp_path, root(1.0), third) as found, pytest.raises(NotFound, match="extra"):
        average(found)


def test_optimizers_in_lists_go_too(tmp_path):
    net = torch.nn.Linear(2, 2)
    states = [torch.optim.SGD(net.parameters(), lr=0.1).state_dict()]
    root = {"state_dict": net.state_dict(), "optimizer_states": states, "names": ["a"]}
    loaded, _, _ = mean_of(tmp_path, root, root)
    assert list(loaded) == ["state_dict", "names"]


def test_nothing_to_average_says_what_there_is(tmp_path):
    with opened(tmp_path, {"epoch": 1}, {"epoch": 2}) as found, pytest.raises(NotFound):
        average(found)


def test_the_api_takes_paths_and_refuses_a_source_as_target(tmp_path):
    for at in (1, 2):
        torch.save({"w": torch.full((3,), float(at))}, tmp_path / f"{at}.pth")
    paths = [tmp_path / "1.pth", tmp_path / "2.pth"]
    receipt = ckptool.average(paths, tmp_path / "mean.pth")
    assert receipt.tensors == 1
    assert torch.load(tmp_path / "mean.pth")["w"].tolist() == [1.5] * 3
    with pytest.raises(TargetExists):
        ckptool.average(paths, tmp_path / "2.pth", overwrite=True)


def test_a_tie_of_the_first_file_alone_is_refused(tmp_path):
    shared, other = torch.randn(4), torch.randn(4)
    roots = [{"a": shared, "b": shared, "c": shared}, {"a": other, "b": other + 1, "c": other}]
    with (
        opened(tmp_path, *roots) as found,
        pytest.raises(UsageError, match="'a' and 'b'") as caught,
    ):
        average(found)
    assert "--ties copy" in caught.value.hint
    loaded, _, _ = mean_of(tmp_path, *reversed(roots))
    for name in "abc":
        assert torch.equal(loaded[name], judged(roots[1][name], roots[0][name]))
    assert loaded["a"].data_ptr() == loaded["c"].data_ptr() != loaded["b"].data_ptr()


def test_a_mean_beyond_the_first_files_type_is_refused_and_nothing_written(tmp_path):
    roots = [{"w": torch.ones(2).half()}, {"w": torch.tensor([1.0, 1e6])}]
    with pytest.raises(NotRepresentable, match="the mean of 'w' overflows float16"):
        mean_of(tmp_path, *roots)
    assert not (tmp_path / "mean.pth").exists()


def test_integers_of_two_types_are_told_as_such(tmp_path):
    roots = [{"w": torch.ones(1), "n": torch.ones(1, dtype=kind)}
             for kind in (torch.int64, torch.int32)]  # fmt: skip
    with pytest.raises(UsageError, match="'n' is int32 here and int64 in"):
        mean_of(tmp_path, *roots)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_source_is_refused_and_nothing_written(tmp_path, damaged):
    values = torch.randn(1000)
    with opened(tmp_path, {"w": values}, {"w": values}) as found:
        path = tmp_path / f"{damaged}.pth"
        content = bytearray(path.read_bytes())
        content[content.index(values.numpy().tobytes()) + 99] ^= 1
        with open(path, "r+b") as file:
            file.write(content)
        paths = [one.path for one in found]
    with pytest.raises(CorruptFile, match="storage '0' is damaged"):
        ckptool.average(paths, tmp_path / "mean.pth")
    assert not (tmp_path / "mean.pth").exists()


def test_one_file_in_place_of_a_list_is_refused(tmp_path):
    with pytest.raises(UsageError, match="list of files"):
        ckptool.average("a.pth", tmp_path / "mean.pth")


def test_an_averaged_model_and_its_plain_one_have_a_mean(tmp_path):
    plain = torch.nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)).state_dict()
    state = plain.state_dict()
    mean, made, _ = mean_of(tmp_path, state, averaged)
    assert texts(made, "left-out") == [f"n_averaged of {tmp_path}/1.pth, which is not a weight"]
    assert torch.equal(mean["weight"], judged(state["weight"], averaged["module.weight"]))
    mean, made, _ = mean_of(tmp_path, averaged, state)
    assert mean.keys() == averaged.keys()
    assert any(text.startswith("n_averaged of") for text in texts(made, "keep"))
    assert torch.equal(mean["module.bias"], judged(state["bias"], averaged["module.bias"]))


def slerp(t, one, two):
    """As in Shoemake's paper, with the constants of mergekit, on whole tensors in float64."""
    one, two = one.double().numpy(), two.double().numpy()
    norms = [np.linalg.norm(each) for each in (one, two)]
    units = [
        each / norm if norm > 1e-8 else each for each, norm in zip((one, two), norms, strict=True)
    ]
    cosine = np.sum(units[0] * units[1])
    if not abs(cosine) <= 0.9995:
        return torch.from_numpy(np.asarray((1 - t) * one + t * two))
    angle = np.arccos(cosine)
    parts = np.sin(angle - t * angle) * one + np.sin(t * angle) * two
    return torch.from_numpy(np.asarray(parts / np.sin(angle)))


@pytest.mark.parametrize(
    ("t", "dtype"),
    [(0.0, torch.float32), (0.3, torch.float32), (1.0, torch.float32), (0.3, torch.bfloat16)],
)
def test_slerp_goes_along_the_arc_between_two_files(tmp_path, t, dtype):
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    pairs = {
        "any": (torch.randn(7, 5), torch.randn(7, 5)),
        "long": torch.randn(2, 300_000 if t == 0.3 else 3).unbind(),
        "parallel": (weight, weight + 0.001 * torch.randn(7, 5)),
        "opposite": (weight.clone(), -weight),
        "zero": (torch.zeros(5), torch.randn(5)),
        "scalar": (torch.tensor(2.0), torch.tensor(4.0)),
        "nan": (torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([3.0, 1.0, -5.0])),
    }
    roots = [{name: pair[at].to(dtype) for name, pair in pairs.items()} for at in range(2)]
    loaded, made, _ = mean_of(tmp_path, *roots, mode="slerp", t=t)
    for name, tensor in loaded.items():
        wanted = slerp(t, roots[0][name], roots[1][name])
        assert torch.allclose(tensor, wanted.to(dtype), rtol=1e-6, atol=1e-9, equal_nan=True), name
        assert tensor.dtype == dtype
    assert loaded["nan"].isnan().tolist() == [False, True, False]
    assert (
        f"interpolated along the arc from the first file to the second, at {t:g}"
        in texts(made, "average")[0]
    )


@pytest.mark.parametrize("weights", [(0.7, 0.3), (2, 1), (1.5, -0.5)])
def test_weights_are_divided_by_their_sum(tmp_path, weights):
    roots = [{"w": torch.randn(50), "n": torch.tensor(3)} for _ in range(2)]
    loaded, _, _ = mean_of(tmp_path, *roots, weights=weights)
    first, second = (one["w"].double() for one in roots)
    wanted = (weights[0] * first + weights[1] * second) / sum(weights)
    assert torch.equal(loaded["w"], wanted.float())
    assert loaded["n"] == 3


@pytest.mark.parametrize("t", [None, 0.25, -1.0])
def test_a_task_is_added(tmp_path, t):
    roots = [{"w": torch.randn(50), "same": torch.randn(5)} for _ in range(3)]
    roots[2]["same"] = roots[1]["same"]
    loaded, made, _ = mean_of(tmp_path, *roots, mode="task", t=t)
    one, two, three = (root["w"].double() for root in roots)
    factor = 1.0 if t is None else t
    assert torch.equal(loaded["w"], (one + factor * (two - three)).float())
    assert torch.equal(loaded["same"], roots[0]["same"])
    assert texts(made, "average")[0].endswith(f"+ {factor:g} (the second - the third): 2 tensors")


def test_a_sum_beyond_the_type_is_refused(tmp_path):
    roots = [{"w": torch.tensor([60000.0 * sign]).half()} for sign in (1, 1, -1)]
    with pytest.raises(NotRepresentable, match="the mean of 'w' overflows float16"):
        mean_of(tmp_path, *roots, mode="task")


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mode": "task"}), (3, {"mode": "slerp"}), (1, {}), (2, {"mode": "ties"}),
        (2, {"t": 0.5}), (2, {"mode": "slerp", "weights": (1, 2)}), (2, {"weights": (1, 2, 3)}),
        (2, {"weights": (1, -1)}), (2, {"weights": (1, float("nan"))}),
        (2, {"weights": (1e308, 1e308)}), (2, {"mode": "slerp", "t": float("inf")}),
    ],
)  # fmt: skip
def test_modes_say_what_they_take(tmp_path, count, options):
    with (
        opened(tmp_path, *[{"w": torch.ones(2)}] * count) as found,
        pytest.raises(UsageError) as told,
    ):
        average(found, **options)
    if options.get("mode") != "ties":
        mode = options.get("mode", "mean")
        assert ("--mode" in told.value.hint) == (mode != "mean")
        assert mode == "mean" or f"--mode {mode} " in told.value.hint
