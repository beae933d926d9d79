"""A patch that is reverted repeatedly is not written forever, even if the controller restarts."""

from copy import deepcopy
from datetime import timedelta

from gpuvirt.controller.kubevirt import changes as histories
from gpuvirt.controller.kubevirt.changes import PatchHistory
from gpuvirt.model.reasons import ReasonCode
from tests.controller.kubevirt.kubevirts import BEGINNING, Cluster, codes, kubevirt


def reverted(times: int) -> Cluster:
    """Return a cluster in which each patch has been reverted; the controller restarts after each."""
    cluster = Cluster(kubevirt())
    own = deepcopy(cluster.document["spec"])
    for _ in range(times):
        cluster.step()
        cluster.history = histories.decode(histories.encode(cluster.history))
        cluster.restore(deepcopy(own))
    return cluster


def test_two_reverts_do_not_stop_patching() -> None:
    cluster = reverted(2)
    assert cluster.step().writes
    assert not cluster.plan.stops_vgpu_changes


def test_three_reverts_stop_patching() -> None:
    cluster = reverted(3)
    plan = cluster.step()
    assert plan.writes == ()
    assert plan.patch, "the reason contains the unwritten patch"
    assert ReasonCode.CONFIG_REVERTED in codes(plan)
    assert plan.stops_vgpu_changes
    cluster.restore({"configuration": {}})
    cluster.now += timedelta(days=2)
    assert cluster.step().writes == (), "patching stays stopped until an admin applies the patch"


def test_a_patch_reverted_before_the_watch_shows_it_counts() -> None:
    """The watch may deliver only the latest version, so it may never have shown the patch."""
    cluster = Cluster(kubevirt())
    for _ in range(3):
        done = cluster.plan
        cluster.history = done.history
        cluster.write(done.writes)
        cluster.history = done.landed(cluster.metadata)
        cluster.restore({})
    assert cluster.step().writes == ()


def test_patching_resumes_after_an_admin_applies_the_patch() -> None:
    cluster = reverted(3)
    stopped = cluster.step()
    cluster.write(stopped.patch)  # by hand, from the shown patch
    plan = cluster.step()
    assert plan.reasons == ()
    assert not plan.stops_vgpu_changes
    cluster.restore({})
    assert cluster.step().writes, "earlier reverts are forgotten"


def test_reverts_of_an_earlier_day_are_forgotten() -> None:
    cluster = reverted(2)
    cluster.step()
    cluster.now += timedelta(days=1)
    cluster.restore({})
    assert cluster.step().writes


def test_a_stale_read_is_no_revert() -> None:
    cluster = Cluster(kubevirt())
    before = deepcopy(cluster.document)
    cluster.step()
    cluster.document = before
    plan = cluster.step()
    assert plan.patch == ()
    assert plan.history.reverts == ()


def test_a_recreated_kubevirt_has_no_history() -> None:
    cluster = reverted(3)
    cluster.step()
    cluster.document = kubevirt(uid="2")
    assert cluster.step().writes


def test_a_removed_annotation_is_no_revert() -> None:
    cluster = Cluster(kubevirt())
    cluster.step()
    metadata = cluster.document["metadata"]
    assert isinstance(metadata, dict)
    del metadata["annotations"]
    assert cluster.step().patch == (), "our former entries stay without an owner"
    assert cluster.history.reverts == ()


def test_an_unreadable_history_counts_as_empty() -> None:
    assert histories.decode("{") == PatchHistory()
    stopped = PatchHistory("1", None, (BEGINNING,), stopped=True)
    assert histories.decode(histories.encode(stopped)) == stopped
