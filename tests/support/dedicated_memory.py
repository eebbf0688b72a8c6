"""Measure the memory of all processes of a training: ``dedicated_memory.py FOLDER TEACHER TINY``, on ranks.

Three trainings follow each other: with the model in TINY as the teacher, with that in TEACHER by its path, and with
that as a module. Proportional set sizes, so that pages that several processes share count once in their sum; and what
is anonymous, which neither a file nor other processes stand behind.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu

FOLDER, TEACHER, TINY = map(Path, sys.argv[1:4])
placement = TeacherPlacement([5], device_type="cpu")
setup_split_gpu(placement)

import gc  # noqa: E402

import psutil  # noqa: E402
import transformers  # noqa: E402
from torch import distributed  # noqa: E402
from transformers import Qwen3ForCausalLM, TrainerCallback  # noqa: E402

from silverspoon_kd import ResponseBasedDistiller, TrainingArguments  # noqa: E402
from support.ranks import MARK, marked  # noqa: E402
from support.tiny import Rows, collate, qwen3  # noqa: E402

transformers.logging.set_verbosity_error()
RANK = int(os.environ["RANK"])


def sizes() -> dict[str, int]:
    """The proportional set sizes of students and of teacher processes, and the anonymous memory of all of them."""
    found = {"student": 0, "teacher": 0, "anonymous": 0}
    for process in marked(os.environ[MARK]):
        with suppress(psutil.Error, OSError):
            kind = "teacher" if "silverspoon_kd.teacher.world.process" in process.cmdline() else "student"
            rows = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
            values = {row.split(":")[0]: 1024 * int(row.split()[1]) for row in rows}
            found[kind] += values["Pss"]
            found["anonymous"] += values["Pss_Anon"]
    return found


class Measure(TrainerCallback):
    """Measure in the third step, when all ranks are there."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 3:
            return
        gc.collect()
        barrier()
        if RANK == 0:
            self.found = sizes()
        barrier()


def barrier():
    if distributed.is_initialized():
        distributed.barrier()


def measure(source):
    """Train, and return the sizes in the third step and the largest sums until then."""
    peak, done = [0, 0], threading.Event()

    def watch():
        while not done.wait(0.1):
            now = sizes()
            peak[:] = max(peak[0], now["student"] + now["teacher"]), max(peak[1], now["anonymous"])

    if RANK == 0:
        threading.Thread(target=watch, daemon=True).start()
    args = TrainingArguments(
        output_dir=str(FOLDER / "output"), max_steps=4, per_device_train_batch_size=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, teacher_placement=placement,
    )  # fmt: skip
    callback = Measure()
    distiller = ResponseBasedDistiller(
        qwen3(1, layers=2), source, args=args, train_dataset=Rows(), data_collator=collate, callbacks=[callback]
    )
    distiller.train()
    done.set()
    barrier()
    distiller._executor.close()
    return {**callback.found, "peak": peak[0], "anonymous": peak[1]} if RANK == 0 else {}


report = {"tiny": measure(str(TINY)), "folder": measure(str(TEACHER))}
gc.collect()
report["module"] = measure(Qwen3ForCausalLM.from_pretrained(TEACHER))
if RANK == 0:
    (FOLDER / "report.json").write_text(json.dumps(report))
