"""The PodDisruptionBudgets of the cluster: which of them cover a pod, and how many evictions each allows.

Source: Kubernetes' API reference, policy/v1, and its counting in pkg/scheduler/framework/plugins/defaultpreemption
(filterPodsWithPDBViolation): a pod in `disruptedPods` is counted by the API server already. A selector that is null
matches no pod, and an empty one each pod of the namespace, as the API server counts for evictions; kube-scheduler alone
takes an empty one for none.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.kube.cache import Delta
from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Collection, Resource
from gpuvirt.model.shares.eviction import BudgetName
from gpuvirt.shares.objects import SharingPod


class BudgetMetadata(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The metadata of a PodDisruptionBudget."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class BudgetSpec(msgspec.Struct, frozen=True, gc=False):
    """The pods that a PodDisruptionBudget covers."""

    selector: LabelSelector | None = None


class BudgetStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The evictions that a PodDisruptionBudget allows now."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] = {}
    """The pods whose eviction the API server has allowed and counted, by name."""


class DisruptionBudget(msgspec.Struct, frozen=True, gc=False):
    """A PodDisruptionBudget."""

    metadata: BudgetMetadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()

    def covers(self, pod: SharingPod) -> bool:
        """Return whether an eviction of a pod of the same namespace counts."""
        selector = self.spec.selector
        if selector is None or pod.metadata.name in self.status.disrupted_pods:
            return False
        return selector.matches(pod.metadata.labels)


DISRUPTION_BUDGETS = Collection(Resource("poddisruptionbudgets", "policy"), DisruptionBudget)


class DisruptionBudgets:
    """The PodDisruptionBudgets by namespace, kept by events."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[ObjectKey, DisruptionBudget]] = {}
        self.is_ready = False
        """Whether the PodDisruptionBudgets have been listed."""

    def __len__(self) -> int:
        return sum(map(len, self._by_namespace.values()))

    def observe(self, delta: Delta[DisruptionBudget]) -> None:
        """Record changes of PodDisruptionBudgets."""
        for key in delta.removed:
            budgets = self._by_namespace.get(key.namespace, {})
            budgets.pop(key, None)
            if not budgets:
                self._by_namespace.pop(key.namespace, None)
        for key in delta.changed:
            self._by_namespace.setdefault(key.namespace, {})[key] = delta.objects[key]
        self.is_ready = True

    def covering(self, pod: SharingPod) -> Mapping[BudgetName, int]:
        """Return the PodDisruptionBudgets that cover a pod, each with the evictions that it allows now."""
        budgets = self._by_namespace.get(pod.metadata.namespace)
        if not budgets:
            return {}
        return {
            BudgetName(f"{key.namespace}/{key.name}"): budget.status.disruptions_allowed
            for key, budget in budgets.items()
            if budget.covers(pod)
        }
