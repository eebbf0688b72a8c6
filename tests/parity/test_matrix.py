"""However the student is trained and wherever the teacher lives: the losses and weights are those of one process.

By default a covering set of rows runs, in which every pair of values meets; ``make parity`` runs the whole table.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import accelerate
import pytest
import torch
import transformers

from parity import matrix_runs
from parity.cases import MOVED
from parity.matrix_runs import COVER, SLOTS, STEPS, TABLE, WHOLE_TABLE, Found, Row, run_reference
from parity.runs import identical, relative
from support.ranks import started

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PATIENCE = 110  # seconds for one row
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp": "FSDPStudentRoot"}  # and DeepSpeedEngine
ROWS = TABLE if WHOLE_TABLE else COVER
HEAD = """# Conformance

Written by `make parity` with {versions}; do not edit.

Two student ranks; a dedicated teacher has two devices. The student is narrower than the teacher, so there are
projectors; rows are ragged, two batches are accumulated, the alignments have learning rates and limits for the
gradient norm of their own. Each row is compared with one process that gets the same rows: the largest relative
difference of the logged numbers (losses, gradient norms, learning rates, in all steps) and of the trained weights, and
that of a run that was saved and resumed in the middle from one without a break. On CPU, in fp32.

The last column is the same question put to the GKDTrainer of trl {trl}, which has response-based distillation with a
teacher on every rank: the difference of its weights after four steps on two ranks from those of its own one process,
with its defaults (`benchmarks/gkd.py`). With DDP the first loss that it logs is {first:.2f} of the one in that process.

| distiller | student | wrapped as | teacher | logged numbers | weights | resumed | GKDTrainer, weights |
|---|---|---|---|---|---|---|---|"""
LOGGED = ("loss", "grad_norm", "learning_rate")
CONFORMANCE = Path(__file__).parents[2] / "docs" / "guide" / "conformance.md"
GKD = Path(__file__).parents[2] / "benchmarks" / "gkd.json"


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
                Path(matrix_runs.__file__),
                [folder, row.mode, *names],
                log=log,
                num_ranks=2,
                variables=variables,
                fork=True,
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
    done: dict[tuple[str, float], Found] = {}

    def outcome(row: Row) -> Found:
        key = (row.distiller, row.alpha)
        if key not in done:
            done[key] = run_reference(row, tmp_path_factory.mktemp("reference"))
        return done[key]

    return outcome


@pytest.fixture(scope="module")
def figures() -> Iterator[list[tuple[Row, str, float, float, float]]]:
    """The figures of each row; those of the whole table are written down."""
    rows: list[tuple[Row, str, float, float, float]] = []
    yield rows
    if len(rows) == len(TABLE):
        CONFORMANCE.write_text(conformance(rows))


def test_e_06_blockwise_with_a_sharded_teacher_and_a_sharded_student_is_among_them():
    assert Row("blockwise", "fsdp", "sharded") in ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_losses_norms_and_weights_are_those_of_one_process(row, on_ranks, reference, figures):
    expected, outcomes = reference(row), on_ranks(row)
    figures.append((row, outcomes[0].wrapped, *differences(outcomes[0], expected)))
    assert relative(expected.after, expected.before) > MOVED
    for outcome in outcomes:
        assert outcome.wrapped == WRAPPERS.get(row.mode, "DeepSpeedEngine")
        assert bool(outcome.shares) == (row.mode in ("fsdp", "zero3"))
        assert outcome.teacher_unchanged is not False
        assert identical(outcome.after, outcomes[0].after) == []
        assert identical(outcome.before, expected.before) == []
        assert relative(outcome.after, expected.after) < row.exact
        assert not row.resumes or relative(outcome.resumed, outcome.after) < 1e-7
        assert len(outcome.logs) == STEPS
        for found, wanted in zip(outcome.logs, expected.logs, strict=True):
            numbers = {key: value for key, value in wanted.items() if key.startswith(LOGGED)}
            assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=2 * row.exact)


def differences(found: Found, expected: Found) -> tuple[float, float, float]:
    """The largest relative differences of logged numbers, of weights, and of a resumed run's weights from the run's."""
    logs = max(
        abs(one[key] - other[key]) / abs(other[key])
        for one, other in zip(found.logs, expected.logs, strict=True)
        for key in other
        if key.startswith(LOGGED) and other[key]
    )
    resumed = relative(found.resumed, found.after) if found.resumed else math.nan
    return logs, relative(found.after, expected.after), resumed


def conformance(rows: list[tuple[Row, str, float, float, float]]) -> str:
    """The page with the figures."""
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    gkd = json.loads(GKD.read_text())
    lines = [
        HEAD.format(
            versions=f"{versions}, accelerate {accelerate.__version__}",
            trl=gkd["trl"],
            first=gkd["modes"]["ddp"]["first loss"],
        )
    ]
    for row, wrapped, *numbers in rows:
        cells = (row.distiller, row.mode, wrapped, row.placement, *(f"{number:.0e}" for number in numbers))
        lines.append("| " + " | ".join((*cells, _of_gkd(gkd["modes"][row.mode], row))) + " |")
    return "\n".join(lines) + "\n"


def _of_gkd(found: dict, row: Row) -> str:
    if row.distiller != "response" or row.placement != "replicated":
        return ""
    if "refused" in found:
        return found["refused"]
    # accelerate makes DDP of FSDP on CPU without saying so.
    return f"{found['weights']:.0e}" + (f" ({found['wrapped']})" if row.mode == "fsdp" else "")
