"""Whether containers can be limited by the node's MPS daemon now: it is asked before each of them starts."""

from pathlib import Path

import msgspec

from gpuvirt.agent.shares.refusals import ShareRefusedError
from gpuvirt.facts.mps import FOLDER, PIPES
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.model.reasons import sharing
from gpuvirt.model.reasons.sharing import NoLimit
from gpuvirt.model.shares.node import mps
from gpuvirt.model.shares.placement import GpuId


class MpsLimits(msgspec.Struct, frozen=True):
    """The daemon of the node."""

    roots: tuple[Path, ...]
    """The roots in which NVIDIA's driver may be installed, in the order of precedence."""
    pipes: Path
    """The folder of the daemon's sockets, with the same path for the agent and on the host."""

    def ensure(self, gpu: GpuId) -> str:
        """Return the folder of the daemon's sockets; raise ShareRefusedError where a client would run without limits.

        A process that finds no daemon runs without it, and so without its limits (seen with driver 580.159.04).
        """
        from gpuvirt.hardware.programs.mpscontrol import MpsControl  # noqa: PLC0415  other agents do without

        pipes = self.pipes
        try:
            daemon = mps.parse(MpsControl(self.roots, pipes).ask(mps.QUESTIONS))
        except ToolError as error:
            raise ShareRefusedError(sharing.limit_not_possible(pipes, NoLimit.DAEMON, str(error))) from error
        if daemon is None:
            raise ShareRefusedError(
                sharing.limit_not_possible(pipes, NoLimit.DAEMON, f"it did not answer {mps.PERCENTAGE}")
            )
        if (clients := daemon.clients_of(gpu)) >= mps.MOST_CLIENTS:
            raise ShareRefusedError(sharing.limit_not_possible(gpu, NoLimit.CLIENTS, f"ps: {clients} clients"))
        return str(pipes)


NO_DAEMON = MpsLimits((), Path("/run/gpuvirt") / FOLDER / PIPES)
"""The `MpsLimits` of an agent that limits no shares."""
