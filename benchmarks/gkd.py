"""Whether TRL's GKDTrainer gives the numbers of one process on two ranks: ``python benchmarks/gkd.py``.

The same ragged rows in steps of eight: one process with batches of four, two ranks with batches of two, accumulation 2
both times; KL, SGD, float32, on CPU, and its defaults. Compared with the one process, which is a GKDTrainer too: the
first logged loss over its own, and relative differences of all logged numbers and of the weights. They go to gkd.json,
from where ``make parity`` takes them into docs/guide/conformance.md, beside ours.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
SIZES = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
MODES: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {},
    "fsdp": {"fsdp": "full_shard"},
    **{
        f"zero{stage}": {"deepspeed": {**SIZES, "zero_optimization": {"stage": stage, **GATHERED}}}
        for stage in range(4)
    },
}
STEPS, ACCUMULATION, ROWS = 4, 2, 8


def main() -> None:
    """Run all modes, print the table and write it down, or (with --mode) run one of them on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        _train(options.mode, options.folder)
        return
    found: dict[str, Any] = {}
    print(f"{'student':<14}{'wrapped as':<28}{'first loss':>12}{'logged numbers':>16}{'weights':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            found[mode] = _start(mode, Path(folder))
            cells = found[mode].get("refused") or (
                f"{found[mode]['wrapped']:<28}{found[mode]['first loss']:>12.3f}{found[mode]['logs']:>16.0e}"
                f"{found[mode]['weights']:>10.0e}"
            )
            print(f"{mode:<14}{cells}", flush=True)
    del found["one process"]
    table = {"trl": importlib.metadata.version("trl"), "modes": found}
    (_HERE.parent / "gkd.json").write_text(json.dumps(table, indent=1) + "\n")


def _start(mode: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a mode, or the last line of what it ended with."""
    ranks = 1 if mode == "one process" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(_HERE), "--mode", mode, "--folder", str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    file = folder / f"{mode}.pt"
    if not file.exists():
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        return {"refused": errors[0].strip()[-160:] if errors else f"ended with {done.returncode}"}
    import torch

    wanted, ours = (torch.load(folder / f"{each}.pt", weights_only=True) for each in ("one process", mode))
    gap = sum(((ours["weights"][name] - value).double() ** 2).sum() for name, value in wanted["weights"].items())
    size = sum((value.double() ** 2).sum() for value in wanted["weights"].values())
    logs = zip(ours["logs"], wanted["logs"], strict=True)
    worst = max(
        abs(one[key] - other[key]) / abs(other[key]) for one, other in logs for key in other.keys() & one.keys()
    )
    first = ours["logs"][0]["loss"] / wanted["logs"][0]["loss"]
    return {"wrapped": ours["wrapped"], "first loss": first, "logs": worst, "weights": float((gap / size) ** 0.5)}


def _train(mode: str, folder: Path) -> None:
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from torch.nn.utils.rnn import pad_sequence
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    transformers.logging.set_verbosity_error()
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", pad_token="?", eos_token="?"
    )
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 13, (ROWS * STEPS,), generator=numbers)
    rows = [torch.randint(1, 64, (int(length),), generator=numbers) for length in lengths]

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        given = [torch.tensor(example["input_ids"]) for example in examples]
        return {
            "input_ids": pad_sequence(given, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in given], batch_first=True),
            "labels": pad_sequence(given, batch_first=True, padding_value=-100),
        }

    args = GKDConfig(
        output_dir=str(folder / mode),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        lmbda=0.0,
        beta=0.0,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // ACCUMULATION // int(os.environ["WORLD_SIZE"]),
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        **MODES[mode],
    )
    trainer = GKDTrainer(
        _model(32, 1),
        _model(48, 0),
        args=args,
        data_collator=collate,
        train_dataset=Dataset.from_dict({"input_ids": [row.tolist() for row in rows]}),
        processing_class=tokenizer,
    )
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        # DeepSpeed's stage 0 gives no norm.
        entries = trainer.state.log_history[:STEPS]
        logs = [{key: entry[key] for key in ("loss", "grad_norm") if key in entry} for entry in entries]
        weights = {name: value.detach().float().cpu().clone() for name, value in weights.items()}
        found = {"weights": weights, "logs": logs, "wrapped": type(trainer.model_wrapped).__name__}
        torch.save(found, folder / f"{mode}.pt")


def _model(width: int, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
