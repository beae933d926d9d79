"""The labels and annotations on a node that belong to its agent: states, shared GPUs, on-demand vGPUs, vGPU types.

The agent owns a label only if it wrote it: an annotation has the labels that it wrote, with their values. A label that
an admin has set, or changed since, stays as it is.
"""

from collections.abc import Mapping

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.kube.labels import AGENT_KEYS, DesiredLabels
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.offers.ondemand.typesannotation import VGPU_TYPES_ANNOTATION
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION

OWNED_ANNOTATION = "gpuvirt.io/vgpu-type-labels"
"""The labels of the vGPU type that the agent wrote, with their values: `{"vgpu.type": "v100-8q-8GB"}`."""


def owned_labels(observed: Metadata) -> Mapping[str, str]:
    """Return the labels that the agent wrote and that still have the values that it wrote."""
    try:
        written = from_json(observed.annotations.get(OWNED_ANNOTATION, "{}").encode(), dict[str, str])
    except DamagedError:  # a user has edited it: the labels are the admin's then
        return {}
    return {key: value for key, value in written.items() if observed.labels.get(key) == value}


def keys_without_agent(observed: Metadata) -> DesiredLabels:
    """Return the removal of all that an agent wrote about states, shares and vGPU types; empty if it wrote nothing."""
    written = (OWNED_ANNOTATION, SHARED_GPUS_ANNOTATION, LIMITS_ANNOTATION, VGPU_TYPES_ANNOTATION, *AGENT_KEYS)
    labels = (*owned_labels(observed), *(key for key in AGENT_KEYS if key in observed.labels))
    return DesiredLabels(dict.fromkeys(labels), dict.fromkeys(key for key in written if key in observed.annotations))
