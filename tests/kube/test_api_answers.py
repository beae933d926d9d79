"""Responses of an API server: lines that arrive in pieces, and errors with their fix."""

from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.kube import failures
from gpuvirt.kube.failures import ApiRefusedError, ForbiddenError, GoneError, NotUnderstoodError, RbacRequest, failure
from gpuvirt.kube.resources import NODES, Resource, config_maps
from gpuvirt.kube.transport import Answer, Lines


@given(st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"x"))), st.integers(1, 9))
def test_lines_are_the_same_however_the_stream_is_split(lines: list[bytes], size: int) -> None:
    body = b"".join(line + b"\n" for line in lines)
    reader = Lines()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    found = [line for piece in pieces for line in reader.feed(piece)]
    assert found == [line for line in lines if line.strip()]


def test_an_unterminated_line_is_not_yielded() -> None:
    """A connection that breaks within an event yields no line."""
    assert list(Lines().feed(b'{"type": "MODI')) == []


def test_an_endless_line_is_refused() -> None:
    reader = Lines(most_bytes=10)
    assert list(reader.feed(b"0123456789")) == []
    with pytest.raises(NotUnderstoodError, match="10 bytes"):
        list(reader.feed(b"x"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (401, failures.UnauthorizedError),
        (403, ForbiddenError),
        (404, failures.NotFoundError),
        (409, failures.ConflictError),
        (410, GoneError),
        (422, ApiRefusedError),
        (429, ApiRefusedError),
        (500, ApiRefusedError),
        (503, ApiRefusedError),
    ],
)
def test_each_status_code_raises_its_own_error(code: int, kind: type[Exception]) -> None:
    body = b'{"kind": "Status", "message": "this is why", "code": 1}'
    error = failure(RbacRequest("get", NODES, "node01"), code, body)
    assert type(error) is kind
    assert str(error).startswith(f"get nodes node01: the API server answers {code}: this is why")


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            RbacRequest("patch", NODES, "node01"),
            'add to the ClusterRole: {apiGroups: [""], resources: [nodes], verbs: [patch]}',
        ),
        (
            RbacRequest("watch", config_maps("gpuvirt")),
            'add to the Role: {apiGroups: [""], resources: [configmaps], verbs: [watch]}',
        ),
        (
            RbacRequest("list", Resource("kubevirts", group="kubevirt.io")),
            'add to the ClusterRole: {apiGroups: ["kubevirt.io"], resources: [kubevirts], verbs: [list]}',
        ),
    ],
)
def test_a_missing_right_is_reported_with_the_rbac_rule_that_grants_it(asked: RbacRequest, line: str) -> None:
    assert line in str(failure(asked, 403, b"{}"))


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7.0), ("", 0.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)])
def test_a_retry_after_header_is_honoured(header: str, wait_s: float) -> None:
    assert Answer(429, {"retry-after": header}, _no_parts()).retry_after_s == wait_s
    assert failure(RbacRequest("list", NODES), 429, b"{}", retry_after_s=wait_s).retry_after_s == wait_s


async def _no_parts() -> AsyncIterator[bytes]:
    for part in list[bytes]():
        yield part


@given(st.binary(max_size=2000))
def test_any_error_response_is_reported_on_a_single_short_line(body: bytes) -> None:
    """The response may be a proxy's page."""
    text = str(failure(RbacRequest("list", NODES), 502, body))
    assert "\n" not in text
    assert len(text) < 400


def test_object_names_are_escaped_in_paths() -> None:
    assert NODES.path_of("../secrets?x=/") == "/api/v1/nodes/..%2Fsecrets%3Fx%3D%2F"
    assert config_maps("a/b").path == "/api/v1/namespaces/a%2Fb/configmaps"
    assert Resource("kubevirts", "kubevirt.io").path == "/apis/kubevirt.io/v1/kubevirts"


def test_a_kubernetes_status_is_decoded() -> None:
    status = msgspec.json.decode(b'{"code": 410, "reason": "Expired", "message": "too old"}', type=failures.Status)
    assert (status.code, status.reason, status.message) == (410, "Expired", "too old")
