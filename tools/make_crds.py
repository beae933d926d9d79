"""Generates the CustomResourceDefinitions of our kinds; with --check, says whether they are up to date."""

import sys
from pathlib import Path

import msgspec
import yaml
from msgspec.structs import replace

from gpuvirt.cluster.kinds import gpunode
from gpuvirt.cluster.kinds.schema import Rule, Schema, description_of, structural

FILE = Path(__file__).parent.parent / "deploy/gpunodes.yaml"
HEAD = """\
# GpuNode: what is wanted of a node's GPUs, and what its agent knows of them (docs/reference.md). Agents do without it.
# Generated from src/gpuvirt/cluster/kinds/gpunode.py by `make generate`.
"""
ODDS = (
    "!((has(self.mode) && self.mode == 'container' || has(self.gpus) && self.gpus.exists(one, one.mode == 'container'))"
    " && (has(self.mode) && self.mode == 'vgpu' || has(self.gpus) && self.gpus.exists(one, one.mode == 'vgpu')))"
)
COLUMNS = (
    ("GPUs", "integer", ".status.totals.gpus"),
    ("Modes", "string", ".status.totals.modes"),
    ("vGPUs", "integer", ".status.totals.vgpus"),
    ("Held", "integer", ".status.totals.held"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def schema_of_gpunode() -> Schema:
    """Return what the API server checks objects by; it checks their metadata itself."""
    spec, status = structural(gpunode.Spec), structural(gpunode.Status)
    message = "container and vgpu can't be on one node: both need nvidia.ko, each from another driver; use one of them"
    gpus = replace(spec.properties["gpus"], list_type="map", list_map_keys=("address",), max_items=256)
    conditions = replace(status.properties["conditions"], list_type="map", list_map_keys=("type",))
    return Schema(
        description=description_of(gpunode.GpuNode),
        type="object",
        properties={
            "apiVersion": Schema(type="string"),
            "kind": Schema(type="string"),
            "metadata": Schema(type="object"),
            "spec": replace(spec, properties={**spec.properties, "gpus": gpus}, rules=(Rule(ODDS, message),)),
            "status": replace(status, properties={**status.properties, "conditions": conditions}),
        },
    )


def crd() -> str:
    """Return the manifest."""
    version = {
        "name": gpunode.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [dict(zip(("name", "type", "jsonPath"), one, strict=True)) for one in COLUMNS],
        "schema": {"openAPIV3Schema": msgspec.to_builtins(schema_of_gpunode())},
    }
    manifest = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{gpunode.PLURAL}.{gpunode.GROUP}"},
        "spec": {
            "group": gpunode.GROUP,
            "scope": "Cluster",
            "names": {
                "kind": gpunode.KIND,
                "plural": gpunode.PLURAL,
                "singular": gpunode.KIND.lower(),
                "shortNames": ["gpun"],
            },
            "versions": [version],
        },
    }
    return HEAD + yaml.safe_dump(manifest, sort_keys=False, width=120)


def main() -> int:
    """Generate, or compare."""
    if "--check" not in sys.argv[1:]:
        FILE.write_text(crd())
        return 0
    if not FILE.exists() or FILE.read_text() != crd():
        print(f"{FILE.name} is not what the code says; run make generate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
