"""Columns that reward functions logged with `log_extra`, under the names that people see."""

from collections.abc import Sequence

from grpo_cli.types import LoggedColumn, ScoredGroup


def shown_names(scored: Sequence[ScoredGroup], reward_names: Sequence[str]) -> dict[LoggedColumn, str]:
    """Name the columns; where two functions logged one name, the later one's has its function's name in front.

    It takes all groups that are shown together: what one of them logged may have the name of what was logged for another.

    Args:
        scored: Those groups.
        reward_names: One per function, in their order.
    """
    found = dict.fromkeys(column for one in scored for column in one.extras)
    names: dict[LoggedColumn, str] = {}
    for column in sorted(found, key=lambda column: reward_names.index(column.function)):
        taken = column.name in names.values()
        names[column] = f"{column.function}/{column.name}" if taken else column.name
    return names
