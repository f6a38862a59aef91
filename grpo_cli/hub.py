"""Whether there is a way to the hub that models and datasets come from."""

import errno
import functools
import logging
import os
import socket

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from grpo_cli.errors import causes

_ATTEMPTS = 3
_NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN}
_SECONDS = 10
"""For an answer. No answer in time is no proof that there is no way."""


@functools.cache
def stay_offline_without_network() -> None:
    """Ask the hub once whether it is there. If there is no way to it, let its libraries read what has come before, and nothing else.

    Their client asks six times for every file that is not here, in which half a minute goes by, and files that a model does not have are
    never here. What is slow, or refuses, is left to it.
    """
    from huggingface_hub import constants, is_offline_mode  # noqa: PLC0415  most runs do without

    if is_offline_mode() or os.environ.get("HF_HUB_OFFLINE"):  # whoever says 0 wants the hub to be waited for
        return
    try:
        _ask(constants.ENDPOINT)
    except Exception as error:  # noqa: BLE001  the client's errors are of another library from version to version
        reason = _no_way(error)
        if reason is None:
            return
        if int(os.environ.get("RANK", "0")) == 0:  # once for all processes of a run
            logging.getLogger(__name__).warning(
                "%s cannot be reached (%s): only what was downloaded before is used, as with HF_HUB_OFFLINE=1",
                constants.ENDPOINT,
                reason,
            )
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that are started
        constants.HF_HUB_OFFLINE = True


def _no_way(error: BaseException) -> str | None:
    """Give the system's own words for why there is no connection; None: there is one, or nobody knows."""
    system = next((one for one in causes(error) if isinstance(one, OSError)), None)
    is_no_way = (
        isinstance(system, socket.gaierror | ConnectionRefusedError) or getattr(system, "errno", None) in _NO_WAY
    )
    return (system.strerror or str(system)) if system is not None and is_no_way else None


@retry(
    stop=stop_after_attempt(_ATTEMPTS),
    wait=wait_exponential(),
    retry=retry_if_exception(lambda error: _no_way(error) is not None),
    reraise=True,
)
def _ask(endpoint: str) -> None:
    """Ask for nothing, by the way that the hub's client takes: its proxies, certificates and settings."""
    from huggingface_hub import get_session  # noqa: PLC0415  as above

    get_session().head(endpoint, timeout=_SECONDS)
