"""Runs that several tests compare are made once."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers

from parity import rank_program
from parity.cases import Case, Layout
from parity.runs import Outcome, run
from support.ranks import torchrun


@pytest.fixture(scope="session", autouse=True)
def _quick_and_quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, Layout], Outcome]:
    """The outcome of a case in this process."""
    done: dict[tuple[str, str], Outcome] = {}

    def outcome(case: Case, layout: Layout) -> Outcome:
        key = (case.name, layout.name)
        if key not in done:
            done[key] = run(case, layout, tmp_path_factory.mktemp("single"))
        return done[key]

    return outcome


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, Layout], list[Outcome]]:
    """The outcomes of a case on two ranks; all cases run in one torchrun."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torchrun(Path(rank_program.__file__), [folder], log=folder / "log.txt", timeout=110, fork=True)

    def outcomes(case: Case, layout: Layout) -> list[Outcome]:
        return [rank_program.read(folder, case, layout, rank) for rank in range(layout.ranks)]

    return outcomes
