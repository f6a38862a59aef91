"""The process behind an isolated reward function.

It takes one request after another from a socket, and ends when the socket does. It imports neither torch nor any
other large library by itself: a process that was ended over a call is replaced in a fraction of a second.
"""

import asyncio
import inspect
import json
import os
import signal
import socket
import traceback
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.errors import GrpoError
from grpo_cli.scoring.binding import bound
from grpo_cli.scoring.isolation.arguments import read
from grpo_cli.scoring.isolation.failures import one_line
from grpo_cli.scoring.isolation.messages import LENGTH, framed
from grpo_cli.scoring.isolation.reply import plain_extra, plain_rewards
from grpo_cli.scoring.journal import Journal
from grpo_cli.scoring.reward import Reward, has_state, make_reward

_MOST_TRACEBACK = 20_000
"""Characters."""


class Service:
    """One reward function, loaded and called."""

    def __init__(self) -> None:
        self._reward: Reward | None = None
        self._runner = asyncio.Runner()

    def load(self, *, name: str, path: str, folder: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Import or construct the function, and say what it wants."""
        reward = make_reward(name, bound(name, path, folder=Path(folder), parameters=parameters))
        self._reward = reward
        return {
            "wanted": sorted(reward.wanted),
            "required": list(reward.required),
            "takes_all": reward.takes_all,
            "bound": sorted(reward.bound),
            "description": reward.description,
            **self._state(),
        }

    def call(self, *, arguments: Mapping[str, Any], count: int, state: Any) -> dict[str, Any]:
        """Call the function.

        Args:
            arguments: All that are available.
            count: Number of completions.
            state: What an object with a state is given first.
        """
        assert self._reward is not None
        if has_state(self._reward.source):
            self._reward.source.load_state_dict(state)
        journal = Journal(count)
        offered = {**arguments, "log_extra": journal.log_extra, "log_metric": journal.log_metric}
        returned = self._reward.function(**self._reward.select(offered))
        if inspect.isawaitable(returned):
            returned = self._runner.run(_awaited(returned))
        return {
            "returned": plain_rewards(returned),
            "columns": {name: [plain_extra(value) for value in values] for name, values in journal.columns.items()},
            "metrics": {str(name): [mean.total, mean.count] for name, mean in journal.metrics.items()},
            **self._state(),
        }

    def _state(self) -> dict[str, Any]:
        assert self._reward is not None
        return {"state": self._reward.source.state_dict()} if has_state(self._reward.source) else {}


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def answer_requests(descriptor: int) -> None:
    """Answer requests until there are no more.

    Args:
        descriptor: Of the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    own = os.getpid()
    service = Service()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        while True:
            length = requests.read(LENGTH.size)
            if len(length) < LENGTH.size:
                return
            request = read(requests.read(*LENGTH.unpack(length)))
            reply = _reply(service, **request)
            if os.getpid() != own:
                os._exit(0)  # the function has forked, and this is the other one: one answer is enough
            connection.sendall(framed(reply))


def _reply(service: Service, *, kind: str, keywords: Mapping[str, Any]) -> bytes:
    try:
        answer = service.load(**keywords) if kind == "load" else service.call(**keywords)
        return json.dumps(answer).encode()
    except GrpoError as error:
        answer = {"refused": [error.message, error.hint]}
    except BaseException as error:  # noqa: BLE001  whatever a user's function raises is the trainer's to judge
        text = one_line(str(error))
        kind_of_error = type(error).__name__
        answer = {
            "raised": f"{kind_of_error}: {text}" if text else kind_of_error,
            "traceback": traceback.format_exc()[-_MOST_TRACEBACK:],
        }
    return json.dumps(answer).encode()
