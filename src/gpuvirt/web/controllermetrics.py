"""The controller's metrics page.

Those of `gpu_operator_...` are NVIDIA's operator's, for dashboards and alerts that exist; the others are ours.
"""

from collections import Counter
from collections.abc import Iterator

from gpuvirt import __version__
from gpuvirt.cluster.operator.controller import Controller
from gpuvirt.cluster.operator.decisions import Decisions
from gpuvirt.cluster.operator.policy.status import verdict_of
from gpuvirt.web.exposition import counter, gauge, text_of

READY, NOT_READY, NO_POLICY = 1, 0, -1
"""Values of `gpu_operator_reconciliation_status`; NVIDIA's operator has -2 for its own failures, too."""


def page(term: Controller | None) -> str:
    """Return the page; None for a process that does not lead."""
    leads = gauge("gpuvirt_controller_leads", "1 in the process that leads.", (), [((), float(term is not None))])
    info = gauge("gpuvirt_info", "The controller's version.", ("version",), [((__version__,), 1)])
    if term is None or term.decisions is None:
        return text_of(leads, info)
    return text_of(leads, info, *of_decisions(term.decisions), _writes(term))


def of_decisions(decided: Decisions) -> tuple[Iterator[str], ...]:
    """Return what there is to say of what was decided last."""
    return (
        _status(decided),
        _gpu_nodes(decided),
        _nodes(decided),
        _late(decided),
        _operands(decided),
        _reasons(decided),
        _invalid(decided),
    )


def _status(decided: Decisions) -> Iterator[str]:
    status = NO_POLICY if not decided.policy else READY if verdict_of(decided.progress).ready else NOT_READY
    yield from gauge(
        "gpu_operator_reconciliation_status",
        "1 where all is as the ClusterPolicy wants it, 0 where it is not, -1 where there is none.",
        (),
        [((), status)],
    )


def _gpu_nodes(decided: Decisions) -> Iterator[str]:
    yield from gauge("gpu_operator_gpu_nodes_total", "Nodes with GPUs.", (), [((), float(len(decided.nodes)))])


def _nodes(decided: Decisions) -> Iterator[str]:
    counts = Counter((str(one.workload or "unknown"), str(one.against is None).lower()) for one in decided.nodes)
    yield from gauge(
        "gpuvirt_nodes",
        "Nodes with GPUs, by what they are for, and whether they are as they should be.",
        ("workload", "ready"),
        counts.items(),
    )


def _late(decided: Decisions) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_node_not_ready",
        "1 for each node that is not as it should be; its GpuNode says why.",
        ("node", "workload"),
        [((one.name, str(one.workload or "unknown")), 1) for one in decided.nodes if one.against is not None],
    )


def _operands(decided: Decisions) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_operand_not_ready",
        "1 for each DaemonSet that is not as it should be; the ClusterPolicy says why.",
        ("operand",),
        [((one.name,), 1) for one in decided.operands if one.against is not None],
    )


def _reasons(decided: Decisions) -> Iterator[str]:
    found = [str(one.code) for one in decided.progress.problems]
    found += [str(code) for one in decided.nodes for code in one.codes]
    kubevirt = decided.progress.kubevirt
    found += [kubevirt.reason] if kubevirt is not None and not kubevirt.ready else []
    yield from gauge(
        "gpuvirt_controller_reasons",
        "What keeps the controller from its work or nodes from being served, and what is not right with KubeVirt.",
        ("reason",),
        [((code,), count) for code, count in Counter(found).items()],
    )


def _invalid(decided: Decisions) -> Iterator[str]:
    counts = Counter((one.node, one.origin, one.code) for one in decided.progress.invalid)
    yield from gauge(
        "gpuvirt_desired_state_invalid",
        "Values of the desired state that are invalid, by node (empty: the cluster), by where they are set, by code.",
        ("node", "origin", "reason"),
        counts.items(),
    )


def _writes(term: Controller) -> Iterator[str]:
    yield from counter(
        "gpuvirt_controller_writes_total",
        "Writes to the API server, by outcome.",
        ("outcome",),
        [(("done",), term.writes_done), (("failed",), term.writes_failed)],
    )
