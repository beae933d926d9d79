"""What follows for KubeVirt: patches of it, what agents are not to offer, and why something can't be as it should.

The history of our patches is kept in a ConfigMap, and written before a patch is sent: a controller that starts again
must not resume a fight that the one before has given up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.gpunode import GpuNode, Withheld
from gpuvirt.cluster.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.cluster.kinds.manifests import ObjectMeta
from gpuvirt.cluster.kinds.workloads import ConfigMap, resource_of
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.operator.deployment.drift import StoredObject
from gpuvirt.cluster.operator.kubevirt import history
from gpuvirt.cluster.operator.kubevirt.history import History
from gpuvirt.cluster.operator.kubevirt.names import Requesting, names_of
from gpuvirt.cluster.operator.kubevirt.offered import offered_of, wants_mdevs
from gpuvirt.cluster.operator.kubevirt.planning import Manner, Plan, plan
from gpuvirt.cluster.operator.kubevirt.scene import KubeVirtPicture
from gpuvirt.cluster.operator.store import Objects
from gpuvirt.cluster.operator.writes import ApplyObject, Target
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.reasons import Reason, ReasonCode, kubevirtproblems

HISTORY = "gpuvirt-kubevirt-history"
"""The ConfigMap: a history by the uid of the object that it is of."""
STOPS = frozenset({ReasonCode.CONFIG_REVERTED, ReasonCode.MDEV_DELETION_RISK})

Histories = Mapping[str, History]


@dataclass(frozen=True, slots=True)
class KubeVirtObserved:
    """What was heard of KubeVirt."""

    kubevirts: Objects[KubeVirt] | None = None
    """None: unheard; none in it: there is no KubeVirt."""
    hyper_convergeds: Observed[tuple[HyperConverged, ...]] | None = None
    requesting: Requesting = field(default_factory=dict)
    histories: Histories = field(default_factory=dict)
    """By uid: what this controller knows, and what the ConfigMap has where it knows nothing yet."""
    problems: tuple[str, ...] = ()
    """Why kinds of objects that were never heard are not."""
    kept: str | None = None
    """What the ConfigMap says, as `kept_text` gives it; None where it is not there."""


@dataclass(frozen=True, slots=True)
class PatchKubeVirt:
    """Have KubeVirt, or HCO for it, permit what nodes offer."""

    target: Target
    plan: Plan

    @property
    def text(self) -> str:
        """What is done: `kubevirts kubevirt: add /spec/configuration/... {...}; ...`."""
        return f"{self.target.text}: {'; '.join(self.plan.changes)}"


@dataclass(frozen=True, slots=True)
class KubeVirtDecisions:
    """What follows."""

    writes: tuple[ApplyObject | PatchKubeVirt, ...] = ()
    withheld: tuple[Withheld, ...] | None = None
    """What agents are not to offer; None where that is not known."""
    stopped_because: str | None = None
    """Why no vGPUs are to be made anywhere."""
    reasons: tuple[Reason, ...] = ()
    drafts: tuple[str, ...] = ()
    """What is lacking and not written: operations, a line each."""
    histories: Histories = field(default_factory=dict)


def decide(
    observed: KubeVirtObserved, gpu_nodes: Sequence[GpuNode], namespace: str, at: datetime, *, manage: bool
) -> KubeVirtDecisions:
    """Return what follows from what nodes offer and what KubeVirt is; nothing where that was not heard."""
    untold = tuple(kubevirtproblems.not_read_completely(problem) for problem in observed.problems)
    if observed.kubevirts is None:
        return KubeVirtDecisions(reasons=untold, histories=observed.histories)
    plans = [
        plan(_scene(observed, one, gpu_nodes), Manner(manage), _history(observed, one), at) for one in _all(observed)
    ]
    histories = {key: value for one in plans if (key := one.history.uid) for value in (one.history,)}
    reasons = tuple(reason for one in plans for reason in one.reasons)
    stops = [one for one in reasons if one.code in STOPS] if any(one.stops_vgpu_changes for one in plans) else []
    return KubeVirtDecisions(
        writes=tuple(_writes(plans, histories, observed, namespace)),
        withheld=tuple(entry for one in plans for entry in one.withheld),
        stopped_because=stops[0].text if stops else None,
        reasons=(*reasons, *untold) if plans else (),
        drafts=tuple(change for one in plans if one.dry_run for change in one.changes),
        histories=histories,
    )


def kept_histories(stored: StoredObject | None) -> Histories:
    """Return what a ConfigMap keeps."""
    data = stored.texts if stored is not None else None
    return {uid: history.decode(text) for uid, text in (data or {}).items()}


def kept_text(stored: StoredObject | None) -> str | None:
    """Return what a ConfigMap says, to be compared with what it is to say."""
    data = stored.texts if stored is not None else None
    return _text(data) if data is not None else None


def history_key(namespace: str) -> ObjectKey:
    """Return the place of that ConfigMap."""
    return ObjectKey(namespace, HISTORY)


def _all(observed: KubeVirtObserved) -> tuple[KubeVirt, ...]:
    return tuple((observed.kubevirts or {}).values())


def _scene(observed: KubeVirtObserved, kubevirt: KubeVirt, gpu_nodes: Sequence[GpuNode]) -> KubeVirtPicture:
    return KubeVirtPicture(
        kubevirt=kubevirt,
        offered=offered_of(gpu_nodes),
        names=names_of(observed.requesting),
        hyper_convergeds=observed.hyper_convergeds,
        mdevs=wants_mdevs(gpu_nodes),
    )


def _history(observed: KubeVirtObserved, kubevirt: KubeVirt) -> History:
    """Return the history of the object that is written for a KubeVirt: its own, or that of the HCO which owns it."""
    hcos = (observed.hyper_convergeds.value if observed.hyper_convergeds is not None else None) or ()
    uids = (kubevirt.metadata.uid, *(one.metadata.uid for one in hcos))
    return next((observed.histories[uid] for uid in reversed(uids) if uid in observed.histories), History())


def _writes(
    plans: Sequence[Plan], histories: Histories, observed: KubeVirtObserved, namespace: str
) -> Sequence[ApplyObject | PatchKubeVirt]:
    """Return the ConfigMap first where it is to say something else, and patches once it says it."""
    data = {uid: history.encode(one) for uid, one in histories.items()}
    if data and _text(data) != observed.kept:
        labels = {"app.kubernetes.io/managed-by": "gpuvirt"}
        about = ObjectMeta(name=HISTORY, namespace=namespace, labels=labels)
        content = ConfigMap(api_version=workloads.CORE, metadata=about, data=data)
        return [ApplyObject(Target(resource_of(content), HISTORY), content)]
    return [
        PatchKubeVirt(Target(one.resource, one.name), one) for one in plans if one.resource is not None and one.writes
    ]


def _text(data: Mapping[str, str]) -> str:
    return msgspec.json.encode(dict(sorted(data.items()))).decode()
