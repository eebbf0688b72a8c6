"""Held-out perplexity."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn import functional


def perplexity(
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    *,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    on_batch: Callable[[int], None] = lambda done: None,
) -> float:
    """Return ``exp`` of the mean negative log-likelihood of every token but the first of each example.

    The examples are divided over the ranks; all of them must call this. The model stays in the mode it was in.

    Args:
        model: a causal language model whose output has ``logits`` ``[batch, length, vocabulary]``.
        examples: dicts with ``input_ids`` of one length.
        batch_size: examples in one forward.
        device: where the model is.
        rank: number of this process.
        world_size: number of processes.
        on_batch: told after each batch how many examples of this rank are done.
    """
    training = model.training
    model.eval()
    mine, total, count = examples[rank::world_size], 0.0, 0
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            ids = torch.tensor([list(example["input_ids"]) for example in batch], device=device)
            logits = model(input_ids=ids, use_cache=False).logits
            # Row by row: an fp32 copy of all logits would be the largest tensor of the whole run.
            for row, targets in zip(logits, ids, strict=True):
                total += functional.cross_entropy(row[:-1].float(), targets[1:], reduction="sum").item()
                count += len(targets) - 1
            on_batch(start + len(batch))
    model.train(training)
    if world_size > 1:
        parts = gather_object([(total, count)])
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return math.exp(min(total / count, 700.0))
