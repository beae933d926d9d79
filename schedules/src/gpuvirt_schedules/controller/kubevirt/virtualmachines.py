"""The collections of VirtualMachines and their VMIs that a schedule reads, and the owners of VMIs and pods.

Source: KubeVirt's API `kubevirt.io/v1` (staging/src/kubevirt.io/api/core/v1/types.go).
"""

from gpuvirt.kube.kinds.core import OwnedMetadata
from gpuvirt.kube.resources import Resource

GROUP = "kubevirt.io"
VM = "VirtualMachine"


def controller_uid(metadata: OwnedMetadata, kind: str) -> str:
    """Return the uid of an object's controller if it is one of KubeVirt's objects of this kind; else an empty text."""
    owner = metadata.controller
    is_one = owner is not None and owner.kind == kind and owner.api_version.startswith(f"{GROUP}/")
    return owner.uid if owner is not None and is_one else ""


def virtual_machines(namespace: str) -> Resource:
    """Return the VirtualMachines of a namespace."""
    return Resource("virtualmachines", GROUP, namespace=namespace)


def instances(namespace: str) -> Resource:
    """Return the VirtualMachineInstances of a namespace."""
    return Resource("virtualmachineinstances", GROUP, namespace=namespace)


def subresources(namespace: str) -> Resource:
    """Return what virt-api serves of the VirtualMachines of a namespace: `stop`."""
    return Resource("virtualmachines", f"subresources.{GROUP}", namespace=namespace)
