"""Messages over a socket: their length, then they themselves. All are JSON: nothing is run by reading them."""

import struct

LENGTH = struct.Struct(">Q")
"""Stands before every message."""

MOST_REPLY_BYTES = 256 * 2**20
"""A longer reply is none: it would only fill the trainer's memory."""


def framed(message: bytes) -> bytes:
    """Put a message's length before it."""
    return LENGTH.pack(len(message)) + message
