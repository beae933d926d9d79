"""The TLS of a child's connections: the server is always verified, and the end of a connection is a reset.

A hypervisor has no precondition on a version. A request that its kernel has not taken yet must therefore end with the
child: without SO_LINGER the child's kernel would go on to deliver it for minutes after the child's death.
"""

import os
import socket
import ssl
import struct
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

RESET = struct.pack("ii", 1, 0)
"""`struct linger`: on, 0 seconds; what is not delivered is dropped when the socket is closed."""
UNACKNOWLEDGED_MS = 10_000
"""TCP_USER_TIMEOUT: how long data may wait for the server while the child is stopped, which can not end then."""


class ResettingContext(ssl.SSLContext):
    """A context whose connections are reset when they are closed, also by the death of the process."""

    @override
    def wrap_socket(  # the signature of ssl.SSLContext
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        """Set the socket's options before the first byte is sent."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        return super().wrap_socket(
            sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, server_hostname, session
        )


def context(ca: str) -> ssl.SSLContext:
    """Return a context that trusts these PEM certificates alone, on 127.0.0.1, too; raises ssl.SSLError."""
    made = ResettingContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    # A Secret may have the certificate that signs the server's alone, without the root above it.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    made.load_verify_locations(cadata=ca)
    return made


def reset_connections() -> None:
    """Let all TCP connections of this process end by a reset, for a library that gives no access to its sockets."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as found:
                if found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
