"""Whatever goes wrong while a model is loaded: it is bit for bit as it was."""

import os
import signal

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CorruptFile, MatchError, UnreadableFile
from ckptool.files import FileSource
from ckptool.loading import fill as reading, load_into as installing
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched, raising, untouched_by


class Stateful(nn.Module):
    """With an extra state, a cache beside it, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.history = ["made"]
        self.cache = None

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = list(state["history"])
        self.cache = "set"
        self.passing += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.state = Stateful()
        self.head = nn.Linear(3, 2)
        self.tied = self.head


class Plain(Net):
    """Without code of its own: what is filled waits for the end."""

    def __init__(self):
        super().__init__()
        self.state = nn.Linear(2, 2)


class Custom(Exception):
    pass


@pytest.fixture
def file(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.fixture
def plain(tmp_path):
    torch.save(Plain().state_dict(), tmp_path / "p.pth")
    return tmp_path / "p.pth"


@pytest.mark.parametrize("error", [Custom, MemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["before", "after", "at the end"])
def test_a_hook_that_raises(file, error, when):
    model = Net()
    if when == "before":
        model.head.register_load_state_dict_pre_hook(raising(error))
    else:
        last = model if when == "at the end" else model.head
        last.register_load_state_dict_post_hook(raising(error))
    with untouched_by(error, model):
        load_into(model, file)
    assert (model.state.cache, model.state.passing.tolist()) == (None, [1, 1])


def test_an_extra_state_that_cannot_be_set(file):
    model = Net()
    model.head.set_extra_state = None
    kind = type(
        "Refusing",
        (nn.Linear,),
        {"set_extra_state": raising(Custom), "get_extra_state": lambda _: 1},
    )
    model.later = kind(2, 2)
    state = {
        **torch.load(file),
        **{f"later.{n}": v for n, v in nn.Linear(2, 2).state_dict().items()},
    }
    state["later._extra_state"] = 3
    with untouched_by(Custom, model):
        load_into(model, state)


def test_what_a_hook_changed_is_put_back(file):
    model = Net()
    old = model.norm

    def meddle(module, keys):
        module.norm = nn.Identity()
        module.register_buffer("more", torch.ones(1))
        module.conv.weight = nn.Parameter(torch.zeros(1))
        module.head.weight.requires_grad_(False)
        module.state.history.append("meddled")
        raise Custom

    model.register_load_state_dict_post_hook(meddle)
    with untouched_by(Custom, model):
        load_into(model, file)
    assert model.norm is old
    assert model.state.history == ["made"]


def test_lazy_parameters_are_lazy_again():
    source = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(1))
    model[1].register_load_state_dict_pre_hook(raising(Custom))
    with untouched_by(Custom, model):
        load_into(model, source.state_dict())
    assert nn.parameter.is_lazy(model[0].weight)
    assert model(torch.ones(1, 3)).shape == (1, 1)


def test_assigned_tensors_give_their_place_back(file):
    with torch.device("meta"):
        model = Net()
    model.register_load_state_dict_post_hook(raising(Custom))
    with untouched_by(Custom, model):
        load_into(model, file)
    real = Net()
    real.register_load_state_dict_post_hook(raising(Custom))
    with untouched_by(Custom, real):
        load_into(real, file, assign=True)


def test_what_torch_refuses_is_a_match_error(file):
    model = Net()

    def take_away(module, state, prefix, *rest):
        state[prefix + "weight"] = "no tensor"

    model.head.register_load_state_dict_pre_hook(take_away)
    untouched = Untouched(model)
    with pytest.raises(
        MatchError, match=r"f\.pth cannot be loaded into Net: .*head\.weight"
    ) as caught:
        load_into(model, file)
    untouched.check()
    assert caught.value.report.coverage == 1.0


@pytest.mark.parametrize("lost", ["missing", "unexpected"])
def test_hooks_that_lose_an_entry(file, lost):
    model = Net()

    def lose(module, state, prefix, *rest):
        value = state.pop(prefix + "bias")
        if lost == "unexpected":
            state[prefix + "bias"] = state[prefix + "more"] = value

    model.head.register_load_state_dict_pre_hook(lose)
    with untouched_by(MatchError, model, match=r"head\.(bias|more), tied\.(bias|more)"):
        load_into(model, file)


def test_tensors_that_torch_will_not_write_to():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    source = nn.Linear(2, 2)
    with pytest.raises(MatchError, match="inference"):
        load_into(model, source.state_dict())


def flip(path):
    """Damage one bit of the last tensor's bytes."""
    data = bytearray(path.read_bytes())
    tensor = torch.load(path)["head.bias"]
    at = data.rindex(tensor.numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit(file):
    flip(file)
    model = Net()
    with untouched_by(CorruptFile, model, match="damaged"):
        load_into(model, file)
    load_into(model, file, verify=False)


def test_a_large_file_is_checked_where_that_is_asked(file, monkeypatch):
    monkeypatch.setattr(installing, "_MAX_CHECKED_BYTES", 10)
    flip(file)
    with pytest.raises(CorruptFile):
        load_into(Net(), file, verify=True)
    load_into(Net(), file)
    with torch.device("meta"):
        model = Net()
    model.state.passing = torch.ones(2)
    with pytest.raises(CorruptFile):
        load_into(model, file, verify=True)


def test_a_file_that_ends_before_its_tensors_do(file):
    data = file.read_bytes()
    model = Net()
    file.write_bytes(data[:-1000])
    with untouched_by(UnreadableFile, model):
        load_into(model, file)


def failing_in_the_end(monkeypatch, *, kept):
    """The disk fails when most of the model is filled."""
    if not kept:
        monkeypatch.setattr(installing, "_MAX_COPIED_BYTES", 0)
    read, left = FileSource.read_into, [12 if kept else 3]

    def fill(fills):
        def fail(self, offset, buffer):
            left[0] -= 1
            if left[0] < 3:
                raise UnreadableFile("the disk is gone")
            read(self, offset, buffer)

        left[0] = 6
        monkeypatch.setattr(FileSource, "read_into", fail)
        reading.fill(fills)

    monkeypatch.setattr(installing, "fill", fill)


def test_a_disk_that_fails_when_the_model_is_half_filled(plain, monkeypatch):
    model = Plain()
    failing_in_the_end(monkeypatch, kept=True)
    with untouched_by(UnreadableFile, model, match="the disk is gone"):
        load_into(model, plain)


def test_a_model_too_large_to_be_kept_is_told_to_be_filled_in_part(plain, monkeypatch):
    failing_in_the_end(monkeypatch, kept=False)
    with pytest.raises(
        UnreadableFile,
        match="the model is partly filled, because loading failed: UnreadableFile:",
    ):
        load_into(Plain(), plain)


@pytest.mark.parametrize("kept", [True, False])
def test_a_device_that_fails_in_the_end(plain, monkeypatch, kept):
    def fill(fills):
        reading.fill([*fills][:1])
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(installing, "fill", fill)
    if not kept:
        monkeypatch.setattr(installing, "_MAX_COPIED_BYTES", 0)
    model = Plain()
    untouched = Untouched(model)
    with pytest.raises(RuntimeError if kept else ckptool.CheckpointError) as caught:
        load_into(model, plain)
    if kept:
        untouched.check()
    else:
        assert caught.value.message == (
            "the model is partly filled, because loading failed: RuntimeError: CUDA error: "
            "device-side assert triggered"
        )
        assert caught.value.hint == "load an intact file before you use the model"


def test_a_file_that_is_written_to_meanwhile(plain, monkeypatch):
    model = Plain()
    untouched = Untouched(model)

    def fill(fills):
        reading.fill(fills)
        os.utime(plain, ns=(1, 1))

    monkeypatch.setattr(installing, "fill", fill)
    with pytest.raises(UnreadableFile, match="changed while it was read"):
        load_into(model, plain)
    untouched.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_last_step_waits_for_its_end(plain, monkeypatch, number):
    def fill(fills):
        signal.raise_signal(number)
        reading.fill(fills)

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(installing, "fill", fill)
    before = signal.signal(number, end)
    model = Plain()
    try:
        with pytest.raises(KeyboardInterrupt):
            load_into(model, plain)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    state = torch.load(plain)
    assert all(
        torch.equal(model.state_dict()[name], state[name]) for name in ("conv.weight", "head.bias")
    )


def trained(**options):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_is_put_back_with_its_model(tmp_path, monkeypatch):
    source, theirs = trained()
    ckptool.save(tmp_path / "f.pth", model=source, optimizer=theirs)
    model, optimizer = trained()
    untouched = Untouched(model, optimizer)

    def fill(fills):
        reading.fill(fills)
        raise UnreadableFile("the disk is gone")

    monkeypatch.setattr(installing, "fill", fill)
    with pytest.raises(UnreadableFile):
        load_into(model, tmp_path / "f.pth", optimizer=optimizer)
    untouched.check()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_an_optimizer_that_a_hook_of_the_model_wrote_to_is_put_back(tmp_path, lr):
    source, theirs = trained()
    ckptool.save(tmp_path / "f.pth", model=source, optimizer=theirs)
    model, optimizer = trained(lr=lr)
    untouched = Untouched(model, optimizer)

    def hook(*_):
        if isinstance(lr, float):
            optimizer.param_groups[0]["lr"] = 9
        else:
            lr.fill_(9)
        optimizer.state[model.bias]["exp_avg"] = torch.ones(3)
        optimizer.state.pop(model.weight)
        raise Custom

    model.register_load_state_dict_post_hook(hook)
    with pytest.raises(Custom):
        load_into(model, tmp_path / "f.pth", optimizer=optimizer)
    untouched.check()
