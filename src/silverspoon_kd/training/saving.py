"""Saving and loading of a distillation run, for every way in which a student is trained."""

import abc
import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch import nn
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from silverspoon_kd.distributed.plan import Plan
from silverspoon_kd.objectives import Objective
from silverspoon_kd.optim import fill_state
from silverspoon_kd.student import StudentRoot
from silverspoon_kd.training import checkpoint
from silverspoon_kd.training.arguments import TrainingArguments

logger = logging.getLogger(__name__)


class SavingTrainer(transformers.Trainer, abc.ABC):
    """A Trainer whose checkpoints are a student for ``from_pretrained``, projectors and a state file written last."""

    args: TrainingArguments
    plan: Plan
    root: StudentRoot
    student_model: nn.Module
    _objective: Objective
    _given_args: TrainingArguments

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        checkpoint.save_weights(folder, self.student_model, self.root.projectors, state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self._given_args, folder / "training_args.bin")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the student as a folder for ``from_pretrained``, the projectors beside it.

        All ranks must call it where the student is sharded.
        """
        if self._saves_shards and not _internal_call:
            self._save(output_dir, self.accelerator.get_state_dict(self.root))
        else:
            super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self._mark_complete(Path(output_dir or self.args.output_dir), "*.safetensors")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Older checkpoints may go only when the new one is complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        run_dir = Path(self._get_output_dir(trial))
        newest = run_dir / f"checkpoint-{self.state.global_step}"
        self._mark_complete(newest)
        if self.args.should_save:
            checkpoint.rotate(run_dir, limit, newest, self.state.best_model_checkpoint)

    def _mark_complete(self, folder: Path, files: str = "*") -> None:
        if self.args.should_save:
            state = {"plan": self.plan.to_dict()}
            checkpoint.mark_complete(folder, self._objective, self.root.projectors, state, files)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._saves_shards:
            plugin = self.accelerator.state.fsdp_plugin
            load_fsdp_model(plugin, self.accelerator, self.root, resume_from_checkpoint)
            return
        checkpoint.load_weights(Path(resume_from_checkpoint), self.student_model, self.root.projectors)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        checkpoint.read_state(Path(best))
        logger.info("Loading the best checkpoint %s (%s).", best, self.state.best_metric)
        if self.is_deepspeed_enabled:
            deepspeed_load_checkpoint(self.model_wrapped, best)
        else:
            self._load_from_checkpoint(best)

    # ---- the optimizer of a sharded student -----------------------------------------------------------------------

    @property
    def _saves_shards(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "SHARDED" in str(plugin.state_dict_type)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.plan.student_mode != "fsdp":
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.accelerator.state.fsdp_plugin, self.accelerator
        if self._saves_shards:  # otherwise model.safetensors has them
            save_fsdp_model(*state, self.root, output_dir)
        save_fsdp_optimizer(*state, self.optimizer, self.root, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.plan.student_mode != "fsdp" or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if fill_state(self.optimizer) or self._saves_shards:
            plugin = self.accelerator.state.fsdp_plugin
            load_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.root, checkpoint)
        else:  # torch cannot load an optimizer without state
            saved = torch.load(os.path.join(checkpoint, "optimizer.bin"), weights_only=True)["param_groups"]
            for group, values in zip(self.optimizer.param_groups, saved, strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))
