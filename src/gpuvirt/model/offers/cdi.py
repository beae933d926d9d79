"""CDI specs of what is offered: where Kata's runtime finds the VFIO nodes of the devices that a pod was given.

Kata asks the kubelet for a pod's devices before it makes the sandbox, and looks for CDI devices `<resource>=<device>`
(kata-containers#12009). So a spec's kind is the resource, and its devices are named as the kubelet knows them. KubeVirt
reads none of it. Contract: tags.cncf.io/container-device-interface, SPEC.md.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.inventory.naming import cdi_kind
from gpuvirt.model.offers.view import NodeView, ResourceView
from gpuvirt.paths import HostPath

PREFIX = "gpuvirt-"
"""What the names of our files begin with; nothing else in the folder is ours."""


class DeviceNode(msgspec.Struct, frozen=True):
    """A node; the runtime reads its type and numbers from the host's."""

    path: HostPath


class ContainerEdits(msgspec.Struct, frozen=True, rename="camel"):
    """What a container gets."""

    device_nodes: tuple[DeviceNode, ...]


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """One device."""

    name: DeviceId
    container_edits: ContainerEdits


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """One file."""

    cdi_version: str
    kind: str
    devices: tuple[Device, ...]


def specs(view: NodeView) -> Mapping[str, bytes]:
    """Return the files that should be there, by name; a device without any node has no part in them."""
    files = ((_file_name(resource), _spec(resource)) for resource in view.resources)
    return {name: msgspec.json.format(msgspec.json.encode(spec), indent=1) for name, spec in files if spec.devices}


def _file_name(resource: ResourceView) -> str:
    """Return a file's name; an underscore can't be part of a domain, so no two resources share one."""
    return f"{PREFIX}{resource.name.replace('/', '_')}.json"


def _spec(resource: ResourceView) -> Spec:
    kind = cdi_kind(resource.name)
    return Spec(
        # The lowest version that has what we use: 0.5 names that begin with a digit, 0.6 dots in kinds. Kata reads 0.5.
        cdi_version="0.6.0" if "." in kind.partition("/")[2] else "0.5.0",
        kind=kind,
        devices=tuple(
            Device(device.id, ContainerEdits(tuple(DeviceNode(path) for path in device.nodes)))
            for device in resource.devices
            if device.nodes
        ),
    )
