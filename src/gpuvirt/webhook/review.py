"""Admission reviews of the API server, admission.k8s.io/v1: decodes requests, and encodes the answers."""

import base64

import msgspec

from gpuvirt import nulls
from gpuvirt.errors import DamagedError
from gpuvirt.webhook.admitting import Decision
from gpuvirt.webhook.pod import Pod

VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
FORBIDDEN = 403
MOST_WARNING = 250
"""The characters of the longest warning; the API server cuts all warnings of an answer off after 4,096."""


class _Kind(msgspec.Struct, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class _Request(msgspec.Struct, frozen=True, rename="camel"):
    uid: str = ""
    kind: _Kind = _Kind()
    sub_resource: str = ""
    namespace: str = ""
    name: str = ""
    operation: str = ""
    object: msgspec.Raw = msgspec.Raw()

    @property
    def creates_pod(self) -> bool:
        return self.operation == "CREATE" and self.kind == _Kind("", "v1", "Pod") and not self.sub_resource


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    request: _Request | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    message: str
    code: int = FORBIDDEN
    reason: str = "Forbidden"
    status: str = "Failure"


class _Answered(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    uid: str
    allowed: bool
    status: _Status | None = None
    patch_type: str = ""
    patch: str = ""
    warnings: tuple[str, ...] = ()


class _Answer(msgspec.Struct, frozen=True, rename="camel"):
    response: _Answered
    api_version: str = VERSION
    kind: str = KIND


class AdmissionRequest(msgspec.Struct, frozen=True):
    """A request of the API server to admit an object."""

    uid: str
    namespace: str
    pod: Pod | None
    """The pod that is to be created; None for anything else, which the webhook does not change."""

    @property
    def name(self) -> str:
        """The pod's name, or how it will begin."""
        if self.pod is None:
            return ""
        return self.pod.metadata.name or f"{self.pod.metadata.generate_name}*"


def decoded(body: bytes) -> AdmissionRequest:
    """Return the request in a body; raise DamagedError."""
    try:
        review = nulls.decode(body, _Review)
        if (review.api_version, review.kind) != (VERSION, KIND):
            found = f"{review.api_version or 'no apiVersion'}, {review.kind or 'no kind'}"
            raise DamagedError(f"expected {KIND} of {VERSION}, found {found}"[:200])
        request = review.request
        if request is None or not request.uid:
            raise DamagedError("expected a review with a request and its uid")
        pod = nulls.decode(request.object, Pod) if request.creates_pod else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"cannot be parsed: {error}"[:200]) from error
    return AdmissionRequest(request.uid, request.namespace, pod)


def encoded(uid: str, decision: Decision) -> bytes:
    """Return the answer to a request."""
    if decision.refusal is not None:
        return _encoded(_Answered(uid, allowed=False, status=_Status(decision.refusal.text)))
    warnings = tuple(warning[:MOST_WARNING] for warning in decision.warnings)
    if not decision.operations:
        return _encoded(_Answered(uid, allowed=True, warnings=warnings))
    patch = base64.b64encode(msgspec.json.encode(decision.operations)).decode()
    return _encoded(_Answered(uid, allowed=True, patch_type="JSONPatch", patch=patch, warnings=warnings))


def _encoded(answer: _Answered) -> bytes:
    return msgspec.json.encode(_Answer(answer))
