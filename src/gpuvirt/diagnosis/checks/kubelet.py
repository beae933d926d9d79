"""Checks of the kubelet: its socket, the devices that it counts, and whether VMs run near their GPUs."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, of_reason, problem, seen, unread
from gpuvirt.facts.pci import Unread
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import CONTAINER_RESOURCES
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.offers.view import ResourceView
from gpuvirt.model.reasons import FindingCode, Reason, Seen, count_of, nodeproblems, refusals
from gpuvirt.model.reasons.codes import Level

MOST_CPUS = 8192
"""The largest NR_CPUS (arch/x86/Kconfig)."""
OF_OTHERS = (DesiredMode.UNMANAGED, DesiredMode.CONTAINER)
"""The modes in which a GPU needs no agent."""
AS_ROOT = "run this command as root, and set the kubelet's folder with --kubelet-dir"


def _not_read(subject: str, message: str, path: str, found: Unread) -> Finding:
    return unread(subject, message, Seen(path, found.detail), fix=AS_ROOT)


def listening(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet accepts device plugins."""
    kubelet, place = evidence.kubelet, evidence.kubelet.socket
    if isinstance(kubelet.listens, Unread):
        yield _not_read("the kubelet", "may or may not run: its socket could not be checked", place, kubelet.listens)
    elif kubelet.listens:
        yield fine("the kubelet", "listens at its socket for device plugins", Seen(place))
    elif not kubelet.ever_ran:
        yield fine(
            "this host",
            "has no kubelet, so the checks of Kubernetes are skipped",
            Seen(kubelet.folder, "no kubelet has run there"),
        )
    else:
        yield problem(
            FindingCode.KUBELET_NOT_LISTENING,
            "the kubelet",
            "has run on this host, but does not listen at its socket for device plugins",
            (Seen.absent(place) if kubelet.has_socket is False else Seen(place, nodeproblems.NO_LISTENER),),
            why="no GPU can be offered, and no pod gets one",
            fix=("systemctl restart kubelet; journalctl -u kubelet -n 50", "or set its folder with --kubelet-dir"),
        )


def registration(evidence: Evidence) -> Iterator[Finding]:
    """Each resource of the agent is registered at the kubelet."""
    view, kubelet = evidence.view, evidence.kubelet
    if view.agent is None:
        names = [resource.name for resource in view.resources if resource.devices]
        others = [name for name in names if is_counted(evidence, name)]
        offered = [name for name in names if name not in others]
        if others:
            yield fine(
                other_plugin(evidence),
                f"has registered {', '.join(others)}, so this host needs no agent for that",
                Seen(kubelet.counted_by, "counts their devices"),
            )
        if kubelet.listens is True and (offered or (not others and _needs_agent(evidence))):
            yield _agent_away(evidence, offered)
        return
    lacking: dict[Reason, list[str]] = {}
    for why in filter(None, (resource.not_registered_because for resource in view.resources)):
        lacking.setdefault(replace(why, subject=""), []).append(why.subject)
    for why, (first, *rest) in lacking.items():
        more = f" and {count_of(len(rest), 'other resource')}" if rest else ""
        yield of_reason(replace(why, subject=f"{first}{more}"), Level.ERROR)
    if registered := [resource.name for resource in view.resources if resource.registered]:
        yield fine(
            "the agent",
            f"has registered {', '.join(registered)}",
            Seen("/run/gpuvirt/node.json", f"pid {view.agent.pid}"),
        )


def _needs_agent(evidence: Evidence) -> bool:
    """Return whether an agent would change GPUs by its settings, or has run where no plugin serves containers now."""
    if any(evidence.desired_of(gpu) not in OF_OTHERS for gpu in evidence.view.gpus):
        return True
    for_containers = any(name.startswith(CONTAINER_RESOURCES) for name in known_counts(evidence))
    return evidence.agent_has_run and bool(evidence.view.gpus) and not for_containers


def _agent_away(evidence: Evidence, offered: Sequence[str]) -> Finding:
    """Advise an agent only where none is installed: a second one exits, or offers the devices twice."""
    # The labels of the agent by the chart, by deploy/node.yaml and by deploy/plugin-only.yaml.
    pods = "kubectl get pods -A -o wide -l app.kubernetes.io/name=gpuvirt"
    see: tuple[str, ...] = (
        "if it lists gpuvirt, see why this node has no agent: gpuvirt status",
        "only if it lists none: kubectl apply -f deploy/node.yaml, or by hand: gpuvirt node",
    )
    if evidence.agent_has_run:
        see = ("see why the agent of this node has ended; as a service of the host: systemctl status gpuvirt-node",)
    return problem(
        FindingCode.AGENT_AWAY,
        "the agent",
        f"does not run on this host, so no plugin registers {', '.join(offered) or 'its GPUs'}",
        (Seen("/run/gpuvirt/node.json", "does not exist, or is of an agent that has ended"),),
        why="pods that request a resource without a plugin are never scheduled",
        fix=(pods, *see),
        level=Level.ERROR if evidence.agent_has_run or _needs_agent(evidence) else Level.WARNING,
    )


def other_plugin(evidence: Evidence) -> str:
    """Return what registers devices where no agent publishes a state: /run/gpuvirt may be full or read-only for it."""
    if evidence.kubelet.offers_without_gate is True:
        return "a device plugin of gpuvirt that can't write to /run/gpuvirt, or is of an older version,"
    return "another device plugin"


def is_counted(evidence: Evidence, resource: str) -> bool:
    """Return whether the kubelet counts healthy devices of a resource, so that a plugin has registered it."""
    return bool(known_counts(evidence).get(resource))


def known_counts(evidence: Evidence) -> Mapping[str, frozenset[str]]:
    """Return the healthy devices of each resource by the kubelet; none where they are unknown."""
    counted = evidence.kubelet.counted
    return {} if isinstance(counted, Unread) or counted is None else counted


def exclusion(evidence: Evidence) -> Iterator[Finding]:
    """Commands can ask the device plugin to drain devices before they change them."""
    kubelet = evidence.kubelet
    if evidence.view.agent is not None:
        return
    if isinstance(kubelet.offers_without_gate, Unread):
        yield _not_read(
            "the gates of the device plugin", "could not be read", kubelet.gates, kubelet.offers_without_gate
        )
    elif kubelet.offers_without_gate:
        problem_seen = "no device plugin has locked it: an older one, or one that may not write there"
        yield of_reason(
            refusals.gate_failed("the device plugin", kubelet.gates, problem_seen, is_plugins=True), Level.WARNING
        )


def counted(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet counts the same healthy devices as the agent."""
    kubelet = evidence.kubelet
    if isinstance(kubelet.counted, Unread):
        yield _not_read("the kubelet's list of devices", "could not be read", kubelet.counted_by, kubelet.counted)
        return
    if evidence.view.agent is None or kubelet.counted is None:
        return
    for resource in evidence.view.resources:
        if not resource.registered:
            continue
        healthy = {device.id for device in resource.devices if device.healthy}
        kubelets = kubelet.counted.get(resource.name, frozenset())
        if healthy == kubelets:
            yield fine(
                resource.name, f"has {count_of(len(healthy), 'healthy device')}, and the kubelet counts the same"
            )
        else:
            yield _differs(evidence, resource, frozenset(map(str, healthy)), kubelets)


def _differs(evidence: Evidence, resource: ResourceView, ours: frozenset[str], kubelets: frozenset[str]) -> Finding:
    apart = [f"only the agent has {device}" for device in sorted(ours - kubelets)]
    apart += [f"only the kubelet has {device}" for device in sorted(kubelets - ours)]
    return problem(
        FindingCode.COUNTS_DIFFER,
        resource.name,
        f"has {count_of(len(ours), 'healthy device')}, but the kubelet counts {len(kubelets)}: {', '.join(apart[:8])}",
        (Seen(evidence.kubelet.counted_by, f"{len(kubelets)} of {resource.name}"),),
        why="the kubelet admits pods by the devices that it counts",
        fix=(
            "run this command again in a few seconds; if nothing has changed, look for another plugin of that name:",
            "kubectl get pods -A -o wide | grep -i device-plugin",
            "and restart the agent's pod: that changes no device",
        ),
    )


def policies(evidence: Evidence) -> Iterator[Finding]:
    """The kubelet places the processors and the memory of a VM on the NUMA node of its GPU."""
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
            "is not where kubeadm writes it, so the kubelet's policies are unknown",
            (Seen.absent(kubelet.config_file),),
            why=f"the GPUs are on NUMA nodes {', '.join(map(str, nodes))}",
            fix=(f"kubectl get --raw /api/v1/nodes/{evidence.node}/proxy/configz",),
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
        yield fine("the kubelet", "aligns processors with NUMA nodes", Seen(kubelet.config_file, shown))
        return
    yield problem(
        FindingCode.NUMA_NOT_ALIGNED,
        "the kubelet",
        f"does not align processors with NUMA nodes, but the GPUs are on nodes {', '.join(map(str, nodes))}",
        (Seen(kubelet.config_file, shown),),
        why="a VM on another NUMA node reaches its GPU only through the slower link between processors",
        fix=(
            f"# in {kubelet.config_file}",
            *(f"{name}: {better}" for name, better in idle.items()),
            "# static policies need reservedSystemCPUs, reservedMemory, and an empty state:",
            "systemctl stop kubelet; rm -f /var/lib/kubelet/{cpu,memory}_manager_state; systemctl start kubelet",
        ),
    )


def vms_near_gpus(evidence: Evidence) -> Iterator[Finding]:
    """No VM with a GPU is pinned to processors of another NUMA node."""
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
            f"{command} (pid {pid})",
            f"uses {gpu.function.address}; the NUMA nodes of its processors could not be read",
            allowed,
            near,
        )
    elif may and local and not may & local:
        yield problem(
            FindingCode.CPUS_ON_OTHER_NODE,
            f"{command} (pid {pid})",
            f"uses {gpu.function.address} of NUMA node {node}, but may run only on processors of other nodes",
            seen(allowed, near),
            why="all traffic to its GPU passes the slower link between processors",
            fix=(
                "topologyManagerPolicy: single-numa-node, or restricted, in the kubelet's configuration",
                "and dedicatedCpuPlacement: true in the VM; then restart the VM",
            ),
        )


def parse_cpulist(text: str) -> frozenset[int] | None:
    """Return the processors in a list of the kernel's format, `0-3,8`; None for another format."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not (_is_cpu(first) and (not dash or _is_cpu(last))):
            return None
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def _is_cpu(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < MOST_CPUS
