"""Replies that were paid for once, in a file that several processes may share."""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WAIT_SECONDS = 60.0
"""For another process that writes."""


class ReplyCache:
    """Texts by request, in an SQLite file. It holds JSON and nothing that could run.

    Args:
        path: The file, which is made with its folder if it is not there; None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    def find(self, key: str) -> str | None:
        """Look for the reply to a request; None if it is not known."""
        if self._path is None:
            return None
        with self._open() as database:
            row = database.execute("SELECT reply FROM replies WHERE request = ?", (key,)).fetchone()
        return None if row is None else str(json.loads(row[0]))

    def keep(self, key: str, reply: str) -> None:
        """Remember the reply to a request."""
        if self._path is None:
            return
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, json.dumps(reply)))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction: a connection must not be carried into another thread or process."""
        assert self._path is not None
        with contextlib.closing(sqlite3.connect(self._path, timeout=_WAIT_SECONDS)) as database, database:
            yield database


def request_key(server: str, body: dict[str, Any]) -> str:
    """Name a request by all that its reply depends on."""
    return hashlib.sha256(json.dumps([server, body], sort_keys=True).encode()).hexdigest()
