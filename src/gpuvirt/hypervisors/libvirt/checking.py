"""What can be done with VMs of a host with libvirt, before anything happens."""

from collections.abc import Iterator, Mapping, Sequence

import libvirt
import libvirt_qemu
import msgspec

from gpuvirt.hypervisors.libvirt.calling import FIXED_TYPE
from gpuvirt.hypervisors.libvirt.devices import VmDevices, devices_of, mdev_types
from gpuvirt.hypervisors.libvirt.faults import words
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.model.schedules.hypervisor import Abilities, Ability, VmKey

QEMU_DECIDES = 8_006_000
"""The version of libvirt from which QEMU's blockers decide on a save. Older ones refuse every PCI device and mdev."""
QUERY = '{"execute": "query-migrate"}'
POSSIBLE = Ability(True)
TAINTS = "the check asked QEMU's monitor: libvirt notes `custom-monitor` for this VM until it ends"


class _Migration(msgspec.Struct, frozen=True, rename="kebab"):
    blocked_reasons: tuple[str, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    returned: _Migration = msgspec.field(name="return")


def check(connection: libvirt.virConnect, keys: Sequence[VmKey]) -> list[Abilities]:
    """Return what can be done with these VMs; those that do not exist are missing. Raises errors of libvirt."""
    version, types = connection.getLibVersion(), mdev_types(connection)
    return [
        abilities(key, domain, devices_of(domain.XMLDesc(0)), version, types)
        for key, domain in _existing(connection, keys)
    ]


def _existing(connection: libvirt.virConnect, keys: Sequence[VmKey]) -> Iterator[tuple[VmKey, libvirt.virDomain]]:
    for key in keys:
        try:
            yield key, connection.lookupByUUIDString(key)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise


def abilities(
    key: VmKey, domain: libvirt.virDomain, devices: VmDevices, version: int, types: Mapping[str, str] | None
) -> Abilities:
    """Return what can be done with one VM; `types` is None while the host's mediated devices are unknown."""
    refused = never_suspended(devices, version, is_persistent=bool(domain.isPersistent()))
    is_asked = refused is None and bool(domain.isActive())
    suspend = refused if refused is not None else _suspend(domain) if is_asked else _NOT_RUNNING
    return Abilities(
        key,
        suspend,
        POSSIBLE if devices.is_agent_connected else _NO_AGENT,
        start(devices, types),
        Ability(False, Problem.REFUSED, FIXED_TYPE),
        (TAINTS,) if is_asked else (),
    )


_NOT_RUNNING = Ability(
    None, Problem.NO_SUSPEND, "only QEMU knows, and it does not run; `leave: ShutDown` needs no proof"
)
_NO_AGENT = Ability(
    None, Problem.TOOLS_MISSING, "no guest agent is connected; the guest may follow ACPI's power button"
)


def never_suspended(devices: VmDevices, version: int, *, is_persistent: bool) -> Ability | None:
    """Return why a VM is not saved, whatever its QEMU says; None where QEMU decides."""
    if not is_persistent:
        return Ability(False, Problem.NO_SUSPEND, "the domain is transient: libvirt forgets it when it is off")
    if version < QEMU_DECIDES and (devices.mdevs or devices.pci_devices):
        text = (
            f"libvirt {version // 1_000_000}.{version // 1000 % 1000} saves no VM with a device of its host, 8.6 does"
        )
        return Ability(False, Problem.NO_SUSPEND, text)
    return None


def _suspend(domain: libvirt.virDomain) -> Ability:
    """Return what QEMU says of a VM that runs; no call of libvirt's own asks for it."""
    try:
        answer = msgspec.json.decode(libvirt_qemu.qemuMonitorCommand(domain, QUERY, 0), type=_Answer)
    except libvirt.libvirtError as error:
        return Ability(None, Problem.NO_SUSPEND, f"QEMU could not be asked: {words(error)}")
    except msgspec.DecodeError as error:
        return Ability(None, Problem.NO_SUSPEND, f"QEMU's answer can't be read: {error}")
    blockers = answer.returned.blocked_reasons
    return Ability(False, Problem.NO_SUSPEND, "QEMU: " + ", ".join(blockers)) if blockers else POSSIBLE


def start(devices: VmDevices, types: Mapping[str, str] | None) -> Ability:
    """Return whether the host shows the VM's mediated devices, which end with the host."""
    lacking = [mdev for mdev in devices.mdevs if types is None or mdev not in types]
    if not lacking:
        return POSSIBLE
    return Ability(None, Problem.TYPE_MISSING, f"its host shows no mediated device {', '.join(lacking)}")
