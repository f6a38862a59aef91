"""The README's tables of recipe keys, generated from the schema.

python -m grpo_cli.recipe.reference README.md --write
python -m grpo_cli.recipe.reference README.md --check
"""

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpo_cli.errors import GrpoError
from grpo_cli.recipe.kinds import default_of, describe, fields_of, is_section, item_type, types_of, without_none
from grpo_cli.recipe.schema import Recipe

_HEADER = ("| key | allowed | default | meaning |", "|---|---|---|---|")


def key_table() -> str:
    """Write Markdown tables of every key: one for the top level, one for each section, one for the items of a list."""
    return "\n\n".join("\n".join(lines) for lines in _tables(Recipe, "", described={}))


def replace_between_markers(text: str, name: str, content: str) -> str:
    """Put generated text between `<!-- name:begin -->` and `<!-- name:end -->`.

    Args:
        text: The whole document.
        name: The marker's.
        content: What comes between the two lines.

    Raises:
        GrpoError: If the markers are not there, in this order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise GrpoError(f"the markers {begin} and {end} are not there, in this order")
    return f"{before}{begin}\n{content}\n{end}{after}"


def _tables(section: type[Any], prefix: str, *, described: dict[type[Any], str]) -> Iterator[list[str]]:
    """Give the table of a section and those of the sections below; a section that is used twice has one, at its first place.

    Keys that a section has from another one are described there.

    Args:
        section: The section.
        prefix: Its place in a recipe.
        described: By section the place of its table; those of this call are added.
    """
    kinds = types_of(section)
    taken_over = {name for base in section.__mro__[1:] if base in described for name in fields_of(base)}
    fields = {name: field for name, field in fields_of(section).items() if name not in taken_over}
    below = {name: found for name in fields if (found := _section_below(kinds[name], f"{prefix}.{name}".lstrip(".")))}
    for inner, place in below.values():
        described.setdefault(inner, place)
    title = f"#### `{prefix}`" if prefix else "#### top level"
    rows = [_row(field, kinds[name], described) for name, field in fields.items() if not is_section(kinds[name])]
    summary = typing.cast("str", section.__doc__)
    yield [title, "", summary, "", *_HEADER, *rows]
    for inner, place in below.values():
        if described[inner] == place:
            yield from _tables(inner, place, described=described)


def _section_below(kind: Any, place: str) -> tuple[type[Any], str] | None:
    """Give the section that a key holds, or a list or mapping of them, and its place in a recipe."""
    inner, _ = without_none(kind)
    if is_section(inner):
        return inner, place
    suffix = {list: "[]", dict: ".NAME"}.get(typing.get_origin(inner))
    if suffix is None or not is_section(item_type(inner)):
        return None
    return item_type(inner), f"{place}{suffix}"


def _row(field: dataclasses.Field[Any], kind: Any, described: dict[type[Any], str]) -> str:
    inner, _ = without_none(kind)
    allowed = (
        f"the keys of `{described[inner]}`, or null" if is_section(inner) else describe(kind, field.metadata["range"])
    )
    cells = (f"`{field.name}`", allowed, _default(field), field.metadata["help"])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    if default == MISSING:
        return "**required**"
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def renew_table(name: str, content: str, *, module: str, arguments: Sequence[str] | None = None) -> int:
    """Check or renew what stands between the markers of a name in a file: the command line of every generated table.

    Args:
        name: Of the markers.
        content: What should stand there.
        module: What the command is run as.
        arguments: The command's; None: the process's.

    Returns:
        The exit code: 1 if the table is out of date.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"The README's table of {name}.")
    parser.add_argument("file", type=Path)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail if the table is out of date")
    mode.add_argument("--write", action="store_true", help="renew the table")
    options = parser.parse_args(arguments)
    before = options.file.read_text(encoding="utf-8")
    after = replace_between_markers(before, name, content)
    if options.write:
        options.file.write_text(after, encoding="utf-8")
    elif before != after:
        sys.stderr.write(f"{options.file}: the table of {name} is out of date; run with --write\n")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or renew the tables of recipe keys in a file; give the exit code."""
    return renew_table("keys", key_table(), module="grpo_cli.recipe.reference", arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
