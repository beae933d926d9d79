"""The libvirt element that a virtual machine gets for a device, as KubeVirt writes it.

Two forms: KubeVirt 1.9's (pkg/virt-launcher/virtwrap/device/hostdevice), and that of 0.54, which NVIDIA's and others'
articles show. They differ in `managed`: today KubeVirt never rebinds, so the device must be on vfio-pci beforehand.
"""

import xml.etree.ElementTree as ET
from enum import StrEnum

from gpuvirt.facts.ids import PciAddress, VgpuId


class Form(StrEnum):
    """Whose XML."""

    KUBEVIRT_1_9 = "1.9"
    KUBEVIRT_0_54 = "0.54"


def pci_hostdev(address: PciAddress, name: str, form: Form = Form.KUBEVIRT_1_9) -> str:
    """Return the element for a PCI function, which the VM's spec calls `name`."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    where = {"domain": f"0x{domain}", "bus": f"0x{bus}", "slot": f"0x{slot}", "function": f"0x{function}"}
    if form is Form.KUBEVIRT_0_54:
        hostdev = ET.Element("hostdev", {"mode": "subsystem", "type": "pci", "managed": "yes"})
        ET.SubElement(ET.SubElement(hostdev, "source"), "address", where)
        ET.SubElement(hostdev, "alias", {"name": f"ua-{name}"})
    else:
        hostdev = ET.Element("hostdev", {"type": "pci", "managed": "no"})
        ET.SubElement(ET.SubElement(hostdev, "source"), "address", {"type": "pci", **where})
        ET.SubElement(hostdev, "alias", {"name": f"ua-gpu-{name}"})
    return _text(hostdev)


def mdev_hostdev(uuid: VgpuId, name: str, *, display: bool = False) -> str:
    """Return the element for a mediated device; the first of a VM has the display unless the VM says otherwise."""
    shown = {"display": "on", "ramfb": "on"} if display else {}
    hostdev = ET.Element("hostdev", {"type": "mdev", "mode": "subsystem", "model": "vfio-pci", **shown})
    ET.SubElement(ET.SubElement(hostdev, "source"), "address", {"uuid": uuid})
    ET.SubElement(hostdev, "alias", {"name": f"ua-gpu-{name}"})
    return _text(hostdev)


def _text(element: ET.Element) -> str:
    ET.indent(element)
    return ET.tostring(element, encoding="unicode")
