"""What a response-based run costs with and without logits: ``python benchmarks/response.py``.

Qwen3 models, a student of 4 layers of width 256 and a teacher of 8 of width 512, 4 rows of 256 tokens, in float32 on
one thread. Each way trains in a process of its own, one after the other in each of several rounds; the figures are
medians over the rounds. All must log the same losses to 1e-5. Where trl is installed (``pip install
'silverspoon-kd[bench]'``), its GKDTrainer with ``lmbda=0`` is one of the ways.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))

WAYS = {"without logits": None, "whole logits": False}
GKD = "TRL GKDTrainer"
# Its losses between the two models, and the name that it gives them; the cases by default.
BETAS = {"KL": 0.0, "JSD": 0.5}
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
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(BETAS))
    parser.add_argument("--way", choices=[*WAYS, GKD], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        train = _gkd if options.way == GKD else _ours
        print(json.dumps(_measure(train, options.case[0], options.way, options.vocabulary)))
        return
    print(f"{ROWS} x {LENGTH} tokens, vocabulary {options.vocabulary}")
    print(f"{'case':<16}{'way':<16}{'CPU s a step':>14}{'peak MiB':>10}{'first / CPU':>14}{'/ peak':>10}")
    for case in options.case:
        _compare(case, options)


def _compare(case: str, options: argparse.Namespace) -> None:
    others = [GKD] if case in BETAS and importlib.util.find_spec("trl") else []
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in [*WAYS, *others]}
    for _ in range(options.rounds):
        for way in found:
            command = [sys.executable, str(_HERE), "--case", case, "--way", way]
            command += ["--vocabulary", str(options.vocabulary)]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    losses = [run["losses"] for runs in found.values() for run in runs]
    worst = max(abs(one - other) / other for run in losses for one, other in zip(run, losses[0], strict=True))
    assert worst < 1e-5, f"the ways differ in their losses by {worst:.1e}"
    medians = {
        way: [statistics.median(run[key] for run in runs) for key in ("cpu", "peak")] for way, runs in found.items()
    }
    ours = medians["without logits"]
    for way, (cpu, peak) in medians.items():
        print(f"{case:<16}{way:<16}{cpu:>14.2f}{peak:>10.0f}{ours[0] / cpu:>14.2f}{ours[1] / peak:>10.2f}", flush=True)


def _measure(train: Callable[..., Any], case: str, way: str, vocabulary: int) -> dict[str, Any]:
    """Return CPU seconds of a step, MiB of memory above what models and torch take, and the losses."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (64, LENGTH), generator=numbers)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    models = _model(256, 4, vocabulary), _model(512, 8, vocabulary)
    shared = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "max_steps": 1 + STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": 5e-5,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }
    trainer = train(case, way, *models, rows, shared)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    trainer.add_callback(Clock())
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"cpu": (times[-1] - times[0]) / STEPS, "peak": peak / 2**20, "losses": losses}


def _ours(case: str, way: str, student: Any, teacher: Any, rows: list[dict[str, Any]], shared: dict[str, Any]) -> Any:
    from silverspoon_kd import ResponseBasedDistiller, TrainingArguments

    options = dict(CASES[case])
    args = TrainingArguments(**shared, alpha=options.pop("alpha", 0.0), fused_losses=WAYS[way])
    return ResponseBasedDistiller(student, teacher, args=args, train_dataset=rows, **options)


def _gkd(case: str, way: str, student: Any, teacher: Any, rows: list[dict[str, Any]], shared: dict[str, Any]) -> Any:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?", eos_token="?")
    # Its defaults for these two are others than the Trainer's.
    args = GKDConfig(**shared, lmbda=0.0, beta=BETAS[case], bf16=False, gradient_checkpointing=False)
    columns = {name: [row[name].tolist() for row in rows] for name in rows[0]}

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([example[name] for example in examples]) for name in columns}

    return GKDTrainer(
        student,
        teacher,
        args=args,
        data_collator=collate,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
    )


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
