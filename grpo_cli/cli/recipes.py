"""`grpo recipes`: what recipes are there?"""

from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.errors import GrpoError


def recipes(
    folder: Annotated[Path, typer.Argument(help="The folder to look in.", metavar="[FOLDER]")] = Path("recipes"),
) -> None:
    """List the recipes of a folder with the first line of their header.

    \b
    Examples:
      grpo recipes
      grpo recipes my_recipes
    """  # noqa: D301  \b keeps the lines apart
    paths = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not paths:
        raise GrpoError(f"no recipes in {folder.resolve()}", hint="name a folder with YAML files: grpo recipes FOLDER")
    width = max(len(str(path)) for path in paths)
    for path in paths:
        typer.echo(f"{path!s:<{width}}  {_description(path)}".rstrip())


def _description(path: Path) -> str:
    """Give the first line of the comment at the top of a recipe."""
    first = next(iter(path.read_text(encoding="utf-8").splitlines()), "")
    return first.removeprefix("#").strip() if first.startswith("#") else ""
