"""Sample completions as a table: what the policy says, and what it is rewarded for."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from grpo_cli.telemetry.readable import head_and_tail, short, tail, visible
from grpo_cli.telemetry.records import Rollouts

PROMPT_CHARACTERS = 160
COMPLETION_CHARACTERS = 400
SCORES_WIDTH = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion to show.

    Attributes:
        prompt, completion: Their texts.
        images: Of the prompt, their number.
        rewards: One per reward function; NaN: it did not apply.
        advantage: What the policy gradient multiplies it with.
    """

    prompt: str
    completion: str
    images: int
    rewards: tuple[float, ...]
    advantage: float


def pick_samples(rollouts: Rollouts, count: int) -> list[Sample]:
    """Choose completions, the best of a group first, the worst of it last, and those between at even distances.

    They come from as few groups as possible, so that they can be compared. Groups that were dropped are left out.
    """
    picked: list[Sample] = []
    for scored, advantages in zip(rollouts.scored, rollouts.advantages, strict=True):
        if scored.dropped:
            continue
        values = advantages.tolist()
        ranking = sorted(range(len(values)), key=lambda index: -values[index])
        picked += [
            Sample(
                prompt=scored.group.prompt.text,
                completion=scored.group.completions[index].text,
                images=len(scored.group.prompt.images),
                rewards=tuple(scored.rewards[index].tolist()),
                advantage=values[index],
            )
            for index in _evenly(ranking, count - len(picked))
        ]
    return picked


def samples_table(samples: Sequence[Sample], reward_names: Sequence[str], *, step: int) -> Table:
    """Lay out samples; texts are shortened, and control characters in them shown as escapes."""
    table = Table(
        title=Text(f"samples of step {step}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_lines=True,
        expand=True,
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=4, overflow="fold")
    table.add_column("scores", max_width=SCORES_WIDTH, overflow="fold")
    for sample in samples:
        table.add_row(
            Text(_images(sample) + tail(visible(sample.prompt), PROMPT_CHARACTERS)),
            Text(head_and_tail(visible(sample.completion), COMPLETION_CHARACTERS)),
            _scores(sample, reward_names),
        )
    return table


def _images(sample: Sample) -> str:
    """Say how many images a prompt has, a line before its text."""
    return f"[{sample.images} {'image' if sample.images == 1 else 'images'}]\n" if sample.images else ""


def _scores(sample: Sample, reward_names: Sequence[str]) -> Text:
    """Write a score a line, the advantage last: however many there are, the texts beside them keep their room."""
    labels = [*(visible(name) for name in reward_names), "advantage"]
    width = max(len(label) for label in labels)
    values = (*sample.rewards, sample.advantage)
    return Text("\n".join(f"{label:<{width}} {short(value):>7}" for label, value in zip(labels, values, strict=True)))


def _evenly(ranking: Sequence[int], count: int) -> list[int]:
    """Take `count` entries at even distances, both ends included; all if there are fewer."""
    if count >= len(ranking):
        return list(ranking)
    if count <= 1:
        return list(ranking[:count])
    return [ranking[round(position * (len(ranking) - 1) / (count - 1))] for position in range(count)]
