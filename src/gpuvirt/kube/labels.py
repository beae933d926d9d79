"""The labels and annotations that the agent, the controller, NVIDIA's operator and admins share.

Source: NVIDIA's operator and its vgpu-device-manager for `nvidia.com/...`, NFD for `feature.node.kubernetes.io/...`.
gpuvirt defines those of `gpuvirt.io`. `model` has the labels that the agent and `gpuvirt discover` decide by. An
annotation that only one module uses is defined in that module. The patches and selectors of labels are below.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gpuvirt import nulls
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired import enforcement
from gpuvirt.model.desired.settings import CONTAINER_RESOURCES, Settings
from gpuvirt.model.desired.workload import LABEL, VGPU_CONFIG_LABEL, Workload
from gpuvirt.model.offers import discovery

# --- the desired state of a node, and its progress

WORKLOAD_LABEL = LABEL
"""The workload of the node's GPUs."""
CONFIG_LABEL = VGPU_CONFIG_LABEL
"""The desired vGPU config of the node."""
ENFORCEMENT_LABEL = enforcement.LABEL
"""The enforcement of new pods' shares on the node."""
STATE_LABEL = "nvidia.com/vgpu.config.state"
"""The progress of the vGPU config: pending, success, failed."""
REASON_ANNOTATION = "gpuvirt.io/vgpu.config.reason"
"""The reason for that state, which is too long for a label's value."""
WORKLOAD_STATE_LABEL = "gpuvirt.io/gpu.workload.state"
"""The progress of the workload: pending, success, failed."""
WORKLOAD_REASON_ANNOTATION = "gpuvirt.io/gpu.workload.reason"
AGENT_KEYS = (STATE_LABEL, WORKLOAD_STATE_LABEL, REASON_ANNOTATION, WORKLOAD_REASON_ANNOTATION)
"""The labels and annotations in which the agent reports progress."""

# --- the hardware and system of a node

PRESENT_LABEL = "nvidia.com/gpu.present"
MIG_CONFIG_LABEL = "nvidia.com/mig.config"
MIG_CAPABLE_LABEL = "nvidia.com/mig.capable"
PRODUCT_LABEL = "nvidia.com/gpu.product"
VGPU_HOST_DRIVER_LABEL = "nvidia.com/vgpu.host-driver-version"
GPU_RESOURCES = CONTAINER_RESOURCES
"""The beginnings of the names of resources that NVIDIA's device plugin offers to containers."""
SHARES_RESOURCE = Settings().shares.resource
"""The resource whose units are parts of GPUs in mode `shared`, by default."""

FEATURES = "feature.node.kubernetes.io/"
GPU_FEATURES = (
    f"{FEATURES}pci-10de.present",
    f"{FEATURES}pci-0302_10de.present",
    f"{FEATURES}pci-0300_10de.present",
    discovery.PRESENT_LABEL,
)
"""Labels of NFD and of `gpuvirt discover`. A node with any of them set to `true` has GPUs."""

OS_LABEL = "gpuvirt.io/os"
"""The tag by which driver images are chosen: `ubuntu22.04`."""
OS_SOURCES = (
    (f"{FEATURES}system-os_release.ID", f"{FEATURES}system-os_release.VERSION_ID"),
    (discovery.OS_ID_LABEL, discovery.OS_VERSION_LABEL),
)
"""The labels with the name and version of a node's system, of NFD and of `gpuvirt discover`."""

# --- which operands run on a node

DEPLOY = "nvidia.com/gpu.deploy."
"""The prefix of the labels that `deploy_label` returns."""


def deploy_label(component: str) -> str:
    """Return the label that selects the nodes of an operand; for `driver` it is `nvidia.com/gpu.deploy.driver`."""
    return f"{DEPLOY}{component}"


OPERANDS_LABEL = deploy_label("operands")
"""`false`: gpuvirt deploys no operands to the node."""
DEVICE_PLUGIN_LABEL = deploy_label("device-plugin")
"""`false`: another device plugin offers the node's GPUs to containers."""
NODE_LABEL = "gpuvirt.io/node"
"""`true`: the agent runs on the node. The agent's DaemonSet selects it."""
AGENT_LABELS = "labels"
"""The agent's label on a node for containers, where an agent runs for the label of the vGPU type alone."""
AGENT_GOES = "false"
"""The agent's label on a node that its agent leaves, until the controller has removed the agent's keys."""
VGPU_DRIVER_LABEL = "gpuvirt.io/vgpu-manager"
"""`true`: the vGPU manager runs on the node beside NVIDIA's operator, which removes the usual label of this operand."""
OPERANDS_OFF_ANNOTATION = "gpuvirt.io/operands-off"
"""`true` on nodes on which gpuvirt has switched off the operands of NVIDIA's operator."""

PAUSED = "paused-for-"
"""The beginning of the values of an operand's label that stop the operand during a change."""
PAUSED_FOR_VGPUS = f"{PAUSED}vgpu-change"
PAUSED_FOR_DRIVER = f"{PAUSED}driver-upgrade"

CLIENT = "client"
"""The label of pods that open GPUs. Before NVIDIA's driver manager unloads a driver, it pauses the label, and waits for
the DaemonSets' pods that select it (k8s-driver-manager of gpu-operator 26.7, `WaitForPodsWithNodeSelector`)."""
UPGRADE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
"""The state of the upgrade of a node's driver (k8s-operator-libs, `pkg/upgrade/consts.go`)."""
NOT_UPGRADING = frozenset({"", "upgrade-done"})

DRIVER = "driver"
MIG_MANAGER = "mig-manager"
TOOLKIT = "container-toolkit"
AGENT = "sandbox-device-plugin"
"""The operand that the agent replaces."""
VALIDATOR = "sandbox-validator"
VFIO_MANAGER = "vfio-manager"
VGPU_DRIVER = "vgpu-manager"
VGPU_DEVICE_MANAGER = "vgpu-device-manager"
WITH_TOOLKIT = frozenset({Workload.CONTAINER, Workload.SHARED})
"""The workloads in which containers get GPUs from NVIDIA's container toolkit."""
WITH_VGPU_DRIVER = frozenset({Workload.VGPU, Workload.ON_DEMAND})
"""The workloads whose GPUs carry vGPUs, for which NVIDIA's vGPU driver runs."""
SETS = {
    Workload.CONTAINER: (
        DRIVER,
        "gpu-feature-discovery",
        TOOLKIT,
        "device-plugin",
        "dcgm",
        "dcgm-exporter",
        "node-status-exporter",
        "operator-validator",
        CLIENT,
    ),
    # Without the driver, whose container would take GPUs from the agent: it is installed on the host.
    Workload.SHARED: (
        AGENT,
        "gpu-feature-discovery",
        TOOLKIT,
        "dcgm",
        "dcgm-exporter",
        "operator-validator",
        CLIENT,
    ),
    Workload.PASSTHROUGH: (
        AGENT,
        VALIDATOR,
        VFIO_MANAGER,
        "kata-manager",
        "cc-manager",
        CLIENT,
    ),
    Workload.VGPU: (
        AGENT,
        VGPU_DRIVER,
        VGPU_DEVICE_MANAGER,
        VALIDATOR,
        "cc-manager",
        CLIENT,
    ),
    # Without the vgpu-device-manager: the agent creates a vGPU when the kubelet allocates one, by no vGPU config.
    Workload.ON_DEMAND: (
        AGENT,
        VGPU_DRIVER,
        VALIDATOR,
        "cc-manager",
        CLIENT,
    ),
    # No operand needs to know in which shape a claim has a GPU: the agent binds it.
    Workload.CLAIMS: (AGENT, CLIENT),
}
"""The operands on the nodes of each workload, as `deploy_label` takes them."""
ALL = frozenset(deploy_label(name) for names in SETS.values() for name in names) | {
    deploy_label(name)
    for name in (
        MIG_MANAGER,
        "kata-sandbox-device-plugin",
        "dra-driver",
        "dra-validator",
        "dcgm-dra",
        "dcgm-exporter-dra",
    )
}
"""All labels of operands that gpuvirt manages; it never changes others."""


def driver_upgrade(state: str, client: str) -> str:
    """Return the label that says that a node's driver is about to be replaced, or is; empty without one.

    `state` and `client` are the values of UPGRADE_LABEL and of the label CLIENT, empty where the node has none.
    """
    if PAUSED_FOR_DRIVER in client:
        return f"{deploy_label(CLIENT)}={client}"
    return "" if state in NOT_UPGRADING else f"{UPGRADE_LABEL}={state}"


def driver_upgrade_in(labels: Mapping[str, str]) -> str:
    """Return the same of all labels of a node."""
    return driver_upgrade(labels.get(UPGRADE_LABEL, ""), labels.get(deploy_label(CLIENT), ""))


# --- the objects of the controller

OPERAND_LABEL = "gpuvirt.io/operand"
"""The label of each object with the operand that it belongs to."""
TEMPLATE_LABEL = "gpuvirt.io/template"
"""The label of each pod with a digest of the DaemonSet's pod template that it was created from."""


# --- desired labels, and the merge patch that sets those that differ

Fields = dict[str, msgspec.Raw]
"""An undecoded object that is written back whole."""


class DesiredLabels(msgspec.Struct, frozen=True, omit_defaults=True):
    """Desired labels and annotations by name; None deletes one."""

    labels: dict[str, str | None] = {}
    annotations: dict[str, str | None] = {}


class LabelPatch(msgspec.Struct, frozen=True):
    """A merge patch of an object's labels and annotations."""

    metadata: DesiredLabels


def patch_of(desired: Sequence[DesiredLabels], observed: Metadata) -> LabelPatch | None:
    """Return the patch for the keys that differ; None if none does."""
    labels = _differing([keys.labels for keys in desired], observed.labels)
    annotations = _differing([keys.annotations for keys in desired], observed.annotations)
    return LabelPatch(DesiredLabels(labels, annotations)) if labels or annotations else None


def _differing(desired: Sequence[dict[str, str | None]], observed: dict[str, str]) -> dict[str, str | None]:
    return {key: value for keys in desired for key, value in keys.items() if observed.get(key) != value}


def patched(whole: Fields, patch: LabelPatch) -> Fields:
    """Return an object with a patch applied and all other fields unchanged."""
    metadata = nulls.decode(whole["metadata"], Fields)
    for field, changes in (("labels", patch.metadata.labels), ("annotations", patch.metadata.annotations)):
        if not changes:
            continue
        has = field in metadata and not nulls.is_null(metadata[field])
        before = nulls.decode(metadata[field], dict[str, str]) if has else {}
        after = {key: value for key, value in (before | changes).items() if value is not None}
        metadata[field] = msgspec.Raw(msgspec.json.encode(after))
    return whole | {"metadata": msgspec.Raw(msgspec.json.encode(metadata))}


# --- label selectors
#
# Source: Kubernetes' API reference, meta/v1, LabelSelector: all requirements must hold; NotIn and DoesNotExist hold for
# an object without the label; a selector without requirements matches each object. The owner of the field that holds a
# selector says what null means there; mostly, that it matches none.


class Requirement(msgspec.Struct, frozen=True, gc=False):
    """A requirement on the value of one label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels satisfy the requirement; an operator that is not known is never satisfied."""
        match self.operator:
            case "In":
                return self.key in labels and labels[self.key] in self.values
            case "NotIn":
                return self.key not in labels or labels[self.key] not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case _:
                return False


class LabelSelector(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A selector of objects by their labels."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether all requirements hold for labels."""
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(requirement.holds(labels) for requirement in self.match_expressions)
