"""Wherever the teacher lives, the losses and weights are those of one process with the teacher in it."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from parity import placement_runs
from parity.cases import MOVED
from parity.placement_runs import RUNS, SLOTS, Placed, PlacedRun, run_reference
from parity.runs import identical, relative
from support.ranks import started

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PATIENCE = 110  # seconds for one run, of which the start of up to three teacher processes takes most


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[PlacedRun], list[Placed]]]:
    """The outcomes of a run on all its ranks; those of one number of ranks are made one after the other in one go."""
    folder: Path = tmp_path_factory.mktemp("placed")
    launchers = {}

    def outcomes(run: PlacedRun) -> list[Placed]:
        log = folder / f"ranks-{run.ranks}.log"
        if run.ranks not in launchers:
            program = Path(placement_runs.__file__)
            slots = {"SILVERSPOON_CPU_SLOTS": str(SLOTS)}
            context = started(program, [folder], log=log, num_ranks=run.ranks, variables=slots, fork=True)
            launchers[run.ranks], _ = stack.enter_context(context)
        deadline = time.monotonic() + PATIENCE
        while launchers[run.ranks].poll() is None and not placement_runs.finished(folder, run):
            assert time.monotonic() < deadline, f"{run.name} takes too long:\n{log.read_text()[-6000:]}"
            time.sleep(0.1)
        assert placement_runs.finished(folder, run), f"{run.name} failed:\n{log.read_text()[-6000:]}"
        return placement_runs.read(folder, run)

    with ExitStack() as stack:
        yield outcomes


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PlacedRun], Placed]:
    """The outcome in this process."""
    done: dict[tuple[str, int, bool, bool], Placed] = {}

    def outcome(run: PlacedRun) -> Placed:
        key = (run.distiller, run.ranks, run.devices == 3, run.lens)
        if key not in done:
            done[key] = run_reference(run, tmp_path_factory.mktemp("reference"))
        return done[key]

    return outcome


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_losses_and_weights_are_those_of_one_process(run, placed, reference):
    expected, outcomes = reference(run), placed(run)
    exact = 1e-5 if run.placement == "tp" else 1e-6
    assert relative(expected.after, expected.before) > MOVED
    assert all(identical(outcome.after, outcomes[0].after) == [] for outcome in outcomes)
    for outcome in outcomes:
        assert identical(outcome.before, expected.before) == []
        assert relative(outcome.after, expected.after) < exact
        assert len(outcome.losses) == placement_runs.STEPS
        for found, wanted in zip(outcome.losses, expected.losses, strict=True):
            assert found == pytest.approx(wanted, rel=exact)
