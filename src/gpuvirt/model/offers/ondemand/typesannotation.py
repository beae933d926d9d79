"""The annotation of a node that says which vGPU type each of its on-demand resources stands for, and its changes.

A resource is named by the number of its type on the host, and the numbers of types may change with the driver. A driver
may not list all types while a GPU carries vGPUs, so that a type without a resource proves nothing then.
"""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import ResourceName, VgpuType
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode, Seen

VGPU_TYPES_ANNOTATION = "gpuvirt.io/vgpu-types"
"""Of a node: the types of its on-demand resources, `{"tencent.com/vgpu-492": "GRID V100-4Q"}`."""

Types = Mapping[ResourceName, VgpuType]


def with_type(resource: str, vgpu_type: str | None) -> str:
    """Return a resource with the type that it stands for, where its name does not have it: a number means nothing."""
    if vgpu_type is None or vgpu_type.replace(" ", "_") in resource:
        return resource
    return f"{resource} ({vgpu_type})"


class TypeChange(msgspec.Struct, frozen=True):
    """A resource that stands for another type than before, or for none."""

    resource: ResourceName
    before: VgpuType
    now: VgpuType | None
    """None if the node offers the resource no more."""
    moved_to: ResourceName | None
    """The resource of the type that it stood for; None if the node does not offer that type."""


def types_text(types: Types) -> str:
    """Return the annotation of a node; equal types give equal texts."""
    return msgspec.json.encode(dict(sorted(types.items()))).decode()


def types_of(text: str | None) -> Types:
    """Return the types in a node's annotation; none if it has none, or if a user has damaged it."""
    try:
        found = from_json((text or "{}").encode(), dict[str, str])
    except DamagedError:
        return {}  # unknown: no resource has moved
    return {ResourceName(resource): VgpuType(vgpu_type) for resource, vgpu_type in found.items()}


def types_on_node(view: NodeView, noted: Types) -> Types:
    """Return the types of the node's on-demand resources; `noted` are those that its annotation has.

    A resource without selectors is one of before, which pods may still have.
    """
    found = {
        resource.name: resource.on_demand
        for resource in view.resources
        if resource.on_demand is not None and (resource.mdev_name_selectors or resource.pci_vendor_selectors)
    }
    gpus = [gpu for gpu in view.gpus if gpu.desired == DesiredMode.ON_DEMAND]
    if all(not gpu.vgpus and gpu.planning is not None and gpu.planning.types for gpu in gpus):
        return found
    listed = set(found.values())
    kept = {name: kind for name, kind in noted.items() if name not in found and kind not in listed}
    return kept | found


def changes_of(before: Types, now: Types) -> Iterator[TypeChange]:
    """Yield the resources that stand for another type than before, or for none."""
    resources = {vgpu_type: resource for resource, vgpu_type in now.items()}
    for resource, vgpu_type in sorted(before.items()):
        if now.get(resource) != vgpu_type:
            yield TypeChange(resource, vgpu_type, now.get(resource), resources.get(vgpu_type))


def reason_of(change: TypeChange, pods: Collection[str]) -> Reason | None:
    """Return the reason of a change, with the pods that request the resource; None if it concerns no pod.

    A pod that is created later may request a resource that stands for another type, so that such a change is reported
    without pods, too.
    """
    now = f"which is {change.moved_to} now" if change.moved_to is not None else "which no GPU of this node offers now"
    fix = "request another resource of the node's annotation gpuvirt.io/vgpu-types"
    if change.moved_to is not None:
        fix = f"request {change.moved_to} for {change.before}, or name resources by type (on_demand.names)"
    seen = tuple(Seen(f"pod {pod}", "requests it") for pod in sorted(pods))
    if change.now is not None:
        message = f"now stands for {change.now}; before, it stood for {change.before}, {now}"
        return Reason(ReasonCode.RESOURCE_TYPE_CHANGED, change.resource, message, seen, fix)
    if not pods:
        return None
    message = f"is no longer offered by this node; it stood for {change.before}, {now}"
    return Reason(ReasonCode.RESOURCE_GONE, change.resource, message, seen, fix)
