"""What an admin may set for a node's agent: the file that `--config` names."""

from enum import StrEnum

import msgspec

from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import ResourceName, parse_config_map_name, parse_pci_address, parse_resource_name
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.inventory.naming import env_name


class Spread(StrEnum):
    """Which of several equal vGPUs a virtual machine gets."""

    SPREAD = "spread"
    """One on the GPU that has most to spare: machines disturb each other least."""
    PACK = "pack"
    """One on the GPU that is fullest: other GPUs stay free for another config."""


class CdiUse(StrEnum):
    """What is done with CDI, by which Kata finds its devices."""

    NONE = "none"
    FILES = "files"
    """Specs are kept in `/run/cdi`, where Kata looks for what the kubelet says a pod has."""
    ANSWERS = "answers"
    """Answers to the kubelet name the CDI devices too, so that container runtimes apply them to every pod."""


class Compat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Switches back to what the kubevirt-gpu-device-plugin does, where gpuvirt deliberately does otherwise."""

    unknown_numa_is_node_0: bool = False
    """Say that a device without a NUMA node is on node 0. Default: say nothing, since it would be a false hint."""
    whole_vfio_folder: bool = False
    """Give a vGPU's pod all of `/dev/vfio`. Default: its own group alone, since the others are other tenants'."""
    drop_mismatched_vgpus: bool = False
    """Leave a vGPU that is gone or of another type out of the answer. Default: refuse, and say so."""
    offer_companions: bool = False
    """Offer audio, USB and NVSwitch functions that are on a VFIO driver. Default: those that `offer` names."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agent's settings; everything has a default, so an empty file is a valid one."""

    offer: tuple[FunctionKind, ...] = (FunctionKind.GPU,)
    """Kinds of functions that are offered when a VFIO driver has them: gpu, audio, usb, serial, nvswitch."""
    aliases: dict[str, str] = {}
    """Other names for resources: `GA102GL_A10: a10` makes `nvidia.com/GA102GL_A10` be `nvidia.com/a10`.

    Several names may share one alias; `GA102GL_A10: example.com/a10` changes the domain too. The name may be given with
    its domain, and may be the first one offered or the one that the PCI ID database has today.
    """
    vgpu_placement: Spread = Spread.SPREAD
    """Which of several equal vGPUs a virtual machine gets: `spread` or `pack`."""
    require_reset: bool = True
    """Whether a whole GPU that can't be reset is withheld once a pod has had it, until the host is rebooted.

    `false` gives it to the next pod, with the memory as the last one left it.
    """
    cdi: CdiUse = CdiUse.FILES
    """What is done with CDI: `none`, `files` or `answers`; without privileges there are neither files nor answers."""
    compat: Compat = Compat()
    mode: DesiredMode = DesiredMode.UNMANAGED
    """What is wanted of all GPUs of the node: `unmanaged` leaves them as they are."""
    modes: dict[str, DesiredMode] = {}
    """What is wanted of single GPUs instead: `"0000:65:00.0": passthrough`."""
    workload_label: bool = False
    """Follow the node's label `nvidia.com/gpu.workload.config`: `container`, `vm-passthrough`, `vm-vgpu`.

    It goes before `mode`, which holds where the label is not there; `modes` go before it.
    """
    vgpu_config: str | None = None
    """The vGPU config of GPUs in mode `vgpu`: `default`, `A10-4Q`; the node's label takes precedence.

    Without both, the GPUs of a node in a cluster get the config `default`, and others are left as they are.
    """
    vgpu_config_file: str | None = None
    """A file of vGPU configs beside the built-in ones, where no ConfigMap is heard."""
    vgpu_config_map: str = "default-vgpu-devices-config"
    """The ConfigMap in the agent's namespace whose key `config.yaml` has the vGPU configurations."""

    @property
    def own_modes(self) -> Modes:
        """Return what is wanted of GPUs where no label says otherwise."""
        return Modes(self.mode, self.modes)

    @property
    def manages(self) -> bool:
        """Return whether any GPU is to be brought anywhere."""
        return self.workload_label or {self.mode, *self.modes.values()} != {DesiredMode.UNMANAGED}

    def offers(self, kind: FunctionKind) -> bool:
        """Return whether functions of a kind are offered."""
        siblings = {FunctionKind.AUDIO, FunctionKind.USB, FunctionKind.SERIAL, FunctionKind.NVSWITCH}
        return kind in self.offer or (self.compat.offer_companions and kind in siblings)


def check(settings: Settings, *, where: str) -> Settings:
    """Return `settings` when they make sense, else raise ConfigError."""
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
    _check_modes(settings, where)
    variables: dict[str, str] = {}
    for name, alias in settings.aliases.items():
        full = alias if "/" in alias else f"nvidia.com/{alias}"
        try:
            parse_resource_name(full)
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=f"$.aliases.{name}") from error
        other = variables.setdefault(env_name("", ResourceName(full)), full)
        if other != full:
            raise ConfigError(
                f"{full} and {other} differ only in case or punctuation, and a virtual machine would find both in one"
                " environment variable; make them one name, or two that differ more",
                where=where,
                path=f"$.aliases.{name}",
            )
    return settings


def _check_modes(settings: Settings, where: str) -> None:
    for address in settings.modes:
        try:
            parse_pci_address(address)
        except InvalidIdError as error:
            raise ConfigError(str(error), where=where, path=f"$.modes.{address}") from error
    if settings.own_modes.are_at_odds:
        path = next((f"$.modes.{one}" for one, mode in settings.modes.items() if mode is not settings.mode), "$.mode")
        raise ConfigError(
            "container and vgpu can't be on one node: both need the kernel module nvidia.ko, each from another driver;"
            " expected one of them, which goes with passthrough",
            where=where,
            path=path,
        )
