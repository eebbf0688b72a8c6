"""Which teacher layer teaches which student layer when their numbers differ."""

from silverspoon_kd.errors import AlignmentError

_CHOICES = ("even", "first", "last")


def layer_map(num_teacher_layers: int, num_student_layers: int, choose: str = "even") -> dict[int, int]:
    """Return ``{teacher layer: student layer}``.

    Args:
        num_teacher_layers: layers of the teacher.
        num_student_layers: layers of the student, not more than the teacher's.
        choose: "even": student layer i learns from the last layer of the i-th of equal parts of the teacher, so the
            last layers meet; "first": the teacher's first layers; "last": its last layers.

    Raises:
        AlignmentError: unknown choice, or a student deeper than its teacher.
    """
    if choose not in _CHOICES:
        raise AlignmentError(f"choose={choose!r} is unknown. Use one of {', '.join(map(repr, _CHOICES))}.")
    if not 0 < num_student_layers <= num_teacher_layers:
        raise AlignmentError(
            f"{num_student_layers} student layers cannot be mapped to {num_teacher_layers} teacher layers: the student "
            "needs at least one layer and not more than its teacher."
        )
    if choose == "even":
        return {(i + 1) * num_teacher_layers // num_student_layers - 1: i for i in range(num_student_layers)}
    offset = 0 if choose == "first" else num_teacher_layers - num_student_layers
    return {offset + i: i for i in range(num_student_layers)}
