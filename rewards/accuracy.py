"""Rewards on the answer: 1 if it is right, 0 if not, None where there is nothing to compare with."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.equivalence import VERIFIER
from rewards.independence import independent
from rewards.text import Completion, text_of

_REMOVED = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![A-Za-z])|[\s$~]")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_CHOICE = re.compile(r"\(?([A-Z])(?:[).:]+(?:\s.*)?)?", re.DOTALL)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@independent
def boxed(completions: Sequence[Completion], ground_truth: Sequence[Any], **_: Any) -> list[float | None]:
    r"""Compare the last `\boxed{...}` with the ground truth, as text.

    1 if both are equal after a light normalisation, else 0; 0 without a box; None where the ground truth is None. Normalised
    away: whitespace, `$`, LaTeX spacing, `\left` and `\right`, `\dfrac` and `\tfrac`, `\text{}`, a final full stop, and commas
    between thousands. A ground truth that is itself boxed counts with what is inside.

    Source: the accuracy reward of DeepSeek-R1 (Guo et al. 2025, arXiv 2501.12948, section 2.2.2): a rule on an answer in a
    box.
    """
    return [
        None if truth is None else float(_same_answer(text_of(completion), truth))
        for completion, truth in zip(completions, ground_truth, strict=True)
    ]


@independent
def math(
    completions: Sequence[Completion],
    ground_truth: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    r"""Compare answers as mathematics: `0.5`, `\frac{1}{2}` and `\frac{2}{4}` are the same.

    1 if math-verify finds the completion's answer (its last box; without one, a formula or number that is announced as the answer) equivalent
    to the true one, else 0; None where the true one is missing or holds no mathematics. The comparison runs in a process of its
    own, with a time limit that no expression can outrun; it may be called from any thread.

    Source: math-verify (https://github.com/huggingface/Math-Verify).

    Args:
        completions: Strings, or lists of messages.
        ground_truth: Answers, such as `\frac{1}{2}` or `42`.
        solution: Worked solutions that end in an answer (or just answers); preferred to `ground_truth` where not None.

    Raises:
        ValueError: If neither column is there.
    """
    return _judged(
        completions, ground_truth, solution, lambda truth, text: VERIFIER.verdict(truth, _final_answer(text))
    )


@independent
def tagged(
    completions: Sequence[Completion],
    ground_truth: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """Compare what stands in the last `<answer>...</answer>`: as text, as the letter of a choice, or as mathematics.

    1 if both are the same after the normalisation of `boxed`, whatever their case; if the true one is the letter of a choice (`B`, `(B)`,
    `B. 5`) and the answer begins with it in one of these forms; or if math-verify finds them equivalent. Else 0; 0 without such a
    block; None where the true one is missing.

    Source: the accuracy reward of DeepSeek-R1 (Guo et al. 2025, arXiv 2501.12948, section 2.2.2) on the template of its table 1, which
    `rewards.format.think_answer` asks for.

    Args:
        completions: Strings, or lists of messages.
        ground_truth: Answers.
        solution: Answers, or texts with one in such a block; preferred to `ground_truth` where not None.

    Raises:
        ValueError: If neither column is there.
    """
    return _judged(completions, ground_truth, solution, _tagged_verdict)


def _judged(
    completions: Sequence[Completion],
    ground_truth: Sequence[Any] | None,
    solution: Sequence[Any] | None,
    verdict: Callable[[str, str], float | None],
) -> list[float | None]:
    """Judge each completion's text by the true answer, where there is one.

    Raises:
        ValueError: If neither column is there.
    """
    if ground_truth is None and solution is None:
        raise ValueError("needs a dataset column `ground_truth` or `solution`")
    nothing = [None] * len(completions)
    rewards: list[float | None] = []
    for completion, answer, worked in zip(completions, ground_truth or nothing, solution or nothing, strict=True):
        truth = answer if worked is None else worked
        rewards.append(None if truth is None else verdict(_as_text(truth), text_of(completion)))
    return rewards


def _tagged_verdict(truth: str, text: str) -> float:
    expected = (_TAGGED.findall(truth) or [truth])[-1].strip()
    answer = (_TAGGED.findall(text) or [""])[-1].strip()
    if not answer:
        return 0.0
    if _normalised(answer).casefold() == _normalised(expected).casefold():
        return 1.0
    choice = _CHOICE.fullmatch(expected)
    if choice is not None:
        chosen = _CHOICE.fullmatch(answer)
        return float(chosen is not None and chosen[1] == choice[1])
    return VERIFIER.verdict(_in_box(expected), _in_box(answer)) or 0.0


def _in_box(answer: str) -> str:
    """Say where the answer is: math-verify looks for formulas among words."""
    return answer if last_boxed(answer) is not None else rf"\boxed{{{answer.replace('$', '')}}}"


def _final_answer(text: str) -> str:
    """Leave only the last box, if there is one: math-verify would take several as one set, a corrected answer included."""
    answer = last_boxed(text)
    return text if answer is None else rf"\boxed{{{answer}}}"


def last_boxed(text: str) -> str | None:
    r"""Give what stands in the last complete `\boxed{...}` (or `\fbox{...}`), nested braces included; None without one."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        inside = _until_closing_brace(text, match.end())
        if inside is not None:
            return inside
    return None


def _until_closing_brace(text: str, start: int) -> str | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # the next character is escaped: \{ and \} do not nest
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


def _same_answer(text: str, truth: Any) -> bool:
    answer = last_boxed(text)
    if answer is None:
        return False
    expected = _as_text(truth)
    return _normalised(answer) == _normalised(last_boxed(expected) or expected)


def _as_text(truth: Any) -> str:
    """A column of numbers that pandas or JSON made floats still means its integers."""
    return str(int(truth)) if isinstance(truth, float) and truth.is_integer() else str(truth)


def _normalised(answer: str) -> str:
    answer = _TEXT.sub(r"\1", answer)
    answer = _REMOVED.sub("", answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").removesuffix(".")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
