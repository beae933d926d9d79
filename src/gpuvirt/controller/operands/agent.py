"""The operands that run gpuvirt itself: the agent with its settings and permissions, the labeller, the MPS daemon."""

import re
from collections.abc import Iterator
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from gpuvirt import plain
from gpuvirt.controller.operands import assembly, bases, hostpaths, overlay
from gpuvirt.controller.operands.inputs import RBAC_GROUP, OperandName, RenderInputs
from gpuvirt.controller.settings import SharedResource
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import parse_config_map_name
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.parts import ObjectMeta
from gpuvirt.kube.kinds.vmoperands import OnDemandVgpus, SandboxMode, ShareLimits
from gpuvirt.kube.kinds.workloads import (
    ConfigMap,
    DaemonSet,
    Manifest,
    PolicyRule,
    Role,
    RoleBinding,
    RoleReference,
    Subject,
)
from gpuvirt.kube.labels import CLIENT, deploy_label
from gpuvirt.model.desired.settings import (
    Enforcement,
    HamiCore,
    OnDemandSettings,
    Settings,
    ShareSettings,
    VfioNodes,
    check,
)

NAME = OperandName.AGENT.value
CONFIGS = f"{NAME}-configs"
CONFIG_FILE = "node.yaml"
KATA_ALIASES = {"P_GPU_ALIAS": FunctionKind.GPU, "NVSWITCH_ALIAS": FunctionKind.NVSWITCH}
"""The variables by which NVIDIA's device plugin for Kata names all functions of a kind."""
SETTINGS_DIGEST = "gpuvirt.io/settings"
"""Annotation of the agent's pods: a digest of the settings, since the agent reads them only when it starts."""


def agent(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the agent's DaemonSet, settings and permissions."""
    if not is_desired(policy):
        return
    try:
        name = parse_config_map_name(policy.spec.vgpu_device_manager.config_map)
    except InvalidIdError as error:
        yield SpecFault(
            "$.spec.vgpuDeviceManager.config.name", f"{error}; set the name of a ConfigMap, or leave the field out"
        )
        return
    try:
        settings = settings_of(policy, inputs.settings.shared)
    except ConfigError as error:
        field = re.sub("_([a-z])", lambda match: match[1].upper(), error.path.removeprefix("$."))
        place = field if field.startswith("spec.") else f"spec.sandboxDevicePlugin.{field}"
        yield SpecFault(f"$.{place}", error.message)
        return
    yield ConfigMap(api_version=workloads.CORE, metadata=_named(policy, inputs, NAME), data={CONFIG_FILE: settings})
    rule = PolicyRule(api_groups=("",), resources=("configmaps",), resource_names=(name,), verbs=("list", "watch"))
    yield Role(api_version=workloads.RBAC, metadata=_named(policy, inputs, CONFIGS), rules=(rule,))
    yield RoleBinding(
        api_version=workloads.RBAC,
        metadata=_named(policy, inputs, CONFIGS),
        role_ref=RoleReference(api_group=RBAC_GROUP, kind="Role", name=CONFIGS),
        subjects=(Subject(kind="ServiceAccount", name=NAME, namespace=inputs.settings.namespace),),
    )
    yield _daemon_set(policy, inputs, settings)


def labeller(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet of agents that only label the nodes for containers, if the settings ask for these labels."""
    if not inputs.settings.labels_vgpu_types:
        return
    manifest = overlay.base(policy, inputs, "labeller")
    context = bases.main_of(manifest).security_context
    if inputs.settings.namespace_sets_uid and context is not None:
        manifest = bases.with_main(manifest, security_context=replace(context, run_as_user=None, run_as_group=None))
    yield assembly.daemon_set(policy, inputs, manifest)


def mps_daemon(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet of the MPS daemon, which nothing restarts, if the policy asks for it beside the agent."""
    plugin = policy.spec.sandbox_device_plugin
    if not is_desired(policy) or plugin.shares is None or plugin.shares.mps.enabled is not True:
        return
    secrets = assembly.secrets(inputs.settings.pull_secrets, plugin)
    base = overlay.base(policy, inputs, "mps")
    selector = dict(bases.pod_of(base).node_selector)
    if inputs.selects_clients:
        selector[deploy_label(CLIENT)] = "true"
    manifest = bases.with_pod(base, image_pull_secrets=secrets, node_selector=selector)
    yield assembly.daemon_set(policy, inputs, manifest, owned=False)


def is_desired(policy: ClusterPolicy) -> bool:
    """Return whether the agent runs: for VMs, unless its switch is off."""
    return policy.spec.sandbox_workloads.enabled is True and switched_off_by(policy) is None


def switched_off_by(policy: ClusterPolicy) -> str | None:
    """Return the part of the policy that switches the agent off, by `enabled: false`; null is not false.

    Contract: NVIDIA's operator deploys another device plugin for Kata than for KubeVirt, each with its own switch.
    """
    spec = policy.spec
    if spec.sandbox_workloads.mode is SandboxMode.KATA:
        return "kataSandboxDevicePlugin" if spec.kata_sandbox_device_plugin.enabled is False else None
    return "sandboxDevicePlugin" if spec.sandbox_device_plugin.enabled is False else None


def settings_of(policy: ClusterPolicy, shared: SharedResource | None = None) -> str:
    """Return the agent's settings as the text of its file; raise ConfigError for invalid ones of mode on-demand."""
    config = policy.spec.vgpu_device_manager.config
    settings: dict[str, plain.Plain] = {"offer": ["gpu"], "vgpu_config_map": policy.spec.vgpu_device_manager.config_map}
    if config is not None and config.default:
        settings["vgpu_config"] = config.default
    if (require_reset := policy.spec.sandbox_device_plugin.require_reset) is not None:
        settings["require_reset"] = require_reset
    if (without_driver := policy.spec.sandbox_device_plugin.grace_without_driver) is not None:
        settings["grace_without_driver"] = without_driver
    if (vfio_nodes := _vfio_nodes_of(policy)) is not None:
        settings["vfio_nodes"] = str(vfio_nodes)
    if without_gpus := policy.spec.sandbox_device_plugin.resources_without_gpus:
        settings["resources_without_gpus"] = list(without_gpus)
    if aliases := _aliases_of(policy):
        settings["offer"] = [str(kind) for kind in dict.fromkeys([FunctionKind.GPU, *aliases])]
        settings["kind_aliases"] = {str(kind): alias for kind, alias in aliases.items()}
    if on_demand := _on_demand_of(policy.spec.sandbox_device_plugin.on_demand or OnDemandVgpus()):
        settings["on_demand"] = on_demand
    shares = _limits_of(policy.spec.sandbox_device_plugin.shares or ShareLimits())
    if shared is not None:
        shares |= {"resource": shared.name, "units": shared.units}
    if shares:
        settings["shares"] = shares
    return plain.write(settings)


def _aliases_of(policy: ClusterPolicy) -> dict[FunctionKind, str]:
    """Return the names of all GPUs and of all NVSwitches that a policy sets; raise ConfigError for invalid ones.

    Contract: NVIDIA's device plugin for Kata reads them from its environment. An empty value means the names of models,
    which are gpuvirt's default; NVIDIA's is `pgpu`. NVSwitches are offered only with a name.
    """
    aliases: dict[FunctionKind, str] = {}
    if policy.spec.sandbox_workloads.mode is not SandboxMode.KATA:
        return aliases
    parts = {
        "sandboxDevicePlugin": policy.spec.sandbox_device_plugin,
        "kataSandboxDevicePlugin": policy.spec.kata_sandbox_device_plugin,
    }
    for part, plugin in parts.items():
        for variable in plugin.env:
            if (kind := KATA_ALIASES.get(variable.name)) is None:
                continue
            try:
                check(Settings(kind_aliases={kind: variable.value} if variable.value else {}), where=NAME)
            except ConfigError as error:
                raise ConfigError(error.message, where=NAME, path=f"$.spec.{part}.env[{variable.name}]") from error
            aliases[kind] = variable.value
    return {kind: alias for kind, alias in aliases.items() if alias}


def _vfio_nodes_of(policy: ClusterPolicy) -> VfioNodes | None:
    """Return the device nodes of VFIO that a policy chooses, None for the agent's default.

    Kata needs one kind. NVIDIA's device plugin for Kata gives the device's own node, and CDI specs have it, too.
    """
    is_for_kata = policy.spec.sandbox_workloads.mode is SandboxMode.KATA
    return policy.spec.sandbox_device_plugin.vfio_nodes or (VfioNodes.IOMMUFD if is_for_kata else None)


def _on_demand_of(policy: OnDemandVgpus) -> dict[str, plain.Plain]:
    """Return the settings of mode on-demand that a policy sets; raise ConfigError for invalid ones."""
    values: dict[str, plain.Plain] = {
        "names": _text(policy.names),
        "prefix": policy.prefix or None,
        "types": list(policy.types) or None,
        "idle_count": _text(policy.idle_count),
        "sizes": _text(policy.sizes),
    }
    chosen: dict[str, plain.Plain] = {name: value for name, value in values.items() if value is not None}
    check(Settings(on_demand=msgspec.convert(chosen, OnDemandSettings)), where=NAME)
    return chosen


def _limits_of(policy: ShareLimits) -> dict[str, plain.Plain]:
    """Return the limits of shares that a policy sets and that differ from the defaults, which older agents don't know.

    Raises ConfigError for invalid ones.
    """
    values: dict[str, plain.Plain] = {}
    if policy.enforcement not in {None, Enforcement.NONE}:
        values["enforcement"] = str(policy.enforcement)
    if policy.otherwise is not None:
        values["otherwise"] = str(policy.otherwise)
    if policy.hami_core.library not in {"", HamiCore().library}:
        values["hami_core"] = {"library": policy.hami_core.library}
    if policy.gpu_memory_mib:
        values["gpu_memory_mib"] = dict(policy.gpu_memory_mib)
    try:
        chosen = msgspec.convert(values, ShareSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=NAME, path="$.shares") from error
    check(Settings(shares=chosen), where=NAME)
    return values


def _text(value: StrEnum | None) -> str | None:
    return str(value) if value is not None else None


def _named(policy: ClusterPolicy, inputs: RenderInputs, name: str) -> ObjectMeta:
    return assembly.metadata(policy, inputs, OperandName.AGENT, name)


def _daemon_set(policy: ClusterPolicy, inputs: RenderInputs, settings: str) -> DaemonSet:
    plugin, kubelet = policy.spec.sandbox_device_plugin, hostpaths.kubelet_of(policy.spec.host_paths)
    manifest = overlay.base(policy, inputs, "agent")
    main = bases.main_of(manifest)
    manifest = bases.with_main(
        manifest,
        env=overlay.with_values(main.env, {"GPUVIRT_KUBELET_DIR": kubelet}),
        volume_mounts=tuple(
            replace(mount, mount_path=mount.mount_path.replace(hostpaths.KUBELET, kubelet, 1))
            for mount in main.volume_mounts
        ),
    )
    manifest = bases.with_metadata(manifest, annotations={SETTINGS_DIGEST: assembly.digest(settings.encode())})
    return assembly.daemon_set(policy, inputs, overlay.configured(manifest, inputs, replace(plugin, args=())))
