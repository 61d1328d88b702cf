"""Steps that processes take together, and models that `fully_shard` spreads over them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptool.errors import CheckpointWarning, MatchError, NotFound, WriteError
from ckptool.loading.load_into import load_into
from ckptool.loading.ranks import Ranks, distribute_like, find_ranks, is_dtensor


@pytest.fixture
def answers(monkeypatch):
    """What the other process, rank 1, gives in each step; an error: it does not."""
    given = []

    def all_gather(box, own, group=None):
        answer = given.pop(0)
        if isinstance(answer, Exception):
            raise answer
        box[:] = [own, answer if isinstance(answer, tuple) else ("it", answer)]

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather)
    return given


def pair():
    return Ranks([None], error=WriteError, undone="nothing is done", call="it")


def alone():
    return Ranks([], error=WriteError, undone="nothing is done", call="it")


def test_a_process_alone_asks_nobody():
    ranks = alone()
    assert (ranks.rank, ranks.collect(3), ranks.run_on_first(lambda: 4)) == (0, [3], 4)
    with pytest.raises(KeyError), ranks.raise_on_all_ranks():
        raise KeyError


def test_a_process_alone_agrees_with_itself():
    together = find_ranks(nn.Linear(2, 2))
    assert together.collect(3) == [3]
    with pytest.raises(KeyError), together.raise_on_all_ranks():
        raise KeyError


def test_a_failure_elsewhere_is_raised_here_with_its_rank(answers):
    answers += [{1: "KeyError: 'x'"}, {1: NotFound("no a", hint="b")}]
    text = "nothing is done, because rank 1 failed: KeyError: 'x'"
    with pytest.raises(WriteError, match=text), pair().raise_on_all_ranks():
        pass
    text = "half is done, because rank 1 failed: no a"
    with pytest.raises(NotFound, match=text) as caught, pair().raise_on_all_ranks("half is done"):
        pass
    assert caught.value.hint == "b"


def test_the_failure_here_is_told_even_where_nobody_hears_it(answers):
    answers += [{}, RuntimeError("Connection closed by peer")]
    for _ in range(2):
        with pytest.raises(MatchError, match="own"), pair().raise_on_all_ranks():
            raise MatchError("own")
    assert not answers


def test_who_does_not_answer_is_an_error_of_ours(answers):
    answers.append(RuntimeError("[tcp] Timed out\nmore"))
    with pytest.raises(WriteError) as caught, pair().raise_on_all_ranks():
        pass
    assert str(caught.value) == (
        "nothing is done, because another rank did not answer rank 0: [tcp] Timed out"
    )
    assert caught.value.hint == "call it on every rank"


def test_what_the_first_has_done_is_handed_on(answers):
    answers += [{}, None]
    assert pair().run_on_first(lambda: "receipt") == "receipt"


@pytest.mark.parametrize("before", [[], [{}]])
def test_what_is_done_is_done_though_nobody_hears_of_it(answers, before):
    answers += [*before, RuntimeError("Connection closed by peer")]
    with pytest.warns(CheckpointWarning, match="it succeeded, but another rank did not"):
        assert pair().run_on_first(lambda: "receipt") == "receipt"


def test_what_fails_elsewhere_after_it_is_raised(answers):
    answers += [{1: "KeyboardInterrupt"}]
    with pytest.raises(
        WriteError, match="nothing is done, because rank 1 failed: KeyboardInterrupt"
    ):
        pair().run_on_first(lambda: "receipt")


def test_a_process_that_calls_something_else_is_told_of(answers):
    answers += [("that", {}), ("that", {}, 3)]
    with pytest.raises(WriteError) as caught, pair().raise_on_all_ranks():
        pass
    assert str(caught.value) == "nothing is done, because rank 1 is in that, but rank 0 in it"
    assert caught.value.hint == "call it on every rank"
    with pytest.raises(
        WriteError, match="nothing is done, because rank 1 is in something else, but rank 0 in it"
    ):
        pair().collect(3)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def sharded(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_loaded(model, source):
    wanted = source.state_dict()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if is_dtensor(tensor) else tensor
        assert torch.equal(whole, wanted[name]), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_rank_takes_its_part_of_a_whole_file(tmp_path, device):
    source = net()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "f.pth")
    with torch.device(device):
        model = net()
    model = sharded(model)
    assert load_into(model, tmp_path / "f.pth").coverage == 1.0
    assert all(map(is_dtensor, model.parameters()))
    assert_loaded(model, source)


def test_parts_are_put_back(tmp_path):
    model = sharded(net())
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]

    def fail(*_):
        raise ZeroDivisionError

    model[2].register_load_state_dict_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        load_into(model, net().state_dict())
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))


def test_what_is_not_spread_stays_as_it_is():
    value = torch.ones(2)
    assert distribute_like(torch.zeros(2), value) is value
    spread = sharded(net())[0].bias
    assert not is_dtensor(value)
    assert distribute_like(spread, spread) is spread
