"""The operands' manifests as they are without a policy: the YAML files beside this module, read when first needed.

A file is what `kubectl apply` takes, except that its images are placeholders: `gpuvirt` stands for the controller's own
image, any other name for that of the policy. A field with its default value (`resources: {}`) is rendered, too: without
it, the digest of the pods' template would change, and the pods of a running cluster would be replaced. A fault in a
file is a ConfigError with its file, line and path.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from gpuvirt import documents
from gpuvirt.kube.kinds.podparts import Container, EnvVar, PodSpec, Volume, VolumeMount
from gpuvirt.kube.kinds.workloads import DaemonSet, Service

FOLDER = Path(__file__).with_name("manifests")


@cache
def daemon_set(name: str) -> DaemonSet:
    """Return the DaemonSet of the file `name`.yaml."""
    return documents.load(FOLDER / f"{name}.yaml", DaemonSet)


@cache
def service(name: str) -> Service:
    """Return the Service of the file `name`.yaml."""
    return documents.load(FOLDER / f"{name}.yaml", Service)


def pod_of(manifest: DaemonSet) -> PodSpec:
    """Return the spec of a DaemonSet's pods."""
    return manifest.spec.template.spec


def main_of(manifest: DaemonSet) -> Container:
    """Return the container that the operand is, the first one."""
    return pod_of(manifest).containers[0]


def with_pod(manifest: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' spec."""
    template = replace(manifest.spec.template, spec=replace(pod_of(manifest), **fields))
    return replace(manifest, spec=replace(manifest.spec, template=template))


def with_main(manifest: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' container."""
    main, *others = pod_of(manifest).containers
    return with_pod(manifest, containers=(replace(main, **fields), *others))


def with_env(manifest: DaemonSet, env: Iterable[EnvVar]) -> DaemonSet:
    """Return a DaemonSet with more environment variables in its pods' container."""
    return with_main(manifest, env=(*main_of(manifest).env, *env))


def with_volumes(manifest: DaemonSet, volumes: Iterable[Volume], mounts: Iterable[VolumeMount]) -> DaemonSet:
    """Return a DaemonSet with more volumes, and more mounts in its pods' container."""
    manifest = with_main(manifest, volume_mounts=(*main_of(manifest).volume_mounts, *mounts))
    return with_pod(manifest, volumes=(*pod_of(manifest).volumes, *volumes))


def with_metadata(manifest: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' metadata."""
    template = manifest.spec.template
    template = replace(template, metadata=replace(template.metadata, **fields))
    return replace(manifest, spec=replace(manifest.spec, template=template))
