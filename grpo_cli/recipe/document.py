"""YAML text to values with their places; duplicate keys and syntax errors become problems with a line."""

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_cli.errors import Problem
from grpo_cli.recipe.position import KeyPath, Placed, key_text

_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
# YAML 1.1 asks for a dot and a signed exponent, so that `1e-6` would be a string.
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


def _recipe_resolvers(inherited: dict[str, list[tuple[str, Any]]]) -> dict[str, list[tuple[str, Any]]]:
    """Read `1e-6` as a number, and a date as the string that it is to every key of a recipe."""
    resolvers = {first: [each for each in rules if each[0] != _TIMESTAMP_TAG] for first, rules in inherited.items()}
    for first in "-+.0123456789":
        resolvers[first] = [*resolvers.get(first, []), (_FLOAT_TAG, _EXPONENT)]
    return resolvers


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the recipe's idea of a number."""

    yaml_implicit_resolvers = _recipe_resolvers(yaml.SafeLoader.yaml_implicit_resolvers)


class RecipeDumper(yaml.SafeDumper):
    """Writes what `RecipeLoader` reads: the string "1e-6" gets its quotes."""

    yaml_implicit_resolvers = _recipe_resolvers(yaml.SafeDumper.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  PyYAML's signature
        """Write equal lists twice rather than as anchor and alias."""
        return True


def read_yaml(text: str, locate: Callable[[int], str], problems: list[Problem], *, path: KeyPath = ()) -> Placed | None:
    """Read one YAML document.

    Args:
        text: The document.
        locate: Line number, from 1, to the text that names the place.
        problems: Gets what is wrong.
        path: The key that the document is the value of.

    Returns:
        The values; None if the text is no YAML. An empty document is an empty mapping.
    """
    try:
        loader = RecipeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Placed(value={}, where=locate(1))
        return _Reader(loader=loader, locate=locate, problems=problems).read(node, path, locate(_line(node.start_mark)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = locate(_line(mark) if mark is not None else 1)
        hint = "indent with spaces" if error.problem and r"'\t'" in error.problem else None
        problems.append(
            Problem(where=where, key=key_text(path), message=f"not valid YAML: {_sentence(error)}", hint=hint)
        )
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(Problem(where=locate(line), key=key_text(path), message=f"not valid YAML: {error.reason}"))
    return None


def _line(mark: Any) -> int:
    return int(mark.line) + 1


def _sentence(error: yaml.MarkedYAMLError) -> str:
    """Put PyYAML's context and problem on one line."""
    return " ".join(", ".join(part for part in (error.context, error.problem) if part).split())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Turns PyYAML's nodes into placed values."""

    loader: RecipeLoader
    locate: Callable[[int], str]
    problems: list[Problem]
    around: set[int] = field(default_factory=set)
    """Ids of the nodes that are being read: an alias to one of them has no end."""
    checked: set[int] = field(default_factory=set)
    """Ids of the mappings whose keys were compared; merging (`<<`) adds keys to a mapping later."""

    def read(self, node: yaml.Node, path: KeyPath, where: str) -> Placed:
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise yaml.constructor.ConstructorError(None, None, f"unknown tag {node.tag}", node.start_mark)
        if id(node) in self.around:
            raise yaml.constructor.ConstructorError(None, None, "a value contains itself", node.start_mark)
        self.around.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, path, where)
            if isinstance(node, yaml.SequenceNode):
                items = [
                    self.read(item, (*path, index), self.locate(_line(item.start_mark)))
                    for index, item in enumerate(node.value)
                ]
                return Placed(value=items, where=where)
            return Placed(value=self.loader.construct_object(node), where=where)
        finally:
            self.around.discard(id(node))

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath, where: str) -> Placed:
        if id(node) not in self.checked:
            self.checked.add(id(node))
            self._report_duplicates(node, path)
        self.loader.flatten_mapping(node)
        values = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            values[key] = self.read(value_node, (*path, key), self.locate(_line(key_node.start_mark)))
        return Placed(value=values, where=where)

    def _key(self, node: yaml.Node) -> Any:
        key = self.loader.construct_object(node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", node.start_mark)
        return key

    def _report_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key, line = self._key(key_node), _line(key_node.start_mark)
            if key in first_lines:
                self.problems.append(
                    Problem(
                        where=self.locate(line),
                        key=key_text((*path, key)),
                        message=f"duplicate key; it was set before on line {first_lines[key]}",
                        hint="remove one of the two",
                    )
                )
            first_lines.setdefault(key, line)
