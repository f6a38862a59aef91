"""From finished rows to groups, each as soon as its last row has finished."""

from collections.abc import Callable, Sequence

from grpo_cli.rollout.engine import OnGroup
from grpo_cli.rollout.local.rows import Row
from grpo_cli.types import Group, Prompt


class FinishedGroups:
    """Collects rows by prompt.

    Args:
        prompts: What is completed.
        rows: All rows of the call, those of a prompt in the order of their index.
        close: Makes a group of a prompt and its rows.
        on_group: Told of every group.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[Row],
        *,
        close: Callable[[Prompt, Sequence[Row]], Group],
        on_group: OnGroup | None,
    ) -> None:
        self.prompts = prompts
        self._rows: list[list[Row]] = [[] for _ in prompts]
        for row in rows:
            self._rows[row.number].append(row)
        self._going = [len(own) for own in self._rows]
        self._close = close
        self._on_group = on_group
        self._groups: dict[int, Group] = {}

    def add(self, row: Row) -> None:
        """Note that a row has finished."""
        self._going[row.number] -= 1
        if self._going[row.number] == 0:
            group = self._close(self.prompts[row.number], self._rows[row.number])
            self._groups[row.number] = group
            if self._on_group is not None:
                self._on_group(group)

    def all(self) -> list[Group]:
        """Give all groups in the order of the prompts; all rows have finished."""
        return [self._groups[number] for number in range(len(self.prompts))]
