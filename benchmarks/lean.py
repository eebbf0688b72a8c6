"""What a training run costs over a loop that does only what is needed: ``python benchmarks/lean.py``.

Qwen3 models of 15 and 12 million parameters, one process, one thread, float32, AdamW, no clipping. The loop by hand has
its batches ready, runs no head for features, and blockwise nothing of the student but its aligned layers. Each way
trains in a process of its own, one after the other in each of several rounds; the figures are medians over the rounds.
Both must log the same losses to 1e-5.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))

KINDS = ("response", "holistic", "blockwise")
WAYS = ("distiller", "by hand")
SHAPES = ("4x128", "8x64", "1x512")
TEACHER_LAYERS, STUDENT_LAYERS, VOCABULARY, RATE = 12, 8, 8192, 1e-3
# Which layers teach the student's first, third, fifth and last.
PAIRS = {0: 0, 4: 2, 7: 4, 11: 7}
STEPS, WARM_UP = 12, 2


def main() -> None:
    """Run all rounds and print the table, or (with --way) one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["4x128", "1x512"], help="rows x tokens")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(_measure(options.kind[0], options.way, options.shape[0])))
        return
    print(f"{'kind':<12}{'shape':<10}{'CPU seconds of a step, distiller / by hand':>44}")
    for kind in options.kind:
        for shape in options.shape:
            _compare(kind, shape, options.rounds)


def _compare(kind: str, shape: str, rounds: int) -> None:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, str(_HERE), "--kind", kind, "--shape", shape, "--way", way]
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    losses = [run["losses"] for runs in found.values() for run in runs]
    worst = max(abs(one - other) / other for run in losses for one, other in zip(run, losses[0], strict=True))
    assert worst < 1e-5, f"the ways differ in their losses by {worst:.1e}"
    ours, lean = (statistics.median(run["cpu"] for run in found[way]) for way in WAYS)
    print(f"{kind:<12}{shape:<10}{ours / lean:>44.3f}", flush=True)


def _measure(kind: str, way: str, shape: str) -> dict[str, Any]:
    """Return the median CPU seconds of a step and the losses."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, length = map(int, shape.split("x"))
    ids = torch.randint(VOCABULARY, (rows * STEPS, length), generator=torch.Generator().manual_seed(0))
    teacher, student = _model(TEACHER_LAYERS, 0).eval(), _model(STUDENT_LAYERS, 1).train()
    train = _distil if way == "distiller" else _by_hand
    times, losses = train(kind, teacher, student, ids, rows)
    gaps = [second - first for first, second in pairwise(times)][WARM_UP:]
    return {"cpu": statistics.median(gaps), "losses": losses}


def _distil(kind: str, teacher: Any, student: Any, ids: Any, rows: int) -> tuple[list[float], list[float]]:
    import torch
    import transformers

    from silverspoon_kd import (
        BlockwiseDistiller,
        HolisticDistiller,
        ResponseBasedDistiller,
        TrainingArguments,
        create_alignments,
    )

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=rows,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        logging_steps=STEPS // 2,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    common = {"args": args, "train_dataset": data, "callbacks": [Clock()]}
    if kind == "response":
        distiller: Any = ResponseBasedDistiller(student, teacher, **common)
    else:
        names = {rf"model\.layers\.{far}": f"model.layers.{near}" for far, near in PAIRS.items()}
        alignments = create_alignments(teacher, student, names, loss_function="mse", output_selector_index=0)
        make = HolisticDistiller if kind == "holistic" else BlockwiseDistiller
        distiller = make(teacher, alignments, student_model=student, **common)
    distiller.train()
    return times, [entry["loss"] for entry in distiller.state.log_history if "loss" in entry]


def _by_hand(kind: str, teacher: Any, student: Any, ids: Any, rows: int) -> tuple[list[float], list[float]]:
    import torch

    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0)
    loss_of = {"response": _response, "holistic": _holistic, "blockwise": _blockwise}[kind]
    times, losses = [], []
    for batch in ids.split(rows):
        loss = loss_of(teacher, student, {"input_ids": batch, "attention_mask": torch.ones_like(batch)})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.append(time.process_time())
    half = STEPS // 2
    return times, [torch.stack(losses[start : start + half]).mean().item() for start in (0, half)]


def _response(teacher: Any, student: Any, inputs: dict[str, Any]) -> Any:
    import torch
    from torch.nn.functional import kl_div

    with torch.no_grad():
        wanted = teacher(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    given = student(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    return kl_div(given, wanted, log_target=True, reduction="sum") / given[..., 0].numel()


def _holistic(teacher: Any, student: Any, inputs: dict[str, Any]) -> Any:
    import torch
    from torch.nn.functional import mse_loss

    with torch.no_grad():
        wanted = _outputs(teacher, PAIRS.keys(), inputs)
    given = _outputs(student, PAIRS.values(), inputs)
    return sum(mse_loss(given[near][1], wanted[far][1]) for far, near in PAIRS.items())


def _blockwise(teacher: Any, student: Any, inputs: dict[str, Any]) -> Any:
    import torch
    from torch.nn.functional import mse_loss

    with torch.no_grad():
        wanted = _outputs(teacher, PAIRS.keys(), inputs)
        positions = torch.arange(inputs["input_ids"].shape[1])[None]
        tables = student.model.rotary_emb(wanted[0][0], positions)
    total = 0
    for far, near in PAIRS.items():
        layer = student.model.layers[near]
        total = total + mse_loss(layer(wanted[far][0], position_embeddings=tables, attention_mask=None), wanted[far][1])
    return total


def _outputs(model: Any, layers: Any, inputs: dict[str, Any]) -> dict[int, tuple[Any, Any]]:
    """Return what each layer takes in and gives out; the head does not run."""
    found: dict[int, tuple[Any, Any]] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple, output: Any) -> None:
            found[layer] = args[0], output

        return hook

    handles = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    model.model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _model(layers: int, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
