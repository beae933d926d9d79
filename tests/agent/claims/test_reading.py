"""A claim as the API server has it: what a scheduler gave to it, and what can't be prepared."""

import json
from collections.abc import Mapping

import pytest

from gpuvirt.agent.claims.preparing import ReservedClaim
from gpuvirt.agent.cluster.claimslices import reserved
from gpuvirt.facts.ids import ClaimUid, DeviceId, PciAddress, ResourceName
from gpuvirt.kube.kinds.resourceclaims import ResourceClaim
from gpuvirt.model.allocation.claims import Shape, accounted, device_name, named_gpu
from gpuvirt.model.dra import claimfiles
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.nulls import decode
from gpuvirt.paths import HostPath
from gpuvirt.plain import Plain

GPU = PciAddress("0000:65:00.0")
UID = ClaimUid("3f0c")
RESULT: dict[str, Plain] = {
    "request": "gpu/half",
    "driver": "gpuvirt.io",
    "pool": "node01/gpuvirt.io",
    "device": "gpu-0000-65-00-0-passthrough",
}
THEIRS: dict[str, Plain] = {"request": "nic", "driver": "nic.example.com", "pool": "node01", "device": "nic-0"}


def found(*results: Mapping[str, Plain], config: Plain = None, pod_claim: str = "") -> ReservedClaim | Reason:
    annotations = {"resource.kubernetes.io/pod-claim-name": pod_claim} if pod_claim else None
    content = {
        "metadata": {"name": "vm-gpu", "namespace": "default", "uid": UID, "annotations": annotations},
        "status": {
            "allocation": {"devices": {"results": list(results) or None, "config": config}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-1"}],
        },
    }
    return reserved(decode(json.dumps(content).encode(), ResourceClaim), UID)


def code(reason: ReservedClaim | Reason) -> ReasonCode:
    assert isinstance(reason, Reason), reason
    return reason.code


def test_the_gpus_of_this_driver_are_the_claims() -> None:
    claim = found(THEIRS, RESULT, pod_claim="gpus")
    assert isinstance(claim, ReservedClaim)
    assert claim.pods == {"pod-1"}
    (gpu,) = claim.claim.gpus
    assert (gpu.gpu, gpu.shape, gpu.request, claim.claim.template) == (GPU, Shape.PASSTHROUGH, "gpu/half", "gpus")


@pytest.mark.parametrize(
    ("changes", "expected", "says"),
    [
        ({"adminAccess": True}, ReasonCode.CLAIM_INVALID, "adminAccess"),
        ({"device": "gpu-0000-65-00-0-container"}, ReasonCode.CLAIM_INVALID, "no device that this version prepares"),
        ({"device": "../../x"}, ReasonCode.CLAIM_INVALID, "no device that this version prepares"),
        ({"driver": "gpu.nvidia.com"}, ReasonCode.CLAIM_UNKNOWN, "no GPU is allocated"),
    ],
)
def test_a_device_that_is_not_ours_to_prepare(changes: Mapping[str, Plain], expected: ReasonCode, says: str) -> None:
    reason = found({**RESULT, **changes})
    assert code(reason) is expected
    assert isinstance(reason, Reason)
    assert says in reason.text


def test_other_claims_that_can_not_be_prepared() -> None:
    opaque: Plain = [{"opaque": {"driver": "gpuvirt.io", "parameters": {"a": 1}}}]
    assert code(found(RESULT, config=opaque)) is ReasonCode.CLAIM_INVALID
    assert isinstance(found(RESULT, config=[{"opaque": {"driver": "nic.example.com"}}]), ReservedClaim)
    second = {**RESULT, "device": "gpu-0000-ca-00-0-passthrough"}
    assert code(found(RESULT, second)) is ReasonCode.CLAIM_INVALID
    assert isinstance(found(RESULT, {**second, "request": "gpu2"}), ReservedClaim)
    assert code(found()) is ReasonCode.CLAIM_UNKNOWN
    not_allocated = decode(b'{"metadata": {"name": "a", "uid": "3f0c"}, "status": null}', ResourceClaim)
    assert code(reserved(not_allocated, UID)) is ReasonCode.CLAIM_UNKNOWN
    assert code(reserved(not_allocated, ClaimUid("other"))) is ReasonCode.CLAIM_UNKNOWN


def test_names_of_devices_say_gpu_and_shape() -> None:
    for shape in Shape:
        assert named_gpu(device_name(GPU, shape)) == (GPU, shape)
    assert accounted("gpuvirt.io", device_name(GPU, Shape.CONTAINER)) == DeviceId(GPU)
    assert accounted(ResourceName("gpu.nvidia.com"), device_name(GPU, Shape.CONTAINER)) == "gpu-0000-65-00-0-container"
    assert accounted("gpuvirt.io", "something") == "something", "an account of an unknown device stays unmapped"


def test_kubevirt_finds_the_address_by_the_requests_name() -> None:
    """Paths and content: KEP-5304 and KubeVirt 1.9, pkg/dra/utils.go; it takes the first version alone."""
    claim = found(RESULT, pod_claim="gpus")
    assert isinstance(claim, ReservedClaim)
    (gpu,) = claim.claim.gpus
    spec = json.loads(
        claimfiles.spec_of(claim.claim, [[HostPath("/dev/vfio/vfio"), HostPath("/dev/vfio/12")]], "/run/x")
    )
    (device,) = spec["devices"]
    assert f"{spec['kind']}={device['name']}" == claimfiles.cdi_device(claim.claim, gpu)
    edits = device["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/vfio/vfio", "/dev/vfio/12"]
    root = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpus"
    assert [(mount["hostPath"], mount["containerPath"]) for mount in edits["mounts"]] == [
        ("/run/x/gpu.json", f"{root}/{request}/gpuvirt.io-metadata.json") for request in ("gpu", "gpu/half")
    ]
    decoder, text = json.JSONDecoder(), claimfiles.metadata_of(claim.claim, gpu).decode()
    first, end = decoder.raw_decode(text)
    second, _ = decoder.raw_decode(text[end:].lstrip())
    assert [first["apiVersion"], second["apiVersion"]] == [
        "metadata.resource.k8s.io/v1alpha1",
        "metadata.resource.k8s.io/v1beta1",
    ]
    assert first["requests"][0]["name"] == "gpu/half"
    (shown,) = first["requests"][0]["devices"]
    assert shown["attributes"]["resource.kubernetes.io/pciBusID"] == {"string": GPU}
