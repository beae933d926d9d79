"""All that follows from one picture: what is to be written, and what somebody should hear."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES, ClusterPolicy, SpecFault, Status, StoredPolicy
from gpuvirt.cluster.operator import nodes, policies, status
from gpuvirt.cluster.operator.announcer import News, node_news, policy_news
from gpuvirt.cluster.operator.nodes import NodeDecisions, NodeVerdict
from gpuvirt.cluster.operator.picture import Picture
from gpuvirt.cluster.operator.policies import Choice
from gpuvirt.cluster.operator.status import Progress
from gpuvirt.cluster.operator.writes import PatchPolicyStatus, Target, Write
from gpuvirt.model.reasons import Reason, ReasonCode

COEXIST_OPTION = "--coexist"


@dataclass(frozen=True, slots=True)
class Site:
    """What the controller was told about itself."""

    namespace: str
    """Where it and what it deploys run."""
    coexists: bool = False
    """Whether NVIDIA's operator has all nodes that are not for machines, and the ClusterPolicy."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What follows."""

    writes: tuple[Write, ...] = ()
    news: tuple[News, ...] = ()
    nodes: tuple[NodeVerdict, ...] = ()
    progress: Progress = field(default_factory=Progress)
    policy: str | None = None
    """The ClusterPolicy that counts."""


def decide(picture: Picture, site: Site, failures: Sequence[str], at: datetime) -> Decisions:
    """Return what follows; `failures` are writes that could not be done."""
    choice = policies.choose(picture.policies.values())
    if choice is None:
        return Decisions()  # without a policy nothing is wanted, and what was deployed before stays as it is
    troubles = tuple(_troubles(choice, picture, site))
    found = NodeDecisions((), (), {})
    if not troubles and isinstance(choice.policy, ClusterPolicy):
        found = nodes.decide(picture, choice.policy, beside=site.coexists, stopped_because=None)
    progress = Progress(nodes=found.verdicts, troubles=troubles, failures=failures)
    writes = (*found.writes, *_statuses(choice, progress, site, at))
    news = (*node_news(picture.nodes.values(), found.placements), *policy_news(choice, status.verdict_of(progress)))
    return Decisions(writes, news, found.verdicts, progress, choice.stored.metadata.name)


def _troubles(choice: Choice, picture: Picture, site: Site) -> Iterator[Reason]:
    """Yield what keeps a policy from being carried out at all: then nothing is changed anywhere."""
    name = policies.called(choice.stored.metadata.name)
    if picture.other_operator is not None and not site.coexists:
        yield Reason(
            ReasonCode.OTHER_OPERATOR,
            "NVIDIA's GPU operator",
            "runs in this cluster, and both would deploy to the same nodes; nothing is changed",
            seen=picture.other_operator,
            fix=f"take the other away, or run the controller with {COEXIST_OPTION} to have the nodes for machines",
        )
    if isinstance(choice.policy, SpecFault):
        fix = "mend the field, or take it away"
        yield Reason(ReasonCode.CONFIG_INVALID, f"{name} {choice.policy.path}", choice.policy.message, fix=fix)
    elif policies.wants_kata(choice.policy):
        yield Reason(
            ReasonCode.KATA_NOT_SUPPORTED,
            f"{name} $.spec.sandboxWorkloads.mode",
            "is kata, for which there are no parts yet; nothing is changed",
            fix="set it to kubevirt",
        )


def _statuses(choice: Choice, progress: Progress, site: Site, at: datetime) -> Iterator[PatchPolicyStatus]:
    """Yield statuses that are not what they should be; beside NVIDIA's operator they are its own."""
    if site.coexists:
        return
    stored = choice.stored
    yield from _status(stored, status.status_of(progress, stored.metadata, stored.status, site.namespace, at))
    for other in choice.ignored:
        wanted = status.ignored(stored.metadata.name, other.metadata, other.status, site.namespace, at)
        yield from _status(other, wanted)


def _status(stored: StoredPolicy, wanted: Status) -> Iterator[PatchPolicyStatus]:
    if stored.status != wanted:
        yield PatchPolicyStatus(Target(CLUSTER_POLICIES, stored.metadata.name, "status"), wanted)
