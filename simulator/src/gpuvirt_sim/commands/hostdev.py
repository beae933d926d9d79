"""The libvirt element that KubeVirt writes for a device of a VM.

It has two forms: that of KubeVirt 1.9 (pkg/virt-launcher/virtwrap/device/hostdevice), and that of 0.54, which articles
of NVIDIA and others show. They differ in `managed`: KubeVirt 1.9 never rebinds, so the device must already be on
vfio-pci.
"""

import xml.etree.ElementTree as ET
from enum import StrEnum

from gpuvirt.facts.ids import PciAddress, VgpuId


class Form(StrEnum):
    """The KubeVirt version whose XML is written."""

    KUBEVIRT_1_9 = "1.9"
    KUBEVIRT_0_54 = "0.54"


def pci_hostdev(address: PciAddress, name: str, form: Form) -> str:
    """Return the element for a PCI function; `name` is its name in the VM's spec."""
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


def mdev_hostdev(uuid: VgpuId, name: str) -> str:
    """Return the element for the first mediated device of a VM, to which KubeVirt gives the display by default."""
    shown = {"display": "on", "ramfb": "on"}
    hostdev = ET.Element("hostdev", {"type": "mdev", "mode": "subsystem", "model": "vfio-pci", **shown})
    ET.SubElement(ET.SubElement(hostdev, "source"), "address", {"uuid": uuid})
    ET.SubElement(hostdev, "alias", {"name": f"ua-gpu-{name}"})
    return _text(hostdev)


def _text(element: ET.Element) -> str:
    ET.indent(element)
    return ET.tostring(element, encoding="unicode")
