"""One run: load, measure, distil, compare, save, report."""

import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.trainer_callback import PrinterCallback

from silverspoon_kd import Distiller, TrainingArguments, create_alignments
from silverspoon_kd.cli.config import RunConfig
from silverspoon_kd.cli.data import load_documents, split_documents, token_blocks
from silverspoon_kd.cli.models import build_student, load_causal_lm, load_tokenizer, resolve_modules, teacher_path
from silverspoon_kd.cli.perplexity import perplexity
from silverspoon_kd.cli.progress import Display, ProgressCallback
from silverspoon_kd.errors import ConfigurationError, SilverSpoonError
from silverspoon_kd.report import RESULTS_FILE, write_report

CONFIG_FILE = "config.yaml"
TEXT_ONLY = "text-only"
_DEFAULTS = {
    "output_dir": "output",
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    # Pinned memory without an accelerator is a warning and nothing else.
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


@dataclass
class Results:
    """What a run found out.

    Attributes:
        perplexity: held-out perplexity of "teacher", "student before", "student after" and, with a baseline,
            "text alone".
        parameters: numbers of parameters of "teacher" and "student".
        seconds: wall time of each part.
        steps: optimizer steps.
        tokens: tokens to train on and held out.
        peak_memory: largest resident size of this process, bytes.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    peak_memory: int = 0


def run(config: RunConfig, console: Console) -> Results:
    """Do everything that a configuration asks for; see ``docs`` and the example for what is written where.

    Raises:
        SilverSpoonError: something in the configuration cannot work.
    """
    args = training_arguments(config.training)
    job = _Job(config, args, Display(console, visible=args.process_index == 0))
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(args.seed)
    job.load()
    job.distil()
    if config.baseline == TEXT_ONLY:
        job.train_on_text_alone()
    job.finish()
    # Without this every rank but the fastest would warn of a peer that left.
    PartialState().destroy_process_group()
    return job.results


def training_arguments(values: dict[str, Any]) -> TrainingArguments:
    """Return the arguments, with the defaults of the command line.

    Raises:
        ConfigurationError: a value or a combination cannot be used.
    """
    values = {**_DEFAULTS, **values}
    if Path(values["output_dir"]).exists() and not Path(values["output_dir"]).is_dir():
        raise ConfigurationError(f"training.output_dir={values['output_dir']!r} is a file. Name a folder.")
    try:
        return TrainingArguments(**values)
    except SilverSpoonError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigurationError(f"The training arguments cannot be used: {error}") from error


class _Job:
    """The state of one run, from step to step."""

    def __init__(self, config: RunConfig, args: TrainingArguments, display: Display) -> None:
        self.config, self.args, self.display = config, args, display
        self.output = Path(str(args.output_dir))
        self.results = Results()

    def load(self) -> None:
        """Get teacher, tokenizer and text, and measure the teacher."""
        started = time.perf_counter()
        self.display.say("Loading the teacher (a GGUF file is converted once and kept)")
        with self.args.main_process_first(local=True, desc="converting the teacher"):
            self.path = teacher_path(self.config.teacher)
        self.tokenizer = load_tokenizer(self.path)
        self._load_text()
        self.teacher = load_causal_lm(self.path)
        self.results.parameters["teacher"] = _num_parameters(self.teacher)
        self.results.seconds["load"] = time.perf_counter() - started
        self._measure("teacher", self.teacher)

    def _load_text(self) -> None:
        data = self.config.data
        documents = load_documents(data.source, data.column)
        train, held_out = split_documents(documents, data.held_out, data.seed)
        self.train_blocks = token_blocks(train, self.tokenizer, data.block_size)
        self.held_out_blocks = token_blocks(held_out, self.tokenizer, data.block_size)
        self.results.tokens = {
            "train": len(self.train_blocks) * data.block_size,
            "held out": len(self.held_out_blocks) * data.block_size,
        }
        self.display.say(
            f"Text: {len(documents)} documents, {self.results.tokens['train']:,} tokens to train on, "
            f"{self.results.tokens['held out']:,} held out"
        )

    def distil(self) -> None:
        """Train the student with the teacher, and save it."""
        student = build_student(self.config.student, self.teacher)
        self.results.parameters["student"] = _num_parameters(student)
        self._measure("student before", student)
        trainer = self._timed("distil", self._distiller(student))
        self.results.steps = trainer.state.global_step
        self._measure("student after", student)
        trainer.save_model(str(self.output / "student"))
        trainer.save_state()
        # The teacher goes too: what follows needs the memory.
        del self.teacher

    def _distiller(self, student: nn.Module) -> Callable[[list[Any]], transformers.Trainer]:
        config = self.config
        specific: dict[str, Any]
        if config.response_based:
            specific = {"soft_loss_fn": config.soft_loss_fn, "soft_loss_fn_kwargs": config.soft_loss_fn_kwargs}
        else:
            specific = {"alignments": _alignments(config, self.teacher, student)}

        def make(callbacks: list[Any]) -> transformers.Trainer:
            return Distiller(
                config.distiller,
                teacher_model=self.teacher,
                student_model=student,
                args=self.args,
                callbacks=callbacks,
                **specific,
                **self._trainer_arguments(),
            )

        return make

    def train_on_text_alone(self) -> None:
        """Train the same student for the same number of steps without the teacher."""
        gc.collect()
        transformers.set_seed(self.args.seed)
        student = build_student(self.config.student, load_causal_lm(self.path))
        values = {**self.config.training, "output_dir": str(self.output / TEXT_ONLY), "save_strategy": "no"}
        values |= {"load_best_model_at_end": False, "resume_from_checkpoint": None}
        args = training_arguments({key: value for key, value in values.items() if key != "teacher_placement"})

        def make(callbacks: list[Any]) -> transformers.Trainer:
            return transformers.Trainer(model=student, args=args, callbacks=callbacks, **self._trainer_arguments())

        trainer = self._timed("train on text alone", make)
        trainer.save_state()
        self._measure("text alone", student)

    def _trainer_arguments(self) -> dict[str, Any]:
        return {
            "train_dataset": self.train_blocks,
            "eval_dataset": self.held_out_blocks,
            "data_collator": transformers.default_data_collator,
            "processing_class": self.tokenizer,
        }

    def finish(self) -> None:
        """Write the results and the report, and show the table."""
        self.results.peak_memory = _peak_memory()
        if self.args.process_index != 0:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / CONFIG_FILE).write_text(
            yaml.safe_dump(dataclasses.asdict(self.config), sort_keys=False), "utf-8"
        )
        (self.output / RESULTS_FILE).write_text(json.dumps(dataclasses.asdict(self.results), indent=2) + "\n", "utf-8")
        self.display.console.print(results_table(self.results))
        self.display.say(f"Student: {self.output / 'student'}")
        self.display.say(f"Report:  {write_report(self.output)}")

    def _timed(self, title: str, make: Callable[[list[Any]], transformers.Trainer]) -> transformers.Trainer:
        started = time.perf_counter()
        with self.display.bar(title, None) as bar:
            trainer = make([ProgressCallback(bar)])
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        self.results.seconds[title] = time.perf_counter() - started
        return trainer

    def _measure(self, name: str, model: nn.Module) -> None:
        started = time.perf_counter()
        model.to(self.args.device)
        share = len(self.held_out_blocks[self.args.process_index :: self.args.world_size])
        with self.display.bar(f"perplexity, {name}", share) as bar:

            def on_batch(done: int) -> None:
                bar.at(done)
                if done == share:
                    bar.line()

            self.results.perplexity[name] = perplexity(
                model,
                self.held_out_blocks,
                batch_size=self.args.per_device_eval_batch_size,
                device=self.args.device,
                rank=self.args.process_index,
                world_size=self.args.world_size,
                on_batch=on_batch,
            )
        self.results.seconds[f"perplexity, {name}"] = time.perf_counter() - started


def results_table(results: Results) -> Table:
    """Return the table that closes a run."""
    table = Table(title=f"Held-out perplexity after {results.steps} steps")
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("perplexity", justify="right")
    for name, value in results.perplexity.items():
        size = results.parameters["teacher" if name == "teacher" else "student"]
        table.add_row(ROW_TITLES.get(name, name), f"{size / 1e6:.1f} M", _number(value))
    return table


ROW_TITLES = {
    "student before": "student before",
    "student after": "student after, distilled",
    "text alone": "same student, same steps, text alone",
}


def _alignments(config: RunConfig, teacher: nn.Module, student: nn.Module) -> Sequence[Any]:
    parts = []
    for source in config.alignments:
        keywords = {item.name: getattr(source, item.name) for item in dataclasses.fields(source)}
        keywords["modules"] = resolve_modules(source.modules, teacher, student)
        parts.append(create_alignments(teacher, student, **keywords))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1e9 else f"{value:.2e}"


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _peak_memory() -> int:
    if os.name != "posix":
        return 0
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
