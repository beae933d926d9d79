"""What operands on nodes for containers have in common: when they are wanted, what they wait for, how they see GPUs.

Contract: NVIDIA's operator, whose images these are. They are gated by `nvidia.com/gpu.deploy.*`, wait for files in
`/run/nvidia/validations`, and see GPUs by the RuntimeClass that the container toolkit sets up, or by the annotation of
its NRI plugin. The containers that wait are of gpuvirt's own image.
"""

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.cluster.kinds.operandparts import Operand
from gpuvirt.cluster.kinds.podparts import Container, EnvVar
from gpuvirt.cluster.labels import deploy_label
from gpuvirt.cluster.operator.operands import hostpaths
from gpuvirt.cluster.operator.operands.hostpaths import INTO, mount
from gpuvirt.cluster.operator.operands.site import Site

RUNTIME_CLASS = "nvidia"
ALL_GPUS = "management.nvidia.com/gpu=all"
NRI_ANNOTATION = "nvidia.cdi.k8s.io/container."
NO_GPUS = EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="void")
"""For containers that need none: container runtimes that give GPUs by default leave them alone."""
SOURCED = f"set -a; . {hostpaths.VALIDATIONS}/driver-ready; set +a"
"""Shell: where the driver is, as the validator has found it."""


def is_desired(site: Site, operand: Operand, *, default: bool = True) -> bool:
    """Return whether an operand is to be there; null is its default, and without nodes for containers there is none."""
    enabled = default if operand.enabled is None else operand.enabled
    return enabled and not site.coexists and site.has_container_nodes


def selector(name: str) -> dict[str, str]:
    """Return the nodes that an operand is for: `driver`."""
    return {deploy_label(name): "true"}


def runtime_class_of(policy: ClusterPolicy) -> str:
    """Return the RuntimeClass of pods that are to see all GPUs; none where the NRI plugin shows them."""
    return "" if has_nri(policy) else policy.spec.operator.runtime_class or RUNTIME_CLASS


def sees_gpus(policy: ClusterPolicy, container: str) -> dict[str, str]:
    """Return the annotation of pods of which a container is to see all GPUs, where that is how it does."""
    return {f"{NRI_ANNOTATION}{container}": ALL_GPUS} if has_nri(policy) else {}


def has_cdi(policy: ClusterPolicy) -> bool:
    """Return whether containers get GPUs by CDI."""
    return policy.spec.cdi.enabled is not False


def has_nri(policy: ClusterPolicy) -> bool:
    """Return whether the container toolkit runs its NRI plugin."""
    return has_cdi(policy) and policy.spec.cdi.nri_plugin_enabled is True


def awaiting(site: Site, marker: str) -> Container:
    """Return a container that ends when a file is there: `toolkit-ready`."""
    return Container(
        name=f"{marker.removesuffix('-ready')}-validation",
        image=site.image,
        image_pull_policy=site.pull_policy,
        args=("validate", "await", marker),
        env=(NO_GPUS,),
        volume_mounts=(mount("run-nvidia-validations", hostpaths.VALIDATIONS, INTO, read_only=True),),
    )
