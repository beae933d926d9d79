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


def pod_of(found: DaemonSet) -> PodSpec:
    """Return the spec of a DaemonSet's pods."""
    return found.spec.template.spec


def main_of(found: DaemonSet) -> Container:
    """Return the container that the operand is, the first one."""
    return pod_of(found).containers[0]


def with_pod(found: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' spec."""
    template = replace(found.spec.template, spec=replace(pod_of(found), **fields))
    return replace(found, spec=replace(found.spec, template=template))


def with_main(found: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' container."""
    main, *others = pod_of(found).containers
    return with_pod(found, containers=(replace(main, **fields), *others))


def with_env(found: DaemonSet, env: Iterable[EnvVar]) -> DaemonSet:
    """Return a DaemonSet with more environment variables in its pods' container."""
    return with_main(found, env=(*main_of(found).env, *env))


def with_volumes(found: DaemonSet, volumes: Iterable[Volume], mounts: Iterable[VolumeMount]) -> DaemonSet:
    """Return a DaemonSet with more volumes, and more mounts in its pods' container."""
    found = with_main(found, volume_mounts=(*main_of(found).volume_mounts, *mounts))
    return with_pod(found, volumes=(*pod_of(found).volumes, *volumes))


def with_metadata(found: DaemonSet, **fields: object) -> DaemonSet:
    """Return a DaemonSet with other fields of its pods' metadata."""
    template = found.spec.template
    template = replace(template, metadata=replace(template.metadata, **fields))
    return replace(found, spec=replace(found.spec, template=template))
