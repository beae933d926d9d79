"""A file of a container is read without following where the container leads."""

import os
import socket
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from gpuvirt.hardware.usage.containerfiles import opened

PATH = ("usr", "local", "region", "memory")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root folder of process 7, with a region; a link leads to it, as in `/proc`."""
    folder = tmp_path / "rootfs"
    (folder / "usr/local/region").mkdir(parents=True)
    (folder / "usr/local/region/memory").write_bytes(b"theirs")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/root").symlink_to(folder)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/memory").write_bytes(b"of the host")
    return folder


def read(tmp_path: Path) -> bytes:
    with opened(tmp_path / "proc", 7, PATH) as file:
        return os.pread(file, 100, 0)


def test_a_file_is_read_below_the_root_of_the_process(tmp_path: Path, root: Path) -> None:
    assert root.is_dir()
    assert read(tmp_path) == b"theirs"


def link_folder(root: Path, outside: Path) -> None:
    (root / "usr/local/region/memory").unlink()
    (root / "usr/local/region").rmdir()
    (root / "usr/local/region").symlink_to(outside)


def link_parent(root: Path, outside: Path) -> None:
    (root / "usr").rename(root / "usr2")
    (outside / "local/region").mkdir(parents=True)
    (outside / "local/region/memory").write_bytes(b"of the host")
    (root / "usr").symlink_to(outside)


def link_file(root: Path, outside: Path) -> None:
    (root / "usr/local/region/memory").unlink()
    (root / "usr/local/region/memory").symlink_to(outside / "memory")


def make_pipe(root: Path, _: Path) -> None:
    (root / "usr/local/region/memory").unlink()
    os.mkfifo(root / "usr/local/region/memory")


def make_folder(root: Path, _: Path) -> None:
    (root / "usr/local/region/memory").unlink()
    (root / "usr/local/region/memory").mkdir()


def make_socket(root: Path, _: Path) -> None:
    (root / "usr/local/region/memory").unlink()
    with socket.socket(socket.AF_UNIX) as of_container, chdir(root / "usr/local/region"):
        of_container.bind("memory")  # the whole path may be too long for a socket


@pytest.mark.parametrize("trick", [link_folder, link_parent, link_file, make_pipe, make_folder, make_socket])
def test_what_a_container_puts_in_the_way_is_not_followed(
    tmp_path: Path, root: Path, trick: Callable[[Path, Path], None]
) -> None:
    trick(root, tmp_path / "outside")
    with pytest.raises(OSError, match=r"Too many levels|Not a directory|not a regular file"):
        read(tmp_path)


def test_a_file_that_is_replaced_after_it_was_seen_is_not_read(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(*arguments: object, **options: object) -> os.stat_result:
        found = stat(*arguments, **options)  # type: ignore[arg-type]  # as they come
        make_pipe(root, tmp_path)
        return found

    stat = os.stat
    monkeypatch.setattr("gpuvirt.hardware.usage.containerfiles.os.stat", replaced)
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open(tmp_path: Path, root: Path) -> None:
    before = open_files()
    for _ in range(3):
        read(tmp_path)
    (root / "usr/local/region/memory").unlink()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            read(tmp_path)
    assert open_files() == before
