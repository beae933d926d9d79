"""The changes that a policy and the controller's settings make to the manifest of one operand (`bases`).

An operand begins with `base`, makes the changes that it alone has, and ends with `assembly.daemon_set`.

Contract: NVIDIA's operator, whose images the operands on nodes for containers run. `nvidia.com/gpu.deploy.*` labels
select their nodes. They wait for files in `/run/nvidia/validations`, with containers of gpuvirt's image. They access
GPUs by the RuntimeClass that the container toolkit configures, or by the annotation of its NRI plugin.
"""

import re
from collections.abc import Generator, Mapping

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, hostpaths, images
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.operandparts import Operand
from gpuvirt.kube.kinds.podparts import Container, EnvVar
from gpuvirt.kube.kinds.workloads import DaemonSet, LabelSelector
from gpuvirt.kube.labels import OS_LABEL

RUNTIME_CLASS = "nvidia"


def is_desired(inputs: RenderInputs, operand: Operand) -> bool:
    """Return whether an operand for containers runs; null is true, and without nodes for containers none runs."""
    return operand.enabled is not False and not inputs.settings.coexists and inputs.has_container_nodes


def image_of(
    inputs: RenderInputs, operand: Operand, path: str, variable: str
) -> Generator[SpecFault, None, str | None]:
    """Return an operand's image; None if the operand does not run, or after yielding the fault of its field `path`."""
    if not is_desired(inputs, operand):
        return None
    image = images.image_of(operand, path, inputs.settings.images, variable)
    if isinstance(image, str):
        return image
    yield image
    return None


def runtime_class_of(policy: ClusterPolicy) -> str:
    """Return the RuntimeClass of pods that access all GPUs; empty if the NRI plugin injects GPUs."""
    return "" if has_nri(policy) else policy.spec.operator.runtime_class or RUNTIME_CLASS


def has_cdi(policy: ClusterPolicy) -> bool:
    """Return whether container runtimes inject GPUs by CDI."""
    return policy.spec.cdi.enabled is not False


def has_nri(policy: ClusterPolicy) -> bool:
    """Return whether the container toolkit runs its NRI plugin."""
    return has_cdi(policy) and policy.spec.cdi.nri_plugin_enabled is True


OWN_IMAGE = "gpuvirt"
"""The image of containers that run gpuvirt itself."""


def base(policy: ClusterPolicy, inputs: RenderInputs, name: str) -> DaemonSet:
    """Return the manifest `name`.yaml with the policy's paths on the host and access to GPUs, and gpuvirt's image."""
    manifest = bases.daemon_set(name)
    pod = bases.pod_of(manifest)
    manifest = bases.with_pod(
        manifest,
        init_containers=tuple(_with_own_image(container, inputs) for container in pod.init_containers),
        containers=tuple(_with_own_image(container, inputs) for container in pod.containers),
        image_pull_secrets=assembly.secrets(inputs.settings.pull_secrets),
        volumes=tuple(hostpaths.moved(volume, policy.spec.host_paths) for volume in pod.volumes),
    )
    if not pod.runtime_class_name:
        return manifest
    # Its pods get GPUs either by the RuntimeClass or by the NRI plugin's annotation.
    manifest = bases.with_pod(manifest, runtime_class_name=runtime_class_of(policy))
    return manifest if has_nri(policy) else bases.with_metadata(manifest, annotations={})


def configured(manifest: DaemonSet, inputs: RenderInputs, desired: Operand, image: str | None = None) -> DaemonSet:
    """Return a manifest with the operand's fields of the policy, and its image unless gpuvirt itself runs."""
    main = bases.main_of(manifest)
    manifest = bases.with_main(
        manifest,
        args=desired.args or main.args,
        env=assembly.environment(main.env, desired.env),
        resources=assembly.resources_of(desired.resources, main.resources),
    )
    if image is not None:
        policy = images.pull_policy(desired.image_pull_policy)
        manifest = bases.with_main(manifest, image=image, image_pull_policy=policy)
    return bases.with_pod(
        manifest,
        host_network=assembly.on_host_network(desired),
        image_pull_secrets=assembly.secrets(inputs.settings.pull_secrets, desired),
    )


def for_os(manifest: DaemonSet, os_tag: str) -> DaemonSet:
    """Return a manifest for the nodes with an operating system, named after it."""
    label, name = {OS_LABEL: os_tag}, re.sub("[^a-z0-9.-]", "-", os_tag.lower())
    manifest = bases.with_pod(manifest, node_selector={**bases.pod_of(manifest).node_selector, **label})
    return replace(
        manifest,
        metadata=replace(manifest.metadata, name=f"{manifest.metadata.name}-{name}".rstrip(".-")),
        spec=replace(
            manifest.spec, selector=LabelSelector(match_labels={**manifest.spec.selector.match_labels, **label})
        ),
    )


def with_values(env: tuple[EnvVar, ...], values: Mapping[str, str]) -> tuple[EnvVar, ...]:
    """Return variables with other values for those that `values` names."""
    return tuple(
        replace(variable, value=values[variable.name]) if variable.name in values else variable for variable in env
    )


def _with_own_image(container: Container, inputs: RenderInputs) -> Container:
    if container.image != OWN_IMAGE:
        return container
    return replace(container, image=inputs.image, image_pull_policy=inputs.settings.pull_policy)
