"""Whatever ends a training whose teacher has processes of its own: one clear error, and nothing is left behind."""

import os
import re
import signal

import pytest

from parity.matrix_runs import WHOLE_TABLE
from support.trainings import STARTED, training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

QUICKLY = 10  # seconds


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "devices", "ranks"), [("pp", 1, 0), ("tp", 2, 2), *([("sharded", 2, 2)] if WHOLE_TABLE else [])]
)
def test_a_killed_teacher_process_ends_every_rank_with_its_state(tmp_path, strategy, devices, ranks):
    with training(tmp_path, ranks, strategy=strategy, devices=devices, trouble="hang") as run:
        victim = run.hanging()
        assert len(run.teachers()) == devices
        victim.kill()
        assert run.ends(QUICKLY) == 1
    for rank in range(max(ranks, 1)):
        run.told(
            rank, rf"TeacherError: The teacher process {devices - 1} \(pid {victim.pid}\) was killed by signal 9\."
        )


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1] if WHOLE_TABLE else [0])  # the teacher's processes are the first's children
def test_a_killed_student_rank_leaves_no_teacher_process(tmp_path, rank):
    with training(tmp_path, 2, strategy="sharded", devices=2, trouble="hang", workers=2) as run:
        run.hanging()
        assert len(run.teachers()) == 2
        run.student(rank).kill()
        assert run.ends(QUICKLY) != 0


@pytest.mark.parametrize(
    ("strategy", "devices", "ranks"), [("sharded", 2, 2), *([("pp", 1, 0), ("pp", 1, 2)] if WHOLE_TABLE else [])]
)
def test_an_error_in_the_teachers_forward_arrives_as_itself(tmp_path, strategy, devices, ranks):
    with training(tmp_path, ranks, strategy=strategy, devices=devices, trouble="raise") as run:
        assert run.ends(STARTED) == 1
    for rank in range(max(ranks, 1)):
        run.told(
            rank,
            r"LookupError: the teacher does not know this word \(In the teacher's forward; its batch was "
            r"(input_ids|attention_mask) \[2, 12\], (input_ids|attention_mask) \[2, 12\]\.\)\n"
            r"TeacherError: The teacher process's own traceback:(.|\n)*, in forward\nLookupError",
        )


def test_a_teacher_that_cannot_be_loaded_is_one_error_on_each_rank_before_training(tmp_path):
    with training(tmp_path, 2, strategy="pp", source=str(tmp_path / "nothing")) as run:
        assert run.ends(STARTED) == 1
    assert len(run.errors()) == 2
    for error in run.errors():
        assert re.match(r"TeacherError: The teacher '.*nothing' cannot be loaded", error)
    assert "'loss'" not in run.output()


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_leaves_nothing(tmp_path, ranks):
    with training(tmp_path, ranks, strategy="sharded", devices=2, trouble="hang") as run:
        run.hanging()
        os.killpg(run.launcher.pid, signal.SIGINT)
        assert run.ends(QUICKLY) != 0
        assert not run.errors()
        assert ranks or run.leftovers() == []


@pytest.mark.alone
def test_a_teacher_that_hangs_is_reported_in_time(tmp_path):
    with training(tmp_path, trouble="hang", timeout=3.0) as run:
        run.hanging()
        assert run.ends(3 + QUICKLY) == 1
    assert re.match("TeacherError: The teacher did not answer within 3 s.*teacher_timeout", run.errors()[0])


def test_a_student_may_be_busy_for_longer_than_the_teacher_may(tmp_path):
    with training(tmp_path, strategy="sharded", devices=2, timeout=5.0, pause=7.0) as run:
        assert run.ends(STARTED + 7) == 0, run.output()


def test_trainings_at_the_same_time_end_by_themselves_and_leave_nothing(tmp_path):
    """Two of the script's own teachers, one as a module and one as a callable."""
    with (
        training(tmp_path / "one", strategy="sharded", devices=2, source="module") as one,
        training(tmp_path / "two", strategy="pp", source="callable", workers=1) as two,
    ):
        one.until(lambda: len(one.teachers()) == 2, STARTED)
        for run in (one, two):
            run.alive()
            assert run.ends(STARTED) == 0, run.output()
            assert run.leftovers() == []
    assert len(one.losses()[0]) == 4
    assert one.losses()[0] == pytest.approx(two.losses()[0], rel=1e-4)
