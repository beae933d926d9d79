"""Reviews of the API server: what is decoded, what is refused as malformed, and the form of answers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.errors import DamagedError
from gpuvirt.kube.jsonpatch import Op, Operation
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.webhook.admitting import UNCHANGED, Decision
from gpuvirt.webhook.review import decoded, encoded
from tests.webhook.reviews import Object, patch, response, review


def test_a_pod_that_is_to_be_created_is_decoded() -> None:
    pod = {"metadata": {"generateName": "a-", "labels": None}, "spec": {"runtimeClassName": "kata", "volumes": None}}
    found = decoded(review(object=pod))
    assert found.pod is not None
    assert (found.uid, found.namespace, found.name) == ("u1", "team", "a-*")
    assert found.pod.spec.runtime_class_name == "kata"


@pytest.mark.parametrize(
    "request_fields",
    [
        {"operation": "UPDATE"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"subResource": "ephemeralcontainers"},
        {"operation": "DELETE", "object": None},
    ],
    ids=str,
)
def test_anything_else_is_none_of_the_webhooks_business(request_fields: Object) -> None:
    assert decoded(review(**request_fields)).pod is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cannot be parsed"),
        (b"{}", "expected AdmissionReview of admission.k8s.io/v1, found no apiVersion, no kind"),
        (review().replace(b"/v1", b"/v1beta1", 1), "found admission.k8s.io/v1beta1, AdmissionReview"),
        (review(uid=""), "expected a review with a request and its uid"),
        (review(object=[]), "cannot be parsed"),
        (review(object={"spec": {"containers": [1]}}), "cannot be parsed"),
        (b"\xff", "cannot be parsed"),
        (b"[" * 100_000, "cannot be parsed"),
    ],
)
def test_what_is_no_review_is_malformed(body: bytes, words: str) -> None:
    with pytest.raises(DamagedError, match=words):
        decoded(body)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=3),
       lambda inner: st.dictionaries(st.sampled_from(["request", "object", "spec", "uid", "kind"]), inner)).map(
           msgspec.json.encode))  # fmt: skip
def test_no_body_raises_another_error(body: bytes) -> None:
    with pytest.raises(DamagedError):
        decoded(body)


def test_an_answer_has_the_patch_in_base64_or_none() -> None:
    answer = encoded("u1", Decision(operations=(Operation(Op.ADD, "/spec/x", [1]),), warnings=("w",)))
    others = {key: value for key, value in response(answer).items() if key != "patch"}
    assert others == {"uid": "u1", "allowed": True, "patchType": "JSONPatch", "warnings": ["w"]}
    assert patch(answer) == [{"op": "add", "path": "/spec/x", "value": [1]}]
    assert response(encoded("u1", UNCHANGED)) == {"uid": "u1", "allowed": True}


def test_a_refusal_has_its_reason_in_the_status() -> None:
    reason = Reason(ReasonCode.INJECTED_NAME_TAKEN, "container nvidia", "has the same name as another")
    found = response(encoded("u1", Decision(reason)))
    status = {"status": "Failure", "reason": "Forbidden", "code": 403, "message": reason.text}
    assert found == {"uid": "u1", "allowed": False, "status": status}
