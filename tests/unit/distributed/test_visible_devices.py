"""Reading the visible list: its forms, its variables, and what nvidia-smi is asked."""

import os
import shutil

import pytest

from silverspoon_kd.distributed.visible_devices import DEVICE_FAMILIES, read_visible_devices
from silverspoon_kd.errors import PlacementError
from support.fresh import broken_nvidia_smi, fake_nvidia_smi, no_nvidia_smi, split

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]
MACHINE_OF_4 = [f"GPU-{index:04}" for index in range(4)]


@pytest.mark.parametrize("text", [" 0, 1 ,2,3", "0,1,2,3,", "00,01,02,03", "0,1,2,3, ,"])
def test_a_07_lenient_lists(text):
    done = split([0, 1], {CUDA: text})
    assert done.result == ([2, 3], [2, 3])
    assert done.after[CUDA] == "2,3,0,1"


def test_a_07_minus_one_ends_the_list():
    done = split([0], {CUDA: "0,1,-1,2"})
    assert (done.result, done.after[CUDA]) == (([1], [1]), "1,0")


@pytest.mark.parametrize("text", ["0,,1", "0,x,1", "0,1.0", "0 1", "none"])
def test_a_07_nonsense_is_refused(text):
    done = split([0], {CUDA: text})
    assert done.refused and "List all devices by their integer ids" in done.message


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles", "  ", "-1,0,1"])
def test_a_08_empty_lists_mean_no_gpu(tmp_path, text):
    done = split([0], {CUDA: text, **fake_nvidia_smi(tmp_path, MACHINE_OF_4)})
    assert done.refused and "makes no GPU visible" in done.message
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("text", ["0,1,1,2", "0,1,01,2", "GPU-aaaa,GPU-bbbb,GPU-aaaa"])
def test_a_10_repeated_entries(text):
    done = split([0], {CUDA: text})
    assert done.refused and "more than once" in done.message


def test_a_11_uuids_without_nvidia_smi(tmp_path):
    done = split([0], {CUDA: ",".join(UUIDS), **no_nvidia_smi(tmp_path)})
    assert done.refused and "UUID" in done.message and "List the integer ids" in done.message
    assert "invalid literal" not in done.message


@pytest.mark.parametrize(
    ("text", "teacher", "written", "result"),
    [
        ("GPU-aaaa,GPU-bbbb,GPU-cccc", [0], "GPU-bbbb,GPU-cccc,GPU-aaaa", ([1, 2], [2])),
        ("GPU-cccc, GPU-aaaa", [0], "GPU-cccc,GPU-aaaa", ([2], [1])),
        ("GPU-a,GPU-b,GPU-c", [2, 0], "GPU-b,GPU-c,GPU-a", ([1], [1, 2])),
    ],
)
def test_a_11_uuids_keep_their_form(tmp_path, text, teacher, written, result):
    done = split(teacher, {CUDA: text, **fake_nvidia_smi(tmp_path, UUIDS)})
    assert (done.after[CUDA], done.result) == (written, result)


@pytest.mark.parametrize(
    ("text", "machine", "words"),
    [
        ("GPU-aaaa,GPU-dddd", UUIDS, "GPU-dddd stands for 0 GPUs"),
        ("GPU-aa,GPU-bbbb", ["GPU-aa11", "GPU-aa22", "GPU-bbbb"], "GPU-aa stands for 2 GPUs"),
        ("GPU-aaaa,GPU-aa", UUIDS, "another entry"),
    ],
)
def test_a_11_uuids_that_name_no_single_gpu(tmp_path, text, machine, words):
    done = split([0], {CUDA: text, **fake_nvidia_smi(tmp_path, machine)})
    assert done.refused and words in done.message


@pytest.mark.parametrize("text", ["GPU-aaaa,1,2", "1,GPU-aaaa,2"])
def test_a_12_uuid_and_integer_mixed(tmp_path, text):
    done = split([1], {CUDA: text, **fake_nvidia_smi(tmp_path, UUIDS)})
    assert done.refused and "not a list of whole devices in one form" in done.message


@pytest.mark.parametrize("teacher", [0, 1])
@pytest.mark.parametrize("text", ["MIG-1111,MIG-2222", "MIG-1111", "0,MIG-GPU-1111/0/0"])
def test_a_13_mig_instances(text, teacher):
    done = split([teacher], {CUDA: text})
    assert done.refused and "Split-GPU is not possible with MIG" in done.message


def test_a_18_nvidia_smi_does_not_widen_the_list(tmp_path):
    machine = fake_nvidia_smi(tmp_path, [f"GPU-{index}" for index in range(8)])
    done = split([0], {CUDA: "0,1,2,3", **machine})
    assert (done.after[CUDA], done.result) == ("1,2,3,0", ([1, 2, 3], [3]))
    assert not (tmp_path / "calls").exists()

    done = split([0], machine)
    assert (done.after[CUDA], done.result) == ("1,2,3,4,5,6,7,0", ([1, 2, 3, 4, 5, 6, 7], [7]))
    assert (tmp_path / "calls").read_text().splitlines() == ["--query-gpu=index --format=csv,noheader"]


@pytest.mark.parametrize("fields", [{}, {"device_type": "cuda"}])
def test_a_19_no_nvidia_smi(tmp_path, fields):
    done = split([0], no_nvidia_smi(tmp_path), **fields)
    assert done.refused and "RuntimeError" in done.errors and "PlacementError" in done.errors
    for words in ("GPU count is unknown", "nvidia-smi cannot be run", "Set CUDA_VISIBLE_DEVICES", 'device_type="cpu"'):
        assert words in done.message


def test_a_19_no_nvidia_smi_but_a_list(tmp_path):
    done = split([0, 1], {CUDA: "0,1,2,3", **no_nvidia_smi(tmp_path)})
    assert done.result == ([2, 3], [2, 3])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'no running driver' >&2; exit 9", "exit code 9 and said 'no running driver'"),
        ("echo 'No devices were found'", "said 'No devices were found'"),
        ("exit 0", "said 'nothing'"),
        ("echo 0; echo oops", "said '0 oops'"),
    ],
)
def test_a_19_failing_nvidia_smi(tmp_path, script, words):
    done = split([0], broken_nvidia_smi(tmp_path, script))
    assert done.refused and "RuntimeError" in done.errors
    assert "GPU count is unknown" in done.message and words in done.message


def test_a_19_hanging_nvidia_smi(tmp_path):
    done = split([0], broken_nvidia_smi(tmp_path, f"exec {shutil.which('sleep')} 60"))
    assert done.refused and "RuntimeError" in done.errors and "did not answer" in done.message
    assert done.seconds < 15


@pytest.mark.parametrize("order", [None, "", "PCI_BUS_ID"])
def test_a_20_device_order_of_nvidia_smi(order):
    variables = {CUDA: "0,1,2,3"} if order is None else {CUDA: "0,1,2,3", "CUDA_DEVICE_ORDER": order}
    done = split([0], variables)
    assert done.after["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert done.result == ([1, 2, 3], [3])


def test_a_20_other_device_order(tmp_path):
    done = split([0], {CUDA: "0,1,2,3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert done.refused and "CUDA_DEVICE_ORDER=FASTEST_FIRST" in done.message

    # A UUID is the same GPU in every order.
    variables = {CUDA: "GPU-aaaa,GPU-bbbb", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", **fake_nvidia_smi(tmp_path, UUIDS)}
    assert split([0], variables).changed == {CUDA: "GPU-bbbb,GPU-aaaa"}


def test_a_20_order_is_left_alone_on_errors():
    assert split([9], {CUDA: "0,1,2,3"}).refused


def test_a_22_containers_renumber(tmp_path):
    pod = {"NVIDIA_VISIBLE_DEVICES": "4,5", **fake_nvidia_smi(tmp_path, UUIDS[:2])}
    done = split([0], pod)
    assert done.result == ([1], [1])
    assert done.changed == {CUDA: "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert split([4], pod).refused


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        ({HIP: "0,1,2,3"}, {HIP: "1,2,3,0"}),
        ({HIP: "0,1,2,3", CUDA: "0, 1,2,3"}, {HIP: "1,2,3,0", CUDA: "1,2,3,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ({ROCR: "4,5,6,7"}, {HIP: "1,2,3,0"}),
        ({ROCR: "4,5,6,7", HIP: "0,1,2,3"}, {HIP: "1,2,3,0"}),
    ],
)
def test_a_23_rocm_lists(variables, changed):
    done = split([0], variables)
    assert done.changed == changed
    assert done.result == ([1, 2, 3], [3])


def test_a_23_rocr_list_beside_a_cuda_list():
    # Some schedulers set both on machines where only one of them is read.
    done = split([4], {ROCR: "4,5,6,7", CUDA: "4,5,6,7"})
    assert done.result == ([5, 6, 7], [3])
    assert done.changed == {CUDA: "5,6,7,4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({HIP: "0,1,2,3", CUDA: "0,1,3,2"}, "differ"),
        ({HIP: "4,5,6,7", ROCR: "4,5,6,7"}, "has only 4 devices numbered from 0"),
        ({ROCR: ""}, "makes no GPU visible"),
        ({HIP: "-1"}, "makes no GPU visible"),
    ],
)
def test_a_23_rocm_lists_that_do_not_fit(variables, words):
    done = split([0], variables)
    assert done.refused and words in done.message


@pytest.mark.parametrize(
    ("device_type", "variable"), [("npu", "ASCEND_RT_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")]
)
def test_a_24_ascend_and_intel(device_type, variable):
    done = split([0], {variable: "0,1", CUDA: "0,1"}, device_type=device_type)
    assert done.refused and "ascending" in done.message and "Use teacher_only_devices=[1]" in done.message

    done = split([3, 1], {variable: "0,3,1"}, device_type=device_type)
    assert done.refused and "Use teacher_only_devices=[1, 3]" in done.message

    done = split([1, 3], {variable: "3,0,1", CUDA: "0,1"}, device_type=device_type)
    assert done.result == ([0], [1, 2])
    assert done.changed == {variable: "0,1,3"}

    done = split([0], {CUDA: "0,1"}, device_type=device_type)
    assert done.refused and f"Set {variable}" in done.message


def test_a_24_tiles_and_unknown_types():
    done = split([0], {"ZE_AFFINITY_MASK": "0.0,0.1"}, device_type="xpu")
    assert done.refused and "whole devices" in done.message
    done = split([0], {CUDA: "0,1"}, device_type="tpu")
    assert done.refused and "'tpu' is not supported" in done.message
    done = split([0], {CUDA: "0,1"}, device_type="CUDA")
    assert done.result == ([1], [1]) and done.after[CUDA] == "1,0"


def test_cpu_slots_follow_the_usable_cores():
    family = DEVICE_FAMILIES["cpu"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    visible = read_visible_devices(family, {CUDA: "4,5"})
    assert visible.ids == tuple(range(cores)) and visible.variables == ()
    assert read_visible_devices(family, {"SILVERSPOON_CPU_SLOTS": " 5 "}).ids == (0, 1, 2, 3, 4)
    for text in ("0", "-2", "many", "", "2.5"):
        with pytest.raises(PlacementError, match="is not a number of CPU slots"):
            read_visible_devices(family, {"SILVERSPOON_CPU_SLOTS": text})


def test_cpu_slots_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert read_visible_devices(DEVICE_FAMILIES["cpu"], {}).ids == (0, 1, 2)
