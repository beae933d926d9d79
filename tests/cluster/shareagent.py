"""The agent's part for shared GPUs as a process of the real node: `python -m tests.cluster.shareagent FOLDER ...`.

It has the plugin of units, the records, the CDI specs and the client of the API server, as the agent has; the test
chooses the GPUs.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path

from lab.cluster import settings
from lab.cluster.cluster import KUBELET_ROOT
from msgspec.structs import replace

from gpuvirt.agent.cluster.clusterside import ClusterSide
from gpuvirt.agent.kubelet.units import RecordedUnits, UnitOffer
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.shares import limitfiles, sharefiles
from gpuvirt.agent.shares.limitfiles import DriverLimits, LimitFiles, MpsLimits
from gpuvirt.agent.shares.nodeshares import stored_shares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.cli.parameters.apiserver import demanded_credentials
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.desired.settings import Enforcement, ShareSettings
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt.model.shares.node.driverlimit import PROGRAM
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.paths import HostRoots, KubeletPaths
from gpuvirt.tasks import until_stopped
from tests.agent.shares.opengpus import OpenGpus, decide, decide_when_observed
from tests.cluster.apilab import Listener
from tests.cluster.drivernode import LIBRARY, cgroups

log = logging.getLogger(__name__)


MEMORY_MIB = 16_384


async def run(folder: Path, cdi: Path, kubeconfig: Path, gpus: dict[str, int], limited_by: str) -> None:
    """Share GPUs until SIGTERM: without limits, by a library, by a driver in a folder, or by its MPS daemon."""
    kubelet, by = KubeletPaths(KUBELET_ROOT), Path(limited_by or "/")
    enforcement = Enforcement.NONE
    if limited_by:
        enforcement = Enforcement.DRIVER if (by / LIBRARY).exists() else Enforcement.MPS
        enforcement = Enforcement.HAMI_CORE if by.suffix == ".so" else enforcement
    limits = LimitFiles(by, Path("/"), folder / limitfiles.FILE)
    records, files = folder / sharefiles.FILE, SpecFiles(cdi, (cdi,))
    shares = stored_shares(records, files, ThreadWorker("records"), ShareSettings(enforcement=enforcement), limits)
    driver = DriverLimits(folder / PROGRAM, by / PROGRAM, cgroups())
    shares = replace(shares, mps=MpsLimits((by,), by / "pipe"), driver=driver)
    memory = {GpuId(gpu): MEMORY_MIB for gpu in gpus}
    capacity = {GpuId(gpu): Units(units) for gpu, units in gpus.items()}
    sharing = NodeSharing(capacity, memory_mib=memory, enforcement=enforcement)
    shares.follow(shares.state.get().with_published(sharing))
    recorded = RecordedUnits(kubelet, shares.resource)
    kernel = RealKernel(HostRoots.under(Path("/")))
    accounts = Accounts(recorded.read, lambda pods: read_running_pods(kernel, pods))
    on = Dependencies(shares, RealClock(), ThreadWorker("specs"), accounts, OpenGpus(), lambda: decide(shares))
    offer = UnitOffer(on, kubelet, Intervals(), lambda _, state: log.info("%s", state))
    side = ClusterSide(demanded_credentials(kubeconfig), NodeName(settings.NODE), None, gpu_nodes=False)
    async with asyncio.TaskGroup() as group:
        group.create_task(side.run(Listener(shares=shares), on.clock))
        group.create_task(offer.run())
        group.create_task(decide_when_observed(shares))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    state, specs, config, capacity, limited_by = sys.argv[1:]
    asyncio.run(until_stopped(run(Path(state), Path(specs), Path(config), json.loads(capacity), limited_by)))
