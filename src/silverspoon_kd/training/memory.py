"""What each device will need, as the plan tells it, and the plan told once."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from silverspoon_kd.capture.head_form import HeadForm
from silverspoon_kd.distributed.plan import DeviceMemory, Plan
from silverspoon_kd.teacher import EACH_RANK, TeacherFacts, bytes_of, capacity
from silverspoon_kd.training.arguments import TrainingArguments

logger = logging.getLogger(__name__)


def rows_of_a_batch(args: TrainingArguments, train_dataset: Any, eval_dataset: Any) -> int:
    """Return the rows of the largest batch that a rank will get."""
    train = args.per_device_train_batch_size if train_dataset is not None else 1
    return max(train, args.per_device_eval_batch_size if eval_dataset is not None else 1)


def plan_with_memory(
    plan: Plan, facts: TeacherFacts, root: nn.Module, trainable: Collection[str], args: TrainingArguments
) -> Plan:
    """Return the plan with what each device of a node will need.

    Args:
        plan: of the run.
        facts: of the teacher.
        root: what is trained.
        trainable: names of its parameters that get gradients.
        args: of the run.
    """
    own = [each for each in facts.memory if each.place != EACH_RANK]
    beside: Mapping[str, int | None] = dict(next((each.parts for each in facts.memory if each.place == EACH_RANK), ()))
    signals = [size for each in facts.memory for name, size in each.parts if name == "signals"]
    known = [size for size in signals if size is not None]
    batches = (plan.lookahead + 1) * args.gradient_accumulation_steps if plan.overlap else 1
    parts: dict[str, int | None] = {
        **{f"teacher's {name}": size for name, size in beside.items() if name != "signals"},
        **_own_head(plan, facts, args),
        f"signals of {batches} batch{'' if batches == 1 else 'es'}": sum(known) * batches
        if len(known) == len(signals)
        else None,
        "student's weights": _share(plan, "fsdp deepspeed-3", sum(map(bytes_of, root.parameters()))),
        "gradients": _share(
            plan,
            "fsdp deepspeed-2 deepspeed-3",
            sum(bytes_of(parameter) for name, parameter in root.named_parameters() if name in trainable),
        ),
    }
    return plan.with_memory([*own, DeviceMemory(EACH_RANK, tuple(parts.items()), capacity(args.device))])


def _own_head(plan: Plan, facts: TeacherFacts, args: TrainingArguments) -> dict[str, int | None]:
    """Return the bytes of the teacher's head where a rank has a copy of its own, for losses without logits."""
    # A teacher on CPU slots shares one copy with all students of its node.
    copied = plan.teacher == "sharded" or (plan.teacher_devices and args.device.type != "cpu")
    if not copied or facts.head is None or not isinstance(facts.head_form, HeadForm):
        return {}
    tensors = (facts.head.weight, facts.head.bias)
    return {"teacher's head": sum(bytes_of(each) for each in tensors if each is not None)}


def tell(plan: Plan, args: TrainingArguments, already: int) -> None:
    """Print the plan on the first rank, unless a log level says not to, and log its notes but the first ``already``."""
    if args.process_index != 0:
        return
    level = args.get_process_log_level()
    if level <= logging.INFO or (args.log_level == "passive" and level <= logging.WARNING):
        print(plan.table(), flush=True)
    for note in plan.notes[already:]:
        logger.warning("%s", note)


def _share(plan: Plan, modes: str, nbytes: int) -> int:
    return -(-nbytes // plan.num_student_ranks) if plan.student_mode in modes.split() else nbytes
