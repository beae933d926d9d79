"""Common parts of the operands on nodes for containers: whether they run, what they wait for, how they access GPUs.

Contract: NVIDIA's operator, whose images they run. `nvidia.com/gpu.deploy.*` labels select their nodes. They wait for
files in `/run/nvidia/validations`, with containers of gpuvirt's image. They access GPUs by the RuntimeClass that the
container toolkit configures, or by the annotation of its NRI plugin.
"""

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.operandparts import Operand
from gpuvirt.cluster.kinds.podparts import Container, EnvVar, PodSpec, Volume
from gpuvirt.cluster.labels import deploy_label
from gpuvirt.cluster.operator.operands import assembly, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import INTO, mount
from gpuvirt.cluster.operator.operands.site import Site

RUNTIME_CLASS = "nvidia"
ALL_GPUS = "management.nvidia.com/gpu=all"
NRI_ANNOTATION = "nvidia.cdi.k8s.io/container."
NO_GPUS = EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="void")
"""For containers that need no GPU: keeps a container runtime that injects GPUs by default from doing so."""
EXPORT_DRIVER_PATHS = f"set -a; . {hostpaths.VALIDATIONS}/driver-ready; set +a"
"""Shell: exports the driver's paths that the validator has found."""


def is_desired(site: Site, operand: Operand, *, default: bool = True) -> bool:
    """Return whether an operand runs; null is its default, and without nodes for containers no operand runs."""
    enabled = default if operand.enabled is None else operand.enabled
    return enabled and not site.settings.coexists and site.has_container_nodes


def image_of(site: Site, operand: Operand, path: str, variable: str) -> str | SpecFault | None:
    """Return an operand's image, or the fault of its field `path`; None if the operand does not run."""
    return images.image_of(operand, path, site.settings.images, variable) if is_desired(site, operand) else None


def pod(
    policy: ClusterPolicy,
    site: Site,
    operand: Operand,
    component: str,
    container: Container,
    volumes: tuple[Volume, ...],
) -> PodSpec:
    """Return the pod of an operand that waits for the container toolkit and then accesses all GPUs."""
    return PodSpec(
        service_account_name=f"nvidia-{component}",
        node_selector=selector(component),
        runtime_class_name=runtime_class_of(policy),
        host_network=assembly.on_host_network(operand),
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, operand),
        init_containers=(awaiting(site, "toolkit-ready"),),
        containers=(container,),
        volumes=volumes,
    )


def selector(name: str) -> dict[str, str]:
    """Return the node selector of a component: `driver`."""
    return {deploy_label(name): "true"}


def runtime_class_of(policy: ClusterPolicy) -> str:
    """Return the RuntimeClass of pods that access all GPUs; empty if the NRI plugin injects GPUs."""
    return "" if has_nri(policy) else policy.spec.operator.runtime_class or RUNTIME_CLASS


def sees_gpus(policy: ClusterPolicy, container: str) -> dict[str, str]:
    """Return the annotation that gives a container of a pod all GPUs; empty if the RuntimeClass does so."""
    return {f"{NRI_ANNOTATION}{container}": ALL_GPUS} if has_nri(policy) else {}


def has_cdi(policy: ClusterPolicy) -> bool:
    """Return whether container runtimes inject GPUs by CDI."""
    return policy.spec.cdi.enabled is not False


def has_nri(policy: ClusterPolicy) -> bool:
    """Return whether the container toolkit runs its NRI plugin."""
    return has_cdi(policy) and policy.spec.cdi.nri_plugin_enabled is True


def awaiting(site: Site, marker: str) -> Container:
    """Return an init container that ends as soon as a file exists: `toolkit-ready`."""
    return Container(
        name=f"{marker.removesuffix('-ready')}-validation",
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("validate", "await", marker),
        env=(NO_GPUS,),
        volume_mounts=(mount("run-nvidia-validations", hostpaths.VALIDATIONS, INTO, read_only=True),),
    )
