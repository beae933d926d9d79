"""The node's annotation with its shared GPUs, and its labels with the vGPU type, as the agent keeps them."""

import msgspec

from gpuvirt.cluster.agent.nodelabels import Claim
from gpuvirt.cluster.labelpatch import DesiredLabels
from gpuvirt.cluster.resources import Metadata
from gpuvirt.cluster.shares.nodekeys import OWNED_ANNOTATION, owned_labels
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION, shared_gpus_text
from gpuvirt.model.shares.sharedgpus import NodeVgpuType, SharedGpus


def shared_claim(views: Cell[NodeView]) -> Claim:
    """Return the claim of the annotation and the labels; before the host is observed, the node's stay as they are."""

    def keys(observed: Metadata) -> DesiredLabels:
        view = views.get()
        if not view.host_observed:
            return DesiredLabels()
        labels = _type_keys(observed, view.vgpu_type) if view.vgpu_type is not None else DesiredLabels()
        return DesiredLabels(labels.labels, labels.annotations | _annotation(view.shared))

    return Claim(keys, views.notifying)


def _annotation(shared: SharedGpus) -> dict[str, str | None]:
    if not shared.gpus and not shared.recorded:
        return {SHARED_GPUS_ANNOTATION: None, LIMITS_ANNOTATION: None}
    limits: dict[str, str | None] = {}
    if shared.enforcement is not None:
        limits[LIMITS_ANNOTATION] = str(shared.enforcement) if shared.enforcement.is_limit else None
    units = {SHARED_GPUS_ANNOTATION: shared_gpus_text(shared.schedulable)} if shared.is_known else {}
    return {**units, **limits}


def _type_keys(observed: Metadata, vgpu_type: NodeVgpuType) -> DesiredLabels:
    owned, label = owned_labels(observed), vgpu_type.label
    desired = {
        key: label for key in vgpu_type.keys if label is not None and (key in owned or key not in observed.labels)
    }
    gone = dict.fromkeys(key for key in owned if key not in desired)
    written = msgspec.json.encode(dict(sorted(desired.items()))).decode() if desired else None
    return DesiredLabels({**gone, **desired}, {OWNED_ANNOTATION: written})
