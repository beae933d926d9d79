"""How the MPS daemon is started: in the root of its driver, once, and for the processes of all users where it can."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.errors import GpuvirtError
from gpuvirt.hardware.access.tools import Ended, ToolError, ToolMissingError
from gpuvirt.hardware.programs.containerdriver import NotReadyError
from gpuvirt.hardware.programs.mpsdaemon import QUIT, MpsControl, prepare
from gpuvirt.loops.serialworker import ThreadWorker
from tests.agent.shares.mpsdaemon import MpsDaemon, write_program
from tests.cli.commandline import ran

FINE = Ended(0, "GPU 0: NVIDIA H200\n", "")
HELP = Ended(0, "  -d,--daemon              Setup the daemon in the background\n", "")
NEW_HELP = Ended(0, "  -M,--multiuser-server    Enable multi-user mode\n", "")


class Programs:
    """The programs of a host, which end as the test sets."""

    def __init__(self, help_text: Ended = NEW_HELP, mounted: Ended = Ended(0, "", "")) -> None:  # noqa: B008
        self.help_text = help_text
        self.mounted = mounted
        self.mounts: list[tuple[str, ...]] = []

    def run(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        assert timeout_s is not None
        if command[-1] == "--help":
            return self.help_text
        if command[0] == "mount":
            self.mounts.append(tuple(command))
            return self.mounted
        return FINE


def installed(root: Path) -> Path:
    write_program(root)
    (root / "usr/bin/nvidia-smi").touch()
    return root


def test_the_daemon_of_a_driver_on_the_host_runs_in_its_root(short_path: Path) -> None:
    root, folder, programs = installed(short_path / "host"), short_path / "mps", Programs()
    start = prepare(root, short_path / "driver", folder, programs.run)
    assert start.command == ("chroot", str(root), "nvidia-cuda-mps-control", "-f", "-multiuser-server")
    assert start.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
    assert (folder / "pipe").stat().st_mode & 0o777 == 0o755, "containers of all users reach the socket"
    assert not programs.mounts


def test_the_daemon_of_a_driver_container_has_its_folder_there(short_path: Path) -> None:
    root, folder, programs = installed(short_path / "driver"), short_path / "mps", Programs(HELP)
    start = prepare(short_path / "host", root, folder, programs.run)
    assert start.command == ("chroot", str(root), "nvidia-cuda-mps-control", "-f")
    assert programs.mounts == [("mount", "--bind", str(folder), f"{root}{folder}")]
    assert (root / folder.relative_to("/")).is_dir()


def test_a_folder_that_cannot_be_mounted_starts_no_daemon(short_path: Path) -> None:
    programs = Programs(mounted=Ended(32, "", "mount: permission denied"))
    with pytest.raises(GpuvirtError, match=r"can't be mounted at .*: mount: permission denied"):
        prepare(short_path / "host", installed(short_path / "driver"), short_path / "mps", programs.run)


async def test_a_second_daemon_does_not_take_the_sockets_of_the_first(short_path: Path) -> None:
    root, daemon = installed(short_path / "host"), MpsDaemon(short_path / "mps/pipe")
    async with await daemon.start():
        with pytest.raises(NotReadyError, match=r"an MPS daemon already serves .*; stop it with gpuvirt mps quit"):
            await ThreadWorker("programs").run(
                lambda: prepare(root, short_path / "driver", short_path / "mps", Programs().run),
                name="the start of a daemon",
                timeout_s=30.0,
            )


def test_a_driver_without_mps_says_so(short_path: Path) -> None:
    root = installed(short_path / "host")
    (root / "usr/bin/nvidia-cuda-mps-control").unlink()
    with pytest.raises(NotReadyError, match=r"no nvidia-cuda-mps-control in .*; it comes with NVIDIA's driver"):
        prepare(root, short_path / "driver", short_path / "mps", Programs().run)


def test_a_daemon_that_is_away_is_named(short_path: Path) -> None:
    write_program(short_path)
    with pytest.raises(ToolError, match="ended with 1: Cannot find MPS control daemon process"):
        MpsControl((short_path,), short_path / "pipe").ask((QUIT,))
    with pytest.raises(ToolMissingError, match="no nvidia-cuda-mps-control in"):
        MpsControl((short_path / "a", short_path / "b"), short_path / "pipe").ask((QUIT,))


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    roots = ("--system-root", str(tmp_path), "--driver-root", str(tmp_path))
    done = ran("mps", "run", *roots)
    assert done.returncode == 1
    assert "no nvidia-smi on the host" in done.stderr
    done = ran("mps", "quit", *roots)
    assert done.returncode == 1
    assert "no nvidia-cuda-mps-control in" in done.stderr
