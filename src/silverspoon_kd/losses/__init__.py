"""Losses: what a distilled student is compared with its teacher by."""

from silverspoon_kd.losses.base import BatchLoss, Loss, LossSum, PositionLoss
from silverspoon_kd.losses.callable_loss import CallableLoss
from silverspoon_kd.losses.factories import (
    angular_magnitude_loss,
    attention_loss,
    cka_loss,
    contrastive_loss,
    cosine_loss,
    jsd_loss,
    kl_divergence_loss,
    logit_lens_kl_loss,
    mahalanobis_cosine_loss,
    mahalanobis_mse_loss,
    mse_loss,
    normalized_mse_loss,
    relkd_angle_loss,
    relkd_distance_angle_loss,
    relkd_distance_loss,
    reverse_kl_loss,
    smooth_l1_loss,
)
from silverspoon_kd.losses.fused import FusedLosses, TaskLabels, fused_divergence, fused_task_and_divergence
from silverspoon_kd.losses.logit_sum import DivergenceLoss
from silverspoon_kd.losses.output_head import OutputHead
from silverspoon_kd.losses.registry import LossRecord, available_losses, get_loss_function, register_loss

__all__ = [
    # by name
    "get_loss_function",
    "register_loss",
    "available_losses",
    "LossRecord",
    # what a loss is
    "Loss",
    "LossSum",
    "PositionLoss",
    "BatchLoss",
    "DivergenceLoss",
    "CallableLoss",
    # two vectors at each position
    "mse_loss",
    "normalized_mse_loss",
    "cosine_loss",
    "smooth_l1_loss",
    "angular_magnitude_loss",
    "mahalanobis_mse_loss",
    "mahalanobis_cosine_loss",
    # two distributions at each position
    "kl_divergence_loss",
    "reverse_kl_loss",
    "jsd_loss",
    "logit_lens_kl_loss",
    # the same from hidden states, without logits
    "fused_divergence",
    "fused_task_and_divergence",
    "TaskLabels",
    "FusedLosses",
    "OutputHead",
    # positions among themselves
    "contrastive_loss",
    "relkd_distance_loss",
    "relkd_angle_loss",
    "relkd_distance_angle_loss",
    "attention_loss",
    "cka_loss",
]
