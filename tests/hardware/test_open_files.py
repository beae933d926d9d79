"""The nodes that real processes have open or mapped are found by their numbers, whatever their paths are."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpuvirt.hardware.access import openfiles
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.access.openfiles import VFIO_DEVICE, OpenFile
from gpuvirt.paths import HostPath, HostRoots
from tests.hardware import fusefile

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes and be another user")
ZERO = os.makedev(1, 5)
NOBODY = 65534
LOW_ADDRESS = 0x20000
"""`maps` writes it with leading zeros, `map_files` without."""

HOLDER = """\
import ctypes, os, sys
path, how, address, uid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
file = os.open(path, os.O_RDONLY)
if how == "mapped":
    assert libc.mmap(address or None, 4096, 1, 0x2 | (0x10 if address else 0), file, 0) != ctypes.c_void_p(-1).value
    os.close(file)
print("x", flush=True)
sys.stdin.read()
"""
"""Opens a file, or maps it and closes its descriptor; Python's own mmap keeps a descriptor."""
MAPPED = pytest.mark.parametrize("how", ["opened", "mapped"])


@contextmanager
def holding(path: Path, how: str = "opened", address: int = 0, uid: int = 0) -> Iterator[int]:
    """Run a process that has a file open or mapped, and yield its pid."""
    command = [sys.executable, "-c", HOLDER, str(path), how, str(address), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x\n"
        yield process.pid


def kernel_of(folder: Path, *pids: int) -> RealKernel:
    """Return a kernel whose `/proc` shows these processes alone."""
    (folder / "proc").mkdir()
    for pid in pids:
        (folder / f"proc/{pid}").symlink_to(f"/proc/{pid}")
    return RealKernel(HostRoots.under(folder))


def zero_in(folder: Path) -> Path:
    """Make a node of `/dev/zero` where no GPU's node is expected."""
    node = folder / "opt/gpu"
    node.parent.mkdir()
    os.mknod(node, 0o20600, ZERO)
    return node


@MAPPED
def test_a_node_that_a_process_has_open_or_mapped_is_found(tmp_path: Path, how: str) -> None:
    with holding(Path("/dev/zero"), how) as pid:
        kernel = kernel_of(tmp_path, pid)
        zero = OpenFile(pid, HostPath("/dev/zero"), ZERO)
        assert list(kernel.open_files(mapped=True)) == [zero]
        assert list(kernel.open_files()) == ([zero] if how == "opened" else [])
    assert list(kernel.open_files(mapped=True)) == []


@AS_ROOT
@pytest.mark.parametrize(("how", "address"), [("opened", 0), ("mapped", 0), ("mapped", LOW_ADDRESS)])
def test_a_node_is_found_at_any_path(tmp_path: Path, how: str, address: int) -> None:
    node = zero_in(tmp_path)
    with holding(node, how, address) as pid:
        assert list(kernel_of(tmp_path, pid).open_files(mapped=True)) == [OpenFile(pid, HostPath(str(node)), ZERO)]


@AS_ROOT
def test_a_node_is_found_after_it_was_deleted(tmp_path: Path) -> None:
    node = zero_in(tmp_path)
    with holding(node) as pid:
        node.unlink()
        assert list(kernel_of(tmp_path, pid).open_files()) == [OpenFile(pid, HostPath(f"{node} (deleted)"), ZERO)]


def test_other_files_are_no_nodes(tmp_path: Path) -> None:
    file = tmp_path / "dri/renderD128"
    file.parent.mkdir()
    file.touch()
    kernel = kernel_of(tmp_path, os.getpid())
    before = list(kernel.open_files(mapped=True))
    one, other = socket.socketpair()
    pipe, event = os.pipe(), os.eventfd(0)
    with file.open("rb"), one, other:
        assert list(kernel.open_files(mapped=True)) == before
    for fd in (*pipe, event):
        os.close(fd)


OTHER_THREAD = """\
import ctypes, os, sys, threading, time
node = os.open("/dev/zero", os.O_RDONLY)
def run():
    while open("/proc/self/stat").read().split()[2] != "Z":
        time.sleep(0.01)
    print("x", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=run).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_node_is_found_that_a_process_has_open_after_its_first_thread_has_ended(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OTHER_THREAD], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x\n"
        assert list(Path(f"/proc/{process.pid}/fd").iterdir()) == []
        zero = OpenFile(process.pid, HostPath("/dev/zero"), ZERO)
        assert zero in list(kernel_of(tmp_path, process.pid).open_files())


def test_a_process_that_has_ended_has_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "proc/77").mkdir(parents=True)
    assert list(RealKernel(HostRoots.under(tmp_path)).open_files(mapped=True)) == []


@pytest.mark.parametrize("target", ["/opt/no/gpu", VFIO_DEVICE, "/vfio/12 (deleted)"])
def test_a_copy_of_a_host_in_files_has_nodes_without_numbers(tmp_path: Path, target: str) -> None:
    copied = tmp_path / "proc/77"
    for folder in ("fd", "map_files"):
        (copied / folder).mkdir(parents=True)
    (copied / "fd/5").symlink_to(target)
    (copied / "fd/6").symlink_to("socket:[612]")
    (copied / "map_files/7f00-8f00").symlink_to(target)
    (copied / "maps").write_text(f"00007f00-00008f00 rw-s 00000000 00:05 612            {target}\n")
    found = OpenFile(77, HostPath(target), 0)
    assert list(RealKernel(HostRoots.under(tmp_path)).open_files(mapped=True)) == [found, found]


def loop_at(path: Path) -> None:
    """Make a link that no process can follow, also not root: ELOOP, which does not mean that the process has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(path)


@pytest.mark.parametrize("unread", ["fd", "task", "maps", "fd/5", "map_files/7f00-8f00"])
def test_what_cannot_be_read_of_a_process_is_unknown(tmp_path: Path, unread: str) -> None:
    process = tmp_path / "proc/77"
    loop_at(process / unread)
    if unread.startswith("map_files"):
        (process / "maps").write_text("7f00-8f00 rw-s 00000000 00:2c 612      /data/file\n")
    with pytest.raises(OSError, match="symbolic links") as refused:
        list(RealKernel(HostRoots.under(tmp_path)).open_files(mapped=True))
    assert refused.value.filename == str(process / unread)


@AS_ROOT
def test_an_open_file_whose_path_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    os.mknod(tmp_path / "proc/77/fd/5", 0o20600, ZERO)
    with pytest.raises(OSError, match="Invalid argument"):
        list(RealKernel(HostRoots.under(tmp_path)).open_files())


@pytest.mark.parametrize(
    ("mounts", "has_nodes"),
    [
        ("33 1 0:44 / /mnt rw,nodev - fuse x y\n34 1 0:45 / /other rw - fuse x y\n", False),
        ("33 1 0:44 / /mnt rw - fuse x y\n34 1 0:45 / /other rw,nodev - fuse x y\n", True),
        ("34 1 0:45 / /other rw,nodev - fuse x y\n", True),
        (None, True),
    ],
    ids=["nodev", "another one is nodev", "no mount", "unread"],
)
@pytest.mark.parametrize("file", ["fd/5", "map_files/7f00-8f00"])
def test_an_unexamined_file_is_no_node_only_if_its_own_mount_has_none(
    tmp_path: Path, mounts: str | None, *, has_nodes: bool, file: str
) -> None:
    process, kernel = tmp_path / "proc/77", RealKernel(HostRoots.under(tmp_path))
    loop_at(process / file)
    (process / "fdinfo").mkdir()
    (process / "fdinfo/5").write_text("pos:\t0\nmnt_id:\t33\n")
    (process / "maps").write_text("7f00-8f00 rw-s 00000000 00:2c 612      /data/file\n" * file.startswith("map"))
    if mounts is None:
        loop_at(process / "mountinfo")
    else:
        (process / "mountinfo").write_text(mounts)
    if has_nodes:
        with pytest.raises(OSError, match="symbolic links"):
            list(kernel.open_files(mapped=True))
    else:
        assert list(kernel.open_files(mapped=True)) == []


@AS_ROOT
@pytest.mark.parametrize("is_node", [False, True])
def test_a_file_that_many_processes_map_is_examined_once(tmp_path: Path, is_node: bool) -> None:
    """Where `maps` names two files alike, as it does for two subvolumes of btrfs, both are examined."""
    library = tmp_path / "lib.so"
    library.touch()
    found, node = library.stat(), zero_in(tmp_path)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino + is_node}"
    for pid, file in ((77, library), (78, node)):
        (tmp_path / f"proc/{pid}/map_files").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/map_files/7f00-8f00").symlink_to(file)
        (tmp_path / f"proc/{pid}/maps").write_text(f"7f00-8f00 rw-s 00000000 {name}      {file}\n")
    nodes = list(RealKernel(HostRoots.under(tmp_path)).open_files(mapped=True))
    assert nodes == ([OpenFile(78, HostPath(str(node)), ZERO)] if is_node else [])


@pytest.mark.parametrize("stale", [1, openfiles._READINGS])
def test_a_mapping_that_is_split_during_the_walk_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: int
) -> None:
    """The kernel finds no file by the addresses that a mapping has had before; it is unknown, not gone."""
    read, readings = openfiles._content, 0

    def content(path: str) -> bytes:
        nonlocal readings
        readings += 1
        return re.sub(rb"-[0-9a-f]+(?= .*/dev/zero)", b"-7fffffffe000", read(path)) if readings <= stale else read(path)

    with holding(Path("/dev/zero"), "mapped") as pid:
        kernel = kernel_of(tmp_path, pid)
        monkeypatch.setattr(openfiles, "_content", content)
        if stale == 1:
            assert list(kernel.open_files(mapped=True)) == [OpenFile(pid, HostPath("/dev/zero"), ZERO)]
        else:
            with pytest.raises(FileNotFoundError):
                list(kernel.open_files(mapped=True))


@contextmanager
def fuse_file(folder: Path, uid: int = 0, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Mount a FUSE file system with one file."""
    command = [sys.executable, fusefile.__file__, str(folder), str(uid), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "mounted\n"
        try:
            yield server
        finally:
            server.kill()
            subprocess.run(["/bin/umount", "-l", folder], check=True)


WALK = """\
import sys
from gpuvirt.hardware.access.openfiles import read_open_files
print(list(read_open_files(sys.argv[1], mapped=True)))
"""


@AS_ROOT
@pytest.mark.ring("mount")
@MAPPED
def test_a_file_on_a_dead_server_does_not_stop_the_walk(tmp_path: Path, how: str) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    # A process that waits for an answer can't be killed, so it is awaited when the server has ended.
    with ExitStack() as ended, fuse_file(mount) as server, holding(mount / "file", how) as pid:
        assert server.stdin is not None
        assert server.stdout is not None
        kernel_of(tmp_path, pid)
        server.stdin.write("hang\n")
        server.stdin.flush()
        assert server.stdout.readline() == "hung\n"
        command = [sys.executable, "-c", WALK, str(tmp_path / "proc")]
        walk = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert walk.communicate(timeout=60)[0] == b"[]\n"
        ended.enter_context(subprocess.Popen(["/bin/stat", mount / "file"], stderr=subprocess.DEVNULL))
        assert server.stdout.readline() == "getattr /file\n", "stat asks first: the walk has not asked"


@AS_ROOT
@pytest.mark.ring("mount")
@pytest.mark.parametrize("options", [(), ("dev",)])
@MAPPED
def test_a_file_that_root_may_not_see_is_unknown_unless_it_can_be_no_node(
    short_path: Path, how: str, options: tuple[str, ...]
) -> None:
    mount = short_path / "mount"
    mount.mkdir()
    short_path.chmod(0o755)
    with fuse_file(mount, NOBODY, *options), holding(mount / "file", how, uid=NOBODY) as pid:
        kernel = kernel_of(short_path, pid)
        if options:
            with pytest.raises(PermissionError) as refused:
                list(kernel.open_files(mapped=True))
            assert refused.value.filename.startswith(f"{short_path}/proc/{pid}/")
        else:
            assert list(kernel.open_files(mapped=True)) == []
