"""`ckptool match` and `load_into` are of one mind: over many models, files and allowances."""

import argparse
import random
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from ckptool.errors import CheckpointError, MatchError
from ckptool.loading.load_into import load_into
from tests.loading.test_own_loading import KINDS, Owner, nested, nested_state
from tests.loading.test_unmade import Stateful


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.b.weight = self.a.weight


class Overlapping(nn.Module):
    """A buffer that looks at a part of another."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[:2])


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.late = nn.Linear(3, 2), nn.LazyLinear(2)


class Raising(nn.Module):
    """Cannot be tried beforehand: it wants numbers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def _load_from_state_dict(self, state, prefix, *rest):
        state.pop(f"{prefix}scale", torch.ones(1)).item()
        super()._load_from_state_dict(state, prefix, *rest)


class Frozen(nn.Module):
    """Leaves a part of itself out of what it saves."""

    def __init__(self):
        super().__init__()
        self.head, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2)
        self._register_state_dict_hook(self._without_teacher)

    @staticmethod
    def _without_teacher(module, state, prefix, *rest):
        for name in module.teacher.state_dict():
            state.pop(f"{prefix}teacher.{name}", None)


def normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4))


def newly_normed():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(3, 4)), nn.BatchNorm1d(4))


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "stateful": Stateful,
    "tied": Tied,
    "overlapping": Overlapping,
    "lazy": Lazy,
    "raising": Raising,
    "frozen": Frozen,
    "normed": normed,
    "newly normed": newly_normed,
    "half": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half(),
    **{kind.__name__: (lambda kind=kind: nested(kind)) for kind in KINDS},
    Owner.__name__: Owner,
}


class OtherTies(Tied):
    def __init__(self):
        super().__init__()
        self.b.weight = nn.Parameter(self.b.weight.detach() + 1)


def objects(value):
    return lambda: Stateful(value).state_dict()


FILES = {
    **{name: (lambda make=make: make().state_dict()) for name, make in MODELS.items()},
    "untied": lambda: OtherTies().state_dict(),
    "object": objects(argparse.Namespace(a=1)),
    "set": objects({frozenset({1}), 2}),
    "type": objects({"dtype": torch.float32, "shape": torch.Size([1])}),
    "tensor": objects(torch.ones(2)),
    "object inside": objects([{"a": (argparse.Namespace(),)}]),
    "apart": lambda: {**Overlapping().state_dict(), "part": torch.zeros(2)},
    "scaled": lambda: {**Raising().state_dict(), "scale": torch.ones(1)},
    **{f"old {kind.__name__}": (lambda kind=kind: nested_state(kind)) for kind in KINDS},
    "old Owner": Owner.saved,
}
FITTING = {
    **{"untied": "tied", "object": "stateful", "set": "stateful", "type": "stateful"},
    **{"tensor": "stateful", "object inside": "stateful", "apart": "overlapping"},
    **{"scaled": "raising", "normed": "newly normed"},
}
CHANGES = {
    "as it is": lambda state, rng: state,
    "wrapped": lambda state, rng: renamed(state, "module."),
    "in a front": lambda state, rng: renamed(state, "net."),
    "one less": lambda state, rng: without(state, rng.choice(list(state))),
    "one more": lambda state, rng: {**state, "other.weight": torch.ones(7)},
    "shaped": lambda state, rng: {**state, rng.choice(list(state)): torch.ones(3, 1, 2)},
    "wider": lambda state, rng: double(state),
    "narrower": lambda state, rng: cast(state, torch.bfloat16),
    "too large": lambda state, rng: {
        n: times(v, 1e30) for n, v in cast(state, torch.float64).items()
    },
    "beside": lambda state, rng: {**state, "epoch": 3},
}
ALLOWANCES = ["missing", "unexpected", "mismatched", "lossy_cast"]

made = MODELS["plain"]


def build():
    torch.manual_seed(1)
    return made()


def renamed(state, front):
    return type(state)((f"{front}{name}", value) for name, value in state.items())


def without(state, name):
    return OrderedDict((n, value) for n, value in state.items() if n != name)


def times(value, factor):
    return value * factor if floats(value) else value


def cast(state, dtype):
    return {name: value.to(dtype) if floats(value) else value for name, value in state.items()}


def double(state):
    return cast(state, torch.float64)


def floats(value):
    lazy = torch.nn.parameter.is_lazy
    return isinstance(value, torch.Tensor) and not lazy(value) and value.is_floating_point()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("mind") / "a.pth")


def check(ckptool, path, model, allowed):
    """Ask both; return the model if it was loaded."""
    global made
    made = MODELS[model]
    built = build()
    options = [f"--allow-{name.replace('_', '-')}" for name in allowed]
    done = ckptool("match", path, "--like", f"{__name__}:build", *options)
    raised = None
    try:
        load_into(built, path, **{f"allow_{name}": True for name in allowed})
    except (CheckpointError, KeyError, TypeError, RuntimeError) as error:
        raised = error
    if "decided by torch" in done.out:  # what the model's own code takes shows when it runs
        assert done.code == 0 or raised is not None
    else:
        code = 0 if raised is None else 1 if isinstance(raised, MatchError) else 2
        assert done.code == code, (done.out, done.err, raised)
    return built if raised is None else None


PAIRS = [(file, FITTING.get(file, file.removeprefix("old "))) for file in FILES]


@pytest.mark.parametrize(("file", "model"), PAIRS)
def test_what_is_of_one_kind_and_what_convert_writes_of_it(ckptool, path, file, model):
    for change, changed in CHANGES.items():
        torch.manual_seed(2)
        torch.save(changed(FILES[file](), random.Random(0)), path)
        loaded = check(ckptool, path, model, [])
        check(ckptool, path, model, ALLOWANCES)
        if change in ("as it is", "wrapped", "one more"):
            check_converted(ckptool, path, [], loaded)
            allowed = ALLOWANCES[:3]
            check_converted(ckptool, path, allowed, check(ckptool, path, model, allowed))


def check_converted(ckptool, path, allowed, loaded):
    """What `convert` writes loads as the file does."""
    options = [f"--allow-{name}" for name in allowed]
    out = path.replace("a.pth", "out.pth")
    done = ckptool("convert", path, out, "--like", f"{__name__}:build", "--force", *options)
    if loaded is not None:
        assert done.code == 0, done.err
        again = build()
        load_into(again, out, **{f"allow_{name}": True for name in allowed})
        found = again.state_dict()
        for name, value in loaded.state_dict().items():
            assert not floats(value) or torch.equal(value, found[name]), name


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    file=st.sampled_from(list(FILES)),
    model=st.sampled_from(list(MODELS)),
    changes=st.lists(st.sampled_from(list(CHANGES)), max_size=3, unique=True),
    allowed=st.sets(st.sampled_from(ALLOWANCES)),
    rng=st.randoms(use_true_random=False),
)
def test_whatever_is_held_beside_whatever(ckptool, path, file, model, changes, allowed, rng):
    torch.manual_seed(2)
    state = FILES[file]()
    for change in changes:
        state = CHANGES[change](state, rng)
    torch.save(state, path)
    check(ckptool, path, model, sorted(allowed))
