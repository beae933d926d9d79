"""A cluster that a run of tests has reserved is known to others, so that `lab-down` leaves it alone."""

from pathlib import Path

from lab.cluster.places import PLAYED
from lab.cluster.playedcluster import PlayedCluster


def test_a_cluster_is_reserved_until_the_run_that_uses_it_ends(tmp_path: Path) -> None:
    used, seen_by_another = (PlayedCluster(tmp_path / PLAYED.folder, tmp_path, PLAYED) for _ in range(2))
    assert not seen_by_another.is_reserved()
    with used.reserved():
        assert seen_by_another.is_reserved()
    assert not seen_by_another.is_reserved()
