"""The labels, annotations and keys by which a node and its agent talk.

Source: NVIDIA's vgpu-device-manager, whose label, states and ConfigMap these are; the annotation is gpuvirt's own.
"""

from gpuvirt.model.workload import LABEL, VGPU_CONFIG_LABEL

CONFIG_LABEL = VGPU_CONFIG_LABEL
"""Which configuration the node is to have."""
STATE_LABEL = "nvidia.com/vgpu.config.state"
"""How far that has come: pending, success, failed."""
REASON_ANNOTATION = "gpuvirt.io/vgpu.config.reason"
"""Why; a label's value has no room for it."""
WORKLOAD_LABEL = LABEL
"""What the node is for."""
WORKLOAD_STATE_LABEL = "gpuvirt.io/gpu.workload.state"
"""How far that has come: pending, success, failed."""
WORKLOAD_REASON_ANNOTATION = "gpuvirt.io/gpu.workload.reason"
CONFIG_MAP = "default-vgpu-devices-config"
CONFIG_KEY = "config.yaml"

OPERAND_LABELS = ("nvidia.com/gpu.deploy.sandbox-device-plugin", "nvidia.com/gpu.deploy.sandbox-validator")
"""The node selectors of NVIDIA's operands that must be away while vGPUs change."""
PAUSED = "paused-for-vgpu-change"
OPERAND_APPS = ("nvidia-sandbox-device-plugin-daemonset", "nvidia-sandbox-validator")
"""The value of `app` that the pods of the same operands have."""
