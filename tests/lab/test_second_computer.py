"""The second computer has what exists once on a computer for itself, and builds there have the first one's network."""

import subprocess
import sys
from pathlib import Path

import pytest
from lab.cluster.footprint import PLACES
from lab.cluster.leftovers import KUBELET, VFIO
from lab.cluster.secondcomputer import COMMAND

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import os
from pathlib import Path
from threading import Thread
from lab.cluster.cluster import cluster
from lab.cluster.secondcomputer import join_network

print(cluster().folder.name)
for path in map(Path, {places}):
    path.mkdir(parents=True)
    path.with_name("{mark}").touch()
for line in Path("/proc/self/mountinfo").read_text().splitlines():
    assert " - cgroup" not in line or " /gpuvirt-second " in line, line
def see(): print(os.readlink("/proc/thread-self/ns/net"), Path("/proc/thread-self/net/dev").read_text().count(":"))
def see_outside(): join_network(), see()
for seen in (see, see_outside):
    thread = Thread(target=seen)
    thread.start()
    thread.join()
raise SystemExit(3)
"""


@pytest.mark.ring("cluster")
def test_the_second_computer_has_its_own_places_cgroups_and_network(tmp_path: Path) -> None:
    places, mark = (KUBELET, VFIO, *PLACES), f"of-{tmp_path.parent.name}-{tmp_path.name}"
    program = PROGRAM.format(places=[str(path) for path in places], mark=mark)
    done = subprocess.run(
        [COMMAND, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    folder, own, outside = done.stdout.splitlines()
    assert folder == "secondcluster"
    assert own.split()[1] == "1", "the link lo alone"
    assert own.split()[0] != outside.split()[0] == str(Path("/proc/self/ns/net").readlink())
    assert [path for path in places if path.with_name(mark).exists()] == []
