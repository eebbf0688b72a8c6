"""Losses under the names of functions, as they are used in code: ``kl_divergence_loss(temperature=2.0)``.

A loss class is its own factory; calling it gives a loss with these hyperparameters.
"""

from silverspoon_kd.losses.attention import AttentionTransfer
from silverspoon_kd.losses.cka import LinearCKA
from silverspoon_kd.losses.contrastive import Contrastive
from silverspoon_kd.losses.divergences import JensenShannon, KLDivergence, ReverseKL
from silverspoon_kd.losses.logit_lens import LogitLensKL
from silverspoon_kd.losses.mahalanobis import MahalanobisCosine, MahalanobisMSE
from silverspoon_kd.losses.pointwise import AngularMagnitude, CosineLoss, MeanSquaredError, NormalizedMSE, SmoothL1
from silverspoon_kd.losses.relational import RelationalAngle, RelationalDistance, RelationalDistanceAngle

mse_loss = MeanSquaredError
normalized_mse_loss = NormalizedMSE
cosine_loss = CosineLoss
smooth_l1_loss = SmoothL1
angular_magnitude_loss = AngularMagnitude
mahalanobis_mse_loss = MahalanobisMSE
mahalanobis_cosine_loss = MahalanobisCosine

kl_divergence_loss = KLDivergence
reverse_kl_loss = ReverseKL
jsd_loss = JensenShannon
logit_lens_kl_loss = LogitLensKL

contrastive_loss = Contrastive
relkd_distance_loss = RelationalDistance
relkd_angle_loss = RelationalAngle
relkd_distance_angle_loss = RelationalDistanceAngle
attention_loss = AttentionTransfer
cka_loss = LinearCKA
