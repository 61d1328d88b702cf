"""What doctor and match print is run, and the result has all values that the source has."""

import shlex
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.matching.test_renamed_trees import cases, leaves

NORM = "running_mean"
WRAPPERS = ["", "module.", "_orig_mod.", "module._orig_mod."]


@st.composite
def norms(draw):
    size = draw(st.sampled_from([3, 19]))
    names = ["weight", "bias", NORM, "running_var"]
    return {**dict.fromkeys(names, (size,)), "num_batches_tracked": ()}


def values(shapes):
    """Tensors of these shapes, no two of one value."""
    return OrderedDict(
        (name, torch.tensor(at) if name.endswith("tracked") else torch.full(shape, float(at)))
        for at, (name, shape) in enumerate(shapes.items(), start=1)
    )


@st.composite
def files(draw):
    """A file, a reference, and of each name of the reference the value that the file has."""
    have, want, truth = draw(cases(leaves() | norms()).filter(lambda case: case[0] and case[1]))
    state, wanted = values(have), values(want)
    weights = [name for name in have if have[name] and not name.endswith((NORM, "running_var"))]
    change = draw(st.sampled_from(["", "", "pruned", "resized", "tied"]))
    if weights and change:
        name = draw(st.sampled_from(weights))
        if change == "resized":
            state[name] = torch.ones(*have[name], 2)
        elif change == "pruned":
            rows = list(state.items())
            at = list(state).index(name)
            mask = torch.ones(have[name])
            rows[at : at + 1] = [(f"{name}_orig", state[name]), (f"{name}_mask", mask)]
            state = OrderedDict(rows)
        else:
            alike = [one for one in weights if have[one] == have[name]]
            other = draw(st.sampled_from(alike))
            state[other] = state[name]
            own = {mine: theirs for theirs, mine in truth.items()}
            if {own[name], own[other]} <= wanted.keys():
                wanted[own[other]] = wanted[own[name]]
    truths = {name: state.get(truth[name]) for name in wanted}
    before = draw(st.sampled_from(WRAPPERS))
    root = OrderedDict((before + name, value) for name, value in state.items())
    if draw(st.booleans()):
        root = {"state_dict": root, "epoch": 3, "pytorch-lightning_version": "2.6"}
        if weights and draw(st.booleans()):
            parameters = [torch.nn.Parameter(v) for v in state.values() if v.is_floating_point()]
            root["optimizer_states"] = [torch.optim.SGD(parameters, momentum=0.9).state_dict()]
    return root, wanted, truths


def loaded(path):
    found = torch.load(path)
    return found.get("state_dict", found)


def check(path, wanted, truths, *, strict):
    """The file loads, and has every value of the source."""
    made = loaded(path)
    # a BatchNorm without _metadata loads strictly without its counter
    lost = [name for name in wanted if name not in made and not name.endswith("batches_tracked")]
    assert made.keys() <= wanted.keys()
    assert not (strict and lost)
    for name, value in made.items():
        assert value.shape == wanted[name].shape, name
    for name, value in truths.items():
        if value is not None and value.shape == wanted[name].shape:
            assert torch.equal(made[name], value), name


def commands_of(document):
    others = [one for complaint in document["complaints"] for one in complaint["alternatives"]]
    return dict.fromkeys([*document["commands"], *others])


@pytest.fixture
def written(memory_path, monkeypatch):
    """Write a file and a reference into a folder in memory, which becomes the working directory."""
    monkeypatch.chdir(memory_path)

    def write(root, wanted):
        for path in memory_path.iterdir():
            path.unlink()
        torch.save(root, "file.pth")
        torch.save(wanted, "like.pth")

    return write


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(files())
def test_what_is_printed_loads_all_that_the_source_has(ckptool, written, case):
    root, wanted, truths = case
    written(root, wanted)
    document = ckptool("doctor", "file.pth", "--like", "like.pth", "--quick", "--json").document
    for command in commands_of(document):
        words = shlex.split(command)[1:]
        assert ckptool(*words).code == 0, command
        if "--like" in words:
            check(words[2], wanted, truths, strict=True)
        else:
            assert len(loaded(words[2])) == len(loaded("file.pth"))
    done = ckptool("match", "file.pth", "--like", "like.pth")
    given = ckptool("match", "file.pth", "--like", "like.pth", "--json").document
    options = (given["remedy"] or {}).get("options", [])
    if done.code == 1 and options:
        done = ckptool("match", "file.pth", "--like", "like.pth", *options)
        assert done.code == 0, options
    if "ckptool convert" in done.out:
        words = shlex.split(done.out.splitlines()[-1])[1:]
        assert ckptool(*words).code == 0, words
        check(words[2], wanted, truths, strict=not options)
