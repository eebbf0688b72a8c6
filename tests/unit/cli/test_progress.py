import io
import re
from types import SimpleNamespace

from rich.console import Console

from silverspoon_kd.cli.progress import Display, ProgressCallback


def run(console: Console, steps: int = 40, visible: bool = True) -> None:
    """What a Trainer calls, without one: a step, then its log."""
    with Display(console, visible=visible).bar("distil", None) as bar:
        callback = ProgressCallback(bar)
        for step in range(1, steps + 1):
            state = SimpleNamespace(global_step=step, max_steps=steps)
            callback.on_step_end(None, state, None)
            callback.on_log(None, state, None, logs={"loss": 100.0 - step})
        callback.on_log(None, state, None, logs={"train_runtime": 1.0})


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def test_a_terminal_gets_a_bar_with_loss_and_time_left():
    terminal = console(True)
    run(terminal)
    last = re.split(r"[\r\n]", terminal.file.getvalue().strip())
    shown = [line for line in last if "40/40" in line][-1]
    assert "distil" in shown
    assert "loss 60.000" in shown
    assert re.search(r"left 0:00:00", shown)


def test_a_log_file_gets_about_ten_lines_with_loss_and_time_left():
    log = console(False)
    run(log)
    lines = log.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[0].startswith("distil 4/40  loss 96.000")
    assert "left" in lines[4]
    assert lines[-1] == "distil 40/40  loss 60.000"


def test_few_steps_get_a_line_each_and_rare_logs_are_shown_when_they_come():
    log = console(False)
    run(log, steps=3)
    assert [line.split()[1] for line in log.file.getvalue().splitlines()] == ["1/3", "2/3", "3/3"]


def test_other_ranks_are_silent():
    for terminal in (True, False):
        silent = console(terminal)
        run(silent, visible=False)
        Display(silent, visible=False).say("x")
        assert silent.file.getvalue() == ""
