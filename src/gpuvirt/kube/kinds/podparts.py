"""Pods as the controller and the webhook write them: the fields of core/v1 that operands and added containers need."""

import msgspec

from gpuvirt.kube.kinds.clusterpolicy import Toleration
from gpuvirt.kube.kinds.operandparts import Quantity
from gpuvirt.kube.kinds.parts import LocalReference, Written


class FieldReference(Written, frozen=True, kw_only=True):
    """A field of the pod: `spec.nodeName`."""

    field_path: str


class EnvSource(Written, frozen=True, kw_only=True):
    """The source of an environment variable's value."""

    field_ref: FieldReference


class EnvVar(Written, frozen=True, kw_only=True):
    """An environment variable of a container."""

    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class EnvFromSource(Written, frozen=True, kw_only=True):
    """Environment variables from all entries of a Secret."""

    secret_ref: LocalReference


class ResourceNeeds(Written, frozen=True, kw_only=True):
    """The resources that a container requests, and their limits."""

    limits: dict[str, Quantity] = msgspec.field(default_factory=dict)
    requests: dict[str, Quantity] = msgspec.field(default_factory=dict)


class SeLinuxOptions(Written, frozen=True, kw_only=True):
    """The SELinux label of a container."""

    level: str


class Capabilities(Written, frozen=True, kw_only=True):
    """The capabilities that a container has, or does not have, besides the default ones."""

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class SeccompProfile(Written, frozen=True, kw_only=True):
    """The system calls that a container may make: `RuntimeDefault`."""

    type: str


class SecurityContext(Written, frozen=True, kw_only=True):
    """The privileges of a container."""

    privileged: bool | None = None
    read_only_root_filesystem: bool | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    allow_privilege_escalation: bool | None = None
    capabilities: Capabilities | None = None
    seccomp_profile: SeccompProfile | None = None
    se_linux_options: SeLinuxOptions | None = None


class VolumeMount(Written, frozen=True, kw_only=True):
    """The path at which a container has a volume."""

    name: str
    mount_path: str
    read_only: bool = False
    mount_propagation: str = ""
    sub_path: str = ""


class HostPathSource(Written, frozen=True, kw_only=True):
    """A volume from a file or folder of the host."""

    path: str
    type: str = ""


class KeyToPath(Written, frozen=True, kw_only=True):
    """An entry of a ConfigMap, and the path of its file."""

    key: str
    path: str


class ConfigMapSource(Written, frozen=True, kw_only=True):
    """A volume with the entries of a ConfigMap as files."""

    name: str
    default_mode: int | None = None
    items: tuple[KeyToPath, ...] = ()


class SecretSource(Written, frozen=True, kw_only=True):
    """A volume with the entries of a Secret as files."""

    secret_name: str


class EmptyDirSource(Written, frozen=True, kw_only=True):
    """A volume from an empty folder that exists as long as the pod."""


class Volume(Written, frozen=True, kw_only=True):
    """A volume of a pod."""

    name: str
    host_path: HostPathSource | None = None
    config_map: ConfigMapSource | None = None
    empty_dir: EmptyDirSource | None = None
    secret: SecretSource | None = None


class HttpGet(Written, frozen=True, kw_only=True):
    """A probe that sends an HTTP GET request."""

    path: str
    port: int | str


class TcpSocket(Written, frozen=True, kw_only=True):
    """A probe that connects to a port."""

    port: int | str


class Exec(Written, frozen=True, kw_only=True):
    """A command inside the container."""

    command: tuple[str, ...]


class ProbeSpec(Written, frozen=True, kw_only=True):
    """A probe of a container. Delays are in seconds, thresholds are numbers of successes or failures in a row."""

    http_get: HttpGet | None = None
    tcp_socket: TcpSocket | None = None
    exec: Exec | None = None
    initial_delay_seconds: int = 0
    timeout_seconds: int = 0
    period_seconds: int = 0
    success_threshold: int = 0
    failure_threshold: int = 0


class LifecycleHandler(Written, frozen=True, kw_only=True):
    """The command of a lifecycle hook."""

    exec: Exec


class Lifecycle(Written, frozen=True, kw_only=True):
    """The lifecycle hooks of a container."""

    pre_stop: LifecycleHandler


class ContainerPort(Written, frozen=True, kw_only=True):
    """A port that a container listens on."""

    name: str
    container_port: int


class Container(Written, frozen=True, kw_only=True):
    """A container."""

    name: str
    image: str
    image_pull_policy: str = ""
    """Empty: the API server chooses it by the image's tag."""
    restart_policy: str = ""
    """`Always` makes an init container a sidecar, which runs as long as the pod."""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFromSource, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    resources: ResourceNeeds = ResourceNeeds()
    security_context: SecurityContext | None = None
    startup_probe: ProbeSpec | None = None
    liveness_probe: ProbeSpec | None = None
    readiness_probe: ProbeSpec | None = None
    lifecycle: Lifecycle | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()


class Requirement(Written, frozen=True, kw_only=True):
    """A requirement on one label of a node."""

    key: str
    operator: str
    values: tuple[str, ...]


class SelectorTerm(Written, frozen=True, kw_only=True):
    """Requirements on a node's labels. All of them must hold."""

    match_expressions: tuple[Requirement, ...]


class NodeSelector(Written, frozen=True, kw_only=True):
    """Alternative terms for a node's labels. One of them must hold."""

    node_selector_terms: tuple[SelectorTerm, ...]


class NodeAffinity(Written, frozen=True, kw_only=True):
    """The nodes that a pod can be scheduled on."""

    required: NodeSelector = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(Written, frozen=True, kw_only=True):
    """The scheduling constraints of a pod."""

    node_affinity: NodeAffinity


class PodSpec(Written, frozen=True, kw_only=True):
    """The spec of a pod."""

    service_account_name: str
    automount_service_account_token: bool | None = None
    """None: the pod has the account's token."""
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] = ()
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    priority_class_name: str = ""
    runtime_class_name: str = ""
    host_network: bool = False
    dns_policy: str = ""
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    termination_grace_period_seconds: int | None = None
    image_pull_secrets: tuple[LocalReference, ...] = ()
    volumes: tuple[Volume, ...] = ()


class TemplateMeta(Written, frozen=True, kw_only=True):
    """The labels and annotations of a DaemonSet's pods."""

    labels: dict[str, str]
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class PodTemplate(Written, frozen=True, kw_only=True):
    """The template of a DaemonSet's pods."""

    metadata: TemplateMeta
    spec: PodSpec
