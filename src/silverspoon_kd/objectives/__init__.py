"""How one batch becomes a loss."""

from silverspoon_kd.objectives.combine import combine
from silverspoon_kd.objectives.fused import FusedHeads, FusedStep, FusedTask
from silverspoon_kd.objectives.objective import (
    BlockwiseObjective,
    HolisticObjective,
    Objective,
    OutputObjective,
    ResponseObjective,
    logits_alignment,
)
from silverspoon_kd.objectives.positions import UNITS, Conventions, Positions, conventions_of, positions_of
from silverspoon_kd.objectives.terms import Counts, TeacherSignals, Term

__all__ = [
    "UNITS",
    "BlockwiseObjective",
    "Conventions",
    "Counts",
    "FusedHeads",
    "FusedStep",
    "FusedTask",
    "HolisticObjective",
    "Objective",
    "OutputObjective",
    "Positions",
    "ResponseObjective",
    "TeacherSignals",
    "Term",
    "combine",
    "conventions_of",
    "logits_alignment",
    "positions_of",
]
