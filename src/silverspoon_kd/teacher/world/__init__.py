"""The teacher world: processes of their own on devices of their own, one copy of the teacher for each node."""
