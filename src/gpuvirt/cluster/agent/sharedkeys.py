"""The node's annotation with its shared GPUs, and its labels with the vGPU type.

The agent owns a label only if it wrote it: an annotation has the labels that it wrote, with their values. A label that
an admin has set, or changed since, stays as it is.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.cluster.agent.nodelabels import Claim
from gpuvirt.cluster.labelpatch import DesiredLabels
from gpuvirt.cluster.resources import Metadata
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION, shared_gpus_text
from gpuvirt.model.shares.sharedgpus import NodeVgpuType, SharedGpus
from gpuvirt.node.loops.cell import Cell

OWNED_ANNOTATION = "gpuvirt.io/vgpu-type-labels"
"""The labels of the vGPU type that the agent wrote, with their values: `{"vgpu.type": "v100-8q-8GB"}`."""


def shared_claim(views: Cell[NodeView]) -> Claim:
    """Return the claim of the annotation and the labels; before the host is observed, the node's stay as they are."""

    def keys(observed: Metadata) -> DesiredLabels:
        view = views.get()
        if not view.looked:
            return DesiredLabels()
        labels = _type_keys(observed, view.vgpu_type) if view.vgpu_type is not None else DesiredLabels()
        return DesiredLabels(labels.labels, labels.annotations | _annotation(view.shared))

    return Claim(keys, views.notifying)


def owned_labels(observed: Metadata) -> Mapping[str, str]:
    """Return the labels that the agent wrote and that still have the values that it wrote."""
    try:
        written = from_json(observed.annotations.get(OWNED_ANNOTATION, "{}").encode(), dict[str, str])
    except DamagedError:  # a user has edited it: the labels are the admin's then
        return {}
    return {key: value for key, value in written.items() if observed.labels.get(key) == value}


def keys_without_shares(observed: Metadata) -> DesiredLabels:
    """Return the removal of all that the agent wrote here."""
    written = (OWNED_ANNOTATION, SHARED_GPUS_ANNOTATION)
    return DesiredLabels(
        dict.fromkeys(owned_labels(observed)), dict.fromkeys(key for key in written if key in observed.annotations)
    )


def _annotation(shared: SharedGpus) -> dict[str, str | None]:
    if not shared.gpus:
        return {SHARED_GPUS_ANNOTATION: None}
    return {SHARED_GPUS_ANNOTATION: shared_gpus_text(shared.capacity)} if shared.is_known else {}


def _type_keys(observed: Metadata, vgpu_type: NodeVgpuType) -> DesiredLabels:
    owned, label = owned_labels(observed), vgpu_type.label
    desired = {
        key: label for key in vgpu_type.keys if label is not None and (key in owned or key not in observed.labels)
    }
    gone = dict.fromkeys(key for key in owned if key not in desired)
    written = msgspec.json.encode(dict(sorted(desired.items()))).decode() if desired else None
    return DesiredLabels({**gone, **desired}, {OWNED_ANNOTATION: written})
