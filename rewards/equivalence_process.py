r"""The process behind `rewards.equivalence`: one question a line on stdin, one answer a line on stdout, both JSON.

`{"truth": ...}` asks whether a text holds mathematics; `{"truth": ..., "text": ...}` asks whether both hold the same. It stands
alone and is run as a script. It ends when stdin does.
"""

import json
import logging
import re
import sys
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import NormalizationConfig

_SECONDS = 5
_ANSWER = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    ),
    ExprExtractionConfig(try_extract_without_anchor=False),
]
"""A box first, then a formula or number that is announced as the answer; not any number that happens to stand last."""

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|operatorname|begin|end)\*?\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3}")
"""Three letters in a row outside of a command: prose, or a word in place of an answer."""


@lru_cache(maxsize=256)
def _truth(text: str) -> list[Any]:
    r"""Parse the true answer.

    A bare answer is LaTeX without delimiters: as ordinary text `2\pi` would be read as 2 and `\sqrt{2}` as nothing.
    """
    bare = not _DELIMITED.search(text) and not _WORD.search(_COMMAND.sub("", text))
    return list((bare and parse(f"${text}$", parsing_timeout=_SECONDS)) or parse(text, parsing_timeout=_SECONDS))


def _answer(question: dict[str, str]) -> bool:
    truth = _truth(question["truth"])
    if "text" not in question:
        return bool(truth)
    found = parse(question["text"], extraction_config=_ANSWER, extraction_mode="first_match", parsing_timeout=_SECONDS)
    return bool(verify(truth, found, timeout_seconds=_SECONDS))


def main() -> None:
    """Answer until there is no question left."""
    logging.disable()  # a time limit that strikes is an answer, not news
    print(json.dumps("ready"), flush=True)  # noqa: T201  stdout is the protocol
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
