"""What overlap is worth: ``python benchmarks/overlap.py`` on a machine with two free cores.

The student trains on one core and a dedicated teacher works on the other. Every way runs in processes of its own, one
after the other in each of several rounds; the figures are medians over the rounds. All ways must give the same losses
and weights to the last bit.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))

WAYS = {
    "off": {"overlap_teacher_forward": False},
    "forward only": {"overlap_teacher_forward": True, "teacher_lookahead": 0},
    "lookahead 1": {"overlap_teacher_forward": True, "teacher_lookahead": 1},
}
# Layers of the teacher, so that it takes about as long as a step of the student.
TEACHER_LAYERS = {"holistic": 13, "blockwise": 13}
STUDENT_LAYERS, WIDTH, ROWS, LENGTH, WARM_UP = 4, 256, 4, 128, 3


def main() -> None:
    """Run all rounds and print the table, or (with --way) one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kind", choices=TEACHER_LAYERS, nargs="+", default=list(TEACHER_LAYERS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(_run(options.kind[0], options.way, options.steps)))
        return
    for kind in options.kind:
        _compare(kind, options.rounds, options.steps)


def _compare(kind: str, rounds: int, steps: int) -> None:
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, str(_HERE), "--kind", kind, "--way", way, "--steps", str(steps)]
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    assert len({run["digest"] for runs in found.values() for run in runs}) == 1, "the ways differ in their numbers"
    step = {way: statistics.median(run["step"] for run in runs) for way, runs in found.items()}
    wait = {way: statistics.median(run["wait"] for run in runs) for way, runs in found.items()}
    teacher = wait["off"]
    student = step["off"] - teacher
    print(f"\n{kind}: teacher / student step {teacher / student:.2f}; {rounds} rounds of {steps} steps, same numbers")
    print(f"{'way':<14}{'off / way':>10}{'way / max(teacher, student)':>30}{'waiting':>10}")
    for way in WAYS:
        ratio = step[way] / max(teacher, student)
        print(f"{way:<14}{step['off'] / step[way]:>10.2f}{ratio:>30.2f}{wait[way] / step[way]:>10.0%}")


def _run(kind: str, way: str, steps: int) -> dict:
    from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu

    slot = len(os.sched_getaffinity(0)) - 1
    placement = TeacherPlacement([slot], "pp", device_type="cpu")
    setup_split_gpu(placement)
    import torch
    import transformers

    from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, TrainingArguments, create_alignments

    transformers.logging.set_verbosity_error()
    teacher, student = _model(TEACHER_LAYERS[kind], seed=0), _model(STUDENT_LAYERS, seed=1)
    spread = [round(index * (TEACHER_LAYERS[kind] - 1) / (STUDENT_LAYERS - 1)) for index in range(STUDENT_LAYERS)]
    names = {rf"model\.layers\.{far}": f"model.layers.{near}" for near, far in enumerate(spread)}
    alignments = create_alignments(teacher, student, names, output_selector_index=0)
    ids = torch.randint(1, 1000, (ROWS * steps, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            learning_rate=0.01,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            teacher_placement=placement,
            **WAYS[way],
        )
        make = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind]
        distiller = make(teacher, alignments, student_model=student, train_dataset=rows, args=args, callbacks=[Clock()])
        distiller.train()
    digest = hashlib.sha256()
    for parameter in distiller.root.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    logs = [entry for entry in distiller.state.log_history if "loss" in entry]
    digest.update(json.dumps([entry["loss"] for entry in logs]).encode())
    waits = [entry.get("teacher_wait", 0.0) for entry in logs][WARM_UP:]
    gaps = [second - first for first, second in pairwise(times)][WARM_UP:]
    return {"step": statistics.median(gaps), "wait": statistics.median(waits), "digest": digest.hexdigest()}


def _model(layers: int, seed: int):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
