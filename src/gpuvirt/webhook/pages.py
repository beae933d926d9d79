"""The webhook's pages: reviews of the API server, and at an address of their own probes and metrics."""

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from gpuvirt import __version__
from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError
from gpuvirt.loops.histogram import Histogram
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.web.certificates import Handshakes
from gpuvirt.web.exposition import CONTENT_TYPE, counter, gauge, histograms, text_of
from gpuvirt.web.exposition import PageAnswer as Page
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest
from gpuvirt.webhook.admitting import UNCHANGED, Decision, admit
from gpuvirt.webhook.config import WebhookConfig
from gpuvirt.webhook.review import AdmissionRequest, decoded, encoded

log = logging.getLogger(__name__)

MUTATE = "/mutate"
JSON = "application/json"
MOST_BODY_BYTES = 8 << 20
"""The most bytes of a review: the API server takes objects of 3 MiB, and a review may have two of them."""
BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PATCHED, SAME, REFUSED, MALFORMED, FAILED = "patched", "unchanged", "refused", "malformed", "failed"
_TEXT = "text/plain; charset=utf-8"


class WebhookPages(msgspec.Struct):
    """The pages of one process."""

    config: WebhookConfig
    clock: Clock
    handshakes: Handshakes
    ends: bool = False
    """Whether the process is about to end, so that connections are closed after their next answer."""
    results: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """The requests by result, and the code of the reason for a refusal."""
    seconds: Histogram = msgspec.field(default_factory=lambda: Histogram(BUCKETS_S))

    def begin_to_end(self) -> None:
        """Be ready no more, and close each connection after its next answer."""
        self.ends = True

    @property
    def missing(self) -> str | None:
        """Why the process is not ready; None if it is."""
        if self.ends:
            return "the webhook is about to end"
        return f"no valid config: {self.config.fault}" if self.config.current is None else None

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request at the address of reviews."""
        if request.path != MUTATE:
            return _refused(404, f"no such page; the page is {MUTATE}; metrics and probes have another port")
        if request.method != "POST":
            return HttpAnswer(405, b"only POST is supported here\n", _TEXT, allow="POST")
        began_s = self.clock.monotonic_s()
        answer = self._reviewed(request)
        self.seconds.observe(self.clock.monotonic_s() - began_s)
        return HttpAnswer(answer.status, answer.body, answer.content_type, closes=self.ends or answer.closes)

    def _reviewed(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a review. An error makes the API server refuse the pod, by its failure policy."""
        if request.fault:
            return self._malformed(413, request.fault)
        if request.content_type != JSON:
            return self._malformed(415, f"the content type is {request.content_type or 'missing'}; expected {JSON}")
        try:
            review = decoded(request.body)
            decision = self._decided(review)
            body = encoded(review.uid, decision)
        except DamagedError as error:
            return self._malformed(400, str(error))
        except Exception as error:
            log.exception("a review failed")
            self.results[FAILED, ""] += 1
            return _refused(500, f"the webhook failed: {type(error).__name__}: {error}; its log has more")
        self._observe(review, decision)
        return HttpAnswer(200, body, JSON)

    def _decided(self, review: AdmissionRequest) -> Decision:
        if review.pod is None:
            return UNCHANGED
        if self.config.current is None:
            return Decision(
                Reason(
                    ReasonCode.WEBHOOK_NOT_CONFIGURED,
                    "the webhook",
                    "has no valid config yet",
                    (Seen(str(self.config.path), self.config.fault or ""),),
                    "correct the config; the webhook reads it again within 10 s of a change",
                )
            )
        return admit(review.pod, self.config.current)

    def _observe(self, review: AdmissionRequest, decision: Decision) -> None:
        if (reason := decision.refusal) is None:
            self.results[PATCHED if decision.operations else SAME, ""] += 1
            return
        times = self._count(REFUSED, str(reason.code))
        if times:
            extra = {"namespace": review.namespace, "pod": review.name, "times": times}
            log.warning("a pod was refused: %s", reason.text, extra=extra)

    def _malformed(self, status: int, why: str) -> HttpAnswer:
        if times := self._count(MALFORMED, ""):
            log.warning("a request is malformed: %s", why, extra={"times": times})
        return _refused(status, why)

    def _count(self, result: str, code: str) -> int:
        """Count a result; return how often it came if that is to be logged (the first, the tenth time ...), else 0."""
        self.results[result, code] += 1
        times = self.results[result, code]
        return times if str(times).rstrip("0") == "1" else 0

    def pages(self) -> dict[str, Callable[[], Page]]:
        """Return the pages at the address of probes and metrics."""

        def healthz() -> Page:
            return Page(200, "ok\n")

        def readyz() -> Page:
            missing = self.missing
            return Page(200 if missing is None else 503, f"{missing or 'ok'}\n")

        def metrics() -> Page:
            return Page(200, self.metrics(), CONTENT_TYPE)

        return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}

    def metrics(self) -> str:
        """Return the metrics page."""
        return text_of(
            counter(
                "gpuvirt_webhook_requests_total",
                "Reviews by result, and the code of the reason of a refusal.",
                ("result", "reason"),
                self.results.items(),
            ),
            histograms("gpuvirt_webhook_request_seconds", "Duration of reviews.", (), [((), self.seconds)]),
            gauge(
                "gpuvirt_webhook_config_valid",
                "1 while the config file is valid; otherwise its last valid content is used.",
                (),
                [((), float(self.config.fault is None))],
            ),
            counter(
                "gpuvirt_webhook_tls_refused_total",
                "Connections whose TLS handshake failed, by reason.",
                ("reason",),
                [((reason,), count) for reason, count in self.handshakes.failed.items()],
            ),
            gauge("gpuvirt_info", "The webhook's version.", ("version",), [((__version__,), 1)]),
        )


def _refused(status: int, why: str) -> HttpAnswer:
    return HttpAnswer(status, f"{why}\n".encode(), _TEXT)
