"""Writes a DRA manager's record of claims, `dra_manager_state`, in the format of the real kubelet (1.32 and later)."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from gpuvirt_sim.kubelet.containers import Claim, Container

HEAD = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1"}


class PodWithClaims(Protocol):
    """A pod whose containers may have claims."""

    @property
    def name(self) -> str:
        """The name of the pod."""
        ...

    @property
    def uid(self) -> str:
        """The UID of the pod."""
        ...

    @property
    def containers(self) -> Sequence[Container]:
        """The containers, init containers too."""
        ...


def encode(pods: Iterable[PodWithClaims]) -> bytes:
    """Return the content of the file."""
    claims = [claim for pod in pods for claim in _claims(pod)]
    return checked({**HEAD, "ClaimInfoStateList": claims or None})


def checked(content: object) -> bytes:
    """Return the content of a file with its checksum."""
    data = msgspec.json.encode(content)
    return msgspec.json.encode({"Data": data.decode(), "Checksum": zlib.crc32(data)})


def _claims(pod: PodWithClaims) -> Iterator[object]:
    claims: list[Claim] = [claim for container in pod.containers for claim in container.claims]
    for number, claim in enumerate(claims):
        device = {
            "PoolName": "node",
            "DeviceName": claim.device,
            "ShareID": None,
            "RequestNames": ["gpu"],
            "CDIDeviceIDs": None,
        }
        yield {
            "ClaimUID": f"{pod.uid}-{number}",
            "ClaimName": f"{pod.name}-{number}",
            "Namespace": "default",
            "PodUIDs": {pod.uid: {}},
            "DriverState": {claim.driver: {"Devices": [device]}},
        }
