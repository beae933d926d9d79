"""Measures the controller's decisions for a cluster, without an API server: the processor time of one decision.

Nodes, GpuNodes and pods are decoded from what an API server sends, and the decisions include all operands. Each figure
is the least of several runs.

    .venv/bin/python -m bench.controllerdecisions --nodes 500 2000 5000
"""

import argparse
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from bench.clusternodes import Json, name_of, node, reported_gpu_node
from bench.controllermemory import read
from gpuvirt.controller.decisions import decide
from gpuvirt.controller.deployment import Existing
from gpuvirt.controller.nodememory import DecidedNodes
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.kinds.clusterpolicy import StoredPolicy
from gpuvirt.kube.kinds.core import Pod, PodSpec, ReadNode
from gpuvirt.kube.objects import ObjectMap, key_of
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import Workload

AT, LATER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)
NAMESPACE = "gpu-operator"
SETTINGS = ControllerSettings(NAMESPACE, image="gpuvirt:1")
RUNS = 7


def policy(**components: bool) -> StoredPolicy:
    """Return a ClusterPolicy for VMs."""
    fields = {"sandboxWorkloads": {"enabled": True}} | {name: {"enabled": on} for name, on in components.items()}
    metadata = Metadata(name="cluster-policy", uid="policy", generation=1, creation_timestamp="2026-01-01T00:00:00Z")
    return StoredPolicy(metadata, msgspec.Raw(msgspec.json.encode(fields)))


def picture_of(nodes: int) -> Picture:
    """Return a cluster whose agents run and have reported."""
    policies = ObjectMap.of({key_of(item): item for item in [policy()]})
    return Picture(
        policies,
        ObjectMap.of({key_of(node): node for node in (observed(number) for number in range(nodes))}),
        ObjectMap.of(
            {
                key_of(gpu_node): gpu_node
                for gpu_node in (read(reported_gpu_node(number), OwnedGpuNode) for number in range(nodes))
            }
        ),
        Existing(pods=ObjectMap.of({key_of(pod): pod for pod in map(agent, range(nodes))})),
    )


def observed(number: int, workload: Workload = Workload.VGPU, beat: Json | None = None) -> ReadNode:
    """Return a node as the controller decodes it."""
    made = node(number, workload, AT)
    return read({**made, **(beat or {})}, ReadNode)


def agent(number: int) -> Pod:
    """Return the pod of a node's agent."""
    metadata = Metadata(
        name=f"gpuvirt-node-{number}", namespace=NAMESPACE, uid=f"a{number}", labels={"app": "gpuvirt-node"}
    )
    return Pod(metadata, PodSpec(name_of(number)))


class Case(msgspec.Struct, frozen=True):
    """A change of the cluster between two decisions."""

    name: str
    change: Callable[[Picture, int], Picture]
    """Returns the changed picture; the second argument is another one in each run."""
    remembers: bool = True


def same(picture: Picture, _: int) -> Picture:
    """Change nothing."""
    return picture


def relabelled(picture: Picture, run: int) -> Picture:
    """Label one node otherwise."""
    item = observed(run, Workload.PASSTHROUGH if run % 2 else Workload.CONTAINER)
    return replace(picture, nodes=ObjectMap.of(picture.nodes).with_object(key_of(item), item))


def reported(picture: Picture, run: int) -> Picture:
    """Have one agent report otherwise."""
    before = next(item for key, item in picture.gpu_nodes.items() if key.name == name_of(run))
    item = msgspec.structs.replace(before, metadata=msgspec.structs.replace(before.metadata, generation=run + 7))
    return replace(picture, gpu_nodes=ObjectMap.of(picture.gpu_nodes).with_object(key_of(item), item))


def restarted(picture: Picture, run: int) -> Picture:
    """Restart the agent of one node."""
    pod = agent(run)
    pod = msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, uid=f"b{run}"))
    pods = ObjectMap.of(picture.existing.pods).with_object(key_of(pod), pod)
    return replace(picture, existing=replace(picture.existing, pods=pods))


def other_policy(picture: Picture, run: int) -> Picture:
    """Change the ClusterPolicy, on which all nodes depend."""
    changed = policy(vfioManager=bool(run % 2))
    return replace(picture, policies=ObjectMap.of({key_of(changed): changed}))


CASES = (
    Case("fresh", same, remembers=False),
    Case("the same picture", same),
    Case("one node relabelled", relabelled),
    Case("one report", reported),
    Case("one pod restarted", restarted),
    Case("another policy", other_policy),
)


def measure(picture: Picture, case: Case) -> float:
    """Return the least processor time of a decision, in ms."""
    memory, found = DecidedNodes(), list[float]()
    for run in range(RUNS + 1):
        before = time.process_time()
        decide(picture, SETTINGS, (), LATER, memory if case.remembers else DecidedNodes())
        found.append((time.process_time() - before) * 1e3)
        picture = case.change(picture, run)
    return min(found[1:])


def table(counts: Sequence[int]) -> str:
    """Return the figures as a Markdown table: a column for each number of nodes."""
    rows: dict[str, list[str]] = {case.name: [] for case in CASES}
    for count in counts:
        picture = picture_of(count)
        for case in CASES:
            rows[case.name].append(f"{measure(picture, case):.1f}")
    head = ["ms", *(f"{count} nodes" for count in counts)]
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[500, 2000, 5000])
    print(table(parser.parse_args().nodes))


if __name__ == "__main__":
    main()
