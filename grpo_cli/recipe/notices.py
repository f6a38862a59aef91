"""What a recipe may say and probably does not mean: shown in one line each, and not in the way of a run."""

from collections.abc import Callable, Iterable

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.schema import DatasetSection, Recipe

_SMALL_LEARNING_RATE = 1e-5
_BFLOAT16_REACH = 512
"""bfloat16 keeps 8 significant bits: less than 1/512 of a weight is always rounded away when it is added to the weight."""


def notices(recipe: Recipe) -> tuple[str, ...]:
    """Give one line per notice, with its key.

    Args:
        recipe: One that is allowed.
    """
    findings = [finding for look in _LOOKS for finding in look(recipe)]
    return tuple(f"{one.keys[0]}: {one.message}" + (f" ({one.hint})" if one.hint else "") for one in findings)


def updates_vanish(recipe: Recipe) -> Iterable[Finding]:
    """AdamW moves a weight by about the learning rate; weights without master copies round that."""
    rate, dtype = recipe.train.learning_rate, recipe.model.dtype
    if dtype not in ("auto", "bfloat16") or not 0 < rate < _SMALL_LEARNING_RATE:
        return
    weights = "bfloat16 weights" if dtype == "bfloat16" else "weights of a checkpoint in bfloat16"
    yield Finding(
        keys=("model.dtype", "train.learning_rate"),
        message=f"found {dtype} with learning rate {rate:g}; {weights} above about {_BFLOAT16_REACH * rate:.2g} in size will not "
        "move, because a step of the optimizer is less than their rounding",
        hint="use float32 with `train.bf16: true`",
    )


def evaluation_is_held_out(recipe: Recipe) -> Iterable[Finding]:
    """Rows that are trained on cannot tell learning from memorising."""
    evaluated = recipe.eval.dataset
    if evaluated is not None and _rows(evaluated) == _rows(recipe.dataset):
        yield Finding(
            keys=("eval.dataset", "dataset"),
            message=f"found {evaluated.name} ({evaluated.split}), which is trained on as well, so that evaluation cannot tell learning "
            "from memorising",
            hint="use another split or file",
        )


def _rows(dataset: DatasetSection) -> tuple[object, ...]:
    return (dataset.name, dataset.config, dataset.split, dataset.revision, dataset.arguments)


_LOOKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (updates_vanish, evaluation_is_held_out)
