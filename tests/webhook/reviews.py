"""Reviews as the API server sends them, and what is in their answers."""

import base64

import msgspec

from gpuvirt.plain import Plain

Object = dict[str, object]
POD = {"group": "", "version": "v1", "kind": "Pod"}
CONFIG = "version: v1\nclasses:\n  kata: {profile: hot-plug}\n"


def review(**request: object) -> bytes:
    """Return a review of a pod that is to be created, with other fields of its request."""
    fields = {"uid": "u1", "kind": POD, "namespace": "team", "operation": "CREATE", "object": {"spec": None}}
    content = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": fields | request}
    return msgspec.json.encode(content)


def pod(resource: str = "tencent.com/vgpu-492", runtime_class: str = "kata", **spec: object) -> Object:
    """Return a pod with a limit on a resource."""
    containers = [{"name": "main", "image": "x", "resources": {"limits": {resource: "1"}}}]
    return {"metadata": {"name": "p"}, "spec": {"runtimeClassName": runtime_class, "containers": containers} | spec}


def response(answer: bytes) -> Object:
    """Return the response in an answer."""
    content = msgspec.json.decode(answer, type=dict[str, object])
    assert (content["apiVersion"], content["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    found = content["response"]
    assert isinstance(found, dict)
    return found


def patch(answer: bytes) -> Plain:
    """Return the patch in an answer; None if it has none."""
    found = response(answer)
    content: Plain = msgspec.json.decode(base64.b64decode(str(found["patch"]))) if "patch" in found else None
    return content
