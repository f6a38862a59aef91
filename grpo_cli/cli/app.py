"""The `grpo` command, and the one place where errors become messages and exit codes."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from grpo_cli import __version__
from grpo_cli.cli.check import check
from grpo_cli.cli.eval import evaluate
from grpo_cli.cli.export import export
from grpo_cli.cli.plan import plan
from grpo_cli.cli.recipes import recipes
from grpo_cli.cli.reward import reward
from grpo_cli.cli.train import train, with_resume_value
from grpo_cli.cli.vllm_serve import vllm_serve
from grpo_cli.errors import GrpoError, Interrupted, LostProcessError, RecipeError

SECONDS_FOR_THE_FIRST = 10.0
"""How long the other processes of a run leave an error to the first one."""

app = typer.Typer(
    name="grpo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass(slots=True)
class _Options:
    """Options that stand before the command."""

    debug: bool = False


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"grpo {__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nExamples:\n  grpo check recipes/quickstart.yaml\n  grpo train recipes/quickstart.yaml train.seed=1\n"
    "  grpo recipes",
)
def _root(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[  # noqa: ARG001  its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language models with GRPO and its family, from YAML recipes."""
    context.obj.debug = debug


app.command(name="train")(train)
app.command(name="eval")(evaluate)
app.command(name="check")(check)
app.command(name="recipes")(recipes)
app.command(name="vllm-serve")(vllm_serve)
app.command(name="plan")(plan)
app.command(name="export")(export)
app.add_typer(reward, name="reward")


def main() -> None:
    """Run the command line; the exit code says what kind of error it was (see `grpo_cli.errors`)."""
    options = _Options()
    # PEFT, and so transformers, imports it wherever it is installed, and it would tell of kernels that it could fetch from the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        app(with_resume_value(_debug_first(sys.argv[1:])), obj=options)
    except (GrpoError, Interrupted) as error:
        if options.debug:
            traceback.print_exc()
        _tell(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell(error: GrpoError | Interrupted) -> None:
    """Write an error, once for all processes of a run.

    Most errors come to all processes, and then the first one tells. Another one waits a moment before it does, in which it is ended if
    the first one has failed as well.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        sys.stderr.write(f"{_message(error)}\n")
    elif not isinstance(error, Interrupted | LostProcessError | RecipeError):  # of the recipe, all have the same
        time.sleep(SECONDS_FOR_THE_FIRST)
        sys.stderr.write(f"process {rank}: {_message(error)}\n")


def _debug_first(arguments: Sequence[str]) -> list[str]:
    """Move `--debug` to where the root command reads it: a person adds it at the end."""
    others = [argument for argument in arguments if argument != "--debug"]
    return others if len(others) == len(arguments) else ["--debug", *others]


def _message(error: GrpoError | Interrupted) -> str:
    if isinstance(error, Interrupted):
        return str(error)
    if not isinstance(error, RecipeError):
        return f"error: {error}"
    count = len(error.problems)
    return f"{error}\n{count} {'problem' if count == 1 else 'problems'}; nothing was started"
