"""Mathematical equivalence, judged in a process of its own (see `rewards.answering`)."""

from functools import lru_cache

from rewards.answering import AnsweringProcess


class Verifier:
    """Judges one pair at a time.

    Args:
        deadline_seconds: Time for one pair, after which the process is ended. The process itself gives up earlier where it can.
    """

    def __init__(self, *, deadline_seconds: float = 20.0) -> None:
        self._process = AnsweringProcess(
            "equivalence_process.py", needs="math-verify", deadline_seconds=deadline_seconds
        )
        # A group's completions share their truth.
        self._is_mathematics = lru_cache(maxsize=4096)(self._ask_for_mathematics)

    def verdict(self, truth: str, text: str) -> float | None:
        """Judge the answer in a text.

        Args:
            truth: The true answer, or a text that ends in it.
            text: A completion.

        Returns:
            1.0 if equivalent; 0.0 if not, or if that was not found out in time; None if `truth` holds no mathematics.

        Raises:
            RuntimeError: If the process does not start.
        """
        if not self._is_mathematics(truth):
            return None
        return float(bool(self._process.ask({"truth": truth, "text": text})))

    def close(self) -> None:
        """End the process; the next verdict starts a new one."""
        self._process.close()

    def _ask_for_mathematics(self, truth: str) -> bool:
        return bool(self._process.ask({"truth": truth}))


VERIFIER = Verifier()
"""The process that all reward functions of this program share."""
