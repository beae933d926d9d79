"""Checks of the kubelet: that it listens, that it counts what we offer, and that a machine is near its GPU."""

from collections.abc import Iterator

from gpuvirt.facts.pci import Unread
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, of_reason, problem, seen, unread
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.offers.view import ResourceView
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.reasons.codes import Level

MOST_CPUS = 8192
"""NR_CPUS where it is largest (arch/x86/Kconfig)."""


def _not_read(subject: str, message: str, path: str, found: Unread) -> Finding:
    return problem(
        FindingCode.NOT_READ,
        subject,
        message,
        (Seen(path, found.said),),
        why="what could not be read is not taken for absent, nor for well",
        fix=("run it as root, and name the kubelet's own folder with --kubelet-dir",),
    )


def listening(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet takes device plugins."""
    kubelet = evidence.kubelet
    if isinstance(kubelet.listens, Unread):
        yield _not_read("the kubelet", "could not be looked for", kubelet.socket, kubelet.listens)
    elif kubelet.listens:
        yield fine("the kubelet", "has its socket for device plugins", Seen(kubelet.socket, "there"))
    elif not kubelet.ever_ran:
        yield fine(
            "this host",
            "has no kubelet, so nothing of Kubernetes is checked",
            Seen(kubelet.folder, "empty, or not there"),
        )
    else:
        yield problem(
            FindingCode.KUBELET_NOT_LISTENING,
            "the kubelet",
            "has run here, and has no socket for device plugins",
            (Seen(kubelet.socket, "not there"),),
            why="no GPU can be offered, and no pod gets one",
            fix=("systemctl restart kubelet; journalctl -u kubelet -n 50", "or name its folder with --kubelet-dir"),
        )


def registration(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet knows each resource of the agent's."""
    view, kubelet = evidence.view, evidence.kubelet
    offered = [one for one in view.resources if one.devices]
    if view.agent is None:
        if offered and kubelet.listens is True:
            yield problem(
                FindingCode.AGENT_AWAY,
                "the agent",
                f"does not run here, so the kubelet is not told of {', '.join(one.name for one in offered)}",
                (Seen("/run/gpuvirt/node.json", "not there, or of an agent that has ended"),),
                why="what nobody registers, no pod can ask for",
                fix=("kubectl apply -f deploy/node.yaml", "or by hand: gpuvirt node"),
            )
        return
    for resource in view.resources:
        if resource.not_registered_because is not None:
            yield of_reason(resource.not_registered_because, Level.ERROR)
    if known := [one.name for one in view.resources if one.registered]:
        yield fine(
            "the agent", f"has registered {', '.join(known)}", Seen("/run/gpuvirt/node.json", f"pid {view.agent.pid}")
        )


def counted(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet counts the devices that we offer, as healthy as we say they are."""
    kubelet = evidence.kubelet
    if isinstance(kubelet.counted, Unread):
        yield _not_read("what the kubelet counts", "could not be read", kubelet.counted_by, kubelet.counted)
        return
    if evidence.view.agent is None or kubelet.counted is None:
        return
    for resource in evidence.view.resources:
        if not resource.registered:
            continue
        healthy = {device.id for device in resource.devices if device.healthy}
        kubelets = kubelet.counted.get(resource.name, frozenset())
        if healthy == kubelets:
            yield fine(resource.name, f"is counted as it is: {len(healthy)} healthy devices")
        else:
            yield _differs(evidence, resource, frozenset(map(str, healthy)), kubelets)


def _differs(evidence: Evidence, resource: ResourceView, ours: frozenset[str], kubelets: frozenset[str]) -> Finding:
    apart = [f"only the agent has {one}" for one in sorted(ours - kubelets)]
    apart += [f"only the kubelet has {one}" for one in sorted(kubelets - ours)]
    return problem(
        FindingCode.COUNTS_DIFFER,
        resource.name,
        f"has {len(ours)} healthy devices, and the kubelet counts {len(kubelets)}: {', '.join(apart[:8])}",
        (Seen(evidence.kubelet.counted_by, f"{len(kubelets)} of {resource.name}"),),
        why="pods are admitted by what the kubelet counts",
        fix=(
            "look once more in a few seconds; if it stays so, another plugin may serve that name:",
            "kubectl get pods -A -o wide | grep -i device-plugin",
            "and restart the agent's pod, which changes nothing on any device",
        ),
    )


def policies(evidence: Evidence) -> Iterator[Finding]:
    """A machine's processors and memory are on its GPU's NUMA node."""
    kubelet = evidence.kubelet
    nodes = sorted(
        {gpu.function.numa_node for gpu in evidence.inventory.gpus.values() if gpu.function.numa_node is not None}
    )
    if len(nodes) < 2 or not kubelet.ever_ran:
        return
    config = kubelet.config
    if isinstance(config, Unread):
        yield _not_read("the kubelet's configuration", "could not be read", kubelet.config_file, config)
        return
    if config is None:
        yield problem(
            FindingCode.NOT_READ,
            "the kubelet's configuration",
            "is not where kubeadm keeps it, so its policies are not known",
            (Seen(kubelet.config_file, "not there"),),
            why=f"the GPUs are on NUMA nodes {', '.join(map(str, nodes))}",
            fix=('kubectl get --raw "/api/v1/nodes/$(hostname)/proxy/configz"',),
        )
        return
    desired = {
        "cpuManagerPolicy": (config.cpu_manager_policy, "static"),
        "memoryManagerPolicy": (config.memory_manager_policy, "Static"),
        "topologyManagerPolicy": (config.topology_manager_policy, "best-effort"),
    }
    idle = {name: better for name, (now, better) in desired.items() if now.lower() == "none"}
    shown = ", ".join(f"{name}: {now}" for name, (now, _) in desired.items())
    if "topologyManagerPolicy" not in idle and "cpuManagerPolicy" not in idle:
        yield fine("the kubelet", "places processors by NUMA node", Seen(kubelet.config_file, shown))
        return
    yield problem(
        FindingCode.NUMA_NOT_ALIGNED,
        "the kubelet",
        f"does not place processors by NUMA node, and the GPUs are on nodes {', '.join(map(str, nodes))}",
        (Seen(kubelet.config_file, shown),),
        why="a machine on the other node reaches its GPU through the link between processors: slower",
        fix=(
            f"# in {kubelet.config_file}",
            *(f"{name}: {better}" for name, better in idle.items()),
            "# static policies need reservedSystemCPUs, reservedMemory, and an empty state:",
            "systemctl stop kubelet; rm -f /var/lib/kubelet/{cpu,memory}_manager_state; systemctl start kubelet",
        ),
    )


def vms_near_gpus(evidence: Evidence) -> Iterator[Finding]:
    """No machine that has a GPU is pinned to processors of another NUMA node."""
    users = evidence.inventory.facts.users or {}
    for gpu in evidence.inventory.gpus.values():
        group, node = gpu.function.iommu_group, gpu.function.numa_node
        if node is None or not isinstance(group, int):
            continue
        for user in users.get(group, ()):
            yield from _pinned(evidence, gpu, node, user.pid, user.command)


def _pinned(evidence: Evidence, gpu: Gpu, node: int, pid: int, command: str) -> Iterator[Finding]:
    allowed, near = evidence.setup.allowed_cpus.get(pid), evidence.setup.numa_cpus.get(node)
    if allowed is None or near is None:
        return
    may, local = parse_cpulist(allowed.text or "?"), parse_cpulist(near.text or "?")
    if may is None or local is None:
        yield unread(
            f"{command} (pid {pid})", f"has {gpu.function.address}; whether it runs near it is not known", allowed, near
        )
    elif may and local and not may & local:
        yield problem(
            FindingCode.CPUS_ON_OTHER_NODE,
            f"{command} (pid {pid})",
            f"has {gpu.function.address} of NUMA node {node}, and may run on processors of other nodes alone",
            seen(allowed, near),
            why="all it sends to its GPU goes through the link between processors",
            fix=(
                "topologyManagerPolicy: single-numa-node, or restricted, in the kubelet's configuration",
                "and dedicatedCpuPlacement: true in the machine; then restart the machine",
            ),
        )


def parse_cpulist(text: str) -> frozenset[int] | None:
    """Return the processors in a list as the kernel writes it, `0-3,8`; None for what is no such list."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not (_is_cpu(first) and (not dash or _is_cpu(last))):
            return None
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def _is_cpu(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < MOST_CPUS
