"""The limit of a share by NVIDIA's Multi-Process Service: a container's variables and mounts, and the daemon's answers.

Each process of a container is a client of the node's daemon, with the limits of its own environment. Contract: NVIDIA's
MPS documentation (docs.nvidia.com/deploy/mps), and what driver 580.159.04 did on an H200: a limit of memory by a GPU's
UUID holds, a client needs one socket of the daemon, and nothing of /dev/shm is shared.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from gpuvirt.facts.mps import PIPE_DIRECTORY
from gpuvirt.model.shares.node.records import ShareLimit
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.plain import Plain

PIPES = "/usr/local/gpuvirt/mps"
"""The folder with the daemon's socket in the container."""
SOCKET = "control"
"""The socket of clients. A container does not get `control_privileged`, by which root can end or change the daemon."""
THREADS, MEMORY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VARIABLES = frozenset({PIPE_DIRECTORY, THREADS, MEMORY})
MOST_CLIENTS = 48
"""Of one GPU since Volta; the 49th gets CUDA error 808. An older GPU has 16."""
PERCENTAGE, CLIENTS = "get_default_active_thread_percentage", "ps"
QUESTIONS = (PERCENTAGE, CLIENTS)
"""The commands of which `parse` understands the answers."""
_NO_LIST = 'Unknown command "ps"'
_MOUNTED: list[Plain] = ["ro", "nosuid", "nodev", "noexec", "bind"]
_GPU_COLUMN = 3


class MpsDaemonState(msgspec.Struct, frozen=True):
    """The state of a node's daemon, by its own answers."""

    clients: Mapping[str, int] | None
    """The processes of each GPU, by the beginning of its UUID; None where the daemon is too old to list them."""

    def clients_of(self, gpu: GpuId) -> int:
        """Return how many processes use a GPU by the daemon, as far as it says so."""
        return sum(number for beginning, number in (self.clients or {}).items() if gpu.startswith(beginning))


def variables(limit: ShareLimit, gpu: GpuId) -> Mapping[str, str]:
    """Return the variables of a container with a limit; HAMi-core and the driver limit its processes together.

    The UUID names the GPU, since variables of a pod can change the order of indices.
    """
    memory = {} if limit.by.has_library or limit.by.has_driver else {MEMORY: f"{gpu}={limit.memory_mib}M"}
    return {PIPE_DIRECTORY: PIPES, THREADS: str(limit.compute_percent), **memory}


def mounts(pipes: str) -> Sequence[Plain]:
    """Return the mounts of a container with a limit; `pipes` is the folder of the daemon's sockets on the host."""
    return [{"hostPath": f"{pipes}/{SOCKET}", "containerPath": f"{PIPES}/{SOCKET}", "options": _MOUNTED}]


def parse(text: str) -> MpsDaemonState | None:
    """Return the daemon's state by its answers to QUESTIONS, None where they are not those of a daemon that serves.

    The first line is a number, `100.0`. A row of `ps` has six columns, the fourth is the beginning of the GPU's UUID:
    `1398 1 1401 GPU-bd5cfcb0-bb78-15f9 4026531836 /tmp/train`. Without clients there is no row, or `Server not found`.
    """
    first, *others = text.splitlines() or [""]
    try:
        float(first)
    except ValueError:
        return None
    if _NO_LIST in others:
        return MpsDaemonState(None)
    rows = (line.split() for line in others)
    return MpsDaemonState(Counter(row[_GPU_COLUMN] for row in rows if len(row) > _GPU_COLUMN and row[0].isdecimal()))
