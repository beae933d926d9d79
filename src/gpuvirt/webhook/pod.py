"""The fields of a pod that admission reads: its requests, and the names of its parts.

gpuvirt does not decode other fields: a JSON patch names only the additions.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from gpuvirt.kube.jsonpatch import at
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import Absent, Quantities, Volume


class EnvVar(msgspec.Struct, frozen=True, rename="camel"):
    """An environment variable."""

    name: str = ""
    value: str = ""
    value_from: Absent | None = None


class Mount(msgspec.Struct, frozen=True, rename="camel"):
    """The path at which a container has a volume."""

    name: str = ""
    mount_path: str = ""
    sub_path: str = ""


class SecurityContext(core.SecurityContext, frozen=True, rename="camel"):
    """The privileges of a container, and its user."""

    run_as_user: int | None = None


class Container(core.Container, frozen=True, gc=True, rename="camel"):
    """A container."""

    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    security_context: SecurityContext = SecurityContext()
    env: tuple[EnvVar, ...] = ()
    volume_mounts: tuple[Mount, ...] = ()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The spec of a pod."""

    runtime_class_name: str = ""
    scheduler_name: str = ""
    """The API server has set the default one before it asks a webhook."""
    resources: Quantities = Quantities()
    """The requests and limits of the whole pod, which its containers share."""
    restart_policy: str = "Always"
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()

    @property
    def has_resources(self) -> bool:
        """Whether the pod as a whole has requests or limits."""
        return bool(self.resources.requests or self.resources.limits)


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of a pod."""

    name: str = ""
    generate_name: str = ""
    annotations: dict[str, str] = {}


class Pod(msgspec.Struct, frozen=True):
    """A pod that is to be created."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()

    def placed(self) -> "Iterator[Placed]":
        """Yield all containers with their places, init containers first, in the order in which they start."""
        for group, containers in (
            (ContainerList.INIT, self.spec.init_containers),
            (ContainerList.APP, self.spec.containers),
        ):
            for index, container in enumerate(containers):
                yield Placed(group, index, container)


class ContainerList(StrEnum):
    """A list of containers in a pod's spec."""

    INIT = "initContainers"
    APP = "containers"


class Placed(msgspec.Struct, frozen=True):
    """A container, and its place in the pod."""

    group: ContainerList
    index: int
    container: Container

    def pointer(self, *keys: str) -> str:
        """Return the JSON pointer of a field of the container."""
        return at("spec", str(self.group), str(self.index), *keys)

    @property
    def path(self) -> str:
        """The place in messages: `spec.containers[0]`."""
        return f"spec.{self.group}[{self.index}]"
