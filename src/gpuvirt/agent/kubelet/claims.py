"""The kubelet's record of resource claims (DRA): `dra_manager_state` in its folder.

Source: pkg/kubelet/cm/dra/state. The kubelet creates the file when it starts, and replaces it before it asks a driver
to prepare a claim, and after that. It has the claims of all containers, those of init containers too, which the
pod-resources API leaves out. Since Kubernetes 1.32 the content is a JSON text with its CRC 32 (IEEE); an older
checksum covers a dump of Go types, and is not checked.
"""

import re
import zlib
from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.paths import KubeletPaths

_GPU_DRIVER = re.compile(r"(?:gpu\.)?(?:nvidia|amd)\.com(?![.\w])|gpu\.intel\.com(?![.\w])")
"""The beginning of a GPU vendor's DRA driver, of its folder `plugins/DRIVER` and its socket `DRIVER-reg.sock`."""

ClaimedDevice = tuple[tuple[ResourceName, DeviceId], Consumer]
"""A device by its driver and name, and the pod that has it."""


class _Device(msgspec.Struct, frozen=True, rename="pascal"):
    device_name: str


class _DriverState(msgspec.Struct, frozen=True, rename="pascal"):
    devices: tuple[_Device, ...] = ()


class _Claim(msgspec.Struct, frozen=True, rename="pascal"):
    claim_name: str
    namespace: str
    pod_uids: Mapping[str, object] = msgspec.field(name="PodUIDs", default_factory=dict)
    driver_state: Mapping[str, _DriverState] = {}
    """By driver since Kubernetes 1.31."""
    driver_name: str = ""
    """The driver in older versions, which do not record the devices."""


class _Content(msgspec.Struct, frozen=True):
    claims: tuple[_Claim, ...] | msgspec.UnsetType | None = msgspec.field(
        name="ClaimInfoStateList", default=msgspec.UNSET
    )
    entries: tuple[_Claim, ...] | msgspec.UnsetType | None = msgspec.field(name="Entries", default=msgspec.UNSET)
    """The name of the field in Kubernetes 1.32."""


class _File(msgspec.Struct, frozen=True):
    data: str | None = msgspec.field(name="Data", default=None)
    checksum: int = msgspec.field(name="Checksum", default=0)
    version: str = ""
    """In versions before Kubernetes 1.32, whose checksum covers a dump of Go types."""
    entries: tuple[_Claim, ...] = ()


def parse(content: bytes) -> tuple[ClaimedDevice, ...]:
    """Return the devices of the pods' claims; raise DamagedError.

    The devices of a claim that a driver is preparing are unknown: an id that no GPU has stands for them.
    """
    return tuple(device for claim in _claims(content) for device in _devices(claim))


def _claims(content: bytes) -> tuple[_Claim, ...]:
    file = from_json(content, _File, null_is_absent=True)
    if file.data is None:
        if not file.version:
            raise DamagedError("it has neither Data nor a version")
        return file.entries
    if zlib.crc32(file.data.encode()) != file.checksum:
        raise DamagedError("its checksum (CRC 32) does not match its content")
    found = from_json(file.data.encode(), _Content, null_is_absent=True)
    claims = found.entries if found.claims is msgspec.UNSET else found.claims
    if claims is msgspec.UNSET:
        raise DamagedError("it has no ClaimInfoStateList")
    return claims if claims is not None else ()


def _devices(claim: _Claim) -> Iterator[ClaimedDevice]:
    states = dict(claim.driver_state)
    if claim.driver_name:
        states.setdefault(claim.driver_name, _DriverState())
    unnamed = (_Device(f"claim {claim.namespace}/{claim.claim_name}"),)
    for uid in claim.pod_uids:
        for driver, state in states.items():
            for device in state.devices or unnamed:
                yield (ResourceName(driver), DeviceId(device.device_name)), Consumer(pod_uid=PodUid(uid))


def read(paths: KubeletPaths) -> tuple[ClaimedDevice, ...]:
    """Return the devices of the pods' claims; raise OSError, DamagedError if they are unknown.

    A kubelet without DRA has no such file. Without the file the claims are unknown if the DRA driver of a GPU vendor
    was registered with the kubelet.
    """
    try:
        return parse(paths.claims.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if (driver := gpu_driver(paths)) is not None:
            raise DamagedError(f"it is missing, although {driver} exists") from None
        return ()  # unknown: nothing, a kubelet without DRA has no file


def gpu_driver(paths: KubeletPaths) -> str | None:
    """Return a socket or folder of a GPU vendor's DRA driver in the kubelet's folder, None without one."""
    for folder in (paths.plugins_registry, paths.plugins):
        try:
            found = sorted(entry.name for entry in folder.iterdir() if _GPU_DRIVER.match(entry.name))
        except FileNotFoundError:
            continue  # unknown: nothing, no such driver is registered
        if found:
            return str(folder / found[0])
    return None
