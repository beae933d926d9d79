"""The settings of a node's agent: the file that `--config` names."""

import re
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import (
    ResourceName,
    parse_config_map_name,
    parse_label_key,
    parse_pci_address,
    parse_resource_name,
)
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.inventory.naming import env_name
from gpuvirt.model.vgputypes.profiles import parse_profile, profile_name

CONTAINER_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""The beginnings of the names under which NVIDIA's device plugin offers GPUs and their instances to containers."""


class Spread(StrEnum):
    """The choice among equal vGPUs for a VM."""

    SPREAD = "spread"
    """A vGPU of the GPU with the most free capacity: VMs disturb each other least."""
    PACK = "pack"
    """A vGPU of the fullest GPU: other GPUs stay free for another config."""


class CdiUse(StrEnum):
    """How gpuvirt uses CDI, by which Kata finds its devices."""

    NONE = "none"
    FILES = "files"
    """Write specs to `/run/cdi`, where Kata looks up the devices that the kubelet reports for a pod."""
    ANSWERS = "answers"
    """Also name the CDI devices in answers to the kubelet, so that container runtimes apply them to every pod."""


class VfioNodes(StrEnum):
    """The device nodes of VFIO that a container gets for a device on hosts with iommufd; others have only one kind.

    A device without the chosen node is given by its other one.
    """

    BOTH = "both"
    """The group's and the device's own: virt-launcher opens whichever its version and feature gates use."""
    IOMMUFD = "iommufd"
    """The device's own node: `/dev/vfio/devices/vfio0`."""
    GROUP = "group"
    """The node of its group: `/dev/vfio/12`."""


class Compat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Switches for the behaviour of the kubevirt-gpu-device-plugin, where gpuvirt deliberately differs."""

    unknown_numa_is_node_0: bool = False
    """Report NUMA node 0 for a device without a NUMA node. Default: report none, since 0 would be a false hint."""
    whole_vfio_folder: bool = False
    """Give a vGPU's pod all of `/dev/vfio`. Default: only its own group, since the others belong to other tenants."""
    drop_mismatched_vgpus: bool = False
    """Leave a vGPU that is gone or has another type out of the answer. Default: refuse with the reason."""
    offer_companions: bool = False
    """Offer audio, USB and NVSwitch functions on a VFIO driver. Default: only the kinds that `offer` names."""


class Enforcement(StrEnum):
    """The mechanism that keeps a container from using more of a GPU than its share."""

    NONE = "none"
    """Nothing: shares are accounting. A container can use the GPU's whole memory and compute time."""
    HAMI_CORE = "hami-core"
    """The library of HAMi-core, in each container: it refuses memory above the share, and delays kernels."""
    MPS = "mps"
    """NVIDIA's Multi-Process Service, a daemon of the node: it limits memory and threads of each process."""
    HAMI_CORE_MPS = "hami-core-mps"
    """Both: the library limits the memory of a container, and the daemon the threads of its processes."""
    DRIVER = "driver"
    """NVIDIA's driver, from release 615 on: it limits the memory of a container's cgroup."""
    DRIVER_MPS = "driver-mps"
    """Both: the driver limits the memory of a container, and the daemon the threads of its processes."""

    @property
    def has_library(self) -> bool:
        """Whether containers have HAMi-core's library."""
        return self in {Enforcement.HAMI_CORE, Enforcement.HAMI_CORE_MPS}

    @property
    def has_daemon(self) -> bool:
        """Whether the processes of containers are clients of the MPS daemon."""
        return self in {Enforcement.MPS, Enforcement.HAMI_CORE_MPS, Enforcement.DRIVER_MPS}

    @property
    def has_driver(self) -> bool:
        """Whether NVIDIA's driver limits the memory of containers."""
        return self in {Enforcement.DRIVER, Enforcement.DRIVER_MPS}

    @property
    def is_limit(self) -> bool:
        """Whether a share is a limit, by whatever means."""
        return self is not Enforcement.NONE


class HamiCore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The library of HAMi-core, which gpuvirt does not contain."""

    library: str = "/usr/local/lib/gpuvirt/libvgpu.so"
    """The path of the library on the host."""


class ShareSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How GPUs in mode `shared` are offered, and which labels name the vGPU type of a node that is a VM."""

    resource: str = "nvidia.com/vgpu"
    """The resource that pods request units of, of the domain `nvidia.com`."""
    units: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    """The units of a whole GPU. A vGPU has as many as its framebuffer is of its card's."""
    vgpu_type_labels: tuple[str, ...] = ("vgpu.type",)
    """The node labels with the vGPU type: `vgpu.type=v100-8q-8GB`. An empty list: no labels."""
    enforcement: Enforcement = Enforcement.NONE
    """The enforcement of shares in the containers of new pods: `none`, `hami-core`, `mps`, `hami-core-mps`, `driver` or
    `driver-mps`."""
    otherwise: Enforcement | None = None
    """The enforcement where `driver` or `driver-mps` is asked for and the node's driver can't limit memory. Without it,
    such a node offers no units."""
    hami_core: HamiCore = HamiCore()
    """The library of HAMi-core, for `hami-core`."""
    gpu_memory_mib: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """The memory of GPUs by the product name that NVIDIA's driver shows, in MiB: `NVIDIA GeForce RTX 3090: 24000`.

    It takes precedence over the catalog, which has the cards that carry vGPUs.
    """


class OnDemandNames(StrEnum):
    """How the resources of GPUs in mode `on-demand` are named."""

    NUMBER = "number"
    """`prefix` and the number of the type on the host: `tencent.com/vgpu-492`."""
    TYPE = "type"
    """NVIDIA's name of the type, as for GPUs in mode `vgpu`: `nvidia.com/NVIDIA_A10-4Q`."""


class IdleCount(StrEnum):
    """How many vGPUs of each type an idle GPU in mode `on-demand` counts."""

    ONE = "one"
    """One: the first vGPU decides what else fits."""
    MAX = "max"
    """As many as fit. Pods of different types may then be bound to one GPU, and all but those of one size fail."""


class OnDemandSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How GPUs in mode `on-demand` are offered."""

    names: OnDemandNames = OnDemandNames.NUMBER
    """`number`: `prefix` and the number of the type on the host. `type`: NVIDIA's name of the type."""
    prefix: str = "tencent.com/vgpu-"
    """The beginning of the names by number."""
    types: tuple[str, ...] = ()
    """The vGPU types to offer: `A10-4Q`, `GRID V100-4Q`. Empty: all types that the driver lists."""
    idle_count: IdleCount = IdleCount.ONE
    """How many vGPUs of each type an idle GPU counts: `one`, or `max` for as many as fit."""
    sizes: Sizes | None = None
    """Whether vGPUs of several sizes may share a GPU: `mixed` or `equal`. Default: as the GPU is."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agent's settings; all have defaults, so an empty file is valid."""

    offer: tuple[FunctionKind, ...] = (FunctionKind.GPU,)
    """The kinds of functions that are offered when they are on a VFIO driver: gpu, audio, usb, serial, nvswitch."""
    aliases: dict[str, str] = {}
    """Other names for resources: with `GA102GL_A10: a10`, `nvidia.com/GA102GL_A10` is offered as `nvidia.com/a10`.

    Several names may share one alias; `GA102GL_A10: example.com/a10` changes the domain too. The name may have its
    domain. It may be the resource's first name or the one of today's PCI ID database.
    """
    kind_aliases: dict[FunctionKind, str] = {}
    """One name for all of NVIDIA's functions of a kind, as its device plugin for Kata has it: `gpu: pgpu`.

    `aliases` take precedence. VFs and vGPUs keep their names.
    """
    vgpu_placement: Spread = Spread.SPREAD
    """The choice among equal vGPUs for a VM: `spread` or `pack`."""
    require_reset: bool = True
    """Whether a whole GPU that can't be reset is withheld after its first pod, until the host is rebooted.

    With `false` the next pod gets it, with the memory that the last one left in it.
    """
    grace_without_driver: bool = False
    """Whether a Grace GPU is bound to vfio-pci and offered where the host lacks `nvgrace_gpu_vfio_pci`.

    A VM then gets the GPU without its memory, which NVIDIA's driver in the VM does not accept.
    """
    resources_without_gpus: tuple[str, ...] = ()
    """Resources of other device plugins, and DRA drivers, that are no GPUs: `example.com/nic`, or all of a domain:
    `example.com`, `*.example.com`.

    While a pod has a device of any other plugin, and neither its id nor the plugin's answer shows which, no GPU leaves
    its native driver. Networks, RDMA, KVM and some accelerators are known to be no GPUs.
    """
    kata_plugs_mdev: tuple[str, ...] = ()
    """Kata's runtimes that plug mediated devices, by the name of their handler: builds in which that fault is mended.

    No version of Kata known to gpuvirt does, so `gpuvirt doctor` reports all others on a node with such vGPUs.
    """
    cdi: CdiUse = CdiUse.FILES
    """How CDI is used: `none`, `files` or `answers`; without privileges there are neither files nor answers."""
    vfio_nodes: VfioNodes = VfioNodes.BOTH
    """The device nodes of VFIO that containers get on hosts with iommufd: `both`, `iommufd` or `group`.

    Kata plugs in each node of a container, so `both` plugs a device twice, which fails.
    """
    compat: Compat = Compat()
    shares: ShareSettings = ShareSettings()
    """How GPUs in mode `shared` are offered."""
    on_demand: OnDemandSettings = OnDemandSettings()
    """How GPUs in mode `on-demand` are offered."""
    mode: DesiredMode = DesiredMode.UNMANAGED
    """The desired mode of all GPUs of the node; gpuvirt does not change `unmanaged` GPUs."""
    modes: dict[str, DesiredMode] = {}
    """The desired modes of single GPUs: `"0000:65:00.0": passthrough`."""
    workload_label: bool = False  # beside NVIDIA's operator, which has the label too, an agent must not change drivers
    """Follow the node's label `nvidia.com/gpu.workload.config`: `container`, `shared`, `vm-passthrough`, `vm-vgpu`,
    `on-demand`.

    Precedence: `modes`, then the label, then `mode`.
    """
    vgpu_config: str | None = None
    """The vGPU config of GPUs in mode `vgpu`: `default`, `A10-4Q`; the node's label takes precedence.

    Without both, GPUs get the config `default` if the node is in a cluster; otherwise their vGPUs stay unchanged.
    """
    vgpu_config_file: str | None = None
    """A file of vGPU configs besides the built-in ones, used while no ConfigMap is observed."""
    vgpu_config_map: str = "default-vgpu-devices-config"
    """The ConfigMap in the agent's namespace whose key `config.yaml` has the vGPU configs."""

    @property
    def own_modes(self) -> Modes:
        """Return the desired modes without a label."""
        return Modes(self.mode, self.modes)

    @property
    def manages(self) -> bool:
        """Return whether the agent may manage any GPU."""
        return self.workload_label or {self.mode, *self.modes.values()} != {DesiredMode.UNMANAGED}

    def offers(self, kind: FunctionKind) -> bool:
        """Return whether functions of a kind are offered."""
        siblings = {FunctionKind.AUDIO, FunctionKind.USB, FunctionKind.SERIAL, FunctionKind.NVSWITCH}
        return kind in self.offer or (self.compat.offer_companions and kind in siblings)


def parse_units_resource(text: str) -> ResourceName:
    """Return `text` as the resource whose units are parts of GPUs, or raise InvalidIdError.

    Its domain is NVIDIA's: the domain of a resource shows gpuvirt whose GPU a pod has, and ids of units name no GPU.
    """
    name = parse_resource_name(text)
    if not name.startswith("nvidia.com/") or name.startswith(CONTAINER_RESOURCES):
        raise InvalidIdError(
            "a resource of units of GPUs", text, f"nvidia.com/NAME, but not {'... or '.join(CONTAINER_RESOURCES)}..."
        )
    return name


def check(settings: Settings, *, where: str) -> Settings:
    """Return `settings` if they are valid, else raise ConfigError."""
    for index, kind in enumerate(settings.offer):
        if kind in {FunctionKind.BRIDGE, FunctionKind.OTHER}:
            raise ConfigError(
                f"{kind} functions can't be offered; expected gpu, audio, usb, serial or nvswitch",
                where=where,
                path=f"$.offer[{index}]",
            )
    try:
        parse_config_map_name(settings.vgpu_config_map)
    except InvalidIdError as error:
        raise ConfigError(str(error), where=where, path="$.vgpu_config_map") from error
    _check_without_gpus(settings, where)
    _check_modes(settings, where)
    _check_shares(settings.shares, where)
    _check_on_demand(settings.on_demand, where)
    variables: dict[str, str] = {}
    named = {f"$.aliases.{name}": alias for name, alias in settings.aliases.items()}
    named |= {f"$.kind_aliases.{kind}": alias for kind, alias in settings.kind_aliases.items()}
    for path, alias in named.items():
        full = alias if "/" in alias else f"nvidia.com/{alias}"
        try:
            parse_resource_name(full)
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=path) from error
        other = variables.setdefault(env_name("", ResourceName(full)), full)
        if other != full:
            raise ConfigError(
                f"{full} and {other} differ only in case or punctuation, so both would have the same environment"
                " variable in a VM's pod; use one name, or two that differ in letters or digits",
                where=where,
                path=path,
            )
    return settings


def _check_without_gpus(settings: Settings, where: str) -> None:
    for index, text in enumerate(settings.resources_without_gpus):
        domain = text.removeprefix("*.")
        try:
            parse_resource_name(f"{domain}/x" if "/" not in domain else text)
        except InvalidIdError as error:
            raise ConfigError(
                f"{text!r} is not a resource or domain; expected domain/name, domain, or *.domain",
                where=where,
                path=f"$.resources_without_gpus[{index}]",
            ) from error


def _check_modes(settings: Settings, where: str) -> None:
    for address in settings.modes:
        try:
            parse_pci_address(address)
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=f"$.modes.{address}") from error
    if (at_odds := settings.own_modes.at_odds) is not None:
        others = (f"$.modes.{address}" for address, mode in settings.modes.items() if mode is not settings.mode)
        path = next(others, "$.mode")
        raise ConfigError(
            f"{at_odds} can't be on one node: both need the kernel module nvidia.ko, each from another driver;"
            " expected only one of them; either can be combined with passthrough",
            where=where,
            path=path,
        )


_LIBRARY = re.compile(r"(/(?!\.\.?(/|$))[A-Za-z0-9._+-]+)+")
_OTHERS_DOMAINS = ("kubernetes.io", "k8s.io", "nvidia.com", "kubevirt.io", "gpuvirt.io")
"""The domains whose labels the agent must not write as labels of vGPU types."""


def _check_shares(shares: ShareSettings, where: str) -> None:
    try:
        parse_units_resource(shares.resource)
    except InvalidIdError as error:
        raise ConfigError(str(error), where=where, path="$.shares.resource") from error
    if not _LIBRARY.fullmatch(shares.hami_core.library):
        raise ConfigError(
            f"{shares.hami_core.library!r} is not the path of a library; expected an absolute path without `..` and"
            " colons",
            where=where,
            path="$.shares.hami_core.library",
        )
    for index, key in enumerate(shares.vgpu_type_labels):
        try:
            parse_label_key(key)
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=f"$.shares.vgpu_type_labels[{index}]") from error
        if key.rpartition("/")[0].endswith(_OTHERS_DOMAINS):
            raise ConfigError(
                f"{key} is a label of another program or of gpuvirt itself; expected a key of your own, as vgpu.type",
                where=where,
                path=f"$.shares.vgpu_type_labels[{index}]",
            )


def _check_on_demand(on_demand: OnDemandSettings, where: str) -> None:
    try:
        parse_resource_name(f"{on_demand.prefix}1")
    except InvalidIdError as error:
        raise ConfigError(
            f"{on_demand.prefix!r} is not the beginning of a resource name; expected DOMAIN/NAME, as tencent.com/vgpu-",
            where=where,
            path="$.on_demand.prefix",
        ) from error
    for index, name in enumerate(on_demand.types):
        try:
            parse_profile(profile_name(name))
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=f"$.on_demand.types[{index}]") from error
