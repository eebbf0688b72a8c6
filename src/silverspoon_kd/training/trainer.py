"""The Trainer that distils: thin overrides around one wrapped forward."""

import atexit
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.deepspeed import DummyOptim
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from silverspoon_kd.ending import let_threads_finish
from silverspoon_kd.errors import TrainingError
from silverspoon_kd.host_memory import keep_freed_memory
from silverspoon_kd.objectives import Counts, Objective, positions_of
from silverspoon_kd.optim import (
    STUDENT_GROUP,
    build_optimizer,
    build_parameter_groups,
    clip_gradients,
    per_group_schedule,
)
from silverspoon_kd.student import flags_kept_on_error, only_trainable
from silverspoon_kd.teacher.sharding import free_gathered
from silverspoon_kd.training import checkpoint, deepspeed
from silverspoon_kd.training.arguments import TrainingArguments
from silverspoon_kd.training.assembly import group_specs, owned_parameters
from silverspoon_kd.training.buffers import SharedBuffers
from silverspoon_kd.training.collate import DictCollator
from silverspoon_kd.training.columns import Prepare
from silverspoon_kd.training.evaluation import evaluated_as_it_is
from silverspoon_kd.training.fsdp import shard_student, sharding_enabled
from silverspoon_kd.training.instruments import make_instruments
from silverspoon_kd.training.lookahead import Lookahead
from silverspoon_kd.training.metrics import RunningMeans, evaluation_logs, not_finite, own_part, own_rows, step_logs
from silverspoon_kd.training.run_arguments import refuse_arguments, run_arguments, step_options
from silverspoon_kd.training.saving import SavingTrainer
from silverspoon_kd.training.setup import Request, TeacherSource, set_up

logger = logging.getLogger(__name__)


class DistillationTrainer(SavingTrainer):
    """What the three distillers share; use one of them.

    A step, as the Trainer runs it::

        get_batch_samples  -> the micro-batches of a step, and how many positions they hold over all ranks
        training_step
          compute_loss     -> executor.start(batch): the teacher runs
                              model(batch, run, counts): student, losses, one scalar   (the wrapped StudentRoot)
          backward         -> the Trainer's own
        _get_grad_norm     -> clipping by alignment
        optimizer, schedule, logging, evaluation, saving: the Trainer's own
    """

    # Kept by the Trainer, which does not declare what they may be.
    optimizer: Any
    lr_scheduler: Any
    data_collator: Any
    _signature_columns: Any
    # By alignment: gradient norms and learning rates of the last step.
    _norms: dict[str, Tensor]
    _teacher_costs: Counter[str]
    _rates: dict[str, Any]

    def __init__(
        self,
        *,
        student_model: nn.Module,
        teacher_model: TeacherSource,
        objective: Objective,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        prepare_teacher_inputs: Prepare | None = None,
        prepare_student_inputs: Prepare | None = None,
        **trainer_arguments: Any,
    ) -> None:
        refuse_arguments(trainer_arguments)
        given, args = args, run_arguments(args, objective.kind, student_model)
        self._given_args = given or args
        self._wants_predictions, self._first_step_checked = True, False
        self._step_values, self._eval_values, self._num_steps = RunningMeans(), RunningMeans(), 0
        self._norms, self._rates, self._teacher_costs = {}, {}, Counter()
        self._prepare_student, self.student_model = prepare_student_inputs, student_model
        request = Request(
            student=student_model,
            teacher=teacher_model,
            objective=objective,
            args=args,
            options=step_options(self._given_args),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            processing_class=trainer_arguments.get("processing_class"),
            prepare_teacher=prepare_teacher_inputs,
            prepare_student=prepare_student_inputs,
            optimizer=trainer_arguments.get("optimizers", (None, None))[0],
        )
        models = [model for model in (student_model, teacher_model) if isinstance(model, nn.Module)]
        with flags_kept_on_error(*models), ExitStack() as on_error:
            setup = set_up(request)
            on_error.callback(setup.executor.close)
            self.plan, self._labels, self._trainable = setup.plan, setup.labels, setup.trainable
            self.root, self.teacher, self._executor = setup.root, setup.teacher, setup.executor
            self._objective, self._ahead = setup.objective, Lookahead(setup.executor, setup.plan.lookahead)
            args.remove_unused_columns = setup.columns is not None
            super().__init__(
                model=self.root,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                **trainer_arguments,
            )
            shard_student(self.root, args, self.accelerator)
            on_error.pop_all()
        names, own = self.root.view.names, data_collator is not None
        self.data_collator = DictCollator(self.data_collator, names, given_by_user=own)
        self._instruments = make_instruments(args)
        for callback in (*self._instruments, SharedBuffers()):
            self.add_callback(callback)
        self.loss_is_scaled_for_ga = self.can_return_loss = True
        self.label_names, self._signature_columns = list(self._labels), setup.columns

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; see the Trainer."""
        with sharding_enabled() if self.args.fsdp else deepspeed.accelerator_of_its_own(self.args):
            super().create_accelerator_and_postprocess()
        if dist.is_initialized():
            atexit.unregister(let_threads_finish)
            atexit.register(let_threads_finish)

    # ---- the step -------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Counts | None = None,
    ) -> Any:
        """Start the teacher, run the wrapped root, keep the parts for the log; see the class for the whole step."""
        training = model.training and torch.is_grad_enabled()
        self._guard(model, training)
        batch = self._student_batch(inputs)
        counts = num_items_in_batch if training else None
        counts = counts or self._count([inputs], self.args.device, over_ranks=training)
        run = self._ahead.run_of(inputs) if training else self._executor.start(inputs)
        try:
            if not self.plan.overlap:
                for tap in self._objective.teacher_taps:
                    run.take(tap)
            with self.accelerator.autocast():
                result = model(batch, run, counts, want_output=return_outputs and self._wants_predictions)
        finally:
            run.close()
        if training:
            self._teacher_costs.update(run.costs())
        self._record(result["parts"], training, inputs)
        loss = result.pop("loss")
        result.pop("parts")
        return (loss, {"loss": loss, **result}) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Counts | None]:
        """Return the micro-batches of a step and their counts; with overlap the teacher starts on later ones too."""
        left = self.state.max_steps - self.state.global_step
        per_step = self.args.gradient_accumulation_steps
        batches = self._ahead.next_batches(epoch_iterator, num_batches, per_step, left)
        return batches, self._get_num_items_in_batch(batches, device)

    def _prepare_input(self, data: Any) -> Any:
        """Move a part of a batch to the device; what is there stays the tensor by which the teacher's run is found."""
        there = isinstance(data, Tensor) and data.device.type == self.args.device.type == "cpu"
        # The ranks of torchrun are on "cpu:0", to which PyTorch copies what is on the CPU already.
        casts = self.is_deepspeed_enabled and isinstance(data, Tensor) and data.is_floating_point()
        return data if there and not casts else super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Counts | None:
        return self._count(batch_samples, device) if batch_samples else None

    def _count(self, batches: list, device: torch.device, *, over_ranks: bool = True) -> Counts:
        """Count each unit over micro-batches and, if the Trainer averages over tokens, over ranks.

        Evaluation counts each rank's batch alone: its metrics do not depend on the number of ranks then.
        """
        local = [positions_of(self._student_batch(batch), self.root.conventions).counts() for batch in batches]
        values = torch.stack([counts.to(device) for counts in local]).sum(0)
        if not over_ranks or not self.args.average_tokens_across_devices or self.args.world_size == 1:
            return Counts(values)
        values = self.accelerator.gather(values[None]).sum(0)
        return Counts(values, scale=float(self.accelerator.num_processes))

    def _student_batch(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._prepare_student(dict(inputs)) if self._prepare_student else inputs

    def _guard(self, model: nn.Module, training: bool) -> None:
        """Refuse a call that goes round the wrapper: its gradients would never be reduced over the ranks."""
        if training and model is self.root and self.args.world_size > 1 and self.plan.student_mode != "fsdp":
            raise TrainingError(
                f"compute_loss got the unwrapped student on one of {self.args.world_size} ranks, so gradients would "
                "not be averaged and the ranks would drift apart. Pass the Trainer's model_wrapped."
            )

    def _record(self, parts: dict[str, Tensor], training: bool, inputs: Mapping[str, Any]) -> None:
        if not training:
            rows = positions_of(inputs, self.root.conventions).rows
            self._eval_values.add(parts, weight=own_rows(rows, self.accelerator))
            return
        if not self._first_step_checked:
            bad = not_finite({name: float(value) for name, value in parts.items()})
            if bad:
                raise TrainingError(
                    f"The loss of {', '.join(map(repr, bad))} is not finite in the first step. Check the teacher's "
                    "weights, the learning task and the loss for these modules before training."
                )
        self._step_values.add(parts)

    # ---- gradients and optimizer ----------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build one optimizer with a group for each alignment, tagged with its name."""
        if isinstance(self.optimizer, DummyOptim):  # DeepSpeed makes the one of its config, for these groups
            self.optimizer.params = self._parameter_groups()
        if self.optimizer is None:
            default = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.root)
            specs = group_specs(self._objective).items()
            named = {name: spec.optimizer for name, spec in specs if spec.optimizer is not None}
            self.optimizer = build_optimizer(self._parameter_groups(), default, named)
        return self.optimizer

    def _parameter_groups(self) -> list[dict[str, Any]]:
        return build_parameter_groups(
            owned_parameters(self.root),
            group_specs(self._objective),
            learning_rate=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            decay_names=set(self.get_decay_parameter_names(self.root)),
            projector_names={f"projectors.{name}" for name, _ in self.root.projectors.named_parameters()},
        )

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Build the Trainer's schedule; alignments that asked for another one follow theirs."""
        named = {
            name: spec.scheduler for name, spec in group_specs(self._objective).items() if spec.scheduler is not None
        }
        if self.lr_scheduler is not None or not named:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = per_group_schedule(
            self.optimizer if optimizer is None else optimizer,
            partial(super().create_scheduler, num_training_steps),
            named,
            self.args.get_warmup_steps(num_training_steps),
            num_training_steps,
        )
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        """Return the run's rate: that of the first group without a rate or schedule of its own."""
        specs = group_specs(self._objective).items()
        own = {name for name, spec in specs if spec.learning_rate is not None or spec.scheduler is not None}
        rates = [group["lr"] for group in self.optimizer.param_groups if group.get("alignment") not in own]
        return float(rates[0]) if rates else super()._get_learning_rate()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_deepspeed_enabled:
            engine = self.model_wrapped
            before_step = partial(self._clip, partial(deepspeed.clip_in_engine, engine))
            self.accelerator.deepspeed_engine_wrapped = deepspeed.ClippingEngine(engine, before_step)
        return prepared

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if not self.is_deepspeed_enabled:  # whose engine has clipped, and stepped, at the end of the backward
            self.accelerator.unscale_gradients()
            self._clip(partial(clip_gradients, self.optimizer.param_groups))
        return self._norms[""]

    def _clip(self, clip: Callable[..., dict[str, Tensor]]) -> None:
        """Clip each alignment's gradient to its own limit; one block cannot starve the others."""
        self.root.release()  # before callbacks may use the student
        groups = self.optimizer.param_groups
        for group in groups:
            group.setdefault("alignment", STUDENT_GROUP)
            group.setdefault("projector", False)
        limits: dict[str, float | None] = dict.fromkeys((g["alignment"] for g in groups), self.args.max_grad_norm)
        for name, spec in group_specs(self._objective).items():
            if spec.max_grad_norm is not None:
                limits[name] = spec.max_grad_norm
        self._norms = clip(limits, clip_projectors=self.args.clip_projectors)
        self._rates = {group["alignment"]: group["lr"] for group in groups}
        self._num_steps, self._first_step_checked = self._num_steps + 1, True

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    # ---- running --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer.train``.

        Parameters that no loss reaches are frozen while this runs.

        Raises:
            CheckpointError: the checkpoint is incomplete or of another run.
        """
        folder = checkpoint.resume_folder(
            resume_from_checkpoint,
            Path(self.args.output_dir),
            self._objective,
            self.root.projectors,
            self.plan.student_mode,
        )
        if folder is not None:
            deepspeed.check_same_ranks(folder, checkpoint.read_state(folder)["plan"], self.plan)
        self._first_step_checked = False
        self._step_values, self._num_steps = RunningMeans(), 0
        self._teacher_costs.clear()
        if self.args.device.type == "cpu":
            keep_freed_memory()
        if self.is_deepspeed_enabled:  # an engine of an earlier call is spent
            self.model_wrapped, self.deepspeed = self.model, None
        with only_trainable(self.root, self._trainable), flags_kept_on_error(self.root):
            try:
                return super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)
            except Exception as error:
                self._executor.leave(error)
            finally:
                self.is_in_train = False
                self._ahead.drain()
                self.root.release()
                for instrument in self._instruments:
                    instrument.stop()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # The Trainer looks only after a step: a finished run that is resumed would be trained one step too far.
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate one batch, with labels or without."""
        self.label_names = [name for name in self._labels if inputs.get(name) is not None]
        self._wants_predictions = not prediction_loss_only
        inputs, fill_up = own_part(inputs, self.accelerator)
        try:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss, fill_up(logits), fill_up(labels)
        finally:
            self.label_names, self._wants_predictions = list(self._labels), True

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate, and report each term beside the total."""
        self._eval_values = RunningMeans()
        try:
            with evaluated_as_it_is(self):
                output = super().evaluation_loop(*args, **kwargs)
        except Exception as error:
            self._executor.leave(error)
        free_gathered(self.root)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update(evaluation_logs(self._eval_values.drain(self.accelerator.gather), prefix))
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; entries of training steps also get each term's loss, learning rate and gradient norm."""
        if "loss" in logs:
            logs |= self._step_logs()
        super().log(logs, start_time)

    def _step_logs(self) -> dict[str, float]:
        num_steps, self._num_steps = max(self._num_steps, 1), 0
        values = self._step_values.drain(self.accelerator.gather, divisor=num_steps)
        rates = {} if set(self._rates) == {STUDENT_GROUP} else self._rates
        logs = step_logs(values, rates, self._norms, self.state.global_step)
        logs |= {name: cost / num_steps for name, cost in self._teacher_costs.items()}
        self._teacher_costs.clear()
        for instrument in self._instruments:
            logs |= instrument.logs()
        return logs
