"""The command ``silverspoon-kd``."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silverspoon_kd.errors import ConfigurationError, MissingDependencyError, SilverSpoonError, TrainingError

try:
    import typer
    from rich.console import Console
except ImportError as error:
    raise MissingDependencyError(
        "The command line needs typer, rich and PyYAML. Install them with: pip install 'silverspoon-kd[cli]'."
    ) from error

app = typer.Typer(
    name="silverspoon-kd",
    help="Knowledge distillation on the Hugging Face Trainer.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback of this package's or a user's code is read as Python prints it.
    pretty_exceptions_enable=False,
)


def readable_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors in what the user gave into one message on stderr and exit code 2; others keep their traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except TrainingError:
            raise
        except SilverSpoonError as error:
            print(f"silverspoon-kd: {error}", file=sys.stderr)
            raise typer.Exit(2) from None

    return wrapped


@app.command(
    # Everything behind the file belongs to the run, known to this parser or not.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
@readable_errors
def train(
    context: typer.Context,
    config: Path = typer.Argument(metavar="CONFIG.yaml", help="What to distil, and how."),
) -> None:
    """Distil as a YAML file says.

    Behind the file, --KEY VALUE or --KEY=VALUE overrides it: KEY is a field of TrainingArguments, such as --max_steps,
    or a path into the file, such as --data.block_size.
    """
    if str(config).startswith("-"):
        raise ConfigurationError(
            f"{str(config)!r} stands before the file. Write: silverspoon-kd train CONFIG.yaml --key value."
        )
    from silverspoon_kd.cli.config import load_config

    # Before the imports that take seconds.
    loaded = load_config(config, context.args)
    from silverspoon_kd.cli.train import run

    run(loaded, Console())


@app.command()
@readable_errors
def report(output_dir: Path = typer.Argument(help="The output folder of a run.")) -> None:
    """Write OUTPUT_DIR/report.html again from what a run logged."""
    from silverspoon_kd.report import write_report

    print(write_report(output_dir))


@app.command()
@readable_errors
def losses() -> None:
    """List the losses that a configuration can name."""
    from rich.table import Table

    from silverspoon_kd.losses import available_losses

    table = Table("name", "also", "arguments", "what it compares")
    for record in available_losses():
        arguments = ", ".join(f"{name}={value!r}" for name, value in record.defaults.items())
        table.add_row(record.name, ", ".join(record.aliases), arguments, record.summary)
    Console().print(table)
