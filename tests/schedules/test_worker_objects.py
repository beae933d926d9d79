"""Objects of the API server as a drain reads them."""

import pytest

from gpuvirt import nulls
from gpuvirt.cluster.operator.schedules.workerobjects import PodObject


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
    assert nulls.decode(content.encode(), PodObject).node_pod.has_empty_dir is has_one
