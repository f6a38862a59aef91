"""Without a way to the hub, what is not here is told of after a few seconds; with one, nothing changes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

RECIPE = """\
model: {name_or_path: nobody/no-such-model}
dataset: {name: prompts.jsonl}
rewards: {reward_funcs: [rewards.length.num_characters]}
"""

PROBE = """\
import os
from huggingface_hub import is_offline_mode
from grpo_cli.hub import stay_offline_without_network
stay_offline_without_network()
stay_offline_without_network()
print(is_offline_mode(), os.environ.get("HF_HUB_OFFLINE"))
"""


class _Answers(BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self) -> None:
        type(self).asked += 1
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...

    asked = 0


class _Refuses(_Answers):
    status = 503
    asked = 0


@pytest.fixture(params=[_Answers, _Refuses])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[type[_Answers], str]]:
    """A hub that answers, well or not."""
    kind = request.param
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    Thread(target=server.serve_forever, daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def run(arguments: list[str], endpoint: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with another hub, and no model or dataset from an earlier time."""
    usual = {
        name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    environment = usual | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub"), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_hub_that_answers_is_asked_as_before(served: tuple[type[_Answers], str], tmp_path: Path) -> None:
    kind, endpoint = served
    done = run(["-c", PROBE], endpoint, tmp_path)
    assert done.stdout.split() == ["False", "None"]
    assert done.stderr == ""
    assert kind.asked == 1


def test_without_a_way_to_it_only_what_is_here_counts(nobody: str, tmp_path: Path) -> None:
    done = run(["-c", PROBE], nobody, tmp_path)
    assert done.stdout.split() == ["True", "1"]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{nobody} cannot be reached (Connection refused): only what was downloaded before is used")


def test_nothing_is_asked_where_the_user_says_so(nobody: str, tmp_path: Path) -> None:
    done = run(["-c", PROBE], nobody, tmp_path, HF_HUB_OFFLINE="1")
    assert (done.stdout.split(), done.stderr) == (["True", "1"], "")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_model_that_is_not_here_is_told_of_soon(command: str, nobody: str, tmp_path: Path) -> None:
    """The hub's own client would go on asking for 23 seconds for each file."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 8)
    done = run(["-m", "grpo_cli", command, "recipe.yaml"], nobody, tmp_path)
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert "cannot be reached (Connection refused)" in said[0]
    assert said[1].startswith("error: model.name_or_path: cannot load nobody/no-such-model (offline): ")
    assert "Retrying" not in done.stderr
