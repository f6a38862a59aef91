"""What processes tell each other, in several real ones."""

from pathlib import Path

import pytest
from many_processes import train_in

TELLING = """
from grpo_cli.engine.distributed import Processes

processes = Processes(bf16=False)
rank, main = processes.rank, processes.is_main
assert processes.gather(b"") == [b""] * 3
assert processes.gather(bytes([255]) * 2 * rank) == [b"", b"\\xff" * 2, b"\\xff" * 4]
assert processes.gather(b"all of it" if main else b"") == [b"all of it", b"", b""]
assert processes.from_main(b"" if main else None) == b""
assert processes.from_main(b"told" if main else None) == b"told"
assert processes.from_main(b"told" if main else b"what the others have") == b"told"
"""


@pytest.mark.slow
def test_messages_of_any_lengths_arrive_as_they_were_sent(tmp_path: Path) -> None:
    train_in(3, [], tmp_path, afterwards=TELLING)
