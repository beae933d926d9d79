"""CDI specs of the offered devices, in which Kata's runtime finds the VFIO device nodes of a pod's devices.

Kata asks the kubelet for a pod's devices before it creates the sandbox, and looks for CDI devices `<resource>=<device>`
(kata-containers#12009). So a spec's kind is the resource, and its devices have the ids that the kubelet lists. Kata
plugs in each node, and its runtime-rs takes the name for a group's number, so a device has one node. There are no
variables, as two devices would each set the same one. KubeVirt reads no CDI specs. Contract:
tags.cncf.io/container-device-interface, SPEC.md.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.inventory.naming import cdi_kind
from gpuvirt.model.offers.view import NodeView, ResourceView
from gpuvirt.paths import HostPath

PREFIX = "gpuvirt-"
"""The prefix of gpuvirt's files; other files in the folder belong to other programs."""


class CdiDeviceNode(msgspec.Struct, frozen=True):
    """A device node; the runtime reads its type and numbers from the host's node."""

    path: HostPath


class ContainerEdits(msgspec.Struct, frozen=True, rename="camel"):
    """The device nodes that a container gets."""

    device_nodes: tuple[CdiDeviceNode, ...]


class CdiDevice(msgspec.Struct, frozen=True, rename="camel"):
    """A CDI device."""

    name: DeviceId
    container_edits: ContainerEdits


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """The content of a file."""

    cdi_version: str
    kind: str
    devices: tuple[CdiDevice, ...]


def specs(view: NodeView) -> Mapping[str, bytes]:
    """Return the desired files by name; devices without device nodes are left out."""
    # Domains have no underscore, so no two resources share a file.
    files = ((f"{PREFIX}{resource.name.replace('/', '_')}.json", _spec(resource)) for resource in view.resources)
    return {name: msgspec.json.format(msgspec.json.encode(spec), indent=1) for name, spec in files if spec.devices}


def _spec(resource: ResourceView) -> Spec:
    kind = cdi_kind(resource.name)
    return Spec(
        # The lowest version that suffices: names that begin with a digit need 0.5, dots in kinds 0.6. Kata reads 0.5.
        cdi_version="0.6.0" if "." in kind.partition("/")[2] else "0.5.0",
        kind=kind,
        devices=tuple(
            CdiDevice(device.id, ContainerEdits(tuple(CdiDeviceNode(path) for path in device.nodes)))
            for device in resource.devices
            if device.nodes
        ),
    )
