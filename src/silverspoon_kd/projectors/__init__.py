"""Maps between the widths of teacher and student."""

from silverspoon_kd.projectors.build import AlignmentProjectors, ProjectorInit, build_projector, describe_projector

__all__ = ["AlignmentProjectors", "ProjectorInit", "build_projector", "describe_projector"]
