"""``python -m silverspoon_kd``."""

from silverspoon_kd.cli.main import app

if __name__ == "__main__":
    app(prog_name="silverspoon-kd")
