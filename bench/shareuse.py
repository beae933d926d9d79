"""Measures how long the agent reads the memory that 64 containers with limits use.

.venv/bin/python -m bench.shareuse
"""

import os
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from tests.agent.shares.memoryregions import region

from bench.results import Results
from gpuvirt.agent.shares.memoryuse import read_use, read_uses
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.paths import HostRoots

CONTAINERS, TIMES = 64, 50


def main() -> None:
    """Measure, and print the table."""
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        proc = Path(folder)
        for pid in range(CONTAINERS):
            inner = proc / f"{pid}/root/usr/local/gpuvirt/region"
            inner.mkdir(parents=True)
            (inner / "memory").write_bytes(region(*range(8)))
        took_s = []
        for _ in range(TIMES):
            began_s = perf_counter()
            for pid in range(CONTAINERS):
                read_use(proc, pid)
            took_s.append(perf_counter() - began_s)
        results.add("gpuvirt", f"the regions of {CONTAINERS} containers, p50, ms", sorted(took_s)[TIMES // 2] * 1000)
    processes = sum(path.name.isdigit() for path in Path("/proc").iterdir())
    pods = [PodUid(f"{number}a5c31f2-0000") for number in range(CONTAINERS)]
    kernel = RealKernel(HostRoots.under(Path("/")))
    began_s = process_time()
    for _ in range(TIMES):
        read_uses(kernel, Path("/proc"), pods)
    what = f"... their processes among {processes}, processor time, ms"
    results.add("gpuvirt", what, (process_time() - began_s) / TIMES * 1000)
    print(f"load {os.getloadavg()[1]:.1f}\n{results.table(('gpuvirt',))}")


if __name__ == "__main__":
    main()
