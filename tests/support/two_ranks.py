"""Whole runs on each of two ranks: ``torchrun two_ranks.py FOLDER`` writes FOLDER/rank-N.json."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed

from silverspoon_kd.errors import CheckpointError
from support.distil import KINDS, make, training_logs
from support.tiny import Rows, qwen3

EQUAL = {"n": 8, "low": 12, "high": 12}  # rows without padding
EVALUATED = (("holistic", 8), ("blockwise", 8), ("response", 8), ("holistic", 7), ("holistic", 6), ("holistic", 5))
RATES = {"model.layers.0": {"learning_rate": 1e-4}}
OWN = {
    "model.layers.0": {"learning_rate": 1e-3, "optimizer": "adagrad"},
    "model.layers.1": {"learning_rate": 3e-3, "scheduler": "cosine"},
}
RESUMED = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.5,
    "save_strategy": "steps",
    "save_steps": 3,
}


def first_step(kind: str, folder: Path, batch: int, average: bool, **rows: Any) -> float:
    """The logged loss of a first step with rate 0."""
    distiller = make(
        kind,
        folder,
        given={"train_dataset": Rows(**rows)},
        max_steps=1,
        learning_rate=0.0,
        alpha=0.25,
        per_device_train_batch_size=batch,
        average_tokens_across_devices=average,
        train_sampling_strategy="sequential",
    )
    distiller.train()
    return training_logs(distiller)[0]["loss"]


def rates(folder: Path) -> list[dict[str, float]]:
    """The rates of four optimizer steps, from the log."""
    distiller = make(
        "holistic",
        folder,
        alignment=RATES,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    distiller.train()
    last = {group["alignment"]: group["lr"] for group in distiller.optimizer.param_groups}
    logged = [{name[14:]: entry[name] for name in entry if "rate/" in name} for entry in training_logs(distiller)]
    return [*logged, last]


def evaluated(kind: str, folder: Path, batch: int, n: int) -> dict[str, Any]:
    """Metrics and predictions of a number of rows, with and without metrics of the user's own."""
    distiller = make(
        kind,
        folder,
        given={"eval_dataset": Rows(n=n, seed=3)},
        alpha=0.25,
        e2e_eval_loss="forward",
        per_device_eval_batch_size=batch,
    )
    output = distiller.predict(Rows(n=n, seed=3))
    report = {"predictions": output.predictions.tolist(), "labels": output.label_ids.tolist()}
    report["metrics"] = losses_of(distiller.evaluate(), "eval_")
    report["with predictions"] = losses_of(output.metrics, "test_")
    distiller.compute_metrics = lambda given: {"rows": len(given.predictions), "sum": float(given.label_ids.sum())}
    metrics = distiller.evaluate()
    report["with metrics"] = losses_of(metrics, "eval_")
    report["own"] = [metrics["eval_rows"], metrics["eval_sum"]]
    return report


def losses_of(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """The losses, whatever the data set is called."""
    return {key.removeprefix(prefix): value for key, value in metrics.items() if "loss" in key}


def resumable(kind: str, folder: Path, seed: int) -> Any:
    """A run of six steps with dropout, projectors and alignments of their own kind."""
    student = qwen3(seed, hidden=16, attention_dropout=0.2)
    alignment = None if kind == "response" else OWN
    return make(kind, folder, student=student, alignment=alignment, given={"train_dataset": Rows(n=20)}, **RESUMED)


def state(distiller: Any) -> dict[str, Any]:
    """Everything that a run has learnt, flat."""
    inner = distiller.optimizer.state_dict()
    flat = {f"weights/{name}": value for name, value in distiller.root.state_dict().items()}
    for index, values in inner["state"].items():
        flat |= {f"optimizer/{index}/{name}": torch.as_tensor(value) for name, value in values.items()}
    return flat


def digest(tensors: dict[str, Any]) -> float:
    """One number that other ranks can compare."""
    return sum(float(tensor.double().abs().sum()) for tensor in tensors.values())


def resumed(kind: str, folder: Path) -> dict[str, Any]:
    """Compare six steps with three, a resume on both ranks, and three more."""
    straight = resumable(kind, folder, 1)
    straight.train()
    distributed.barrier()
    if distributed.get_rank() == 0:
        (folder / "checkpoint-6" / "distillation.json").unlink()
    distributed.barrier()
    files = sorted(path.name for path in (folder / "checkpoint-3").iterdir())
    again = resumable(kind, folder, 7)
    again.train(resume_from_checkpoint=True)
    own, other = state(straight), state(again)
    return {
        "files": files,
        "digest": digest(own),
        "same": own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own),
        "logs": training_logs(straight) == training_logs(again),
        "steps": again.state.global_step,
    }


def evaluated_first(folder: Path) -> dict[str, Any]:
    """Train after an evaluation, and without."""
    given = {"eval_dataset": Rows(n=8, seed=3)}
    first, plain = (make("holistic", folder, given=given, max_steps=3, learning_rate=1.0) for _ in range(2))
    first.evaluate()
    for distiller in (first, plain):
        distiller.train()
    own, other = first.root.state_dict(), plain.root.state_dict()
    return {
        "wrapped": type(first.model_wrapped).__name__,
        "digest": digest(own),
        "same": all(torch.equal(own[name], other[name]) for name in other),
    }


def refused(folder: Path) -> str:
    """What every rank says when there is nothing to resume from."""
    try:
        resumable("holistic", folder, 1).train(resume_from_checkpoint=True)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    """Run everything on this rank."""
    transformers.logging.set_verbosity_error()
    gc.freeze()
    report = {
        "equal": {
            f"{kind} {name}": first_step(kind, folder, 2, flag, **EQUAL)
            for kind in KINDS
            for name, flag in (("averaged", True), ("not averaged", False))
        },
        "ragged": {kind: first_step(kind, folder, 2, True, n=8) for kind in KINDS},
        "rates": rates(folder),
        "resumed": {kind: resumed(kind, folder / kind) for kind in KINDS},
        "evaluated": {f"{kind} {n}": evaluated(kind, folder, 2, n) for kind, n in EVALUATED},
        "evaluated first": evaluated_first(folder),
        "refused": refused(folder / "empty"),
    }
    (folder / f"rank-{distributed.get_rank()}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
