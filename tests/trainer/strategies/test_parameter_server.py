"""A server and its workers: the same numbers as one process, or numbers as old as is allowed."""

import json
import socket

import pytest
import torch
from hypothesis import given, strategies as st

import ckptool
from ckptool.errors import TrainingError
from ckptool.trainer.strategies.parameter_server import InFlight
from tests.forks import ended
from tests.trainer.ranks import started
from tests.trainer.runs import assert_same_run, held, net, run
from tests.trainer.served_cases import EXACT, LIMITS

TIMEOUT = 300


def launched(out, scene, processes):
    """The exit codes of the processes of `served.py`, by rank, and what they said."""
    ranks = started("tests.trainer.served", out, scene, size=processes, said=out / "said")
    return ended(ranks, timeout=TIMEOUT), (out / "said").read_text()


def records(out, rank):
    """What one process was told of each run, the last one of a name."""
    lines = (out / f"rank{rank}.jsonl").read_text().splitlines()
    return {record["case"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    codes, said = launched(folder, "all", 3)
    assert codes == [0, 3, 0], said  # worker 1 is ended by `dies`
    return folder


@pytest.fixture(scope="module")
def server(out):
    return records(out, 0)


@pytest.mark.parametrize("case", [*EXACT, "normed"])
def test_without_staleness_it_is_the_run_of_one_process_to_the_bit(out, case):
    assert_same_run(out / f"{case}-single", out / case)


def test_a_batch_that_is_split_over_the_workers_makes_the_step_of_one_process(out, server):
    one, two = (torch.load(out / case / "last.pth") for case in ("split-single", "split"))
    assert one["step"] == two["step"] == 9
    for name, tensor in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], tensor, rtol=1e-9, atol=1e-12)
    assert server["split"]["staleness"] == [0] * 9
    assert server["split-dropout"]["result"]["step"] == 9


def test_one_worker_is_never_stale_whatever_is_allowed(out, server):
    assert_same_run(out / "all-single", out / "one-worker")
    assert set(server["one-worker"]["staleness"]) == {0}


def test_a_run_with_dropout_goes_on_as_if_it_had_not_been_cut(out):
    assert_same_run(out / "whole", out / "cut")


@pytest.mark.parametrize("case", ["to-single", "from-single"])
def test_a_run_changes_between_one_process_and_a_server(out, case):
    assert_same_run(out / "plain-single", out / case)


def test_asynchronous_training_gets_to_the_synchronous_loss(server):
    synchronous = server["friedman-single"]["val_loss"][-1]
    assert server["friedman"]["val_loss"][-1] == pytest.approx(synchronous, rel=0.05)
    assert max(server["friedman"]["staleness"]) <= max(LIMITS)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_slow_worker_is_waited_for_before_its_gradient_is_too_old(server, limit):
    ages = server[f"slow-{limit}"]["staleness"]
    assert ages[: limit + 1] == [0] * limit + [limit]
    assert max(ages) == limit


def test_a_checkpoint_in_the_middle_has_all_that_was_handed_out(out, server):
    steps = [torch.load(path)["step"] for path in sorted((out / "saving").glob("step-*.pth"))]
    assert steps == [10, 11, 12]
    assert server["saving"]["result"]["step"] == 12


def test_its_checkpoint_loads_into_a_plain_model(out):
    model = net(dropout=0)
    model.load_state_dict(ckptool.load_state_dict(out / "plain" / "last.pth"), strict=True)
    assert held(out / "plain" / "last.pth")["optimizer"]["state"]


def test_all_processes_are_told_of_and_only_the_server_takes_steps(out, server):
    assert server["plain"]["processes"] == [3]
    worker = records(out, 2)["plain"]
    assert worker["result"] == server["plain"]["result"]
    assert worker["staleness"] == []


def test_a_loss_that_is_no_number_stops_all_of_them_at_its_step(out, server):
    assert server["nan"]["error"].startswith("the loss is nan at step ")
    for rank in (1, 2):
        worker = records(out, rank)["nan"]
        assert (worker["error"], worker["hint"]) == (server["nan"]["error"], server["nan"]["hint"])


def test_a_worker_that_raises_is_named(out, server):
    assert server["raises"]["error"] == "worker 1 cannot continue: ValueError: that is no picture"
    assert records(out, 1)["raises"]["error"] == "ValueError('that is no picture')"
    assert records(out, 2)["raises"]["error"] == server["raises"]["error"]


def test_a_worker_without_its_device_says_so_through_the_server(server):
    assert server["no-device"]["error"].startswith(
        "worker 1 cannot continue: cuda:7 is not available"
    )
    assert server["no-device"]["hint"] == "use --device cpu"


def test_after_an_error_the_same_processes_train_again(out):
    assert_same_run(out / "plain-single", out / "after")


def test_a_signal_to_a_worker_ends_the_run_with_a_checkpoint(out, server):
    assert server["signal"]["result"]["stopped"] == 15
    assert torch.load(out / "signal" / "last.pth")["step"] == server["signal"]["result"]["step"]
    assert records(out, 1)["signal"]["result"] == server["signal"]["result"]


def test_a_worker_that_dies_is_named(server):
    assert server["dies"]["error"].startswith(
        "worker 1 cannot continue: the connection was closed ("
    )


def test_workers_end_when_the_server_dies(tmp_path):
    codes, said = launched(tmp_path, "server-dies", 2)
    assert codes == [4, 0], said
    assert records(tmp_path, 1)["dies"]["error"].startswith(
        "the server, rank 0, cannot continue: the connection"
    )


def test_a_process_that_nobody_launched_is_told_what_does(tmp_path):
    with pytest.raises(TrainingError, match="several processes") as raised:
        run(tmp_path, strategy="parameter-server")
    assert "torchrun" in raised.value.hint


def test_a_server_without_a_worker_is_refused(tmp_path, monkeypatch):
    named = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match="at least 2 processes") as raised:
        run(tmp_path, strategy="parameter-server")
    assert "--nproc 3" in raised.value.hint


def test_a_port_that_is_taken_is_one_sentence(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        named = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**named, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TrainingError, match="cannot connect at port") as raised:
            run(tmp_path, strategy="parameter-server")
    assert "\n" not in str(raised.value)
    assert str(port) in str(raised.value)


@given(st.integers(0, 6), st.integers(1, 5), st.data())
def test_no_gradient_is_older_than_the_limit_in_any_order_of_arrival(limit, workers, data):
    in_flight, open_steps, ages = InFlight(limit), [], []
    for number in range(30):
        while not in_flight.has_room or len(open_steps) == workers:
            arrived = data.draw(st.sampled_from(open_steps))
            open_steps.remove(arrived)
            ages.append(in_flight.finish(arrived))
        in_flight.begin(number)
        open_steps.append(number)
    ages += [in_flight.finish(number) for number in open_steps]
    assert max(ages) <= limit
    assert len(ages) == 30 == in_flight.applied
    assert len(in_flight) == 0


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_as_many_as_the_limit_and_one_more_are_in_flight_at_once(limit):
    in_flight = InFlight(limit)
    while in_flight.has_room:
        in_flight.begin(len(in_flight))
    assert len(in_flight) == limit + 1


def test_one_that_does_not_come_back_gets_as_old_as_it_may():
    in_flight = InFlight(3)
    in_flight.begin(0)
    number = 0
    while in_flight.has_room:
        number += 1
        in_flight.begin(number)
        in_flight.finish(number)
    assert in_flight.finish(0) == 3
