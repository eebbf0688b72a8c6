"""The plan answers every combination: what will run, or the one sentence that refuses it."""

import itertools
import json
from dataclasses import FrozenInstanceError

import pytest

from silverspoon_kd.distributed import Plan, TeacherPlacement, resolve_plan
from silverspoon_kd.distributed.plan import STUDENT_MODES, DeviceMemory, resolve_distiller
from silverspoon_kd.distributed.split_gpu import Split
from silverspoon_kd.errors import ConfigurationError, PlacementError

KINDS = ("blockwise", "holistic", "response_based")
STRATEGIES = ("pp", "tp", "sharded")
PLACEMENTS = ("replicated", "sharded", *(TeacherPlacement([0, 1], strategy) for strategy in STRATEGIES))
SPLIT = Split("cuda", student_ids=(2, 3), teacher_ids=(0, 1))
MEMORY = (
    DeviceMemory("cuda:2", (("weights", 3 << 30), ("gathered", 0), ("forward", 5 << 19), ("signals", 100)), 8 << 30),
    DeviceMemory("each rank", (("student's weights", 1536), ("forward", None))),
)
MATRIX = list(itertools.product(KINDS, PLACEMENTS, STUDENT_MODES, (1, 2, 3, 4), (1, 2), (None, True, False), (0, 1, 3)))


def can_run(placement, mode, ranks, nodes):
    """Two teacher and two student devices on every node."""
    if (mode == "single" and ranks > 1) or (mode == "fsdp" and ranks == 1) or ranks < nodes:
        return False
    if placement == "sharded":
        return ranks > 1
    return placement == "replicated" or (ranks % nodes == 0 and ranks // nodes <= 2)


def test_every_combination_has_a_plan_or_one_sentence():
    seen = set()
    for kind, placement, mode, ranks, nodes, overlap, lookahead in MATRIX:
        plan = resolve_plan(
            distiller=kind,
            placement=placement,
            student_mode=mode,
            num_student_ranks=ranks,
            num_nodes=nodes,
            split=SPLIT,
            overlap=overlap,
            lookahead=lookahead,
        )
        case = (kind, placement, mode, ranks, nodes, overlap, lookahead)
        dedicated = isinstance(placement, TeacherPlacement)
        runs = can_run(placement, mode, ranks, nodes)
        assert (plan.refusal is None) is runs, case
        if not runs:
            assert plan.refusal.endswith(".") and ". " not in plan.refusal and "\n" not in plan.refusal, plan.refusal
        assert (plan.distiller, plan.student_mode) == (kind, mode)
        assert (plan.num_student_ranks, plan.num_nodes) == (ranks, nodes)
        assert plan.teacher == (f"dedicated-{placement.strategy}" if dedicated else placement)
        assert plan.teacher_devices == ((2, 3) if dedicated else ())
        assert plan.num_teacher_copies == {"replicated": ranks, "sharded": 1}.get(plan.teacher, nodes)
        assert plan.num_teacher_processes == {"dedicated-pp": 1, "dedicated-tp": 2, "dedicated-sharded": 2}.get(
            plan.teacher, 0
        )
        assert plan.overlap is (dedicated if overlap is None else overlap), case
        assert plan.lookahead == (lookahead if plan.overlap else 0)
        assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
        assert plan.table()
        known = plan.with_memory(MEMORY)
        assert known.memory == MEMORY and plan.memory == ()
        assert (known.refusal, known.notes, known.overlap) == (plan.refusal, plan.notes, plan.overlap)
        assert json.loads(json.dumps(known.to_dict())) == known.to_dict()
        assert [line.split() for line in plan.table().splitlines()] == [
            line.split() for line in known.table().splitlines() if not line.startswith("memory")
        ]
        seen.add((kind, plan.teacher, mode, plan.overlap) if runs else None)
    assert len(seen - {None}) == len(KINDS) * (5 * len(STUDENT_MODES) - 1) * 2  # a sharded teacher needs two ranks


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [(None, False), ("replicated", False), ("sharded", False), (TeacherPlacement([0, 1]), True)],
)
def test_e_16_overlap_by_default(placement, wanted):
    plan = resolve_plan(
        distiller="hkd", placement=placement, student_mode="ddp", num_student_ranks=2, split=SPLIT, lookahead=2
    )
    assert plan.refusal is None
    assert (plan.overlap, plan.lookahead) == (wanted, 2 if wanted else 0)


def test_e_16_overlap_on_cpu():
    assert not resolve_plan(distiller="hkd", student_device_type="cpu").overlap
    # Slots of their own are other devices.
    slots, split = TeacherPlacement([0], device_type="cpu"), Split("cpu", (1,), (0,))
    assert resolve_plan(distiller="hkd", placement=slots, split=split, student_device_type="cpu").overlap


def test_e_16_forced_overlap_with_a_sharded_teacher_is_noted():
    common = {"distiller": "hkd", "placement": "sharded", "student_mode": "ddp", "num_student_ranks": 2}
    plan = resolve_plan(**common, overlap=True)
    assert plan.overlap and plan.refusal is None
    assert len(plan.notes) == 1 and "communicate at the same time" in plan.notes[0]
    assert resolve_plan(**common).notes == resolve_plan(**common, overlap=False).notes == ()


def test_e_17_sharded_needs_two_ranks():
    plan = resolve_plan(distiller="holistic", placement="sharded")
    assert plan.refusal.startswith("teacher_placement='sharded' needs at least two ranks, but this process is alone")
    assert "torchrun --nproc_per_node=2" in plan.refusal
    with pytest.raises(PlacementError, match="needs at least two ranks"):
        plan.require_runnable()
    resolve_plan(distiller="holistic").require_runnable()


@pytest.mark.parametrize("overlap", ["yes", 1, 0, "True"])
def test_j_05_overlap_is_a_choice_of_three(overlap):
    with pytest.raises(ConfigurationError, match="Give None, True or False"):
        resolve_plan(distiller="holistic", overlap=overlap)


@pytest.mark.parametrize(
    "values",
    [
        {"lookahead": -1},
        {"lookahead": True},
        {"lookahead": 1.0},
        {"num_student_ranks": 0},
        {"num_nodes": 0},
        {"student_mode": "fdsp"},
        {"placement": "shard"},
        {"distiller": "holist"},
    ],
    ids=str,
)
def test_values_that_are_none(values):
    with pytest.raises(ValueError, match=r"Did you mean|Give a whole number"):
        resolve_plan(**{"distiller": "holistic", **values})


def test_distiller_names():
    names = ("blockwise", "bkd", "holistic", "hkd", "response_based", "reskd")
    assert [resolve_distiller(name) for name in names] == [kind for kind in KINDS for _ in range(2)]
    with pytest.raises(ConfigurationError, match="is unknown. Did you mean 'response_based'"):
        resolve_distiller("response-based")
    with pytest.raises(ConfigurationError):
        resolve_distiller(None)


def dedicated(placement, split, **values):
    return resolve_plan(distiller="holistic", placement=placement, split=split, **values).refusal


def test_a_26_more_ranks_than_student_devices():
    placement = TeacherPlacement([0, 1])
    refusal = dedicated(placement, SPLIT, student_mode="ddp", num_student_ranks=4)
    assert refusal.startswith("4 student ranks per node") and "at most 2 processes on this node" in refusal
    assert dedicated(placement, SPLIT, student_mode="ddp", num_student_ranks=4, num_nodes=2) is None


def test_a_27_dedicated_devices_without_a_split():
    placement = TeacherPlacement([0, 1])
    assert "setup_split_gpu(placement) at the top of the script" in dedicated(placement, None)
    assert "was called for cuda devices [0, 1]" in dedicated(TeacherPlacement([1, 0]), SPLIT)
    assert "was called for cuda devices [0, 1]" in dedicated(TeacherPlacement([0, 1], device_type="cpu"), SPLIT)
    refusal = dedicated(placement, SPLIT, student_device_type="cpu")
    assert "are cuda devices, but the student trains on cpu" in refusal and "device_type='cpu'" in refusal
    assert dedicated(placement, SPLIT, student_device_type="cuda") is None


def test_idle_student_devices_are_noted():
    common = {"distiller": "holistic", "placement": TeacherPlacement([0, 1]), "split": SPLIT}
    assert resolve_plan(**common, student_mode="ddp", num_student_ranks=2).notes == ()
    (note,) = resolve_plan(**common).notes
    assert note.startswith("1 of the 2 student devices of a node stay idle") and "--nproc_per_node=2" in note


def test_table():
    plan = resolve_plan(
        distiller="bkd",
        placement={"teacher_only_devices": [0, 1], "strategy": "sharded"},
        student_mode="fsdp",
        num_student_ranks=6,
        num_nodes=2,
        split=SPLIT,
        lookahead=2,
    )
    lines = plan.table().splitlines()
    assert lines[:-1] == [
        "distiller        blockwise",
        "teacher          dedicated-sharded, 2 copies",
        "teacher devices  cuda:2 cuda:3 of each node, 2 processes",
        "student          fsdp, 6 ranks on 2 nodes",
        "overlap          on, lookahead 2",
    ]
    assert lines[-1].startswith("refused          3 student ranks per node do not fit")
    assert resolve_plan(distiller="bkd").table().splitlines() == [
        "distiller  blockwise",
        "teacher    replicated, 1 copy",
        "student    single, 1 rank on 1 node",
        "overlap    off",
    ]


def test_memory_in_the_table():
    plan = resolve_plan(distiller="bkd").with_memory(MEMORY)
    assert str(plan).splitlines() == [
        "distiller         blockwise",
        "teacher           replicated, 1 copy",
        "student           single, 1 rank on 1 node",
        "overlap           off",
        "memory cuda:2     3.00 GiB: weights 3.00 GiB, forward 2.50 MiB, signals 100 B",
        "memory each rank  at least 1.50 KiB: student's weights 1.50 KiB, forward not known",
    ]
    assert plan.to_dict()["memory"][1] == {
        "place": "each rank",
        "total": 1536,
        "parts": {"student's weights": 1536, "forward": None},
        "capacity": None,
    }
    assert resolve_plan(distiller="bkd").to_dict()["memory"] == []


def test_a_device_that_has_less_than_it_will_need_is_noted():
    parts = (("weights", 5 << 30), ("forward", 1 << 30))
    fits = [DeviceMemory("cuda:0", parts, size) for size in (6 << 30, None)]
    assert resolve_plan(distiller="bkd").with_memory(fits).notes == ()
    (note,) = resolve_plan(distiller="bkd").with_memory([*fits, DeviceMemory("cuda:1", parts, (6 << 30) - 1)]).notes
    assert note.startswith("cuda:1 will need 6.00 GiB, but has 6.00 GiB; most of it is weights")
    assert note.endswith(".") and "\n" not in note and ". " not in note


def test_plan_is_frozen_and_comparable():
    plan = resolve_plan(distiller="holistic")
    assert isinstance(plan, Plan) and plan == resolve_plan(distiller="hkd", placement="replicated", overlap=False)
    assert hash(plan) == hash(resolve_plan(distiller="hkd"))
    with pytest.raises(FrozenInstanceError):
        plan.overlap = True
