"""KubeVirt's kinds for a real API server: the relevant fields by facts, and KubeVirt's own manifests if present.

The manifests are in the folder that GPUVIRT_KUBEVIRT_CRDS names, or beside the repository. HCO's kind is by facts only;
its lists are keyed by their selectors (x-kubernetes-list-type: map), and KubeVirt's are atomic.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

BESIDE = Path(__file__).parent.parent.parent.parent / "shared/data/kubevirt-crds"
FOLDER = Path(os.environ.get("GPUVIRT_KUBEVIRT_CRDS", str(BESIDE)))

Schema = Mapping[str, object]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def _list(items: Schema, **more: object) -> Schema:
    return {"type": "array", "items": items, **(more or {"x-kubernetes-list-type": "atomic"})}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _entry(key: str, **more: Schema) -> Schema:
    return _object((key, "resourceName"), **{key: TEXT}, resourceName=TEXT, externalResourceProvider=FLAG, **more)


def _keyed(key: str) -> Schema:
    return _list(_entry(key, disabled=FLAG), **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})


MEDIATED = _object(enabled=FLAG, mediatedDeviceTypes=_list(TEXT), nodeMediatedDeviceTypes=_list({"type": "object"}))
KUBEVIRT_SPEC = _object(
    configuration=_object(
        permittedHostDevices=_object(
            pciHostDevices=_list(_entry("pciVendorSelector")), mediatedDevices=_list(_entry("mdevNameSelector"))
        ),
        mediatedDevicesConfiguration=MEDIATED,
        developerConfiguration=_object(featureGates=_list(TEXT), disabledFeatureGates=_list(TEXT)),
    )
)
HCO_SPEC = _object(
    permittedHostDevices=_object(
        pciHostDevices=_keyed("pciDeviceSelector"), mediatedDevices=_keyed("mdevNameSelector")
    ),
    mediatedDevicesConfiguration=MEDIATED,
    featureGates={**_object(disableMDevConfiguration=FLAG), "default": {"disableMDevConfiguration": False}},
)


ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def manifest(
    group: str, versions: Sequence[str], plural: str, kind: str, spec: Schema, *, scope: str = "Namespaced"
) -> Mapping[str, object]:
    """Return the definition of a kind; the first version is the one that is stored."""
    schema = _object(("spec",), spec=spec, status=ANY)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == versions[0],
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
                for version in versions
            ],
        },
    }


V1 = ("v1", "v1alpha3")
OURS = {
    "kubevirts.kubevirt.io": manifest("kubevirt.io", V1, "kubevirts", "KubeVirt", KUBEVIRT_SPEC),
    "virtualmachines.kubevirt.io": manifest("kubevirt.io", V1, "virtualmachines", "VirtualMachine", ANY),
    "virtualmachineinstances.kubevirt.io": manifest(
        "kubevirt.io", V1, "virtualmachineinstances", "VirtualMachineInstance", ANY
    ),
    "hyperconvergeds.hco.kubevirt.io": manifest(
        "hco.kubevirt.io", ("v1beta1",), "hyperconvergeds", "HyperConverged", HCO_SPEC
    ),
}
BESIDE_VMS = {
    "virtualmachineinstancereplicasets.kubevirt.io": manifest(
        "kubevirt.io", V1, "virtualmachineinstancereplicasets", "VirtualMachineInstanceReplicaSet", ANY
    ),
    "virtualmachinepools.pool.kubevirt.io": manifest(
        "pool.kubevirt.io", ("v1alpha1",), "virtualmachinepools", "VirtualMachinePool", ANY
    ),
    "virtualmachineinstancetypes.instancetype.kubevirt.io": manifest(
        "instancetype.kubevirt.io", ("v1beta1",), "virtualmachineinstancetypes", "VirtualMachineInstancetype", ANY
    ),
    "virtualmachineclusterinstancetypes.instancetype.kubevirt.io": manifest(
        "instancetype.kubevirt.io",
        ("v1beta1",),
        "virtualmachineclusterinstancetypes",
        "VirtualMachineClusterInstancetype",
        ANY,
        scope="Cluster",
    ),
}
"""The other kinds that name devices of VMs."""
SOURCES = ["facts", *(["manifests"] if (FOLDER / "kubevirt.crd.yaml").exists() else [])]
"""Where KubeVirt's own kind may come from; never none."""


def manifests(source: str, *, all_kinds: bool = False) -> Mapping[str, str]:
    """Return the manifests of KubeVirt's and HCO's kinds, by the name of the kind's definition."""
    chosen = OURS | (BESIDE_VMS if all_kinds else {})
    found = {name: json.dumps(ours) for name, ours in chosen.items()}
    if source == "manifests":
        own = ("kubevirt", "virtualmachine", "virtualmachineinstance")
        found |= {f"{name}s.kubevirt.io": (FOLDER / f"{name}.crd.yaml").read_text() for name in own}
    return found
