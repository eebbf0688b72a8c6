"""Step time and memory of a distiller over a loop written by hand, and memory over what the plan says."""

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from gpu_checks.rows import Checks, Found, Setting, Skipped
from support.by_hand import blockwise_loss, divergence, holistic_loss
from support.distil import make

KINDS = ("response", "holistic", "blockwise")


@dataclass(frozen=True)
class Sizes:
    """Of the student and a batch of full rows; the teacher has twice as many layers."""

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int
    warm_up: int
    steps: int

    @staticmethod
    def of(setting: Setting) -> "Sizes":
        """Sizes that keep the device busy; small ones for the CPU."""
        if setting.device == "cpu":
            return Sizes(hidden=64, layers=2, vocabulary=512, rows=4, length=64, warm_up=1, steps=3)
        return Sizes(hidden=2048, layers=8, vocabulary=32000, rows=4, length=1024, warm_up=3, steps=10)


def checks(setting: Setting) -> Checks:
    """Return the checks of this file."""
    for kind in KINDS[:1] if setting.quick else KINDS:
        yield f"{kind} step time / by hand", partial(step_time, setting, kind)
        yield f"{kind} peak memory / by hand", partial(peak_memory, setting, kind)
    yield "peak memory / plan", partial(memory_of_plan, setting)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, bytes at the peak (0: the device does not count them), and the distiller's plan."""

    seconds: float
    nbytes: int
    plan: Mapping[str, Any]


def step_time(setting: Setting, kind: str) -> Found:
    """The ratio of the fastest of two rounds of each; on a CPU it is only shown."""
    ours, by_hand = measured(setting, kind)
    limit = None if setting.device == "cpu" else 1.5
    return Found(ours.seconds / by_hand.seconds, limit, f"{1e3 * ours.seconds:.1f} ms / {1e3 * by_hand.seconds:.1f} ms")


def peak_memory(setting: Setting, kind: str) -> Found:
    """The ratio of the peaks that the device's allocator saw."""
    ours, by_hand = measured(setting, kind)
    if not by_hand.nbytes:
        raise Skipped("the CPU's memory has no counter of its own")
    return Found(
        ours.nbytes / by_hand.nbytes, 1.25, f"{ours.nbytes / 2**20:.0f} MiB / {by_hand.nbytes / 2**20:.0f} MiB"
    )


def memory_of_plan(setting: Setting) -> Found:
    """How far the peak is from what the plan said, as a share of the peak."""
    ours, _ = measured(setting, KINDS[0])
    predicted = next((value for key, value in ours.plan.items() if "memory" in key and value), None)
    if predicted is None:
        raise Skipped("not built yet: the plan says nothing of memory")
    if not ours.nbytes:
        raise Skipped("the CPU's memory has no counter of its own")
    return Found(abs(ours.nbytes - predicted) / ours.nbytes, 0.1, f"{ours.nbytes} bytes, planned {predicted}")


@cache
def measured(setting: Setting, kind: str) -> tuple[Cost, Cost]:
    """Measure both twice, in turn, and return the better of each."""
    rounds = [(_distiller(setting, kind), _loop(setting, kind)) for _ in range(1 if setting.quick else 2)]
    ours, by_hand = zip(*rounds, strict=True)
    return min(ours, key=lambda cost: cost.seconds), min(by_hand, key=lambda cost: cost.seconds)


class FullRows(Dataset):
    """Rows without padding, all of one length."""

    def __init__(self, sizes: Sizes, num_rows: int) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, sizes.vocabulary, (num_rows, sizes.length), generator=numbers)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": torch.ones_like(self.ids[index])}


class Clock(TrainerCallback):
    """Time and memory of the steps after the first ones; made before there is a model."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self._sizes, self._device, self._steps = sizes, device, 0
        self._start = self.seconds = 0.0
        gc.collect()  # what is left of the side measured before
        self._before = 0 if device == "cpu" else torch.accelerator.memory_allocated()
        self.nbytes = 0

    def on_step_end(self, args: Any = None, state: Any = None, control: Any = None, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == self._sizes.warm_up:
            self._wait()
            if self._device != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            self._start = time.perf_counter()
        if self._steps == self._sizes.warm_up + self._sizes.steps:
            self._wait()
            self.seconds = (time.perf_counter() - self._start) / self._sizes.steps
            self.nbytes = 0 if self._device == "cpu" else torch.accelerator.max_memory_allocated() - self._before

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize()


def _distiller(setting: Setting, kind: str) -> Cost:
    sizes = Sizes.of(setting)
    total, clock = sizes.warm_up + sizes.steps, Clock(sizes, setting.device)
    distiller = make(
        kind,
        setting.folder,
        teacher=_model(setting, 0, 2 * sizes.layers),
        student=_model(setting, 1, sizes.layers),
        modules=_layers(sizes),
        given={"train_dataset": FullRows(sizes, sizes.rows * total), "callbacks": [clock], "data_collator": None},
        use_cpu=setting.device == "cpu",
        bf16=True,
        max_steps=total,
        per_device_train_batch_size=sizes.rows,
        learning_rate=1e-4,
        optim="adamw_torch",
        max_grad_norm=1.0,
        logging_steps=1000,
        train_sampling_strategy="sequential",
        report_to="none",
    )
    plan = distiller.plan.to_dict()
    distiller.train()
    distiller._executor.close()
    return Cost(clock.seconds, clock.nbytes, plan)


def _loop(setting: Setting, kind: str) -> Cost:
    """The same steps, as one would write them."""
    sizes = Sizes.of(setting)
    clock, rows = Clock(sizes, setting.device), FullRows(sizes, sizes.rows * (sizes.warm_up + sizes.steps))
    teacher, student = _model(setting, 0, 2 * sizes.layers).eval(), _model(setting, 1, sizes.layers).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, weight_decay=0.0)
    for start in range(0, len(rows), sizes.rows):
        several = [rows[index] for index in range(start, start + sizes.rows)]
        batch = {key: torch.stack([row[key] for row in several]).to(setting.device) for key in several[0]}
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            loss = _loss(kind, student, teacher, batch, sizes)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return Cost(clock.seconds, clock.nbytes, {})


def _loss(kind: str, student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor], sizes: Sizes) -> Tensor:
    if kind == "response":
        with torch.no_grad():
            target = teacher(**batch, use_cache=False).logits
        return divergence(student(**batch, use_cache=False).logits.flatten(0, 1), target.flatten(0, 1))
    names = [f"model.layers.{index}" for index in range(sizes.layers)]
    nothing = dict.fromkeys(names, nn.Identity())
    common = (student, teacher, names, {**batch, "use_cache": False}, lambda name: None, nothing)
    values = holistic_loss(*common) if kind == "holistic" else blockwise_loss(*common, nothing)
    return torch.stack(list(values.values())).sum()


def _layers(sizes: Sizes) -> dict[str, str]:
    return {rf"model\.layers\.{index}": f"model.layers.{index}" for index in range(sizes.layers)}


def _model(setting: Setting, seed: int, layers: int) -> nn.Module:
    sizes = Sizes.of(setting)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=sizes.hidden // 16,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=False,
    )
    with torch.device(setting.device):
        return Qwen3ForCausalLM(config)
