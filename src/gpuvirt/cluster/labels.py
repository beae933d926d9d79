"""The labels and annotations of nodes and operands: what the agent, the controller, NVIDIA's operator and admins share.

Source: NVIDIA's operator and its vgpu-device-manager, whose labels `nvidia.com/...` and values these are, and NFD's;
those of `gpuvirt.io` are our own. What the agent and `gpuvirt discover` decide by is named in `model`. An annotation
that one module alone writes and reads is named there.
"""

from gpuvirt.model.desired.workload import LABEL, VGPU_CONFIG_LABEL, Workload
from gpuvirt.model.offers import discovery

# --- what a node is for, and how far it has come

WORKLOAD_LABEL = LABEL
"""What the node is for."""
CONFIG_LABEL = VGPU_CONFIG_LABEL
"""Which vGPU config the node is to have."""
STATE_LABEL = "nvidia.com/vgpu.config.state"
"""How far that has come: pending, success, failed."""
REASON_ANNOTATION = "gpuvirt.io/vgpu.config.reason"
"""Why; a label's value has no room for it."""
WORKLOAD_STATE_LABEL = "gpuvirt.io/gpu.workload.state"
"""How far what the node is for has come: pending, success, failed."""
WORKLOAD_REASON_ANNOTATION = "gpuvirt.io/gpu.workload.reason"
AGENT_KEYS = (STATE_LABEL, WORKLOAD_STATE_LABEL, REASON_ANNOTATION, WORKLOAD_REASON_ANNOTATION)
"""Labels and annotations by which a node's agent says how far it has come."""

# --- what a node has

PRESENT_LABEL = "nvidia.com/gpu.present"
MIG_CONFIG_LABEL = "nvidia.com/mig.config"
MIG_CAPABLE_LABEL = "nvidia.com/mig.capable"
PRODUCT_LABEL = "nvidia.com/gpu.product"
VGPU_HOST_DRIVER_LABEL = "nvidia.com/vgpu.host-driver-version"
GPU_RESOURCES = "nvidia.com/gpu", "nvidia.com/mig-"
"""How the names of what device plugins offer to containers begin."""

FEATURES = "feature.node.kubernetes.io/"
GPU_FEATURES = (
    f"{FEATURES}pci-10de.present",
    f"{FEATURES}pci-0302_10de.present",
    f"{FEATURES}pci-0300_10de.present",
    discovery.PRESENT_LABEL,
)
"""Any of these with value `true`: NFD's, and that of `gpuvirt discover`."""

OS_LABEL = "gpuvirt.io/os"
"""The tag by which images of drivers are chosen: `ubuntu22.04`."""
OS_SOURCES = (
    (f"{FEATURES}system-os_release.ID", f"{FEATURES}system-os_release.VERSION_ID"),
    (discovery.OS_ID_LABEL, discovery.OS_VERSION_LABEL),
)
"""Where a node says its system and version: NFD's labels, and those of `gpuvirt discover`."""

# --- which operands run on a node

DEPLOY = "nvidia.com/gpu.deploy."
"""The prefix of the operands' node selectors; see `deploy_label`."""


def deploy_label(component: str) -> str:
    """Return the label that selects the nodes of an operand: of `driver`, `nvidia.com/gpu.deploy.driver`."""
    return f"{DEPLOY}{component}"


OPERANDS_LABEL = deploy_label("operands")
"""`false`: nothing of ours is to run on the node."""
NODE_LABEL = "gpuvirt.io/node"
"""`true` where the node agent is to run: its DaemonSet selects it."""
VGPU_DRIVER_LABEL = "gpuvirt.io/vgpu-manager"
"""`true` where the vGPU manager is to run beside NVIDIA's operator, which takes away the labels that it would go by."""
OPERANDS_OFF_ANNOTATION = "gpuvirt.io/operands-off"
"""On nodes that NVIDIA's operator was asked by us to leave alone."""

PAUSED = "paused-for-"
"""How a value of an operand's label begins that keeps the operand away during a change."""
PAUSED_FOR_VGPUS = f"{PAUSED}vgpu-change"
PAUSED_FOR_DRIVER = f"{PAUSED}driver-upgrade"

DRIVER = "driver"
MIG_MANAGER = "mig-manager"
AGENT = "sandbox-device-plugin"
"""The operand in whose place the node agent runs."""
VALIDATOR = "sandbox-validator"
VFIO_MANAGER = "vfio-manager"
VGPU_DRIVER = "vgpu-manager"
VGPU_DEVICE_MANAGER = "vgpu-device-manager"
SETS = {
    Workload.CONTAINER: (
        DRIVER,
        "gpu-feature-discovery",
        "container-toolkit",
        "device-plugin",
        "dcgm",
        "dcgm-exporter",
        "node-status-exporter",
        "operator-validator",
        "client",
    ),
    Workload.PASSTHROUGH: (
        AGENT,
        VALIDATOR,
        VFIO_MANAGER,
        "kata-manager",
        "cc-manager",
        "client",
    ),
    Workload.VGPU: (
        AGENT,
        VGPU_DRIVER,
        VGPU_DEVICE_MANAGER,
        VALIDATOR,
        "cc-manager",
        "client",
    ),
}
"""What runs on a node of each kind: the operands, as `deploy_label` takes them."""
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
"""Every such label that is known; others are not touched."""

# --- what an object of the controller belongs to

OPERAND_LABEL = "gpuvirt.io/operand"
"""On each object: the operand that it is part of."""
TEMPLATE_LABEL = "gpuvirt.io/template"
"""On each pod: a digest of what the pods of its DaemonSet were when it was made."""
