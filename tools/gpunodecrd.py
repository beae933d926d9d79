"""The CustomResourceDefinition of GpuNode."""

from crd import Crd, whole
from crdschema import Rule, Schema, description_of, structural
from msgspec.structs import replace

from gpuvirt.kube.kinds import gpunode

HEAD = """\
# GpuNode: the desired state of a node's GPUs, and what its agent has observed (docs/reference.md). Optional for agents.
# Generated from src/gpuvirt/kube/kinds/gpunode.py by `make generate`.
"""
ODDS = (
    "!((has(self.mode) && self.mode == 'container' || has(self.gpus) && self.gpus.exists(one, one.mode == 'container'))"
    " && (has(self.mode) && self.mode == 'vgpu' || has(self.gpus) && self.gpus.exists(one, one.mode == 'vgpu')))"
)
COLUMNS = (
    ("GPUs", "integer", ".status.totals.gpus"),
    ("Modes", "string", ".status.totals.modes"),
    ("vGPUs", "integer", ".status.totals.vgpus"),
    ("Allocated", "integer", ".status.totals.allocated"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def _schema() -> Schema:
    spec, status = structural(gpunode.Spec), structural(gpunode.Status)
    message = "container and vgpu can't be on one node: both need nvidia.ko, each from another driver; use one of them"
    gpus = replace(spec.properties["gpus"], list_type="map", list_map_keys=("address",), max_items=256)
    withheld = replace(spec.properties["withheld"], list_type="map", list_map_keys=("resource",), max_items=256)
    conditions = replace(status.properties["conditions"], list_type="map", list_map_keys=("type",))
    return whole(
        description_of(gpunode.GpuNode),
        replace(spec, properties={**spec.properties, "gpus": gpus, "withheld": withheld}, rules=(Rule(ODDS, message),)),
        replace(status, properties={**status.properties, "conditions": conditions}),
    )


CRD = Crd(
    "gpunodes.yaml",
    HEAD,
    gpunode.GROUP,
    gpunode.VERSION,
    gpunode.KIND,
    gpunode.PLURAL,
    _schema(),
    COLUMNS,
    ("gpun",),
)
