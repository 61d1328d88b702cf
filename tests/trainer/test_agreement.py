"""Every strategy takes the steps that one process takes, to rounding."""

import json

import pytest

from tests.forks import ended, start
from tests.trainer.agreeing import KINDS, losses
from tests.trainer.ranks import by_ranks, free_port, needs_gloo

pytestmark = needs_gloo
TABLE = [("dp", None), *(("ddp", one) for one in ("two", "three", "nodes"))]
"""Others are held against one process in `strategies/`."""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return {kind: losses(folder, kind, "single") for kind in KINDS}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return by_ranks("tests.trainer.agreeing", tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return by_ranks("tests.trainer.agreeing", tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two agents of torchrun, which meet on loopback as two machines would; a process each."""
    folder, port = tmp_path_factory.mktemp("nodes"), free_port()
    said = folder / "said"
    agents = [
        start(
            *("torch.distributed.run", "--nnodes", 2, "--node-rank", number),
            *("--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port),
            *("-m", "tests.trainer.node", folder),
            environment={},
            said=said,
        )
        for number in range(2)
    ]
    assert ended(agents, timeout=300) == [0, 0], said.read_text()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "processes"), TABLE)
def test_losses_are_those_of_one_process(request, tmp_path, single, strategy, processes, kind):
    if processes is None:
        told = losses(tmp_path, kind, strategy)
    else:
        ranks = request.getfixturevalue(processes)
        told, *others = (rank["ddp"][kind] for rank in ranks)
        assert all(other == told for other in others)
    assert len(told) > 20
    assert told == pytest.approx(single[kind], rel=1e-6, abs=0)


def test_two_nodes_of_one_process_are_one_node_of_two(two, nodes):
    assert nodes[0] == two[0]
