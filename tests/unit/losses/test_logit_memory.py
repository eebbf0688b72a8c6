"""How much memory a loss on logits needs."""

import gc
import sys
import weakref

import pytest
import torch

from silverspoon_kd.losses import jsd_loss, kl_divergence_loss
from support.fresh import run_fresh

# The peak of the whole process is the only honest measure on a CPU, so each run has its own process.
# Not getrusage: its peak outlives the exec, so that a large test process hides what its child does.
PROGRAM = r"""
import json, re, sys
import torch
from silverspoon_kd.losses import get_loss_function
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
name, chunk_size, length, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
loss = get_loss_function(name, chunk_size=chunk_size)
warm = torch.zeros(1, 8, requires_grad=True)
loss(warm, torch.zeros(1, 8)).backward()
student = torch.empty(2, length, 32000, dtype=dtype).uniform_().requires_grad_()
teacher = torch.empty(2, length, 32000, dtype=dtype).uniform_()
before = peak()
loss(student, teacher).backward()
print(json.dumps((peak() - before) / (2 * length * 32000 * 4)))
"""


# By default glibc keeps some of the freed memory for later. The second setting gives all of it back at once.
LIBRARY_DEFAULT = {}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "500000", "MALLOC_TRIM_THRESHOLD_": "500000"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("name", "chunk_size", "length", "dtype", "malloc", "bound"),
    [
        ("kl_divergence", 0, 512, "float32", LIBRARY_DEFAULT, 5.0),
        ("kl_divergence", 0, 512, "float32", GIVE_BACK, 2.1),  # 1 for the gradient, 1/8 for each copy of a block
        ("jsd", 8, 256, "bfloat16", GIVE_BACK, 0.8),  # 1/2 for the gradient, 1/64 for each copy of a block
    ],
)
def test_h_10_peak_in_float32_tensors_of_logits(name, chunk_size, length, dtype, malloc, bound):
    growth = run_fresh(PROGRAM, {"OMP_NUM_THREADS": "1", **malloc}, [name, str(chunk_size), str(length), dtype])
    assert 0.4 < growth < bound


@pytest.mark.parametrize("loss", [kl_divergence_loss(), jsd_loss(chunk_size=2)])
def test_h_10_teacher_logits_are_free_after_the_backward(loss):
    student, teacher = torch.randn(2, 4, 16, requires_grad=True), torch.randn(2, 4, 16)
    alive = weakref.ref(teacher)
    value = loss(student, teacher)
    value.backward()
    del teacher
    gc.collect()
    assert alive() is None
    assert value.isfinite()
