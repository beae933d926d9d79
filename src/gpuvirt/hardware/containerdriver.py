"""Whether NVIDIA's driver for containers works on this host, and where it is: installed on it, or in a container.

Contract: NVIDIA's validator. A driver that the host has itself goes before one in a container. One in a container
counts only once that has written that it is up: its nvidia-smi is there while the driver is still being built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.errors import GpuvirtError
from gpuvirt.hardware.tools import HostTools, Run, ToolError, ToolMissingError, is_there, run_program
from gpuvirt.paths import HostPath

SEEN_HOST, SEEN_DRIVER = "/host", "/driver-root"
"""Where the containers of NVIDIA's operands see the host's root, and the driver's."""


class NotReadyError(GpuvirtError):
    """Something that a node for containers needs is not as it should be; the text says what, and where."""


@dataclass(frozen=True, slots=True)
class DriverRoots:
    """Where a driver may be."""

    system: Path
    """The host's root, as this process sees it."""
    driver: Path
    """The root of the driver's container, as this process sees it."""
    driver_on_host: HostPath
    """The same as the host calls it."""
    started: Path | None
    """The file by which the driver's container says that it is up; None where somebody else runs the driver."""


@dataclass(frozen=True, slots=True)
class FoundDriver:
    """A driver that works."""

    root: HostPath
    """As the host calls it; `/`: the host has it itself."""
    has_nodes: bool
    """Whether its root has the nodes of GPUs in a `/dev` of its own."""

    @property
    def is_the_hosts(self) -> bool:
        """Whether the host has it itself."""
        return self.root == "/"

    @property
    def lines(self) -> str:
        """What NVIDIA's operands are told of it: variables of a shell, one a line."""
        own_nodes = self.has_nodes and not self.is_the_hosts
        told = {
            "IS_HOST_DRIVER": str(self.is_the_hosts).lower(),
            "NVIDIA_DRIVER_ROOT": self.root,
            "DRIVER_ROOT_CTR_PATH": SEEN_HOST if self.is_the_hosts else SEEN_DRIVER,
            "NVIDIA_DEV_ROOT": self.root if own_nodes else "/",
            "DEV_ROOT_CTR_PATH": SEEN_DRIVER if own_nodes else SEEN_HOST,
        }
        return "".join(f"{name}={value}\n" for name, value in told.items())


def find_driver(roots: DriverRoots, run: Run = run_program) -> FoundDriver:
    """Return the driver that works; raise NotReadyError."""
    try:
        HostTools(roots.system, run=run).nvidia_smi("-L")
    except ToolMissingError:
        pass
    except ToolError as error:
        raise NotReadyError(f"the host has a driver of its own, which does not work: {error}") from error
    else:
        return FoundDriver(HostPath("/"), has_nodes=True)
    if roots.started is not None and not roots.started.exists():
        raise NotReadyError(
            f"no {roots.started}: the driver's container is not up yet; kubectl logs says how far it is"
        )
    try:
        HostTools(roots.driver, run=run).nvidia_smi("-L")
    except ToolMissingError as error:
        raise NotReadyError(
            f"no driver: no nvidia-smi on the host, nor in {roots.driver_on_host}; install NVIDIA's driver on the host,"
            " or have the ClusterPolicy deploy it: driver.enabled"
        ) from error
    except ToolError as error:
        raise NotReadyError(f"the driver in {roots.driver_on_host} does not work: {error}") from error
    return FoundDriver(roots.driver_on_host, has_nodes=(roots.driver / "dev").is_dir())


def check_toolkit(run: Run = run_program, has: Callable[[Path], bool] = is_there) -> None:
    """Raise NotReadyError where this container was not given GPUs by the container toolkit, as others would be."""
    try:
        HostTools(Path("/"), run=run, has=has).nvidia_smi("-L")
    except ToolMissingError as error:
        raise NotReadyError(
            "no nvidia-smi in this container: its runtime has given it no GPU; look at the pod's RuntimeClass, and at"
            " what the container toolkit's pod says on this node"
        ) from error
    except ToolError as error:
        raise NotReadyError(f"this container was given GPUs that it can't use: {error}") from error
