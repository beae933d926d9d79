"""The files of a prepared claim: a CDI spec with a device for each of its GPUs, and the metadata that KubeVirt reads.

Metadata: KEP-5304, k8s.io/dynamic-resource-allocation/api/metadata/doc.go of 0.36.3. It is no code of the kubelet: a
driver writes a stream of JSON objects, one for each version, and mounts it. KubeVirt 1.9 takes the first version alone
(pkg/dra/utils.go), and looks for a request without the name of the alternative that was chosen.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuvirt.facts.ids import ClaimUid
from gpuvirt.model.allocation.claims import DRIVER, Claim, ClaimedGpu
from gpuvirt.model.dra.shapes import STANDARD
from gpuvirt.paths import HostPath
from gpuvirt.plain import Plain

KIND = f"{DRIVER}/claim"
PREFIX = "gpuvirt.io-claim-"
"""The prefix of the names of CDI specs; other files in the folder belong to other programs."""
CDI_VERSION = "0.5.0"
"""The first one whose names of devices may begin with a digit."""
METADATA_VERSIONS = ("metadata.resource.k8s.io/v1alpha1", "metadata.resource.k8s.io/v1beta1")
IN_CONTAINER = "/var/run/kubernetes.io/dra-device-attributes"
PERMISSIONS = "mrw"


def spec_name(uid: ClaimUid) -> str:
    """Return the name of a claim's CDI spec."""
    return f"{PREFIX}{uid}.json"


def base_request(request: str) -> str:
    """Return the name of a request without that of the alternative that was chosen: `gpu` of `gpu/half`."""
    return request.partition("/")[0]


def cdi_device(claim: Claim, claimed: ClaimedGpu) -> str:
    """Return the CDI device of one GPU of a claim."""
    return f"{KIND}={_device_name(claim, claimed)}"


def _device_name(claim: Claim, claimed: ClaimedGpu) -> str:
    return f"{claim.uid}-{base_request(claimed.request)}"


def metadata_name(claimed: ClaimedGpu) -> str:
    """Return the name of the file with the metadata of one GPU, in the folder of its claim."""
    return f"{base_request(claimed.request)}.json"


def spec_of(claim: Claim, nodes: Sequence[Sequence[HostPath]], folder: str) -> bytes:
    """Return the CDI spec of a claim; `nodes` are those of each of its GPUs, `folder` that of its metadata."""
    devices: list[Plain] = [
        {
            "name": _device_name(claim, claimed),
            "containerEdits": {
                "deviceNodes": [{"path": node, "permissions": PERMISSIONS} for node in of_gpu],
                "mounts": [
                    {"hostPath": f"{folder}/{metadata_name(claimed)}", "containerPath": path, "options": ["ro", "bind"]}
                    for path in _mounted_at(claim, claimed)
                ],
            },
        }
        for claimed, of_gpu in zip(claim.gpus, nodes, strict=True)
    ]
    return _text({"cdiVersion": CDI_VERSION, "kind": KIND, "devices": devices})


def _mounted_at(claim: Claim, claimed: ClaimedGpu) -> Iterator[str]:
    folder = f"resourceclaims/{claim.name}"
    if isinstance(claim.template, str):
        folder = f"resourceclaimtemplates/{claim.template}"
    for request in dict.fromkeys((base_request(claimed.request), claimed.request)):
        yield f"{IN_CONTAINER}/{folder}/{request}/{DRIVER}-metadata.json"


def metadata_of(claim: Claim, claimed: ClaimedGpu) -> bytes:
    """Return the metadata of one GPU of a claim, in all versions."""
    device: Mapping[str, Plain] = {
        "driver": DRIVER,
        "pool": claim.pool,
        "name": claimed.device,
        "attributes": {f"{STANDARD}/pciBusID": {"string": claimed.gpu}},
    }
    content: dict[str, Plain] = {
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **({"podClaimName": claim.template} if isinstance(claim.template, str) else {}),
        "requests": [{"name": claimed.request, "devices": [dict(device)]}],
    }
    return b"".join(
        _text({"kind": "DeviceMetadata", "apiVersion": version, **content}) for version in METADATA_VERSIONS
    )


def _text(content: Mapping[str, Plain]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
