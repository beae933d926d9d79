"""Checks of KubeVirt's feature gates for Grace GPUs, one of which (IOMMUFD) concerns every VM of the cluster.

Source: KubeVirt 1.9. With IOMMUFD, virt-controller requests `devices.kubevirt.io/iommufd` for each virt-launcher pod,
and a node without `/dev/iommu` has none (`pkg/virt-controller/services/template.go`, `iommufd_device.go`).
"""

from collections.abc import Iterable, Iterator

from gpuvirt.diagnosis.checks.kubevirt import GATES_FIELD, place_of
from gpuvirt.diagnosis.clusternodes import IOMMUFD_RESOURCE, ClusterNode, probably_without_iommufd, without_iommufd
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, listed, problem
from gpuvirt.facts.sysfs import IOMMUFD
from gpuvirt.model.kubevirt.gracegpus import IOMMUFD_GATE, SINCE, is_grace, missing_gates
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.model.kubevirt.version import version_of
from gpuvirt.model.offers.view import GpuView
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.reasons.codes import Level


def feature_gates(evidence: Evidence) -> Iterator[Finding]:
    """KubeVirt has the feature gates that this node's devices need."""
    grace = [gpu for gpu in evidence.view.gpus if gpu.offered_as is not None and is_grace(gpu.pci_id)]
    for kubevirt in evidence.kubevirts or () if grace else ():
        missing, place = missing_gates(version_of(kubevirt.version), kubevirt.gates), place_of(kubevirt, GATES_FIELD)
        seen = Seen(place, listed(sorted(kubevirt.gates)) or "none")
        if missing:
            yield _missing(evidence, kubevirt, grace, missing, seen)
        else:
            yield fine("KubeVirt", f"{kubevirt.version} has the gates that Grace GPUs need", seen)


def _missing(
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
            *(_warning(evidence) if IOMMUFD_GATE in missing else ()),
            f"# add to spec.configuration.{GATES_FIELD}, and keep the others:",
            *(f"- {gate}" for gate in missing),
        ),
        level=Level.ERROR if has_list else Level.WARNING,
    )


def _warning(evidence: Evidence) -> Iterator[str]:
    """Yield the warnings about enabling IOMMUFD."""
    yield f"# before: with IOMMUFD each virt-launcher pod, also of VMs without a GPU, requests {IOMMUFD_RESOURCE};"
    names = [] if evidence.inventory.facts.platform.iommufd else ["this host"]
    names += [_name(node) for node in probably_without_iommufd(evidence.cluster_nodes or ())]
    if names:
        yield f"# nodes without {IOMMUFD} then start no VM. They lack it, or their kernel is older than 6.2:"
        yield f"# {listed(names)}"
    else:
        yield f"# nodes without {IOMMUFD} (kernels before 6.2) then start no VM; none is known"
    if evidence.cluster_nodes is None:
        yield "# the other nodes are not known: gpuvirt doctor --kubeconfig FILE reads them"
    yield "# VMs with a GPU then need libvirt 12.2 in virt-launcher. KubeVirt 1.9.0's images have 11.10, but for those"
    yield "# that are built on CentOS Stream 10: kubectl exec POD -c compute -- virsh --version"


def _name(node: ClusterNode) -> str:
    return f"{node.name} (Linux {node.kernel})" if node.iommufd is None else f"{node.name} ({IOMMUFD_RESOURCE}: 0)"


def iommufd(evidence: Evidence) -> Iterator[Finding]:
    """Each node can run VMs if KubeVirt's gate IOMMUFD is on."""
    for kubevirt in evidence.kubevirts or ():
        version = version_of(kubevirt.version)
        if IOMMUFD_GATE not in kubevirt.gates or (version is not None and version < SINCE):
            continue
        if not evidence.inventory.facts.platform.iommufd:
            yield _without(kubevirt, "this host", Seen(IOMMUFD, "does not exist"))
        for node in without_iommufd(evidence.cluster_nodes or ()):
            yield _without(
                kubevirt, node.name, Seen(f"node {node.name} $.status.allocatable[{IOMMUFD_RESOURCE!r}]", "0")
            )


def _without(kubevirt: KubeVirt, subject: str, seen: Seen) -> Finding:
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
