"""The devices of a host that a VM has, by the VM's XML, and the vGPU types of a host's mediated devices."""

from collections.abc import Mapping
from xml.etree import ElementTree as Xml

import libvirt
import msgspec

from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import Problem

AGENT = "org.qemu.guest_agent.0"


class VmDevices(msgspec.Struct, frozen=True):
    """The devices in a VM's XML, and the state of its guest agent."""

    mdevs: tuple[str, ...]
    """The UUIDs of its mediated devices, in lower case."""
    pci_devices: int
    """How many PCI functions of the host it has: whole GPUs, and vGPUs on virtual functions."""
    is_agent_connected: bool
    """Whether a guest agent runs in it."""


def devices_of(domain: str) -> VmDevices:
    """Return the devices of a VM's XML; raises BackEndError."""
    root = _parsed(domain)
    hostdevs = root.findall("devices/hostdev[@mode='subsystem']")
    mdevs = [hostdev.find("source/address") for hostdev in hostdevs if hostdev.get("type") == "mdev"]
    agents = root.findall(f"devices/channel/target[@name='{AGENT}']")
    return VmDevices(
        tuple(mdev.get("uuid", "").lower() for mdev in mdevs if mdev is not None),
        sum(hostdev.get("type") == "pci" for hostdev in hostdevs),
        any(agent.get("state") == "connected" for agent in agents),
    )


def mdev_types(connection: libvirt.virConnect) -> Mapping[str, str] | None:
    """Return the types of the host's mediated devices by UUID, as in sysfs (`nvidia-63`); None if they are unknown."""
    try:
        found = [
            device.XMLDesc(0) for device in connection.listAllDevices(libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV)
        ]
    except libvirt.libvirtError:
        return None  # no driver of node devices, or no right; a device that ended meanwhile
    return dict(mdev_type(device) for device in found)


def mdev_type(device: str) -> tuple[str, str]:
    """Return UUID and type of a mediated device's XML; raises BackEndError."""
    root = _parsed(device)
    capability = root.find("capability[@type='mdev']")
    # `uuid` since libvirt 7.3; the name has been mdev_UUID, with the parent's address behind it since 7.7.
    name = (root.findtext("name") or "").removeprefix("mdev_")[:36].replace("_", "-")
    uuid = capability.findtext("uuid") if capability is not None else None
    kind = capability.find("type") if capability is not None else None
    return (uuid or name).lower(), kind.get("id", "") if kind is not None else ""


def _parsed(text: str) -> Xml.Element:
    try:
        return Xml.fromstring(text)  # noqa: S314  of a server that the CA proves; expat bounds what entities become
    except Xml.ParseError as error:
        raise BackEndError(Problem.INCOMPLETE, f"XML that can't be read: {error}", is_certain=True) from error
