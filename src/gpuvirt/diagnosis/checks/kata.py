"""Checks of Kata's runtimes: whether their VMs get the devices that the kubelet gives to a pod.

With cold plug Kata finds a pod's devices by CDI before it starts the VM. It reads all specs of both folders then, and
any of them that it can't use fails the pod (`pkg/device/config/config.go` and `libs/pod-resources-rs`, Kata 4.1.0).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, listed, problem, unread
from gpuvirt.facts.cdispecs import CdiSpec, Version, go_fault, parse_spec
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.runtimes import KataRuntime, parse_toml, toml_or_fault
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.attachment import VFIO_FOLDER
from gpuvirt.model.desired.settings import VfioNodes
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.reasons.codes import Level

NO_PORT = "no-port"
HOT = "hot_plug_vfio"
PORTS = ("cold_plug_vfio", HOT)
GO_PORTS = ("root-port", "switch-port", "bridge-port")
GO_READS: Version = (0, 6, 0)
"""The newest version of CDI that the runtime in Go reads (its `go.mod`)."""
RUST_READS: Version = (1, 1, 0)
"""The same of the runtime in Rust."""
SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
WHY = "Kata reads all specs before it starts a pod with devices, and fails at the first that it can't use"
EXPECTED = "expected JSON or YAML without aliases, with cdiVersion, kind (vendor/class) and devices, each with a name"


def kata_cdi_specs(evidence: Evidence) -> Iterator[Finding]:
    """Kata's runtimes can read all CDI specs, of which one alone fails each pod with devices."""
    runtimes = [runtime for runtime in evidence.setup.kata if _is_on(runtime, "cold_plug_vfio")]
    if not runtimes:
        return
    for folder in evidence.setup.cdi_folders:
        if isinstance(folder.names, Unread):
            yield unread("a folder of CDI specs", "could not be listed", folder)
    specs: dict[Attribute, CdiSpec] = {}
    faults: list[Finding] = []
    for file in evidence.setup.cdi_specs:
        if isinstance(file.value, Unread):
            faults.append(unread("a CDI spec", "could not be read", file))
        elif file.text is not None and (spec := parse_spec(file.text)) is not None:
            specs[file] = spec
            faults += _too_new(file, spec, runtimes)
            faults += _refused_by_go(file, file.text, spec, runtimes)
        elif file.text is not None:
            faults.append(_invalid(file, runtimes))
    faults += _defined_twice(specs, runtimes)
    yield from faults
    if not faults:
        newest = max((spec.version for spec in specs.values()), default="")
        count = f"{len(specs)}, the newest of version {newest}" if specs else "there are none"
        yield fine("Kata", f"reads all CDI specs: {count}", *list(specs)[:3])


def _invalid(file: Attribute, runtimes: Sequence[KataRuntime]) -> Finding:
    return problem(
        FindingCode.KATA_CDI_SPEC,
        "a CDI spec",
        f"is not valid, so that {_names(runtimes)} starts no pod with devices",
        (Seen(file.path, EXPECTED),),
        why=WHY,
        fix=(f"correct or delete {file.path}; the program that wrote it writes it again",),
    )


def _too_new(file: Attribute, spec: CdiSpec, runtimes: Sequence[KataRuntime]) -> Iterator[Finding]:
    reads = {True: RUST_READS, False: GO_READS}
    for is_rust, limit in reads.items():
        behind = [runtime for runtime in runtimes if runtime.handler.is_rust is is_rust and spec.numbers > limit]
        if behind:
            newest = ".".join(map(str, limit))
            yield problem(
                FindingCode.KATA_CDI_SPEC,
                "a CDI spec",
                f"is of version {spec.version}, and {_names(behind)} reads versions up to {newest}",
                (Seen(file.path, f"$.cdiVersion: {spec.version}"),),
                why=WHY,
                fix=(
                    f"have the program that wrote it write version {newest} or older",
                    *(("or use a RuntimeClass of Kata's runtime in Rust",) if spec.numbers <= RUST_READS else ()),
                ),
            )


def _refused_by_go(file: Attribute, text: str, spec: CdiSpec, runtimes: Sequence[KataRuntime]) -> Iterator[Finding]:
    behind = [runtime for runtime in runtimes if not runtime.handler.is_rust]
    if behind and spec.numbers <= GO_READS and (fault := go_fault(text)) is not None:
        yield problem(
            FindingCode.KATA_CDI_SPEC,
            "a CDI spec",
            f"is refused by the library of {_names(behind)}, which starts no pod with devices",
            (Seen(file.path, fault),),
            why=WHY,
            fix=(f"correct or delete {file.path}; the program that wrote it writes it again",),
        )


def _defined_twice(specs: dict[Attribute, CdiSpec], runtimes: Sequence[KataRuntime]) -> Iterator[Finding]:
    """Yield the devices that two specs of one folder define; a device of the other folder replaces the first one."""
    defined = sorted(
        (file.path.rpartition("/")[0], f"{spec.kind}={name}", file.path)
        for file, spec in specs.items()
        for name in spec.devices
    )
    for (_, device), found in groupby(defined, key=lambda definition: definition[:2]):
        paths = [path for *_, path in found]
        if len(paths) > 1:
            yield problem(
                FindingCode.KATA_CDI_SPEC,
                f"the CDI device {device}",
                f"is defined {len(paths)} times in one folder, so that {_names(runtimes)} starts no pod with devices",
                tuple(Seen(path, device) for path in paths),
                why=WHY,
                fix=(f"delete all but one: {', '.join(paths)}",),
            )


def kata_settings(evidence: Evidence) -> Iterator[Finding]:
    """Kata's runtimes accept their settings for devices, and one of them plugs devices.

    Source: Kata 4.1, `checkPCIeConfig` and `hotplugVFIODevice` of the runtime in Go, `prepare_coldplug_cdi_devices` and
    `Runtime::validate` of the one in Rust, which ignores `hot_plug_vfio`.
    """
    for file in {file.path: file for runtime in evidence.setup.kata for file in runtime.files}.values():
        if file.text is not None and isinstance(fault := toml_or_fault(file.text), str):
            yield problem(
                FindingCode.KATA_SETTINGS_INVALID,
                "Kata's configuration",
                "is not TOML, so that no pod of its RuntimeClass starts",
                (Seen(file.path, fault),),
                fix=(f"correct {file.path}",),
            )
    runtimes = [runtime for runtime in evidence.setup.kata if _is_read(runtime)]
    refused = {runtime.handler.name: faults for runtime in runtimes if (faults := tuple(_refused_settings(runtime)))}
    for name, faults in refused.items():
        for seen, expected in faults:
            yield problem(
                FindingCode.KATA_SETTINGS_INVALID,
                f"the Kata runtime {name}",
                f"refuses its own setting, so that its pods do not start: expected {expected}",
                (seen,),
                why="Kata checks these settings when it starts a pod, and fails",
                fix=(f"correct the setting in {seen.path}, or in a file of config.d beside it",),
            )
    plugging = [runtime for runtime in runtimes if _plugs(runtime)]
    if runtimes and not plugging and not refused:  # kata-deploy also installs classes without devices
        yield problem(
            FindingCode.KATA_SETTINGS_INVALID,
            "Kata",
            f"plugs no device: {_names(runtimes)} have {NO_PORT} for both cold_plug_vfio and hot_plug_vfio",
            tuple(Seen(runtime.setting("hypervisor", "cold_plug_vfio")[1], NO_PORT) for runtime in runtimes[:3]),
            why="a pod of these RuntimeClasses that requests a GPU or a vGPU does not start",
            fix=('# in the configuration of the class for GPUs: [hypervisor.qemu] cold_plug_vfio = "root-port"',),
            level=Level.WARNING,
        )


def kata_nodes(evidence: Evidence) -> Iterator[Finding]:
    """Kata's runtimes get one device node of each device, as they plug each node that a container gets.

    Source: kubevirt-gpu-device-plugin #147 for hot plug. With cold plug, the runtimes compare a container's nodes with
    those of the CDI spec, and plug the others (`deviceManager.FindDevice` in Go, `DeviceManager::find_device` in Rust).
    """
    facts = evidence.inventory.facts
    own = facts.cdev_nodes.intersection(name for found in facts.functions.values() for name in found.cdevs)
    plugging = [runtime for runtime in evidence.setup.kata if _is_read(runtime) and _plugs(runtime)]
    if plugging and own and facts.platform.iommufd and facts.group_nodes and evidence.vfio_nodes is VfioNodes.BOTH:
        ports = (runtime.setting("hypervisor", key) for runtime in plugging for key in PORTS if _is_on(runtime, key))
        yield problem(
            FindingCode.KATA_GETS_TWO_NODES,
            "Kata",
            f"plugs each device twice, and fails: {_names(plugging)} get its own node and that of its group",
            (
                Seen("settings", "vfio_nodes: both"),
                Seen(f"{VFIO_FOLDER}/devices", listed(sorted(own))),
                *(Seen(where, f"[hypervisor.*] plugs VFIO devices: {port!r}") for port, where in list(ports)[:3]),
            ),
            why="a pod of these RuntimeClasses that requests a GPU, or a vGPU on a VF, does not start",
            fix=(
                "# in the agent's settings; in a cluster sandboxDevicePlugin.vfioNodes, or sandboxWorkloads.mode: kata",
                "vfio_nodes: iommufd",
                "# or vfio_nodes: group, if VMs of KubeVirt also use this node, other than those with a Grace GPU",
            ),
        )


def kata_handler(evidence: Evidence) -> Iterator[Finding]:
    """A container runtime has a handler that starts Kata, where Kata's configurations are on the host."""
    installed = [folder for folder in evidence.setup.kata_folders if folder.known]
    if installed:
        runtimes = [runtime.own for runtime in evidence.setup.runtimes]
        yield problem(
            FindingCode.KATA_HAS_NO_HANDLER,
            "Kata",
            "is installed, and no handler of the container runtime starts it",
            (
                *(Seen(folder.path, folder.shown) for folder in installed),
                *(Seen(file.path, "has no handler of Kata, nor have the files that it imports") for file in runtimes),
            ),
            why="no pod of a RuntimeClass of Kata starts on this node, and no other setting of Kata can be checked",
            fix=(
                "# kata-deploy writes the handler; the log of its pod on this node tells why it did not:",
                "kubectl get pods -A -l name=kata-deploy -o wide",
                f"# where a file has the handler: import it in {runtimes[0].path}, and restart the container runtime",
            ),
            level=Level.WARNING,
        )


def _is_read(runtime: KataRuntime) -> bool:
    texts = [file.text for file in runtime.files]
    return bool(texts) and all(text is not None and parse_toml(text) is not None for text in texts)


def _refused_settings(runtime: KataRuntime) -> Iterator[tuple[Seen, str]]:
    """Yield the settings that a runtime refuses, each with what it expects."""
    cold, hot = runtime.setting("hypervisor", "cold_plug_vfio"), runtime.setting("hypervisor", HOT)
    mode, where = runtime.setting("runtime", "vfio_mode")
    if mode not in {None, "", "vfio", "guest-kernel"}:
        yield Seen(where, f"[runtime] vfio_mode = {mode!r}"), "vfio or guest-kernel"
    if runtime.handler.is_rust:
        if cold[0] not in {None, "", NO_PORT, "root-port"}:
            yield Seen(cold[1], f"cold_plug_vfio = {cold[0]!r}"), f"root-port or {NO_PORT}"
        return
    for key, (value, place) in (("cold_plug_vfio", cold), (HOT, hot)):
        if value not in {None, "", NO_PORT, *GO_PORTS}:
            yield Seen(place, f"{key} = {value!r}"), f"{', '.join(GO_PORTS)} or {NO_PORT}"
    if _is_on(runtime, "cold_plug_vfio") and _is_on(runtime, HOT):
        both = f"cold_plug_vfio = {cold[0]!r}, {HOT} = {hot[0]!r}"
        yield Seen(hot[1], both), f"only one of cold_plug_vfio and {HOT}, and {NO_PORT} for the other"
    elif hot[0] == "root-port":
        ports, place = runtime.setting("hypervisor", "pcie_root_port")
        if not isinstance(ports, int) or ports < 1:
            yield Seen(place, f"{HOT} = 'root-port', pcie_root_port = {ports!r}"), "pcie_root_port of at least 1"


def kata_devices(evidence: Evidence) -> Iterator[Finding]:
    """Kata's runtimes plug the devices that this node offers, and ask the kubelet which these are."""
    vgpus = evidence.inventory.vgpus.values()
    has_mdevs = any(vgpu.framework is Framework.MDEV for vgpu in vgpus)
    for runtime in evidence.setup.kata:
        unreadable = [file for file in runtime.files if isinstance(file.value, Unread)]
        yield from (unread("Kata's configuration", "could not be read", file) for file in unreadable)
        if not unreadable:
            plugs_mdevs = runtime.handler.name in evidence.settings.kata_plugs_mdev
            faults = [*_asks_no_kubelet(runtime), *(_plugs_no_mdev(runtime) if has_mdevs and not plugs_mdevs else ())]
            yield from faults
            if not faults and _is_on(runtime, "cold_plug_vfio"):
                asks = "asks the kubelet for a pod's devices"
                yield fine(f"the Kata runtime {runtime.handler.name}", asks, *runtime.files[:1])


def _asks_no_kubelet(runtime: KataRuntime) -> Iterator[Finding]:
    name, (socket, where) = runtime.handler.name, runtime.setting("runtime", "pod_resource_api_sock")
    if _is_on(runtime, "cold_plug_vfio") and not socket:
        yield problem(
            FindingCode.KATA_ASKS_NO_KUBELET,
            f"the Kata runtime {name}",
            "plugs devices before its VM starts, and does not ask the kubelet which devices a pod has",
            (Seen(where, f"[runtime] pod_resource_api_sock = {socket!r}" if socket == "" else "no such key"),),
            why="its pods start without their GPUs and vGPUs",
            fix=(f'# in {where}, or a file of config.d beside it: [runtime] pod_resource_api_sock = "{SOCKET}"',),
        )


def _plugs_no_mdev(runtime: KataRuntime) -> Iterator[Finding]:
    """Yield why a runtime plugs no mediated device; that in Go plugs one into a running VM, by its code.

    Source: Kata 4.1, `hotplug_vfio_device` of the runtime in Rust: it passes the address (`host`), not `sysfsdev`.
    """
    name, is_rust, cold = runtime.handler.name, runtime.handler.is_rust, _is_on(runtime, "cold_plug_vfio")
    if not cold and not (is_rust and _is_on(runtime, HOT)):
        return
    key = "cold_plug_vfio" if cold else HOT
    port, where = runtime.setting("hypervisor", key)
    what = "into a running VM: it takes the address of the GPU below the vGPU"
    if cold:
        what = f"before its VM starts: it {'fails' if is_rust else 'gives the VM the whole GPU below the vGPU'}"
    yield problem(
        FindingCode.KATA_PLUGS_NO_MDEV,
        f"the Kata runtime {name}",
        f"can't plug mediated devices {what}, and this node has such vGPUs",
        (Seen(where, f"[hypervisor.*] {key} = {port!r}"),),
        why="a pod of this RuntimeClass that requests such a vGPU doesn't start, or takes the whole GPU from its"
        " other users",
        fix=(
            f"keep pods that request these vGPUs off the RuntimeClass of {name}: KubeVirt's VMs can use them,",
            "or use cards whose vGPUs are VFs (vendor-specific VFIO), or whole GPUs; see docs/kata.md",
            f"if this build of Kata plugs them: kata_plugs_mdev: [{name}] in the file of gpuvirt doctor --config",
        ),
    )


def _plugs(runtime: KataRuntime) -> bool:
    return any(_is_on(runtime, key) for key in PORTS)


def _is_on(runtime: KataRuntime, key: str) -> bool:
    value, _ = runtime.setting("hypervisor", key)
    return isinstance(value, str) and value not in {"", NO_PORT}


def _names(runtimes: Sequence[KataRuntime]) -> str:
    return listed(sorted(runtime.handler.name for runtime in runtimes), most=5)
