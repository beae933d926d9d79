"""Pods without a folder: which of them have ended, and which a killed kubelet has only admitted."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuvirt.facts.ids import PodUid
from gpuvirt.kubelet.accountwatch import PodFolders
from tests.thoroughness import examples


@dataclass
class _Pod:
    kubelet: int
    """The kubelet that has admitted it."""
    has_folder: bool = False
    had_folder: bool = False
    ended: bool = False
    found_by: int | None = None
    """The kubelet of the reading that has found the pod first."""
    seen: bool = field(default=False)
    """Whether a reading has seen its folder."""


class Folders(RuleBasedStateMachine):
    """A node's pods, the kubelets that follow one another, and the readings of an agent."""

    def __init__(self) -> None:
        super().__init__()
        self.folders = PodFolders()
        self.pods: dict[PodUid, _Pod] = {}
        self.kubelet = 0
        self.read_by: int | None = None
        """The kubelet of the last reading."""
        self.unmade: frozenset[PodUid] = frozenset()
        self.read()

    @rule()
    def admit(self) -> None:
        self.pods[PodUid(f"pod-{len(self.pods)}")] = _Pod(self.kubelet)

    @precondition(lambda self: any(not (pod.had_folder or pod.ended) for pod in self.pods.values()))
    @rule()
    def make_folder(self) -> None:
        pod = next(pod for pod in self.pods.values() if not (pod.had_folder or pod.ended))
        pod.has_folder = pod.had_folder = True

    @precondition(lambda self: any(not pod.ended for pod in self.pods.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pod = data.draw(st.sampled_from([pod for pod in self.pods.values() if not pod.ended]))
        pod.ended, pod.has_folder = True, False

    @rule()
    def restart(self) -> None:
        self.kubelet += 1

    @rule()
    def read(self) -> None:
        with_folder = frozenset(uid for uid, pod in self.pods.items() if pod.has_folder)
        self.unmade = self.folders.unmade(frozenset(self.pods), with_folder, str(self.kubelet))
        for uid, pod in self.pods.items():
            pod.found_by = self.kubelet if pod.found_by is None else pod.found_by
            pod.seen = pod.seen or uid in with_folder
        self.read_by = self.kubelet

    @invariant()
    def a_pod_that_another_kubelet_has_admitted_alone_is_kept(self) -> None:
        for uid, pod in self.pods.items():
            if pod.found_by is not None and pod.kubelet != self.read_by and not pod.had_folder:
                assert uid in self.unmade

    @invariant()
    def a_pod_whose_folder_was_seen_is_judged_by_it(self) -> None:
        assert not any(self.pods[uid].seen for uid in self.unmade)

    @precondition(lambda self: self.kubelet == 0)
    @invariant()
    def a_pod_of_the_only_kubelet_is_judged_by_its_folder(self) -> None:
        assert not self.unmade


TestFolders = Folders.TestCase
TestFolders.settings = settings(max_examples=examples(200), stateful_step_count=20, deadline=None)


def test_a_pod_that_is_found_at_the_start_is_one_of_the_running_kubelet() -> None:
    """Ended pods are in the checkpoint of a kubelet that is not ready: nothing else would tell of their end."""
    assert PodFolders().unmade({PodUid("a")}, frozenset(), "1") == frozenset()


def test_a_pod_that_leaves_the_checkpoint_is_forgotten() -> None:
    folders = PodFolders()
    folders.unmade({PodUid("a")}, {PodUid("a")}, "1")
    folders.unmade(frozenset(), frozenset(), "1")
    folders.unmade({PodUid("a")}, frozenset(), "1")
    assert folders.unmade({PodUid("a")}, frozenset(), "2") == {PodUid("a")}
