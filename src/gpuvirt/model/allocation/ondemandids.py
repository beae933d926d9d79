"""The ids of vGPUs of mode `on-demand` in the kubelet: `v3f2a9c04-17`, which name no device.

A vGPU does not exist when its id is listed, and the kubelet gives the id of a pod that has ended to the next pod. So an
id says nothing about a vGPU: the ledger and the answer to Allocate do. The first part is a random number of the agent's
process and the second one counts up, so that an id is never listed again once it was free.
"""

import re

from gpuvirt.facts.ids import DeviceId, is_mdev_uuid, is_pci_address
from gpuvirt.model.allocation.pluginanswers import PluginAnswer

_ID = re.compile(r"v[0-9a-f]{8}-(?:0|[1-9][0-9]{0,17})")
_VARIABLES = ("MDEV_PCI_RESOURCE_", "PCI_RESOURCE_")


def on_demand_id(token: str, number: int) -> DeviceId:
    """Return the id with a number, of the agent's process with this token."""
    return DeviceId(f"v{token}-{number}")


def number_of(device: DeviceId, token: str) -> int | None:
    """Return the number of an id of the agent's process with this token, None for another id."""
    prefix, _, number = device.rpartition("-")
    return int(number) if prefix == f"v{token}" and is_on_demand_id(device) else None


def is_on_demand_id(device: DeviceId) -> bool:
    """Return whether an id is one of mode `on-demand`."""
    return _ID.fullmatch(device) is not None


def vgpus_in(answer: PluginAnswer) -> tuple[DeviceId, ...]:
    """Return the vGPUs that gpuvirt's answer for such an id names in its environment: UUIDs, or addresses of VFs."""
    values = (value for name, value in answer.env if name.startswith(_VARIABLES))
    words = (word.strip().lower() for value in values for word in value.split(","))
    return tuple(DeviceId(word) for word in words if is_mdev_uuid(word) or is_pci_address(word))
