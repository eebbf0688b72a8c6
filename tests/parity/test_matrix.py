"""However the student is trained and wherever the teacher lives: the losses and weights are those of one process.

By default a covering set of rows runs, in which every pair of values meets; ``make parity`` runs the whole table.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from parity import matrix_runs
from parity.cases import MOVED
from parity.matrix_runs import COVER, SLOTS, STEPS, TABLE, Found, Row, run_reference
from parity.runs import identical, relative
from support.ranks import started

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PATIENCE = 110  # seconds for one row
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp": "FSDPStudentRoot"}
ROWS = TABLE if os.environ.get("SILVERSPOON_PARITY") == "all" else COVER


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Row], list[Found]]]:
    """The outcomes of a row on both ranks; the rows of a mode are made one after the other in one go."""
    folder: Path = tmp_path_factory.mktemp("matrix")
    launchers = {}

    def outcomes(row: Row) -> list[Found]:
        log = folder / f"{row.mode}.log"
        if row.mode not in launchers:
            names = [other.name for other in ROWS if other.mode == row.mode]
            variables = {"SILVERSPOON_CPU_SLOTS": str(SLOTS), "DS_ACCELERATOR": "cpu"}
            context = started(
                Path(matrix_runs.__file__), [folder, row.mode, *names], log=log, num_ranks=2, variables=variables
            )
            launchers[row.mode], _ = stack.enter_context(context)
        deadline = time.monotonic() + PATIENCE
        while launchers[row.mode].poll() is None and not matrix_runs.finished(folder, row):
            assert time.monotonic() < deadline, f"{row.name} takes too long:\n{log.read_text()[-6000:]}"
            time.sleep(0.1)
        assert matrix_runs.finished(folder, row), f"{row.name} failed:\n{log.read_text()[-6000:]}"
        return matrix_runs.read(folder, row)

    with ExitStack() as stack:
        yield outcomes


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Found]:
    """The outcome in this process."""
    done: dict[str, Found] = {}

    def outcome(row: Row) -> Found:
        if row.distiller not in done:
            done[row.distiller] = run_reference(row, tmp_path_factory.mktemp("reference"))
        return done[row.distiller]

    return outcome


def test_e_06_blockwise_with_a_sharded_teacher_and_a_sharded_student_is_among_them():
    assert Row("blockwise", "fsdp", "sharded") in ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_losses_norms_and_weights_are_those_of_one_process(row, on_ranks, reference):
    expected, outcomes = reference(row), on_ranks(row)
    assert relative(expected.after, expected.before) > MOVED
    for outcome in outcomes:
        assert outcome.wrapped == WRAPPERS[row.mode]
        assert bool(outcome.shares) == (row.mode in ("fsdp", "zero3"))
        assert outcome.teacher_unchanged is not False
        assert identical(outcome.after, outcomes[0].after) == []
        assert identical(outcome.before, expected.before) == []
        assert relative(outcome.after, expected.after) < row.exact
        assert relative(outcome.resumed, outcome.after) < 1e-7
        assert len(outcome.logs) == STEPS
        for found, wanted in zip(outcome.logs, expected.logs, strict=True):
            numbers = {key: value for key, value in wanted.items() if key.startswith(("loss", "grad_norm", "learning"))}
            assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=2 * row.exact)
