"""Finds NVIDIA's driver for containers, which is installed on the host or runs in a driver container, and checks it.

Contract: NVIDIA's validator. A driver on the host takes precedence over one in a container. A driver container counts
only after it has written its file: its nvidia-smi exists while the driver is still being built.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.hardware.access.tools import HostTools, Run, ToolError, ToolMissingError, exists, run_program
from gpuvirt.paths import HostPath

SEEN_HOST, SEEN_DRIVER = "/host", "/driver-root"
"""Where the containers of NVIDIA's operands mount the root of the host and the root of the driver container."""


class NotReadyError(GpuvirtError):
    """A node is not ready for containers with GPUs; the text names the problem and its place."""


class DriverRoots(msgspec.Struct, frozen=True):
    """The folders in which a driver may be installed."""

    system: Path
    """The host's root, as this process sees it."""
    driver: Path
    """The root of the driver's container, as this process sees it."""
    driver_on_host: HostPath
    """The path of the same folder on the host."""
    started: Path | None
    """The file that the driver container writes when its driver runs; None where another program manages the driver."""


class FoundDriver(msgspec.Struct, frozen=True):
    """A working driver."""

    root: HostPath
    """A path on the host; `/` for a driver that is installed on the host."""
    has_nodes: bool
    """Whether the root has its own `/dev` with the device nodes of the GPUs."""

    @property
    def is_on_host(self) -> bool:
        """Whether the driver is installed on the host."""
        return self.root == "/"

    @property
    def lines(self) -> str:
        """The shell variables that NVIDIA's operands read, one per line."""
        own_nodes = self.has_nodes and not self.is_on_host
        variables = {
            "IS_HOST_DRIVER": str(self.is_on_host).lower(),
            "NVIDIA_DRIVER_ROOT": self.root,
            "DRIVER_ROOT_CTR_PATH": SEEN_HOST if self.is_on_host else SEEN_DRIVER,
            "NVIDIA_DEV_ROOT": self.root if own_nodes else "/",
            "DEV_ROOT_CTR_PATH": SEEN_DRIVER if own_nodes else SEEN_HOST,
        }
        return "".join(f"{name}={value}\n" for name, value in variables.items())


def find_driver(roots: DriverRoots, run: Run = run_program) -> FoundDriver:
    """Return the working driver; raise NotReadyError where there is none."""
    try:
        HostTools(roots.system, run=run).nvidia_smi("-L")
    except ToolMissingError:
        pass
    except ToolError as error:
        raise NotReadyError(f"the driver that is installed on the host does not work: {error}") from error
    else:
        return FoundDriver(HostPath("/"), has_nodes=True)
    if roots.started is not None and not roots.started.exists():
        raise NotReadyError(
            f"no {roots.started}: the driver container is not ready yet; its progress is in kubectl logs"
        )
    try:
        HostTools(roots.driver, run=run).nvidia_smi("-L")
    except ToolMissingError as error:
        raise NotReadyError(
            f"no driver: no nvidia-smi on the host or in {roots.driver_on_host}; install NVIDIA's driver on the host,"
            " or set driver.enabled in the ClusterPolicy"
        ) from error
    except ToolError as error:
        raise NotReadyError(f"the driver in {roots.driver_on_host} does not work: {error}") from error
    return FoundDriver(roots.driver_on_host, has_nodes=(roots.driver / "dev").is_dir())


def check_toolkit(run: Run = run_program, has: Callable[[Path], bool] = exists) -> None:
    """Raise NotReadyError unless the container toolkit has given GPUs to this container, as to any other."""
    try:
        HostTools(Path("/"), run=run, has=has).nvidia_smi("-L")
    except ToolMissingError as error:
        raise NotReadyError(
            "no nvidia-smi in this container: its runtime has given it no GPU; check the pod's RuntimeClass and the log"
            " of the container toolkit's pod on this node"
        ) from error
    except ToolError as error:
        raise NotReadyError(f"the GPUs of this container do not work: {error}") from error
