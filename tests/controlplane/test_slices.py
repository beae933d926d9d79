"""The API server keeps the slices of a host as they are: its gates drop no field of them, and its limits hold."""

import json
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from tests.model.dra.shapedhosts import printed

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]


@pytest.mark.parametrize("name", ["two in a group", "4xL40S"])
def test_slices_come_back_as_they_were_sent(lab: PlayedCluster, name: str, tmp_path: Path) -> None:
    sent = printed(name, tmp_path)
    created = lab.kubectl("create", "-f", "-", given=sent)
    try:
        assert created.returncode == 0, created.stderr
        kept = lab.kubectl("get", "resourceslices", "-o", "json").stdout
        stored = {item["metadata"]["name"]: item["spec"] for item in json.loads(kept)["items"]}
        assert stored == {item["metadata"]["name"]: item["spec"] for item in json.loads(sent)["items"]}
    finally:
        lab.kubectl("delete", "resourceslices", "--all")
