"""The console, compared as a whole: plain lines, live view on a real pseudo-terminal, sample tables."""

import io
import math
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from grpo_cli.telemetry.console import open_console, open_view
from grpo_cli.telemetry.live import LiveView
from grpo_cli.telemetry.plain import Pace, PlainView
from grpo_cli.telemetry.records import Rollouts
from grpo_cli.telemetry.samples import pick_samples, samples_table
from grpo_cli.types import ScoredGroup

Maker = Callable[..., ScoredGroup]

NUMBERS = {
    "reward": -2.1875,
    "reward_std": 0.4,
    "reward/length/mean": -2.0,
    "loss": 0.00123456,
    "grad_norm": 1.25,
    "entropy": 2.31,
    "kl": 0.0125,
    "completions/mean_length": 87.5,
    "completions/clipped_ratio": 0.125,
    "learning_rate": 1e-6,
    "tokens_per_second": 12345.6,
    "step_time": 4.0,
}


def test_a_log_file_gets_one_plain_line_per_step(plain_console: Console, written: Callable[[], str]) -> None:
    view = open_view(plain_console, total_steps=30)
    view.phase("generate")
    view.progress(100)
    view.step(9, NUMBERS)
    view.step(10, {"loss": 0.0, "step_time": 2.0})
    view.evaluation(10, {"eval/reward": -1.5, "eval/completions/mean_length": 20.0, "eval/reward/length/mean": -1.5})
    view.evaluation(10, {"eval/reward": 1.0, "eval/reward/a/mean": 0.25, "eval/reward/b/mean": math.nan})
    view.say("a line that is longer than the console is wide, " * 3 + "is not wrapped")
    view.warn("every reward was equal")
    view.close()
    assert written() == (
        "step  9/30  reward -2.188  std 0.4  loss 0.001235  grad_norm 1.25  entropy 2.31  kl 0.0125  length 87.5  "
        "clipped 12%  lr 1e-06  tokens/s 12,346  time 4.0s  eta 1m 24s\n"
        "step 10/30  loss 0  time 2.0s  eta 1m 00s\n"
        "evaluation at step 10  reward -1.5  length 20\n"
        "evaluation at step 10  reward 1  a 0.25  b -\n"
        + "a line that is longer than the console is wide, "
        * 3
        + "is not wrapped\n"
        "warning: every reward was equal\n"
    )


def test_text_is_neither_markup_nor_emoji_code_nor_control_code(
    plain_console: Console, written: Callable[[], str]
) -> None:
    view = PlainView(plain_console, 1)
    view.say("[bold]no[/bold] [/] :smile: \x1b[31mred\nsecond line")
    view.warn("[red]row 3[/red]")
    assert written() == "[bold]no[/bold] [/] :smile: \\x1b[31mred\nsecond line\nwarning: [red]row 3[/red]\n"


def test_eta_follows_the_last_twenty_steps() -> None:
    pace = Pace(total_steps=100)
    assert pace.eta(0) == "-"
    for _ in range(20):
        pace.add(1000.0)
    for _ in range(20):
        pace.add(2.0)
    assert pace.eta(40) == "2m 00s"
    assert pace.eta(100) == "0.0s"


def _scored(make: Maker) -> Rollouts:
    groups = [
        make("ab", [[math.nan]] * 2, dropped=True),
        make(["[bold]best[/bold]\x1b[2J", "worst\n", "middle"], [[1.0, 0.5], [-1.0, math.nan], [0.0, 0.25]]),
        make(["next"], [[2.0, 2.0]], prompt="Other."),
    ]
    advantages = [torch.zeros(2), torch.tensor([1.25, -1.25, 0.0]), torch.tensor([0.0])]
    return Rollouts(scored=groups, advantages=advantages)


@pytest.mark.parametrize(
    ("count", "advantages"),
    [
        (1, [1.25]),
        (2, [1.25, -1.25]),
        (3, [1.25, 0.0, -1.25]),
        (4, [1.25, 0.0, -1.25, 0.0]),
        (9, [1.25, 0.0, -1.25, 0.0]),
    ],
)
def test_samples_span_a_group_from_best_to_worst(make_scored: Maker, count: int, advantages: list[float]) -> None:
    assert [sample.advantage for sample in pick_samples(_scored(make_scored), count)] == advantages


def test_the_sample_table_shows_foreign_text_as_it_is(
    make_scored: Maker, plain_console: Console, written: Callable[[], str]
) -> None:
    samples = pick_samples(_scored(make_scored), 2)
    PlainView(plain_console, 1).show(samples_table(samples, ["length", "[red]x"], step=10))
    assert [line.rstrip() for line in written().splitlines()] == [
        "samples of step 10",
        "",
        "  prompt                     completion                                          scores",
        " " + "─" * 98,
        "  Say hi.                    [bold]best[/bold]\\x1b[2J                            length          1",
        "                                                                                 [red]x        0.5",
        "                                                                                 advantage    1.25",
        "",
        "  Say hi.                    worst\\n                                             length         -1",
        "                                                                                 [red]x          -",
        "                                                                                 advantage   -1.25",
        "",
    ]


def test_many_rewards_leave_room_for_the_texts(make_scored: Maker) -> None:
    names = [f"a_rather_long_reward_name_{number}" for number in range(8)]
    group = make_scored(["completion " * 5], [[0.5] * 8])
    samples = pick_samples(Rollouts(scored=[group], advantages=[torch.zeros(1)]), 1)
    console = Console(file=io.StringIO(), width=80)
    console.print(samples_table(samples, names, step=1))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(line.count("completion ") for line in lines) >= 2
    assert len(lines) < 30


def test_long_texts_are_shortened_in_the_table(make_scored: Maker) -> None:
    group = make_scored(["c" * 5000], [[0.0]], prompt="p" * 5000)
    samples = pick_samples(Rollouts(scored=[group], advantages=[torch.zeros(1)]), 1)
    console = Console(file=io.StringIO(), width=120)
    console.print(samples_table(samples, ["r"], step=1))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("p") < 200
    assert text.count("c") < 420


def test_output_that_cannot_hold_a_character_gets_an_escape() -> None:
    raw = io.BytesIO()
    console = open_console(io.TextIOWrapper(raw, encoding="ascii"))
    PlainView(console, 1).say("数 ± 🙂")
    console.file.flush()
    assert raw.getvalue() == b"\\u6570 \\xb1 \\U0001f642\n"


PROGRAM = """
    import sys
    from grpo_cli.telemetry.console import open_console, open_view

    view = open_view(open_console(), 3)
    view.resume_at(1)
    view.phase("generate")
    view.say("said [bold]meanwhile[/bold]")
    view.step(2, {"reward": -1.5, "step_time": 2.0})
    view.phase("score")
    print("printed by a reward function")
    view.close()
    view.say("afterwards")
    sys.stderr.write(type(view).__name__)
"""


def _on_a_terminal(**environment: str) -> tuple[str, str]:
    """Run the program on a pseudo-terminal; give what the terminal received and the kind of view."""
    leader, follower = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        stdout=follower,
        stderr=subprocess.PIPE,
        env=clean | {"TERM": "xterm-256color", "COLUMNS": "110"} | environment,
    )
    os.close(follower)
    received = b""
    try:
        while chunk := os.read(leader, 4096):
            received += chunk
    except OSError:  # how Linux tells that the other end is closed
        pass
    os.close(leader)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    return received.decode(), errors.decode()


def test_a_terminal_gets_a_live_view_that_leaves_the_cursor_as_it_was() -> None:
    received, kind = _on_a_terminal()
    assert kind == "LiveView"
    assert received.count("\x1b[?25l") == received.count("\x1b[?25h") == 1
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received)
    for expected in ("sampling completions", "said [bold]meanwhile[/bold]", "printed by a reward function"):
        assert expected in text
    last = text.split("\r\n")[-4:]
    assert re.fullmatch(r". computing rewards {4}━+[╸╺]━+ 2/3 0:00:0\d eta 2.0s *", last[0].split("\r")[-1])
    assert last[1].rstrip() == "reward -1.5  time 2.0s"
    assert last[2:] == ["afterwards", ""]


def test_no_color_keeps_the_live_view_without_its_colours() -> None:
    def colours(text: str) -> list[str]:
        codes = [code for found in re.findall(r"\x1b\[([0-9;]*)m", text) for code in found.split(";")]
        return [code for code in codes if code.startswith(("3", "4", "9", "10")) and code not in {"3", "4", "9"}]

    received, kind = _on_a_terminal(NO_COLOR="1")
    assert kind == "LiveView"
    assert colours(received) == []
    assert colours(_on_a_terminal()[0])


def test_a_dumb_terminal_gets_plain_lines() -> None:
    received, kind = _on_a_terminal(TERM="dumb")
    assert kind == "PlainView"
    assert received.split("\r\n") == [
        "said [bold]meanwhile[/bold]",
        "step 2/3  reward -1.5  time 2.0s  eta 2.0s",
        "printed by a reward function",
        "afterwards",
        "",
    ]


def test_colours_forced_into_a_log_file_do_not_bring_a_live_view() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert console.is_interactive
    assert not isinstance(open_view(console, 3), LiveView)


def _last_drawing(*phases: tuple[str, list[int]]) -> str:
    """Go through phases with their sampled tokens on a live view; give what stays on the screen."""
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=True, width=110), 3)
    for name, progress in phases:
        view.phase(name)
        for tokens in progress:
            time.sleep(0.05)
            view.progress(tokens)
    file.truncate(0)
    view.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_the_live_view_shows_how_fast_a_phase_samples() -> None:
    found = re.search(r"^2,000 tokens, ([\d,]+) tokens/s *$", _last_drawing(("generate", [1500, 500])), re.MULTILINE)
    assert found
    assert 2000 / 10 < int(found[1].replace(",", "")) <= 2000 / 0.1


def test_the_count_of_sampled_tokens_begins_anew_with_each_phase() -> None:
    assert "tokens" not in _last_drawing(("generate", [1500]), ("score", []))
    assert "\n7 tokens, " in _last_drawing(("generate", [1500]), ("evaluate", [3, 4]))
