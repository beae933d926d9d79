"""Tells systemd that the agent is ready: services that are ordered after it, the kubelet's, start then.

Contract: sd_notify(3), a datagram to the socket that the variable NOTIFY_SOCKET names; `@` begins an abstract name.
"""

import logging
import socket

from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView

log = logging.getLogger(__name__)

READY = b"READY=1"


async def announce_ready(address: str, views: Cell[NodeView]) -> None:
    """Tell the service manager at this socket once the host has been observed; an error is logged.

    It can't wait for the registration, since the kubelet is ordered after this service.
    """
    async for view in views.follow():
        if view.host_observed:
            break
    try:
        _send(address, READY)
    except OSError as error:
        log.warning("systemd can't be told that the agent is ready: %s: %s", address, error.strerror)


def _send(address: str, state: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as service_manager:
        service_manager.setblocking(False)  # a full queue must not hold up the agent
        service_manager.connect("\0" + address[1:] if address.startswith("@") else address)
        service_manager.send(state)
