"""What a response-based run costs with and without logits: ``python benchmarks/response.py``.

Qwen3 models, a student of 4 layers of width 256 and a teacher of 8 of width 512, 4 rows of 256 tokens, in float32 on
one thread. Each way trains in a process of its own, one after the other in each of several rounds; the figures are
medians over the rounds. Both must log the same losses to 1e-5.
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
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))

WAYS = {"without logits": None, "whole logits": False}
CASES: dict[str, dict[str, Any]] = {
    "KL": {"soft_loss_fn": "kl_divergence"},
    "KL, alpha 0.5": {"soft_loss_fn": "kl_divergence", "alpha": 0.5},
    "JSD": {"soft_loss_fn": "jsd"},
    "JSD, alpha 0.5": {"soft_loss_fn": "jsd", "alpha": 0.5},
}
ROWS, LENGTH, STEPS = 4, 256, 3


def main() -> None:
    """Run all rounds and print the table, or (with --way) one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(_measure(options.case[0], options.way, options.vocabulary)))
        return
    print(f"{ROWS} x {LENGTH} tokens, vocabulary {options.vocabulary}")
    print(f"{'case':<16}{'way':<16}{'CPU s a step':>14}{'peak MiB':>10}")
    for case in options.case:
        _compare(case, options)


def _compare(case: str, options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, str(_HERE), "--case", case, "--way", way]
            command += ["--vocabulary", str(options.vocabulary)]
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    losses = [run["losses"] for runs in found.values() for run in runs]
    worst = max(abs(one - other) / other for run in losses for one, other in zip(run, losses[0], strict=True))
    assert worst < 1e-5, f"the ways differ in their losses by {worst:.1e}"
    medians = {
        way: [statistics.median(run[key] for run in runs) for key in ("cpu", "peak")] for way, runs in found.items()
    }
    for way, (cpu, peak) in medians.items():
        print(f"{case:<16}{way:<16}{cpu:>14.2f}{peak:>10.0f}")
    ours, theirs = medians.values()
    print(f"{case:<16}{'ratio':<16}{ours[0] / theirs[0]:>14.2f}{ours[1] / theirs[1]:>10.2f}", flush=True)


def _measure(case: str, way: str, vocabulary: int) -> dict[str, Any]:
    """Return CPU seconds of a step, MiB of memory above what models and torch take, and the losses."""
    import torch
    import transformers

    from silverspoon_kd import ResponseBasedDistiller, TrainingArguments

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    options = dict(CASES[case])
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=1 + STEPS,
        per_device_train_batch_size=ROWS,
        alpha=options.pop("alpha", 0.0),
        fused_losses=WAYS[way],
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (64, LENGTH), generator=numbers)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    models = _model(256, 4, vocabulary), _model(512, 8, vocabulary)
    distiller = ResponseBasedDistiller(*models, args=args, train_dataset=rows, **options)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    distiller.add_callback(Clock())
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    distiller.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    losses = [entry["loss"] for entry in distiller.state.log_history if "loss" in entry]
    return {"cpu": (times[-1] - times[0]) / STEPS, "peak": peak / 2**20, "losses": losses}


def _model(width: int, layers: int, vocabulary: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(width)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
