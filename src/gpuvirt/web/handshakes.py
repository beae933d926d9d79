"""The TLS handshakes that fail: the client gets the alert with the reason, and the server counts and logs it.

asyncio does neither: it closes the connection without the alert, so that the client only sees that it ended.
"""

import logging
import ssl
from collections import Counter

from typing_extensions import override

log = logging.getLogger(__name__)

_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""No failures, or clients that went away."""


class Handshakes:
    """The failed handshakes of a server's contexts."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """By the reason in OpenSSL's words."""

    def observe(self, context: ssl.SSLContext) -> None:
        """Count the failures of a context's connections, and send their alerts."""
        handshakes = self

        class Observed(ssl.SSLObject):
            _failure: ssl.SSLError | None = None

            @override
            def do_handshake(self) -> None:
                if self._failure is not None:
                    raise self._failure
                try:
                    super().do_handshake()
                except _WAITS:
                    raise
                except ssl.SSLError as error:
                    handshakes.observe_error(error)
                    self._failure = error
                    # asyncio then sends what OpenSSL has written, the alert, and waits until the client has closed.
                    raise ssl.SSLWantReadError from error

        context.sslobject_class = Observed

    def observe_error(self, error: ssl.SSLError) -> None:
        """Count a failure, and log the first, the tenth, the hundredth of each kind."""
        reason = (error.reason or "unknown").lower().replace("_", " ")
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"{reason}: {error.verify_message}"
        self.failed[reason] += 1
        times = self.failed[reason]
        if str(times).rstrip("0") == "1":
            log.warning("a client was refused by TLS: %s", reason, extra={"times": times})
