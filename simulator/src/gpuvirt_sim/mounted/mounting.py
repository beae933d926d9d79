"""The life of a mount: it is checked, mounted, served until it is unmounted or interrupted, and always cleaned up."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mfusepy

from gpuvirt_sim.archives.export import export
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.mounted.calls import Calls
from gpuvirt_sim.mounted.files import KernelFiles
from gpuvirt_sim.mounted.mountedhost import KERNELS, MountedHost
from gpuvirt_sim.mounted.mounterror import MountError
from gpuvirt_sim.mounted.nodes import Nodes
from gpuvirt_sim.mounted.record import NO_RECORD, Record
from gpuvirt_sim.mounted.scratch import Scratch
from gpuvirt_sim.programs import executables
from gpuvirt_sim.programs.executables import VgpuManager
from gpuvirt_sim.programs.tools import SimTools

MOST_CALLS = 256
"""Calls served at one time: each that waits in the simulated kernel occupies a thread. libfuse's default is 10."""

WATCHER = 'read -r _; umount -l "$1" || fusermount3 -u -z "$1"; rm -rf "$2"'
"""Waits until its standard input closes, which it does however the simulator ends, and removes the mount."""


def serve(
    kernel: SimKernel,
    folder: Path,
    nodes: Nodes,
    ready: Callable[[], None],
    manager: VgpuManager = VgpuManager.HOST,
    record: Record = NO_RECORD,
) -> None:
    """Mount a simulated host at `folder`, and serve it until it is unmounted, or SIGTERM or SIGINT comes.

    `ready` is called once other programs can use the mount; `record` gets what they write. Must run in the main thread.
    Raises MountError.
    """
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    with mounted(kernel, folder, nodes, manager, ended, record):
        ready()
        ended.wait()


@contextmanager
def mounted(
    kernel: SimKernel,
    folder: Path,
    nodes: Nodes,
    manager: VgpuManager,
    ended: threading.Event,
    record: Record = NO_RECORD,
) -> Iterator[None]:
    """Mount a simulated host at `folder`; `ended` is set when the mount ends. Raises MountError."""
    _check(folder)
    # A child of vfork that looks for its program in this mount waits for threads of this process. Before 3.11.4, Python
    # keeps the GIL until the child has found it (https://github.com/python/cpython/issues/104372).
    if sys.version_info < (3, 11, 4):
        setattr(subprocess, "_USE_VFORK", False)  # noqa: B010  types call it Final, the manual does not
    failures: list[BaseException] = []
    answered = threading.Event()
    with _cleaned_up(folder) as scratch:
        export(kernel, scratch, leave_out=KERNELS)
        executables.install(kernel, scratch, manager)
        paths = [f"{root.rstrip('/')}/{executables.CALLS}" for root in executables.roots(manager)]
        calls = Calls(SimTools(kernel), paths, record)
        host = MountedHost(KernelFiles(kernel, nodes, record), calls, Scratch(scratch), answered.set)

        def answer() -> None:
            try:
                mfusepy.FUSE(host, str(folder), False, "utf-8", "surrogateescape", **_options())
            except BaseException as error:  # noqa: BLE001  handed to the waiting thread
                failures.append(error)
            answered.set()
            ended.set()

        threading.Thread(target=answer, name="mount", daemon=True).start()
        answered.wait()
        if not failures:
            yield
    if failures:
        raise MountError(f"{folder} can't be mounted: libfuse failed with {failures[0]}; see its messages above")


def _options() -> dict[str, bool | int | str]:
    root = os.geteuid() == 0  # only root can use allow_other, and mount with device nodes
    options: dict[str, bool | int | str] = {
        "foreground": True,
        "direct_io": True,
        "allow_other": root,
        "dev": root,
        "fsname": "gpuvirt",
    }
    if (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12):  # older versions have no limit
        options["max_threads"] = MOST_CALLS
        options["max_idle_threads"] = MOST_CALLS  # libfuse warns about its own default
    return options


@contextmanager
def _cleaned_up(folder: Path) -> Iterator[Path]:
    """Provide a folder on disk; at the end remove it, and unmount `folder`."""
    scratch = Path(tempfile.mkdtemp(prefix="gpuvirt-mount-"))
    scratch.chmod(0o755)
    with subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "watcher", str(folder), str(scratch)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        yield scratch


def _check(folder: Path) -> None:
    try:
        empty = not any(folder.iterdir())
    except OSError as error:
        stale = error.errno == errno.ENOTCONN
        fix = f"; a simulator that was killed left this mount, unmount it: umount -l {folder}" if stale else ""
        raise MountError(f"{folder}: {error.strerror}{fix}") from error
    if not empty:
        raise MountError(f"{folder} is not empty; give an empty folder to mount on")
    check_fuse()


def check_fuse() -> None:
    """Raise MountError where FUSE is not available."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MountError("/dev/fuse can't be opened; load the module fuse, or run as a user who may open it")
