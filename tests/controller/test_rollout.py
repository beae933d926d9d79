"""Upgrades of the agent: one node first, then never more nodes at once than maxUnavailable."""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.controller.deployment import rollout
from gpuvirt.kube.kinds.core import Condition, Pod, PodSpec, PodStatus
from gpuvirt.kube.labels import TEMPLATE_LABEL
from gpuvirt.kube.resources import Metadata

OLD, NEW = "old", "new"


def pod(node: int, template: str, *, ready: bool = True, going: bool = False) -> Pod:
    metadata = Metadata(
        name=f"agent-{node}-{template}",
        labels={TEMPLATE_LABEL: template},
        deletion_timestamp="2026-01-01T00:00:00Z" if going else "",
    )
    status = PodStatus("Running", conditions=(Condition("Ready", "True" if ready else "False"),))
    return Pod(metadata, PodSpec(f"node{node:02}"), status)


def nodes(*pods: Pod, desired: int = 4, most: str | int = 1) -> list[str]:
    return [pod.spec.node_name for pod in rollout(pods, NEW, desired=desired, most_unavailable=most).delete]


def test_a_single_node_is_upgraded_first() -> None:
    assert nodes(*(pod(n, OLD) for n in range(4)), most=3) == ["node00"]
    waiting = rollout([pod(0, NEW, ready=False), pod(1, OLD)], NEW, desired=2, most_unavailable=2)
    assert waiting.delete == ()
    assert waiting.waits_for == "waits for the first node to be upgraded; not ready: agent-0-new on node00"
    gone = rollout([pod(0, OLD, going=True), pod(1, OLD)], NEW, desired=2, most_unavailable=2)
    assert gone.delete == ()
    assert "Kubernetes has not created all new pods yet" in (gone.waits_for or "")


def test_after_the_first_node_max_unavailable_nodes_are_upgraded_at_once() -> None:
    assert nodes(pod(0, NEW), *(pod(n, OLD) for n in range(1, 4))) == ["node01"]
    assert nodes(pod(0, NEW), *(pod(n, OLD) for n in range(1, 4)), most="50%") == ["node01", "node02"]
    assert nodes(pod(0, NEW), pod(1, NEW, ready=False), pod(2, OLD), pod(3, OLD)) == []


def test_an_unready_agent_pod_is_replaced_before_ready_pods() -> None:
    assert nodes(pod(0, NEW), pod(1, OLD), pod(2, OLD, ready=False), pod(3, OLD)) == ["node02"]
    assert nodes(pod(0, OLD), pod(1, OLD), pod(2, OLD, ready=False), pod(3, OLD)) == ["node02"], (
        "an unready pod is also replaced before the first upgrade"
    )


def test_a_fully_upgraded_fleet_is_left_alone() -> None:
    assert nodes(*(pod(n, NEW) for n in range(4))) == []


@dataclass
class Fleet:
    """Nodes with a pod each, as a DaemonSet of strategy OnDelete keeps them."""

    pods: dict[int, Pod] = field(default_factory=dict)
    most_away: int = 0
    random: Random = field(default_factory=lambda: Random(0))  # noqa: S311

    def step(self, size: int, most: int) -> bool:
        """Let the controller act once, then change a pod at random; return whether the upgrade is complete."""
        plan = rollout(self.pods.values(), NEW, desired=size, most_unavailable=most)
        for outdated in plan.delete:
            self.pods.pop(int(outdated.spec.node_name.removeprefix("node")))
        ready = sum(pod.status.ready for pod in self.pods.values())
        self.most_away = max(self.most_away, size - ready)
        missing = [n for n in range(size) if n not in self.pods]
        late = [n for n, pod in self.pods.items() if not pod.status.ready]
        if missing and (not late or self.random.random() < 0.5):
            self.pods[missing[0]] = pod(missing[0], NEW, ready=False)
        elif late:
            self.pods[late[0]] = pod(late[0], NEW)
        return all(pod.metadata.labels[TEMPLATE_LABEL] == NEW and pod.status.ready for pod in self.pods.values())


@given(st.integers(1, 12), st.integers(1, 5), st.integers())
def test_every_fleet_is_upgraded_within_max_unavailable(size: int, most: int, seed: int) -> None:
    fleet = Fleet({n: pod(n, OLD) for n in range(size)}, random=Random(seed))  # noqa: S311
    for _ in range(20 * size):
        if fleet.step(size, most):
            break
    assert {pod.metadata.labels[TEMPLATE_LABEL] for pod in fleet.pods.values()} == {NEW}
    assert fleet.most_away <= most
