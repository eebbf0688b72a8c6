"""Which teacher module teaches which student module."""

from silverspoon_kd.alignment.alignment import Alignment, AlignmentList
from silverspoon_kd.alignment.create import create_alignments
from silverspoon_kd.alignment.layer_map import layer_map

__all__ = ["Alignment", "AlignmentList", "create_alignments", "layer_map"]
