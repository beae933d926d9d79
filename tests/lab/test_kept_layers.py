"""The lab's builds of images use layers of earlier builds only if those were completed, and few enough."""

from pathlib import Path

from lab.cluster.ourimage import COMPLETE, is_whole


def test_layers_are_used_again_unless_a_build_was_killed_or_they_are_too_many(tmp_path: Path) -> None:
    storage = tmp_path / "storage" / "overlay"
    storage.mkdir(parents=True)
    (storage / "layer").write_bytes(bytes(2 << 20))
    assert not is_whole(tmp_path / "none")
    assert not is_whole(tmp_path), "a build that was killed"
    (tmp_path / COMPLETE).touch()
    assert is_whole(tmp_path)
    assert not is_whole(tmp_path, most_gib=0.001)
