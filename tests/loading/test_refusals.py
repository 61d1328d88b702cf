"""What `load_into` refuses leaves the model, and its optimizer, bit for bit as they were."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import AmbiguousName, CheckpointError, MatchError, NameCollision, NotFound
from tests.loading.bits import raising, saved, untouched_by
from tests.loading.optimizing import model_of
from tests.loading.wrappings import TOKENS, Net, copied, trained


def stated(**changes):
    """The state dict of a trained network, with entries that others stand for (None: taken out)."""
    state = copied(trained("plain").state_dict())
    for name, value in changes.items():
        if value is None:
            del state[name.replace("__", ".")]
        else:
            state[name.replace("__", ".")] = value
    return state


def model(device="cpu"):
    """What is loaded into, with gradients and a frozen parameter where it has numbers."""
    torch.manual_seed(2)
    with torch.device(device):
        net = Net()
    if device == "meta":
        return net.eval()
    net.scale.requires_grad_(False)
    net(TOKENS).sum().backward()
    return net.eval()


def optimizer_of(net):
    """One that has taken a step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.step()
    return optimizer


NOT_FITTING = {
    "missing": (lambda: stated(head__bias=None), {}, r"head\.bias", "allow_missing"),
    "unexpected": (
        lambda: stated(extra__weight=torch.ones(3)), {}, r"extra\.weight", "allow_unexpected",
    ),
    "of another shape": (
        lambda: stated(head__bias=torch.ones(8)), {}, r"head\.bias", "allow_mismatched",
    ),
    "of another shape though strict is off": (
        lambda: stated(head__bias=torch.ones(8)), {"strict": False}, r"\[?8", "allow_mismatched",
    ),
    "transposed": (
        lambda: stated(embed__weight=torch.ones(4, 7), head__weight=torch.ones(4, 7)),
        {}, r"(embed|head)\.weight", "allow_mismatched",
    ),
    "as many elements": (lambda: stated(scale=torch.ones(2, 2)), {}, "scale", "allow_mismatched"),
    "of one more dimension": (
        lambda: stated(mean=torch.ones(1, 4)), {}, "mean", "allow_mismatched",
    ),
    "a tie that is none in the file": (
        lambda: stated(head__weight=torch.ones(7, 4)), {}, r"head\.weight", "",
    ),
    "numbers that lose digits": (
        lambda: stated(scale=torch.full((4,), 0.1, dtype=torch.float64)),
        {}, "scale", "allow_lossy_cast",
    ),
    "numbers too large": (
        lambda: stated(scale=torch.full((4,), 1e300, dtype=torch.float64)),
        {}, "scale", "allow_lossy_cast",
    ),
    "fractions for a counter": (
        lambda: stated(blocks__0__norm__num_batches_tracked=torch.tensor(2.87)),
        {}, "num_batches_tracked", "allow_lossy_cast",
    ),
    "a complex number": (
        lambda: stated(scale=torch.full((4,), 1 + 2j)), {}, "scale", "allow_lossy_cast",
    ),
    "too little of it": (
        lambda: stated(embed__weight=None, head__weight=None),
        {"allow_missing": True, "min_coverage": 0.9}, "coverage|%", "",
    ),
    "nothing of it": (
        lambda: {"zzz": torch.ones(3), "yyy": torch.ones(9)}, {"strict": False}, "Net", "",
    ),
    "an empty file": (lambda: OrderedDict(), {"strict": False}, "Net", ""),
    "twins of new names": (
        lambda: {
            name.replace("blocks.0", "first").replace("blocks.1", "second"): value
            for name, value in stated().items()
        },
        {}, "first|blocks", "",
    ),
    "allowed for other names only": (
        lambda: stated(head__bias=None), {"allow_missing": ["embed.*"]}, r"head\.bias", "",
    ),
    "one of two is allowed": (
        lambda: stated(head__bias=None, more=torch.ones(2, 2)),
        {"allow_missing": True}, "more", "allow_unexpected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FITTING)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(tmp_path, case):
    make, options, said, hint = NOT_FITTING[case]
    state = make()
    wrapped = OrderedDict((f"module.{name}", value) for name, value in state.items())
    plain, file = (
        saved(tmp_path / f"{n}.pth", {"epoch": 3, "state_dict": content})
        for n, content in enumerate((state, wrapped))
    )
    for given, device in ((state, "cpu"), (plain, "cpu"), (file, "cpu"), (file, "meta")):
        net = model(device)
        if case == "an empty file" and given is not state:
            with untouched_by(CheckpointError, net):
                ckptool.load_into(net, given, **options)
            continue
        with untouched_by(MatchError, net, match=said) as caught:
            ckptool.load_into(net, given, **options)
        assert len(str(caught.value).splitlines()) <= 3
        assert hint in (caught.value.hint or "")
        assert caught.value.report.model == "Net"
        assert not caught.value.report.fits
        assert isinstance(caught.value, RuntimeError)  # what code around load_state_dict catches


NOT_FOUND = {
    "no such section": (lambda: {"model": stated()}, {"key": "ema"}, NotFound),
    "several": (lambda: {"model": stated(), "ema": stated()}, {}, AmbiguousName),
    "none": (lambda: {"epoch": 1, "names": ["a"]}, {}, CheckpointError),
    "rules that make two names one": (
        stated, {"rename": [r"^blocks\.0\.=>blocks.1."]}, NameCollision,
    ),
    "no rule": (stated, {"rename": ["blocks"]}, CheckpointError),
    "a rule that is no pattern": (stated, {"rename": ["(=>x"]}, CheckpointError),
    "an optimizer that is not there": (stated, {"optimizer": True}, CheckpointError),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FOUND)
def test_what_cannot_be_found_touches_nothing(tmp_path, case):
    make, options, error = NOT_FOUND[case]
    net = model()
    optimizer = optimizer_of(net)
    options = {**options, "optimizer": optimizer} if "optimizer" in options else options
    for given in (make(), saved(tmp_path / "f.pth", make())):
        with untouched_by(error, net, optimizer):
            ckptool.load_into(net, given, **options)


def flipped(path):
    """Turn over one bit of the last tensor."""
    data = bytearray(path.read_bytes())
    wanted = stated()["head.bias"].numpy().tobytes()
    data[data.index(wanted) + len(wanted) - 1] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-700])


def pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")


@pytest.mark.parametrize("damage", [flipped, cut, pointer, lambda path: path.unlink()])
def test_a_damaged_file_touches_nothing(tmp_path, damage):
    path = saved(tmp_path / "f.pth", stated())
    damage(path)
    for device in ("cpu", "meta"):
        if device == "cpu" or damage is not flipped:  # a mapped file is read when it is used
            net = model(device)
            with untouched_by(CheckpointError, net, match=r"f\.pth"):
                ckptool.load_into(net, path)


PARTS = [
    "dtensor_0_of_2.pth", "fsdp2_0_of_2.pth", "fsdp1_sharded_0_of_2.pth",
    "sharded_tensor_0_of_2.pth",
]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_tensors_are_refused_with_a_sentence(fixtures, name):
    file = fixtures / "distributed" / name
    with ckptool.open(file) as checkpoint:
        (section, *_) = [one for one in checkpoint.sections if one.kind == "state_dict"]
        refs = {str(key): ref for key, ref in section.node.items() if hasattr(ref, "shape")}
    net = model_of({key: torch.ones(ref.shape) for key, ref in refs.items()})
    with untouched_by(CheckpointError, net):
        ckptool.load_into(net, file)


class Oops(Exception):
    """Raised by what a model does while it is loaded."""


class Stateful(nn.Module):
    """A module with an extra state, which it may refuse to take back."""

    error = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.steps = 4

    def forward(self, x):
        return x * self.weight

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]
        if self.error is not None and state["steps"] == 9:
            raise self.error


class Own(nn.Linear):
    """A module that loads itself."""

    error = None

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.error is not None:
            raise self.error


class Whole(nn.Sequential):
    """A model with a `load_state_dict` of its own."""

    error = None

    def load_state_dict(self, state_dict, *rest, **options):
        super().load_state_dict(state_dict, *rest, **options)
        if self.error is not None:
            raise self.error


def hooked(failing, error):
    """A model of modules that may fail, and the one that does."""
    torch.manual_seed(5)
    net = Whole(nn.Linear(3, 3), Own(3, 3), Stateful(), nn.BatchNorm1d(3), nn.LazyLinear(2))
    if failing == "before":
        net[3].register_load_state_dict_pre_hook(raising(error))
    elif failing == "after":
        net[3].register_load_state_dict_post_hook(raising(error))
    elif failing == "after it all":
        net.register_load_state_dict_post_hook(raising(error))
    elif failing == "a message":
        net[3].register_load_state_dict_pre_hook(lambda *given: given[-1].append("no good"))
    elif failing:
        {"extra state": net[2], "own": net[1], "whole": net}[failing].error = error
    return net


def state_for_hooked():
    """What fits `hooked`."""
    net = hooked(None, None)
    net(torch.ones(2, 3))
    net[2].steps = 9
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(3, 4)
    return net.state_dict()


ERRORS = [Oops("no"), KeyboardInterrupt(), MemoryError()]
FAILURES = ["before", "after", "after it all", "a message", "extra state", "own", "whole"]


@pytest.mark.parametrize("failing", FAILURES)
def test_a_module_that_raises_leaves_the_model_as_it_was(tmp_path, failing):
    state = state_for_hooked()
    file = saved(tmp_path / "f.pth", state)
    for given, errors in ((state, ERRORS), (file, [*ERRORS[1:], ERRORS[0]])):
        for assign, error in zip((None, False, True), errors, strict=True):
            net = hooked(failing, error)
            with untouched_by(RuntimeError if failing == "a message" else type(error), net):
                ckptool.load_into(net, given, assign=assign)


def test_the_same_model_is_loaded_whole_where_nothing_raises(tmp_path):
    wanted = state_for_hooked()
    for given in (wanted, saved(tmp_path / "f.pth", wanted)):
        net = hooked(None, None)
        assert ckptool.load_into(net, given).coverage == 1.0
        assert net[2].steps == 9
        state = net.state_dict()
        assert all(
            torch.equal(state[name], value)
            for name, value in wanted.items()
            if isinstance(value, torch.Tensor)
        )
