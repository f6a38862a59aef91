"""`grpo export`: take a model out of a run."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.errors import CheckpointError


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run directory (its final model, or else its newest checkpoint), a checkpoint, or a model's folder."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters (model.lora) into the model that they were trained on.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="With --merge: that model, as model.name_or_path names it, if it is no longer where it was. Other weights are refused.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="With --merge: run Python code that comes with that model (model.trust_remote_code).",
        ),
    ] = False,
) -> None:
    """Write a trained model to a folder of its own, which `from_pretrained` and vLLM read.

    \b
    Examples:
      grpo export runs/tldr my-model
      grpo export runs/tldr/checkpoints/step-000100 my-model
      grpo export --merge runs/lora my-model
    """  # noqa: D301  \b keeps the lines apart
    if base is not None and not merge:
        raise typer.BadParameter("it is the model to merge adapters into: add --merge", param_hint="--base")
    if trust_remote_code and not merge:
        raise typer.BadParameter("nothing is loaded without --merge", param_hint="--trust-remote-code")
    from grpo_cli.engine.model_folder import model_folder

    folder = model_folder(source)
    if target.exists():
        raise CheckpointError(f"{target} is there already", hint="name a folder that is not, or remove it")
    beside = target.with_name(f".writing-{target.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        if merge:
            _write_merged(folder, beside, base, trust_remote_code=trust_remote_code)
        else:
            shutil.copytree(folder, beside)
        beside.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    typer.echo(f"{target}: {'merged from' if merge else 'copied from'} {folder}")


def _write_merged(folder: Path, target: Path, base: str | None, *, trust_remote_code: bool) -> None:
    from transformers.utils import logging

    from grpo_cli.policy.merge import merged_model

    logging.disable_progress_bar()
    merged = merged_model(
        folder, base=base, trust_remote_code=trust_remote_code, say=lambda line: typer.echo(f"notice: {line}")
    )
    merged.save_pretrained(target)
    for path in folder.iterdir():  # the tokenizer's files
        if not path.name.startswith(("adapter_", "quantization.")) and not (target / path.name).exists():
            shutil.copy(path, target / path.name)
