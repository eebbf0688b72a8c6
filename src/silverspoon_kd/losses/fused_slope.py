"""A divergence at each position and its gradient by the student's logits, from log-probabilities."""

import torch
from torch import Tensor

# exp(80) times a probability is still finite in float32; a token that is rarer by this factor on one side adds nothing.
MAX_LOG_RATIO = 80.0


def divergence_and_slope(log_q: Tensor, log_p: Tensor, mixture: float) -> tuple[Tensor, Tensor]:
    """Return D at each position ``[n]`` and its gradient by the student's softened logits ``[n, vocabulary]``.

    All three write differences of probabilities as p * expm1(log q - log p), which keeps small ones exact, and add
    q - p to the terms of a KL, which changes no sum and leaves no term negative.

    Args:
        log_q: the student's log-probabilities.
        log_p: the teacher's.
        mixture: weight of the teacher in the mixture; 0 for forward KL, 1 for reverse KL.
    """
    if mixture == 0:
        p, gap, ratio = _ratio(log_p, log_q)
        gradient = p * ratio  # q - p
        return ratio.sub_(gap).mul_(p).sum(-1).clamp_(min=0), gradient
    q, gap, ratio = _ratio(log_q, log_p)
    if mixture == 1:
        mean_gap = torch.linalg.vecdot(q, gap).unsqueeze(-1)
        value = ratio.sub_(gap).mul_(q).sum(-1).clamp_(min=0)
        return value, gap.neg_().add_(mean_gap).mul_(q)
    # m = q (1 + w); p log(p / m) and q log(q / m) share the logarithm. A mixture next to 1 would make w = -1.
    w = ratio.mul_(mixture).clamp_(min=torch.finfo(ratio.dtype).eps - 1)
    log_ratio = w.log1p()  # log m - log q
    terms = gap.mul_(w + mixture).addcmul_(w.add_(1), log_ratio, value=-1)
    value = torch.linalg.vecdot(q, terms).clamp_(min=0)
    mean = torch.linalg.vecdot(q, log_ratio).unsqueeze(-1)
    return value, log_ratio.neg_().add_(mean).mul_(q).mul_(1 - mixture)


def _ratio(log_a: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, log b - log a, and b / a - 1."""
    log_a = torch.maximum(log_a, log_b - MAX_LOG_RATIO)
    gap = log_b - log_a
    return log_a.exp_(), gap, gap.expm1()
