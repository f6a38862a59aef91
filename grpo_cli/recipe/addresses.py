"""Where the servers of `vllm:` are, and whether others than this machine reach them."""

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from grpo_cli.recipe.schema import VllmSection

TOKEN_VARIABLE = "GRPO_VLLM_TOKEN"  # noqa: S105  a name, not a secret
"""The environment variable that holds the servers' token where `vllm.token_file` is not set."""
NEW_TOKEN = "(umask 077; openssl rand -hex 32 > token)"  # noqa: S105  how to make one
"""Command for a token file that its owner alone can read."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def server_addresses(section: VllmSection) -> tuple[str, ...]:
    """Give the base URL of each server, without a slash at the end.

    Args:
        section: One that is allowed, with `mode: server`.
    """
    if section.server_base_urls:
        return tuple(url.rstrip("/") for url in section.server_base_urls)
    host = f"[{section.server_host}]" if ":" in section.server_host else section.server_host
    return (f"http://{host}:{section.server_port}",)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine as only it sees itself. Names are not looked up."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_host(text: str) -> bool:
    """Tell whether a text is a host name or an address, with nothing around it."""
    try:
        ip_address(text)
    except ValueError:
        return _NAME.fullmatch(text) is not None
    return True


def is_base_url(url: str) -> bool:
    """Tell whether a URL is a server's: http or https, a host, perhaps a port, and nothing else."""
    parts = split_url(url)
    if parts is None or parts.scheme not in ("http", "https") or not is_host(parts.hostname or ""):
        return False
    return (
        parts.port != 0
        and "@" not in parts.netloc
        and url.rstrip("/").lower() == f"{parts.scheme}://{parts.netloc}".lower()
    )


def split_url(url: str) -> SplitResult | None:
    """Take a URL apart; None if its host or port is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # refused only when it is read
    except ValueError:
        return None
    return parts
