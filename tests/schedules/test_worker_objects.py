"""Objects of the API server as a drain reads them."""

import pytest

from gpuvirt import nulls
from gpuvirt.kube.kinds.core import Taint, WholePod
from gpuvirt_schedules.controller.nodemarks import marks_patch
from gpuvirt_schedules.controller.workerobjects import ANNOUNCED, node_pod


@pytest.mark.parametrize(
    ("volume", "has_one"),
    [
        ('{"name": "scratch", "emptyDir": {}}', True),
        ('{"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}', True),
        ('{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}', False),
        ('{"name": "data", "emptyDir": null}', False),
    ],
)
def test_a_pod_has_data_that_an_eviction_deletes_if_a_volume_is_an_empty_dir(volume: str, *, has_one: bool) -> None:
    content = f'{{"metadata": {{"name": "train-0", "uid": "u"}}, "spec": {{"volumes": [{volume}]}}}}'
    assert node_pod(nulls.decode(content.encode(), WholePod)).has_empty_dir is has_one


def test_a_taint_that_is_set_or_removed_leaves_those_of_others() -> None:
    other, ours = Taint("dedicated", "NoSchedule", "gpus"), Taint(ANNOUNCED, "PreferNoSchedule")
    for before in ((other,), (other, ours)):
        for taint, after in ((True, (other, ours)), (False, (other,))):
            assert marks_patch("7", before, "gpus", cordon=None, taint=taint).spec.taints == after
