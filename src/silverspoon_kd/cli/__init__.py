"""The command ``silverspoon-kd``."""
