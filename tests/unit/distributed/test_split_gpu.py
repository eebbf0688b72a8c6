"""setup_split_gpu: the order it writes, what it refuses, and that it may be called again."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.distributed.split_gpu import split_devices
from silverspoon_kd.distributed.visible_devices import DEVICE_FAMILIES, VisibleDevices
from support.fresh import environment, fake_nvidia_smi, run_fresh, split

CUDA = "CUDA_VISIBLE_DEVICES"
MACHINE_OF_4 = [f"GPU-{index:04}" for index in range(4)]


@pytest.mark.parametrize(
    ("teacher", "written", "result"),
    [
        ([0, 1], "2,3,0,1", ([2, 3], [2, 3])),
        ([3], "0,1,2,3", ([0, 1, 2], [3])),
        ([1, 0], "2,3,1,0", ([2, 3], [2, 3])),
    ],
)
def test_a_01_variable_unset(tmp_path, teacher, written, result):
    done = split(teacher, fake_nvidia_smi(tmp_path, MACHINE_OF_4))
    assert done.changed == {CUDA: written, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert done.result == result


TORCH_PROGRAM = """
import json, os
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from silverspoon_kd.distributed.split_gpu import require_split_done
import torch

def attempt(action):
    before = dict(os.environ)
    try:
        return {"result": action()}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"errors": kinds, "message": str(error), "unchanged": before == dict(os.environ)}

wanted, other = TeacherPlacement([0, 1]), TeacherPlacement([2])
report = {"no_call": attempt(lambda: require_split_done(wanted))}
really = torch.cuda.is_initialized
torch.cuda.is_initialized = lambda: True
report["late"] = attempt(lambda: setup_split_gpu(wanted))
torch.cuda.is_initialized = really
report["in_time"], report["list"] = attempt(lambda: setup_split_gpu(wanted)), os.environ["CUDA_VISIBLE_DEVICES"]
torch.cuda.is_initialized = lambda: True
report["again"], report["other"] = attempt(lambda: setup_split_gpu(wanted)), attempt(lambda: setup_split_gpu(other))
torch.cuda.is_initialized = really
report["gpus"] = torch.cuda.is_available()
report["done"] = attempt(lambda: require_split_done(wanted).teacher_indices)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def with_torch():
    return run_fresh(TORCH_PROGRAM, {CUDA: "0,1,2,3"})


def test_a_03_torch_imported_but_no_device_used(with_torch):
    assert with_torch["in_time"] == {"result": [[2, 3], [2, 3]]}
    assert with_torch["list"] == "2,3,0,1"


def test_a_03_device_already_used(with_torch):
    for refused in (with_torch["late"], with_torch["other"]):
        assert {"RuntimeError", "PlacementError"} <= set(refused["errors"])
        assert "came too late" in refused["message"] and "before 'import torch'" in refused["message"]
        assert refused["unchanged"]


def test_a_03_a_split_that_was_made_in_time_may_be_asked_again(with_torch):
    assert with_torch["again"] == with_torch["in_time"]


def test_a_27_helper_never_called_with_torch(with_torch):
    refused = with_torch["no_call"]
    assert "ValueError" in refused["errors"] and "setup_split_gpu(placement)" in refused["message"]
    assert ("torch finds no GPU" in refused["message"]) is not with_torch["gpus"]


def test_a_27_helper_called_on_a_machine_without_gpus(with_torch):
    if with_torch["gpus"]:
        assert with_torch["done"] == {"result": [2, 3]}
    else:
        assert "RuntimeError" in with_torch["done"]["errors"]
        assert "torch finds no GPU" in with_torch["done"]["message"]


def test_a_04_subset_from_the_scheduler(tmp_path):
    done = split([4, 5], {CUDA: "4,5,6,7", **fake_nvidia_smi(tmp_path, [f"GPU-{index}" for index in range(8)])})
    assert (done.after[CUDA], done.result) == ("6,7,4,5", ([6, 7], [2, 3]))
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("text", "teacher", "bad"), [("4,5,6,7", [0], 0), ("2,3", [2, 5], 5)])
def test_a_05_teacher_id_not_visible(text, teacher, bad):
    done = split(teacher, {CUDA: text})
    assert done.refused and f"device {bad} is not among" in done.message and text in done.message


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_06_order_of_the_list_is_kept(seed):
    done = split([2], {CUDA: "3,1,2,0", "PYTHONHASHSEED": seed})
    assert (done.after[CUDA], done.result) == ("3,1,0,2", ([3, 1, 0], [3]))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_15_ranks_do_not_matter(rank):
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    done = split([0, 1], {CUDA: "0,1,2,3", **ranks})
    assert (done.after[CUDA], done.result) == ("2,3,0,1", ([2, 3], [2, 3]))


GATHER_PROGRAM = """
import json, os, sys
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
answer = setup_split_gpu(TeacherPlacement([0, 1]))
import torch.distributed as dist
dist.init_process_group("gloo")
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, [answer, os.environ["CUDA_VISIBLE_DEVICES"]])
if dist.get_rank() == 0:
    json.dump(everyone, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
def test_a_15_same_answer_in_every_torchrun_rank(tmp_path):
    script, answers = tmp_path / "train.py", tmp_path / "answers.json"
    script.write_text(GATHER_PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    variables = environment({CUDA: "0,1,2,3", "OMP_NUM_THREADS": "1"})
    done = subprocess.run([*launcher, script, answers], env=variables, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(answers.read_text()) == [[[[2, 3], [2, 3]], "2,3,0,1"]] * 2


@pytest.mark.parametrize(
    ("text", "teacher", "words"),
    [
        ("0,1", [0, 1], "leaves none for the student"),
        ("0,1", [], "leaves the teacher without a device"),
        ("2", [2], "sees only one cuda device"),
    ],
)
def test_a_16_an_empty_side(text, teacher, words):
    done = split(teacher, {CUDA: text})
    assert done.refused and words in done.message


def test_a_16_default_placement():
    report = run_fresh(AGAIN_PROGRAM, {CUDA: "0,1"}, ["[{}]"])
    assert "leaves the teacher without a device" in report[0]


@pytest.mark.parametrize("ids", ["0,1", [True], [-1], [1.0], ["0"], None])
def test_a_17_bad_teacher_ids_leave_the_environment(ids):
    assert split(ids, {CUDA: "0,1,2,3"}).refused


@pytest.mark.parametrize("teacher", [0, 2])
def test_a_21_one_device_per_rank(teacher):
    done = split([teacher], {CUDA: "2", "LOCAL_RANK": "2"})
    assert done.refused and "this process sees only one cuda device (CUDA_VISIBLE_DEVICES=2)" in done.message


# Calls the helper for each placement in turn; an item that is an object with "set" changes the environment instead.
AGAIN_PROGRAM = """
import json, os, sys
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
answers = []
for item in json.loads(sys.argv[1]):
    if "set" in item:
        os.environ.update(item["set"])
        continue
    try:
        answers.append([*setup_split_gpu(TeacherPlacement(**item)), os.environ.get("CUDA_VISIBLE_DEVICES")])
    except ValueError as error:
        answers.append(str(error))
if len(sys.argv) > 2:
    import subprocess
    subprocess.run([sys.executable, "-c", sys.argv[2], *sys.argv[3:]], check=True)
else:
    print(json.dumps(answers))
"""


def test_a_28_the_launchers_list_is_respected():
    launcher = "import os, subprocess, sys; os.environ['CUDA_VISIBLE_DEVICES'] = '1,3'; "
    launcher += "subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    child = [AGAIN_PROGRAM, json.dumps([{"teacher_only_devices": [3]}])]
    assert run_fresh(launcher, {}, child) == [[[1], [1], "1,3"]]


def test_a_28_a_list_that_was_changed_after_the_split_is_read_again():
    calls = [{"teacher_only_devices": [3]}, {"set": {CUDA: "3,2"}}, {"teacher_only_devices": [3]}]
    calls += [{"set": {CUDA: "0,1"}}, {"teacher_only_devices": [3]}]
    first, second, third = run_fresh(AGAIN_PROGRAM, {CUDA: "0,1,2,3"}, [json.dumps(calls)])
    assert first == [[0, 1, 2], [3], "0,1,2,3"]
    assert second == [[2], [1], "2,3"]
    assert "device 3 is not among the visible cuda devices 0,1" in third


@pytest.mark.parametrize("strategy", ["pp", "sharded"])
def test_called_again_gives_the_same_answer(tmp_path, strategy):
    placement = {"teacher_only_devices": [1, 0]}
    wanted = [[2, 3], [2, 3], "2,3,1,0"]
    machine = fake_nvidia_smi(tmp_path, MACHINE_OF_4)
    calls = json.dumps([placement, placement, {**placement, "strategy": strategy}])
    assert run_fresh(AGAIN_PROGRAM, machine, [calls]) == [wanted] * 3
    # In a child that has the environment of its parent, the devices are not even looked up.
    (tmp_path / "calls").unlink()
    assert run_fresh(AGAIN_PROGRAM, machine, [calls, AGAIN_PROGRAM, calls]) == [wanted] * 3
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_called_again_with_uuids_needs_no_nvidia_smi(tmp_path):
    machine = fake_nvidia_smi(tmp_path, ["GPU-aaaa", "GPU-bbbb"])
    placement = json.dumps([{"teacher_only_devices": [0]}])
    remove = "import os, subprocess, sys; os.environ['PATH'] = ''; "
    remove += "subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    answer = run_fresh(
        AGAIN_PROGRAM, {CUDA: "GPU-aaaa,GPU-bbbb", **machine}, [placement, remove, AGAIN_PROGRAM, placement]
    )
    assert answer == [[[1], [1], "GPU-bbbb,GPU-aaaa"]]


def test_called_for_another_placement():
    calls = [{"teacher_only_devices": [0]}, {"teacher_only_devices": [3, 2]}, {"teacher_only_devices": [0]}]
    answers = run_fresh(AGAIN_PROGRAM, {CUDA: "0,1,2,3"}, [json.dumps(calls)])
    assert answers[1] == [[1, 0], [2, 3], "1,0,3,2"]
    assert answers[0][1] == answers[2][1] == [3]


def test_a_foreign_record_is_ignored():
    for text in ("nonsense", "[]", "{}", "3"):
        done = split([0], {CUDA: "0,1", "SILVERSPOON_KD_SPLIT": text})
        assert done.result == ([1], [1])


def test_cpu_slots():
    done = split([0, 1], {"SILVERSPOON_CPU_SLOTS": "4", CUDA: "7,8"}, device_type="cpu")
    assert done.result == ([2, 3], [2, 3])
    assert done.changed == {}

    done = split([4], {"SILVERSPOON_CPU_SLOTS": "4"}, device_type="cpu")
    assert done.refused and "device 4 is not among the visible cpu devices 0,1,2,3" in done.message
    done = split([0], {"SILVERSPOON_CPU_SLOTS": "1"}, device_type="cpu")
    assert done.refused and "Set SILVERSPOON_CPU_SLOTS" in done.message


def test_cpu_slots_stay_as_they_were_in_a_pinned_child():
    pin = "import os, subprocess, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    pin += "subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    call = json.dumps([{"teacher_only_devices": [0], "device_type": "cpu"}])
    slots = {"SILVERSPOON_CPU_SLOTS": "3"}
    assert run_fresh(AGAIN_PROGRAM, slots, [call, pin, AGAIN_PROGRAM, call]) == [[[1, 2], [2], None]]
    calls = json.dumps([json.loads(call)[0], {"set": {"SILVERSPOON_CPU_SLOTS": "2"}}, json.loads(call)[0]])
    assert run_fresh(AGAIN_PROGRAM, slots, [calls]) == [[[1, 2], [2], None], [[1], [1], None]]


@pytest.mark.parametrize("value", ["sharded", None, "pp", 3, {"teacher_only_devices": []}])
def test_only_a_placement_can_be_split(value):
    code = "import json, sys; from silverspoon_kd.distributed import setup_split_gpu\n"
    code += "try: setup_split_gpu(json.loads(sys.argv[1]))\nexcept ValueError as error: print(json.dumps(str(error)))"
    assert run_fresh(code, {CUDA: "0,1"}, [json.dumps(value)])


def test_ids_that_were_changed_after_construction_are_checked():
    code = (
        "import json; from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu\n"
        "placement = TeacherPlacement([0]); placement.teacher_only_devices.append('1')\n"
        "try: setup_split_gpu(placement)\nexcept ValueError as error: print(json.dumps(str(error)))"
    )
    assert "contains '1'" in run_fresh(code, {CUDA: "0,1,2"})


CHECK_PROGRAM = """
import json, os, sys
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from silverspoon_kd.distributed.split_gpu import check_student_processes, require_split_done
answers = []
for step in json.loads(sys.argv[1]):
    placement = TeacherPlacement(**step.get("placement", {"teacher_only_devices": [0, 1]}))
    os.environ.update(step.get("set", {}))
    try:
        if step.get("setup"):
            setup_split_gpu(placement)
        elif "processes" in step:
            answers.append(check_student_processes(placement, step["processes"]))
        elif "set" not in step:
            answers.append(require_split_done(placement).teacher_indices)
    except ValueError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def check(*steps, variables):
    return run_fresh(CHECK_PROGRAM, variables, [json.dumps(steps)])


def test_a_26_more_ranks_than_student_devices():
    steps = [{"setup": True}, *({"processes": number} for number in (1, 2, 3, 4))]
    ranks = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    one, two, three, four = check(*steps, variables={CUDA: "0,1,2,3", **ranks})
    assert one is None and two is None
    for number, text in ((3, three), (4, four)):
        assert text.startswith(f"PlacementError: {number} processes were started on this node")
        assert "at most 2 processes on this node" in text and "--nproc_per_node=2" in text


def test_a_26_processes_on_cpu_slots():
    placement = {"teacher_only_devices": [0], "device_type": "cpu"}
    steps = [{"setup": True}, {"processes": 2}, {"processes": 3}]
    fits, too_many = check(*({**s, "placement": placement} for s in steps), variables={"SILVERSPOON_CPU_SLOTS": "3"})
    assert fits is None
    assert "at most 2 processes" in too_many and "SILVERSPOON_CPU_SLOTS" in too_many


def test_a_27_helper_never_called():
    for step in ({}, {"processes": 1}):
        (text,) = check(step, variables={CUDA: "0,1,2,3"})
        assert text.startswith("PlacementError") and "which was not called in this process" in text
        assert "Call it at the top of the script, before 'import torch'" in text


def test_a_27_helper_called_for_something_else():
    other = {"placement": {"teacher_only_devices": [2]}}
    slots = {"placement": {"teacher_only_devices": [0, 1], "device_type": "cpu"}}
    strategy = {"placement": {"teacher_only_devices": [0, 1], "strategy": "tp"}}
    changed = {"set": {CUDA: "0,1,2,3"}}
    answers = check({"setup": True}, {}, strategy, other, slots, changed, {}, variables={CUDA: "0,1,2,3"})
    assert answers[:2] == [[2, 3], [2, 3]]
    assert "it was called for cuda devices [0, 1]" in answers[2]
    assert "it was called for cuda devices [0, 1]" in answers[3]
    assert "CUDA_VISIBLE_DEVICES was '2,3,0,1' after it and is '0,1,2,3' now" in answers[4]


@given(st.data())
def test_a_split_is_a_reordering_and_stable(data):
    ids = data.draw(st.lists(st.integers(0, 15), min_size=2, max_size=8, unique=True))
    teacher = data.draw(st.permutations(ids))[: data.draw(st.integers(1, len(ids) - 1))]
    placement, family = TeacherPlacement(teacher), DEVICE_FAMILIES["cuda"]
    done = split_devices(placement, VisibleDevices(family, tuple(ids), tuple(map(str, ids)), (CUDA,)))
    order = [*done.student_ids, *done.teacher_ids]
    assert sorted(order) == sorted(ids)
    assert [device for device in ids if device in done.student_ids] == list(done.student_ids)
    assert [order[index] for index in done.teacher_indices] == teacher
    assert split_devices(placement, VisibleDevices(family, tuple(order), tuple(map(str, order)), (CUDA,))) == done
