"""Checks of KubeVirt's configuration: the resources that it permits, its mediated devices, its feature gates.

Source: KubeVirt 1.9. With IOMMUFD, virt-controller requests `devices.kubevirt.io/iommufd` for each virt-launcher pod,
and a node without `/dev/iommu` has none (`pkg/virt-controller/services/template.go`, `iommufd_device.go`).
"""

from collections.abc import Iterable, Iterator, Mapping

from gpuvirt.diagnosis.evidence import (
    IOMMUFD_RESOURCE,
    ClusterNode,
    Evidence,
    probably_without_iommufd,
    without_iommufd,
)
from gpuvirt.diagnosis.findings import Finding, fine, listed, of_reason, problem
from gpuvirt.facts.sysfs import IOMMUFD
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.devices.candidates import normal
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.kubevirt.kubevirt import (
    IOMMUFD_GATE,
    MDEV_GATE,
    SINCE,
    KubeVirt,
    Permitted,
    is_grace,
    missing_gates,
    version_of,
)
from gpuvirt.model.offers.view import GpuView, ResourceView
from gpuvirt.model.reasons import FindingCode, Seen, clusterproblems
from gpuvirt.model.reasons.codes import Level

GATES_FIELD = "developerConfiguration.featureGates"
HOST_DEVICES = "HostDevices"
"""The gate without which KubeVirt's webhook refuses VMIs with `hostDevices`."""


def place_of(kubevirt: KubeVirt, path: str) -> str:
    """Return the place of a field of KubeVirt's configuration."""
    return f"KubeVirt {kubevirt.metadata.namespace}/{kubevirt.metadata.name} $.spec.configuration.{path}"


def _entries(kubevirt: KubeVirt) -> Mapping[str, list[tuple[str, Permitted]]]:
    found: dict[str, list[tuple[str, Permitted]]] = {}
    permitted = kubevirt.configuration.permitted_host_devices
    for place, entry in permitted.entries() if permitted is not None else ():
        found.setdefault(entry.resource_name, []).append((f"permittedHostDevices.{place}", entry))
    return found


def not_permitted_by(kubevirt: KubeVirt, name: str) -> Seen | None:
    """Return the field in which KubeVirt would have to permit a resource, None where it permits the resource."""
    entries = _entries(kubevirt)
    if kubevirt.configuration.permitted_host_devices is None or name in entries:
        return None
    return Seen(place_of(kubevirt, "permittedHostDevices"), listed(entries) or "empty")


def host_device_gate(kubevirt: KubeVirt, subject: str) -> Finding | None:
    """Return the finding for a VM that requests `hostDevices` without the feature gate for them."""
    if HOST_DEVICES in kubevirt.gates:
        return None
    return problem(
        FindingCode.FEATURE_GATE_MISSING,
        subject,
        f"requests hostDevices, for which KubeVirt needs the feature gate {HOST_DEVICES}",
        (Seen(place_of(kubevirt, GATES_FIELD), listed(sorted(kubevirt.gates)) or "none"),),
        why=f"KubeVirt {kubevirt.version} refuses to start such VMs; `gpus` in place of `hostDevices` needs no gate",
        fix=(f"# add to spec.configuration.{GATES_FIELD}, and keep the others:", f"- {HOST_DEVICES}"),
    )


def permitted_names(evidence: Evidence) -> Iterator[Finding]:
    """KubeVirt permits each resource of this node, and does not offer it itself."""
    for kubevirt in evidence.kubevirts or ():
        if kubevirt.configuration.permitted_host_devices is None:
            yield fine("KubeVirt", "permits all devices", Seen(place_of(kubevirt, "permittedHostDevices"), "not set"))
            continue
        entries = _entries(kubevirt)
        ours = {str(resource.name): resource for resource in evidence.view.resources if resource.devices}
        for name, resource in ours.items():
            if (foreign := _foreign(kubevirt, resource, entries)) is not None:
                yield foreign
            elif name in entries:
                yield from _permitted(kubevirt, resource, entries[name])
            else:
                yield _not_permitted(kubevirt, resource, entries)


def _foreign(
    kubevirt: KubeVirt, resource: ResourceView, entries: Mapping[str, list[tuple[str, Permitted]]]
) -> Finding | None:
    """Return the finding for a resource whose devices KubeVirt's own plugin offers under another name.

    Devices decide, as for the controller: KubeVirt lets the last of two entries with one selector win, so another entry
    for them would change nothing, and two plugins would offer one device.
    """
    for name, found in entries.items():
        for place, entry in found if name != resource.name else ():
            if _offers(entry, resource):
                reason = clusterproblems.foreign_provider(resource.name, name, place_of(kubevirt, place))
                return of_reason(reason, Level.ERROR, why="two device plugins would give one device to two VMs")
    return None


def _offers(entry: Permitted, resource: ResourceView) -> bool:
    """Return whether KubeVirt's own plugin offers devices of a resource by an entry."""
    selector = normal(entry.pci_vendor_selector or entry.mdev_name_selector or "")
    return not entry.external_resource_provider and selector in set(map(normal, _selectors(resource)))


def near_misses(evidence: Evidence) -> Iterator[Finding]:
    """KubeVirt permits no name that looks like a misspelled resource of this node."""
    ours = [str(resource.name) for resource in evidence.view.resources]
    offered = [str(resource.name) for resource in evidence.view.resources if resource.devices]
    for kubevirt in evidence.kubevirts or ():
        permitted = _entries(kubevirt)
        for name, entries in permitted.items():
            by_kubevirt = any(_offers(entry, view) for view in evidence.view.resources for _, entry in entries)
            near = None if name in ours or by_kubevirt else nearest(name, offered)
            if near is not None and near in permitted:  # otherwise _not_permitted reports the near name
                yield problem(
                    FindingCode.PERMITTED_NAME_UNKNOWN,
                    name,
                    f"is permitted, but this node offers no such resource; did you mean {near}?",
                    (Seen(place_of(kubevirt, entries[0][0]), f"resourceName: {name}"),),
                    why="a VM that requests it is not scheduled until a node offers it",
                    fix=(f"resourceName: {near}", "# unless another node offers a resource of that name"),
                )


def _permitted(kubevirt: KubeVirt, resource: ResourceView, entries: list[tuple[str, Permitted]]) -> Iterator[Finding]:
    desired = _selectors(resource)
    selectors = [entry.pci_vendor_selector or entry.mdev_name_selector or "" for _, entry in entries]
    theirs = [(place, entry) for place, entry in entries if not entry.external_resource_provider]
    for place, _ in theirs:
        yield problem(
            FindingCode.NOT_EXTERNAL,
            resource.name,
            "is offered both by KubeVirt and by gpuvirt",
            (Seen(place_of(kubevirt, place), "externalResourceProvider: false"),),
            why="KubeVirt's plugin and gpuvirt replace each other at the kubelet, with other ids for the same devices",
            fix=(f"# in {place}", "externalResourceProvider: true"),
        )
    if desired and not {normal(text) for text in selectors} & {normal(text) for text in desired}:
        yield problem(
            FindingCode.SELECTOR_MISMATCH,
            resource.name,
            f"is permitted by the selector {', '.join(selectors) or 'none'}, but its devices are {', '.join(desired)}",
            (Seen(place_of(kubevirt, entries[0][0]), ", ".join(selectors) or "no selector"),),
            why="with externalResourceProvider: true only the name counts; without, KubeVirt would offer another card",
            fix=_entry(resource, desired[0]),
        )
    elif not theirs:
        yield fine(
            resource.name, "is permitted", Seen(place_of(kubevirt, entries[0][0]), f"resourceName: {resource.name}")
        )


def _not_permitted(
    kubevirt: KubeVirt, resource: ResourceView, entries: Mapping[str, list[tuple[str, Permitted]]]
) -> Finding:
    near = nearest(resource.name, entries)
    also = f"; it permits the similar name {near}" if near is not None else ""
    desired = _selectors(resource)
    return problem(
        FindingCode.NOT_PERMITTED,
        resource.name,
        f"is offered, but KubeVirt does not permit it{also}",
        (Seen(place_of(kubevirt, "permittedHostDevices"), listed(entries) or "empty"),),
        why="KubeVirt refuses VMs that request it: `is not permitted in permittedHostDevices configuration`",
        fix=_entry(resource, desired[0] if desired else "VENDOR:DEVICE"),
    )


def _entry(resource: ResourceView, selector: str) -> tuple[str, ...]:
    return permitted_entry(resource.name, selector, is_mdev=bool(resource.mdev_name_selectors))


def permitted_entry(name: str, selector: str, *, is_mdev: bool) -> tuple[str, ...]:
    """Return the lines of KubeVirt's configuration that permit a resource."""
    kind, key = ("mediatedDevices", "mdevNameSelector") if is_mdev else ("pciHostDevices", "pciVendorSelector")
    return (
        f"# in spec.configuration.permittedHostDevices.{kind} (kubectl edit kubevirt -A):",
        f'- {key}: "{selector}"',
        f"  resourceName: {name}",
        "  externalResourceProvider: true",
    )


def _selectors(resource: ResourceView) -> tuple[str, ...]:
    """Return KubeVirt's selectors for the devices of a resource: ids of PCI functions, types of mdevs."""
    return (*resource.pci_vendor_selectors, *resource.mdev_name_selectors)


def mediated_devices(evidence: Evidence) -> Iterator[Finding]:
    """KubeVirt does not delete mediated devices that it did not create."""
    live = [vgpu for vgpu in evidence.inventory.vgpus.values() if vgpu.framework is Framework.MDEV]
    if not live:
        return
    types = {str(vgpu.live.type) for vgpu in live if isinstance(vgpu.live.type, str)}
    for kubevirt in evidence.kubevirts or ():
        configuration = kubevirt.configuration
        mediated, permitted = configuration.mediated_devices_configuration, configuration.permitted_host_devices
        external = {
            normal(entry.mdev_name_selector or "")
            for entry in (permitted.mediated_devices if permitted is not None else None) or ()
            if entry.external_resource_provider
        }
        enabled = mediated.enabled if mediated is not None else None
        shown = Seen(place_of(kubevirt, "mediatedDevicesConfiguration.enabled"), str(enabled))
        # The field takes precedence over the gate (KubeVirt's MediatedDevicesHandlingDisabled since v1.8).
        if enabled is False or (enabled is None and MDEV_GATE in kubevirt.gates):
            yield fine("KubeVirt", "leaves mediated devices alone", shown)
        elif {normal(name) for name in types} <= external:
            yield fine("KubeVirt", "leaves mediated devices of this node's types alone", shown)
        else:
            yield problem(
                FindingCode.MDEVS_NOT_OURS,
                "KubeVirt",
                f"deletes mediated devices that it did not create, such as the {len(live)} of this node",
                (shown,),
                why="virt-handler deletes them at each heartbeat, even if a VM uses them",
                fix=(
                    f"kubectl patch kubevirt -n {kubevirt.metadata.namespace} {kubevirt.metadata.name} --type merge \\",
                    """  -p '{"spec":{"configuration":{"mediatedDevicesConfiguration":{"enabled":false}}}}'""",
                ),
            )


def feature_gates(evidence: Evidence) -> Iterator[Finding]:
    """KubeVirt has the feature gates that this node's devices need."""
    grace = [gpu for gpu in evidence.view.gpus if gpu.offered_as is not None and is_grace(gpu.pci_id)]
    for kubevirt in evidence.kubevirts or () if grace else ():
        missing, place = missing_gates(version_of(kubevirt.version), kubevirt.gates), place_of(kubevirt, GATES_FIELD)
        seen = Seen(place, listed(sorted(kubevirt.gates)) or "none")
        if missing:
            yield _gates_missing(evidence, kubevirt, grace, missing, seen)
        else:
            yield fine("KubeVirt", f"{kubevirt.version} has the gates that Grace GPUs need", seen)


def _gates_missing(
    evidence: Evidence, kubevirt: KubeVirt, grace: Iterable[GpuView], missing: tuple[str, ...], seen: Seen
) -> Finding:
    has_list = kubevirt.configuration.permitted_host_devices is not None
    why = (
        f"KubeVirt {kubevirt.version} refuses VMs with a Grace GPU without them"
        if has_list
        else "without permittedHostDevices KubeVirt admits such VMs; with an entry for the GPU it would refuse them"
    )
    return problem(
        FindingCode.FEATURE_GATE_MISSING,
        ", ".join(gpu.address for gpu in grace),
        f"needs KubeVirt's feature gates {', '.join(missing)}",
        (seen,),
        why=why,
        fix=(
            *(_iommufd_warning(evidence) if IOMMUFD_GATE in missing else ()),
            f"# add to spec.configuration.{GATES_FIELD}, and keep the others:",
            *(f"- {gate}" for gate in missing),
        ),
        level=Level.ERROR if has_list else Level.WARNING,
    )


def _iommufd_warning(evidence: Evidence) -> Iterator[str]:
    """Yield the warnings about enabling IOMMUFD."""
    yield f"# before: with IOMMUFD each virt-launcher pod, also of VMs without a GPU, requests {IOMMUFD_RESOURCE};"
    names = [] if evidence.inventory.facts.platform.iommufd else ["this host"]
    names += [_node_name(node) for node in probably_without_iommufd(evidence.cluster_nodes or ())]
    if names:
        yield f"# nodes without {IOMMUFD} then start no VM. They lack it, or their kernel is older than 6.2:"
        yield f"# {listed(names)}"
    else:
        yield f"# nodes without {IOMMUFD} (kernels before 6.2) then start no VM; none is known"
    if evidence.cluster_nodes is None:
        yield "# the other nodes are not known: gpuvirt doctor --kubeconfig FILE reads them"
    yield "# VMs with a GPU then need libvirt 12.2 in virt-launcher. KubeVirt 1.9.0's images have 11.10, but for those"
    yield "# that are built on CentOS Stream 10: kubectl exec POD -c compute -- virsh --version"


def _node_name(node: ClusterNode) -> str:
    return f"{node.name} (Linux {node.kernel})" if node.iommufd is None else f"{node.name} ({IOMMUFD_RESOURCE}: 0)"


def iommufd(evidence: Evidence) -> Iterator[Finding]:
    """Each node can run VMs if KubeVirt's gate IOMMUFD is on."""
    for kubevirt in evidence.kubevirts or ():
        version = version_of(kubevirt.version)
        if IOMMUFD_GATE not in kubevirt.gates or (version is not None and version < SINCE):
            continue
        if not evidence.inventory.facts.platform.iommufd:
            yield _without_iommufd(kubevirt, "this host", Seen(IOMMUFD, "does not exist"))
        for node in without_iommufd(evidence.cluster_nodes or ()):
            yield _without_iommufd(
                kubevirt, node.name, Seen(f"node {node.name} $.status.allocatable[{IOMMUFD_RESOURCE!r}]", "0")
            )


def _without_iommufd(kubevirt: KubeVirt, subject: str, seen: Seen) -> Finding:
    return problem(
        FindingCode.IOMMUFD_MISSING,
        subject,
        f"starts no VM: KubeVirt's feature gate {IOMMUFD_GATE} is on, and there is no {IOMMUFD}",
        (seen, Seen(place_of(kubevirt, GATES_FIELD), IOMMUFD_GATE)),
        why=f"each virt-launcher pod requests {IOMMUFD_RESOURCE}, which only nodes with {IOMMUFD} have",
        fix=(
            "modprobe iommufd  # in a kernel since 6.2 with CONFIG_IOMMUFD",
            f"# or remove {IOMMUFD_GATE} from spec.configuration.{GATES_FIELD}; VMs with a Grace GPU need it",
        ),
    )
