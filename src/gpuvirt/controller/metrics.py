"""The controller's metrics page.

The metrics `gpu_operator_...` are those of NVIDIA's operator, for its dashboards and alerts; the others are gpuvirt's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from gpuvirt import __version__
from gpuvirt.controller.controller import Controller
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.policy.status import verdict_of
from gpuvirt.controller.webhookcertificate.keeper import CertificateKeeper
from gpuvirt.web.exposition import counter, gauge, text_of

READY, NOT_READY, NO_POLICY = 1, 0, -1
"""Values of `gpu_operator_reconciliation_status`; NVIDIA's operator also has -2, for its own failures."""


def page(controller: Controller | None, certificate: CertificateKeeper | None = None, more: Iterable[str] = ()) -> str:
    """Return the page; `controller` is None in a process that does not lead.

    `certificate` keeps the webhook's certificate, None if the controller does not. `more` has lines of other metrics.
    """
    leads = gauge("gpuvirt_controller_leads", "1 in the leading process.", (), [((), float(controller is not None))])
    info = gauge("gpuvirt_info", "The controller's version.", ("version",), [((__version__,), 1)])
    if controller is None or controller.decisions is None:
        return text_of(leads, info, more)
    return text_of(
        leads, info, *of_decisions(controller.decisions), _writes(controller), _certificate(certificate), more
    )


def _certificate(keeper: CertificateKeeper | None) -> Iterator[str]:
    if keeper is None:
        return
    yield from gauge(
        "gpuvirt_webhook_certificate_kept", "1 while the webhook's certificate is kept.", (), [((), not keeper.problem)]
    )
    if keeper.ends_s is not None:
        text = "When the webhook's certificate ends, in seconds since 1970."
        yield from gauge("gpuvirt_webhook_certificate_end_seconds", text, (), [((), keeper.ends_s)])


def of_decisions(decided: Decisions) -> tuple[Iterator[str], ...]:
    """Return the metrics of the last decisions."""
    return (
        _status(decided),
        _gpu_nodes(decided),
        _nodes(decided),
        _not_ready(decided),
        _operands(decided),
        _reasons(decided),
        _invalid(decided),
    )


def _status(decided: Decisions) -> Iterator[str]:
    status = NO_POLICY if not decided.policy else READY if verdict_of(decided.progress).ready else NOT_READY
    yield from gauge(
        "gpu_operator_reconciliation_status",
        "1 if the cluster is as the ClusterPolicy describes, 0 if it is not, -1 without a ClusterPolicy.",
        (),
        [((), status)],
    )


def _gpu_nodes(decided: Decisions) -> Iterator[str]:
    yield from gauge("gpu_operator_gpu_nodes_total", "Nodes with GPUs.", (), [((), float(len(decided.nodes)))])


def _nodes(decided: Decisions) -> Iterator[str]:
    counts = Counter((str(node.workload or "unknown"), str(node.against is None).lower()) for node in decided.nodes)
    yield from gauge(
        "gpuvirt_nodes",
        "Nodes with GPUs, by workload and by whether they are ready.",
        ("workload", "ready"),
        counts.items(),
    )


def _not_ready(decided: Decisions) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_node_not_ready",
        "1 for each node that is not ready; its GpuNode has the reason.",
        ("node", "workload"),
        [((node.name, str(node.workload or "unknown")), 1) for node in decided.nodes if node.against is not None],
    )


def _operands(decided: Decisions) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_operand_not_ready",
        "1 for each DaemonSet that is not ready; the ClusterPolicy has the reason.",
        ("operand",),
        [((operand.name,), 1) for operand in decided.operands if operand.against is not None],
    )


def _reasons(decided: Decisions) -> Iterator[str]:
    codes = [str(problem.code) for problem in decided.progress.problems]
    codes += [str(code) for node in decided.nodes for code in node.codes]
    kubevirt = decided.progress.kubevirt
    codes += [kubevirt.reason] if kubevirt is not None and not kubevirt.ready else []
    yield from gauge(
        "gpuvirt_controller_reasons",
        "Reasons that stop the controller or make nodes not ready, and problems with KubeVirt.",
        ("reason",),
        [((code,), count) for code, count in Counter(codes).items()],
    )


def _invalid(decided: Decisions) -> Iterator[str]:
    counts = Counter((value.node, value.origin, value.code) for value in decided.progress.invalid)
    yield from gauge(
        "gpuvirt_desired_state_invalid",
        "Invalid values of the desired state, by node (empty: the cluster), origin and code.",
        ("node", "origin", "reason"),
        counts.items(),
    )


def _writes(controller: Controller) -> Iterator[str]:
    yield from counter(
        "gpuvirt_controller_writes_total",
        "Writes to the API server, by outcome.",
        ("outcome",),
        [(("done",), controller.writes_done), (("failed",), controller.writes_failed)],
    )
