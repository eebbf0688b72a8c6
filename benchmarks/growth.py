"""How time and memory of a step grow with one size at a time: ``python benchmarks/growth.py``.

Each size has its own process and one thread, one size after the other in each of several rounds; the figures are
medians over the rounds. Beside a figure stands what a straight line says: time over the multiplications that the step
needs (formulas below), memory over the size itself, on top of the chunk of logits that a step holds at a time (it stops
growing at a fixed size). Qwen3 models in float32, SGD.

    length      one row, response-based KL, teacher 6 layers of 256, student 4 of 128, vocabulary 8192
    vocabulary  256 tokens, else the same
    alignments  holistic, 48 layers of 64 on both sides; the last layers are always aligned, so both models run whole
    ranks       student ranks beside one dedicated teacher of 1376 MiB; memory of all processes together
    lookahead   steps of 16 rows that a dedicated teacher of 6 layers of 128 may be ahead of a student of 8; memory of
                the student's process
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))
PLOTS = _HERE.parent / "growth"

AXES = {
    "length": (128, 256, 512, 1024, 2048, 4096),
    "vocabulary": (8192, 16384, 32768, 65536, 131072, 262144),
    "alignments": (1, 3, 6, 12, 24, 48),
    "ranks": (1, 2, 4),
    "lookahead": (0, 1, 2, 3, 6),
}
# A dedicated teacher needs a second core, on which it would disturb a measured time.
UNTIMED = ("ranks", "lookahead")
TEACHER, STUDENT, VOCABULARY, TOKENS, DEEP, STEPS = (256, 6), (128, 4), 8192, 256, 48, 4


def main() -> None:
    """Run all rounds, print the tables and draw the curves, or (with --value) one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--axis", choices=AXES, nargs="+", default=list(AXES))
    parser.add_argument("--value", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.value is not None:
        found = _measure(options.axis[0], options.value)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    for axis in options.axis:
        _grow(axis, options.rounds)


def _grow(axis: str, rounds: int) -> None:
    found: dict[int, list[dict[str, float]]] = {value: [] for value in AXES[axis]}
    for _ in range(rounds):
        for value in found:
            found[value].append(_start(axis, value))
    values = list(found)
    peaks = [statistics.median(run["peak"] for run in found[value]) for value in values]
    print(f"\n{axis:<12}{'peak MiB':>10}{'/ line':>8}", end="")
    columns = {"peak MiB": (peaks, _line(values, peaks, [_chunk(axis, value) for value in values]))}
    work = [_work(axis, value) for value in values]
    if axis not in UNTIMED:
        times = [statistics.median(run["cpu"] for run in found[value]) for value in values]
        columns["CPU ms"] = (times, _line(work, times, [0.0] * len(work)))
        print(f"{'CPU ms':>10}{'/ line':>8}{'multiplications':>18}", end="")
    print()
    for index, value in enumerate(values):
        print(f"{value:<12}", end="")
        for measured, line in columns.values():
            print(f"{measured[index]:>10.0f}{measured[index] / line[index]:>8.2f}", end="")
        print("" if axis in UNTIMED else f"{work[index]:>18.2e}", flush=True)
    _draw(axis, values, columns)


def _line(over: list[float], measured: list[float], known: list[float]) -> list[float]:
    """Return what is known plus a straight line, by least squares of the relative distance from what was measured."""
    import numpy as np

    slope, start = np.polyfit(over, np.array(measured) - known, 1, w=1 / np.array(measured))
    return [start + slope * each + above for each, above in zip(over, known, strict=True)]


def _chunk(axis: str, value: int) -> float:
    """Return the MiB of logits, of both models, that a response-based step holds at a time."""
    from silverspoon_kd.losses.fused import DEFAULT_CHUNK_BYTES

    sizes = {"length": (value, VOCABULARY), "vocabulary": (TOKENS, value)}
    tokens, vocabulary = sizes.get(axis, (0, 0))
    return min(DEFAULT_CHUNK_BYTES, 2 * 4 * tokens * vocabulary) / 2**20


def _work(axis: str, value: int) -> float:
    """Return the multiplications of a step: forward of the teacher, forward and backward (twice that) of the student.

    A layer of width d has 4 d^2 weights in its attention and 9 d^2 behind it; causal attention multiplies L d twice for
    every token, half of it masked.
    """
    if axis not in ("length", "vocabulary"):
        # The work of both models does not change: only the terms grow, and each adds the same.
        return float(value)
    length = value if axis == "length" else TOKENS
    vocabulary = value if axis == "vocabulary" else VOCABULARY
    total = 0.0
    for (width, layers), passes in ((TEACHER, 1), (STUDENT, 3)):
        total += passes * length * (layers * (13 * width**2 + length * width) + vocabulary * width)
    return total


def _draw(axis: str, values: list[int], columns: dict[str, tuple[list[float], list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    figure, axes = pyplot.subplots(1, len(columns), figsize=(4.5 * len(columns), 3), squeeze=False)
    for plot, (name, (measured, line)) in zip(axes[0], columns.items(), strict=True):
        plot.plot(values, line, color="0.6", label="line")
        plot.plot(values, measured, "o", color="tab:blue", label="measured")
        if axis in ("length", "vocabulary"):
            plot.set_xscale("log", base=2)
            plot.set_yscale("log")
        else:
            plot.set_ylim(bottom=0)
        plot.set_xlabel(axis)
        plot.set_ylabel(name)
        plot.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PLOTS / f"{axis}.png", dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _start(axis: str, value: int) -> dict[str, float]:
    command = [sys.executable]
    if axis == "ranks":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={value}"]
    command += [str(_HERE), "--axis", axis, "--value", str(value)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SILVERSPOON_CPU_SLOTS": str(max(AXES["ranks"]) + 1)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(axis: str, value: int) -> dict[str, float]:
    """Return CPU milliseconds of a step, and MiB of memory above what models and torch take (ranks: of everything)."""
    placement = None
    if axis in UNTIMED:
        from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu

        placement = TeacherPlacement([max(AXES["ranks"])], "pp", device_type="cpu")
        setup_split_gpu(placement)
    import torch
    import transformers

    from silverspoon_kd.host_memory import return_freed_memory

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    times: list[float] = []
    totals: list[float] = [0.0]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **kwargs: Any) -> None:
            times.append(time.process_time())
            if axis == "ranks" and os.environ["RANK"] == "0":
                totals.append(_of_all_processes())

    with tempfile.TemporaryDirectory() as folder:
        distiller = _distiller(axis, value, folder, placement)
        distiller.add_callback(Clock())
        return_freed_memory()  # what making the models has left free must not count as there
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _peak()
        distiller.train()
    peak = max(totals) if axis == "ranks" else _peak() - before
    gaps = [1000 * (second - first) for first, second in pairwise(times)]
    return {"cpu": statistics.median(gaps), "peak": peak}


def _distiller(axis: str, value: int, folder: str, placement: Any) -> Any:
    import torch

    from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, TrainingArguments, create_alignments

    length, vocabulary, rows = (TOKENS, VOCABULARY, 1)
    sizes = {"teacher": TEACHER, "student": STUDENT}
    if axis == "length":
        length = value
    elif axis == "vocabulary":
        vocabulary = value
    elif axis == "alignments":
        sizes = {"teacher": (64, DEEP), "student": (64, DEEP)}
    elif axis == "ranks":
        length, sizes["teacher"] = 32, (2048, 6)
    else:
        # A teacher that is much faster than the student, so that it is as far ahead as it may be.
        rows, sizes = 16, {"teacher": (128, 6), "student": (128, 8)}
    teacher, student = (_model(*size, vocabulary, seed) for seed, size in enumerate(sizes.values()))
    ids = torch.randint(1, 1000, (8 * rows * (1 + STEPS), length), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=(8 if axis == "lookahead" else STEPS) + 1,
        per_device_train_batch_size=rows,
        optim="sgd",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        teacher_placement=placement,
        **({"teacher_lookahead": value} if axis == "lookahead" else {}),
    )
    common = {
        "args": args,
        "train_dataset": [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids],
    }
    if axis in ("length", "vocabulary", "ranks"):
        return ResponseBasedDistiller(student, teacher, **common)
    depth = sizes["teacher"][1]
    count = value if axis == "alignments" else depth
    far = sorted({depth - 1 - round(step * depth / count) for step in range(count)})
    names = {rf"model\.layers\.{each}": f"model.layers.{each + sizes['student'][1] - depth}" for each in far}
    alignments = create_alignments(teacher, student, names, output_selector_index=0)
    return HolisticDistiller(teacher, alignments, student_model=student, **common)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _of_all_processes() -> float:
    """Return the MiB that the launcher's processes take together; what they share counts once."""
    import psutil

    total = 0
    for process in psutil.Process(os.getppid()).children(recursive=True):
        with suppress(psutil.Error, OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += next(int(row.split()[1]) for row in text.splitlines() if row.startswith("Pss:"))
    return total / 1024


def _model(width: int, layers: int, vocabulary: int, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
