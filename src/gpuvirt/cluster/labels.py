"""The labels and annotations by which the controller talks with nodes, operands and admins.

Source: NVIDIA's operator, whose labels `nvidia.com/...` these are, and NFD's; those of `gpuvirt.io` are our own.
"""

from gpuvirt.model.workload import LABEL, Workload

WORKLOAD_LABEL = LABEL
VGPU_CONFIG_LABEL = "nvidia.com/vgpu.config"
PRESENT_LABEL = "nvidia.com/gpu.present"
OPERANDS_LABEL = "nvidia.com/gpu.deploy.operands"
"""`false`: nothing of ours is to run on the node."""
MIG_CONFIG_LABEL = "nvidia.com/mig.config"
NODE_LABEL = "gpuvirt.io/node"
"""`true` where the node agent is to run: its DaemonSet selects it."""
VGPU_DRIVER_LABEL = "gpuvirt.io/vgpu-manager"
"""`true` where the vGPU manager is to run beside NVIDIA's operator, which takes away the labels that it would go by."""
OPERANDS_OFF_ANNOTATION = "gpuvirt.io/operands-off"
"""On nodes that NVIDIA's operator was asked by us to leave alone."""

AGENT_KEYS = (
    "nvidia.com/vgpu.config.state",
    "gpuvirt.io/gpu.workload.state",
    "gpuvirt.io/vgpu.config.reason",
    "gpuvirt.io/gpu.workload.reason",
)
"""Labels and annotations by which a node's agent says how far it has come."""

FEATURES = "feature.node.kubernetes.io/"
GPU_FEATURES = (
    f"{FEATURES}pci-10de.present",
    f"{FEATURES}pci-0302_10de.present",
    f"{FEATURES}pci-0300_10de.present",
    "gpuvirt.io/pci-10de.present",
)
"""Any of these with value `true`: NFD's, and that of `gpuvirt discover`."""

OS_LABEL = "gpuvirt.io/os"
"""The tag by which images of drivers are chosen: `ubuntu22.04`."""
OS_SOURCES = (
    (f"{FEATURES}system-os_release.ID", f"{FEATURES}system-os_release.VERSION_ID"),
    ("gpuvirt.io/os-release.id", "gpuvirt.io/os-release.version-id"),
)
"""Where a node says its system and version: NFD's labels, and those of `gpuvirt discover`."""

DEPLOY = "nvidia.com/gpu.deploy."
SETS = {
    Workload.CONTAINER: (
        "driver",
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
        "sandbox-device-plugin",
        "sandbox-validator",
        "vfio-manager",
        "kata-manager",
        "cc-manager",
        "client",
    ),
    Workload.VGPU: (
        "sandbox-device-plugin",
        "vgpu-manager",
        "vgpu-device-manager",
        "sandbox-validator",
        "cc-manager",
        "client",
    ),
}
"""What runs on a node of each kind: node selectors of the operands, after the prefix."""
MIG_MANAGER = "mig-manager"
AGENT = "sandbox-device-plugin"
"""The operand in whose place the node agent runs."""
VGPU_DRIVER = "vgpu-manager"
ALL = frozenset(f"{DEPLOY}{name}" for names in SETS.values() for name in names) | {
    f"{DEPLOY}{name}"
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
