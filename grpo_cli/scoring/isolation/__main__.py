"""`python -m grpo_cli.scoring.isolation DESCRIPTOR`: a worker, and above it what sees to its end."""

import sys

from grpo_cli.scoring.isolation.supervision import supervised


def main(descriptor: int) -> None:
    """Fork, and answer requests in the child."""
    supervised(descriptor)
    from grpo_cli.scoring.isolation.process import answer_requests  # noqa: PLC0415  the supervisor is to stay small

    answer_requests(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
