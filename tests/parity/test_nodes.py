"""Two nodes on one machine: each has a teacher of its own, and the numbers are those of one process."""

import socket
import time
from pathlib import Path

import pytest

from parity import node_runs
from parity.cases import MOVED
from parity.matrix_runs import WHOLE_TABLE
from parity.node_runs import NODES, PER_NODE, RUNS
from parity.placement_runs import SLOTS, run_reference
from parity.runs import identical, relative
from support.ranks import marked, started

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not WHOLE_TABLE, reason="`make test-extended` runs it"),
]

RANKS = range(NODES * PER_NODE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks of both nodes have written; they are over by now, and nothing of them is left."""
    folder: Path = tmp_path_factory.mktemp("nodes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [f"--nnodes={NODES}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    options = {"num_ranks": PER_NODE, "variables": {"SILVERSPOON_CPU_SLOTS": str(SLOTS)}}
    logs, program = [folder / f"node{node}.log" for node in range(NODES)], Path(node_runs.__file__)
    with (
        started(program, [folder], log=logs[0], rendezvous=[*common, "--node_rank=0"], **options) as (one, first),
        started(program, [folder], log=logs[1], rendezvous=[*common, "--node_rank=1"], **options) as (other, second),
    ):
        deadline = time.monotonic() + 220
        while None in (one.poll(), other.poll()) and time.monotonic() < deadline:
            time.sleep(0.1)
        said = "\n".join(log.read_text()[-4000:] for log in logs)
        assert (one.returncode, other.returncode) == (1, 1), said
        assert all(node_runs.error(folder, rank) for rank in (PER_NODE, PER_NODE + 1)), said
        assert [*marked(first), *marked(second)] == []
    return folder


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_losses_and_weights_are_those_of_one_process(run, folder, tmp_path):
    expected, outcomes = run_reference(run, tmp_path), [node_runs.read(folder, run, rank) for rank in RANKS]
    assert relative(expected.after, expected.before) > MOVED
    for outcome in outcomes:
        assert identical(outcome.placed.after, outcomes[0].placed.after) == []
        assert relative(outcome.placed.after, expected.after) < 1e-6
        for found, wanted in zip(outcome.placed.losses, expected.losses, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_first_rank_of_each_node_has_a_teacher_world(run, folder):
    for rank in RANKS:
        outcome = node_runs.read(folder, run, rank)
        assert outcome.local_rank == rank % PER_NODE
        assert outcome.num_teacher_processes == (run.devices if rank % PER_NODE == 0 else 0)
        assert (outcome.plan["num_nodes"], outcome.plan["num_teacher_copies"]) == (NODES, NODES)
        assert outcome.plan["teacher_devices"] == list(range(SLOTS - run.devices, SLOTS))


def test_a_node_without_its_teacher_ends_the_other_too(folder):
    errors = [node_runs.error(folder, rank) for rank in RANKS]
    assert all("TeacherError: The teacher process" in told for told in errors[PER_NODE:])
    assert all("was killed by signal 9" in told for told in errors[PER_NODE:])
    # The first node's ranks lose the others in a collective; their own teacher is well.
    assert any(errors[:PER_NODE]) and not any("TeacherError" in told for told in errors[:PER_NODE])
