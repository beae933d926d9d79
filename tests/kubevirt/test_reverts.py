"""What is taken back again and again is not written for ever, whatever is restarted meanwhile."""

from copy import deepcopy
from datetime import timedelta

from gpuvirt.cluster.operator.kubevirt import history as histories
from gpuvirt.cluster.operator.kubevirt.history import History
from gpuvirt.model.reasons import ReasonCode
from tests.kubevirts import BEGINNING, Cluster, codes, kubevirt


def reverted(times: int) -> Cluster:
    """Return a cluster in which somebody has taken back what was written; the controller restarts each time."""
    cluster = Cluster(kubevirt())
    own = deepcopy(cluster.document["spec"])
    for _ in range(times):
        cluster.step()
        cluster.history = histories.decode(histories.encode(cluster.history))
        cluster.restore(deepcopy(own))
    return cluster


def test_twice_is_no_reason_to_stop() -> None:
    cluster = reverted(2)
    assert cluster.step().writes
    assert not cluster.plan.stops_vgpu_changes


def test_three_times_are() -> None:
    cluster = reverted(3)
    plan = cluster.step()
    assert plan.writes == ()
    assert plan.patch, "it is said what would be written"
    assert ReasonCode.CONFIG_REVERTED in codes(plan)
    assert plan.stops_vgpu_changes
    cluster.restore({"configuration": {}})
    cluster.now += timedelta(days=2)
    assert cluster.step().writes == (), "not until somebody has written it themselves"


def test_a_patch_that_was_taken_back_before_it_was_seen_counts_too() -> None:
    """The picture is of the latest versions alone: it may never have shown what was written."""
    cluster = Cluster(kubevirt())
    for _ in range(3):
        done = cluster.plan
        cluster.history = done.history
        cluster.write(done.writes)
        cluster.history = done.landed(cluster.metadata)
        cluster.restore({})
    assert cluster.step().writes == ()


def test_whoever_writes_it_themselves_has_us_go_on() -> None:
    cluster = reverted(3)
    stopped = cluster.step()
    cluster.write(stopped.patch)  # by hand, from what was shown
    plan = cluster.step()
    assert plan.reasons == ()
    assert not plan.stops_vgpu_changes
    cluster.restore({})
    assert cluster.step().writes, "it is forgotten what was before"


def test_reverts_of_another_day_are_forgotten() -> None:
    cluster = reverted(2)
    cluster.step()
    cluster.now += timedelta(days=1)
    cluster.restore({})
    assert cluster.step().writes


def test_an_object_read_before_it_was_written_is_no_revert() -> None:
    cluster = Cluster(kubevirt())
    before = deepcopy(cluster.document)
    cluster.step()
    cluster.document = before
    plan = cluster.step()
    assert plan.patch == ()
    assert plan.history.reverts == ()


def test_another_kubevirt_by_that_name_has_no_history() -> None:
    cluster = reverted(3)
    cluster.step()
    cluster.document = kubevirt(uid="2")
    assert cluster.step().writes


def test_an_annotation_alone_is_no_revert() -> None:
    cluster = Cluster(kubevirt())
    cluster.step()
    metadata = cluster.document["metadata"]
    assert isinstance(metadata, dict)
    del metadata["annotations"]
    assert cluster.step().patch == (), "what was ours stays, and is nobody's now"
    assert cluster.history.reverts == ()


def test_a_history_that_cannot_be_read_is_none() -> None:
    assert histories.decode("{") == History()
    stopped = History("1", None, (BEGINNING,), stopped=True)
    assert histories.decode(histories.encode(stopped)) == stopped
