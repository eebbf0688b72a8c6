"""Step time and memory of a distiller over a loop written by hand, and memory over what the plan says."""

import gc
import time
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
NO_COUNTER = "the memory of a CPU has no counter of its own"


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
        """Sizes that keep an accelerator busy, or small ones."""
        if setting.small:
            return Sizes(hidden=64, layers=2, vocabulary=512, rows=4, length=64, warm_up=1, steps=3)
        return Sizes(hidden=2048, layers=8, vocabulary=32000, rows=4, length=1024, warm_up=3, steps=10)


def checks(setting: Setting) -> Checks:
    """Return the checks of this file."""
    for kind in KINDS[:1] if setting.quick else KINDS:
        yield f"{kind} step time / by hand", partial(step_time, setting, kind)
        yield f"{kind} peak memory / by hand", partial(peak_memory, setting, kind)
        yield f"{kind} memory off the plan", partial(memory_of_plan, setting, kind)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and bytes at the peak; 0: the device does not count them."""

    seconds: float
    nbytes: int


def step_time(setting: Setting, kind: str) -> Found:
    """The ratio of the faster of two rounds of each; with small models it is only shown."""
    ours, by_hand = measured(setting, kind)
    limit = None if setting.small else 1.5
    return Found(ours.seconds / by_hand.seconds, limit, f"{1e3 * ours.seconds:.1f} ms / {1e3 * by_hand.seconds:.1f} ms")


def peak_memory(setting: Setting, kind: str) -> Found:
    """The ratio of the peaks that the device's allocator saw."""
    ours, by_hand = measured(setting, kind)
    if not by_hand.nbytes:
        raise Skipped(NO_COUNTER)
    return Found(ours.nbytes / by_hand.nbytes, 1.25, f"{_mib(ours.nbytes)} / {_mib(by_hand.nbytes)}")


def memory_of_plan(setting: Setting, kind: str) -> Found:
    """How far weights and a forward of the teacher are from what the plan says of them, as a share of what they are.

    What training adds (the student's activations, the optimizer) the plan does not know.
    """
    if setting.device == "cpu":
        raise Skipped(NO_COUNTER)
    gc.collect()
    before, sizes = torch.accelerator.memory_allocated(), Sizes.of(setting)
    distiller, rows = _distiller(setting, kind), FullRows(sizes, sizes.rows)
    weights = torch.accelerator.memory_allocated() - before
    batch = {key: value.to(setting.device) for key, value in _batch(rows, range(sizes.rows)).items()}
    for _ in range(2):  # the libraries behind the kernels take their own memory at the first call
        held = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        distiller._executor.start(batch).close()
    forward = torch.accelerator.max_memory_allocated() - held
    planned = {name: size or 0 for each in distiller.plan.memory for name, size in each.parts if name != "gradients"}
    found, predicted = weights + forward, sum(planned.values())
    note = ", ".join(f"{name} {_mib(size)}" for name, size in planned.items())
    return Found(abs(found - predicted) / found, 0.1, f"{_mib(weights)} + {_mib(forward)}; planned {note}")


@cache
def measured(setting: Setting, kind: str) -> tuple[Cost, Cost]:
    """Measure both twice, in turn, and return the better of each."""
    rounds = [(_steps(setting, kind), _loop(setting, kind)) for _ in range(1 if setting.quick else 2)]
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


def _steps(setting: Setting, kind: str) -> Cost:
    clock = Clock(Sizes.of(setting), setting.device)
    distiller = _distiller(setting, kind, callbacks=[clock])
    distiller.train()
    distiller._executor.close()
    return Cost(clock.seconds, clock.nbytes)


def _distiller(setting: Setting, kind: str, **given: Any) -> Any:
    sizes = Sizes.of(setting)
    total = sizes.warm_up + sizes.steps
    return make(
        kind,
        setting.folder,
        teacher=_model(setting, 0, 2 * sizes.layers),
        student=_model(setting, 1, sizes.layers),
        modules={rf"model\.layers\.{index}": f"model.layers.{index}" for index in range(sizes.layers)},
        given={"train_dataset": FullRows(sizes, sizes.rows * total), "data_collator": None, **given},
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


def _loop(setting: Setting, kind: str) -> Cost:
    """The same steps, as one would write them."""
    sizes = Sizes.of(setting)
    clock, rows = Clock(sizes, setting.device), FullRows(sizes, sizes.rows * (sizes.warm_up + sizes.steps))
    teacher, student = _model(setting, 0, 2 * sizes.layers).eval(), _model(setting, 1, sizes.layers).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, weight_decay=0.0)
    for start in range(0, len(rows), sizes.rows):
        batch = {key: value.to(setting.device) for key, value in _batch(rows, range(start, start + sizes.rows)).items()}
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            loss = _loss(kind, student, teacher, batch, sizes)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return Cost(clock.seconds, clock.nbytes)


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


def _batch(rows: FullRows, indices: range) -> dict[str, Tensor]:
    several = [rows[index] for index in indices]
    return {key: torch.stack([row[key] for row in several]) for key in several[0]}


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


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
