"""How many units packing wastes until a pod no longer fits, beside best fit with perfect knowledge.

For the extender, a score of 11 levels decides among nodes, as in kube-scheduler; best fit takes the GPU of the whole
cluster that leaves the least. Both place the same random pods until the first does not fit.
"""

from collections.abc import Mapping, Sequence
from random import Random

from tests.extender.pods import decoded_pod, pod

from gpuvirt.extender.filtering import prioritized
from gpuvirt.extender.protocol import NodeArguments
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.placement import GpuId, Steps, finished
from gpuvirt.shares.index import ClusterUsage
from gpuvirt.shares.objects import SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing

NODES, GPUS = 50, 8
SIZES = (50, 100, 125, 200, 250, 300, 333, 400, 500, 600, 750, 1000)
TRACES = 20


def wasted(random: Random) -> str:
    """Return the share of units that stay free, of the extender and of best fit, over several traces."""
    sharing, ours, best, nothing = Sharing(), 0, 0, 0
    for _ in range(TRACES):
        trace = [random.choice(SIZES) for _ in range(20 * NODES * GPUS)]
        ours += _by_scores(trace, sharing)
        best += best_fit(trace, NODES * GPUS)
        nothing += NODES * GPUS * 1000
    return f"{ours / nothing:.2%}; best fit {best / nothing:.2%}"


def _by_scores(trace: Sequence[int], sharing: Sharing) -> int:
    usage, names = ClusterUsage(), [NodeName(f"n{number}") for number in range(NODES)]
    for name in names:
        usage.set_node(name, {GpuId(f"{name}-{number}"): Units(1000) for number in range(GPUS)})
    pods: Mapping[int, SharingPod] = {units: decoded_pod(pod("p", units)) for units in SIZES}
    for number, units in enumerate(trace):
        asked = pods[units]
        demand = demand_of_pod(asked, sharing.resource)
        fitting = [name for name in names if usage.rows[name].largest >= units]
        if not fitting:
            break
        scores = finished(prioritized(NodeArguments(asked, fitting), usage.rows, sharing, Steps(0)))
        name = NodeName(max(scores, key=lambda score: score.score).host)
        placed = usage.nodes[name].place(demand, sharing.policy)
        if placed is None:
            raise SystemExit(f"{units} units do not fit on {name}, although they fit into a piece")
        usage.put(name, PodUid(str(number)), placed.used, demand.total)
    return sum(sum(node.free.values()) for node in usage.nodes.values())


def best_fit(trace: Sequence[int], gpus: int) -> int:
    """Return the units that stay free when each pod goes to the GPU of all that it leaves the least free units on."""
    free = [1000] * gpus
    for units in trace:
        fitting = [number for number, left in enumerate(free) if left >= units]
        if not fitting:
            break
        free[min(fitting, key=lambda number: free[number])] -= units
    return sum(free)
