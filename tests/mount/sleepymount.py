"""A mounted simulated host that blocks writers of some files: it reads `sleep PATH` and `wake PATH` from its input."""

import sys
import threading
from pathlib import Path

from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.mounted.mounting import serve
from gpuvirt_sim.mounted.nodes import Nodes


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def obey(kernel: SimKernel) -> None:
    for line in sys.stdin:
        word, path = line.split()
        with kernel.blocking.condition:
            change = kernel.faults.asleep.add if word == "sleep" else kernel.faults.asleep.discard
            change(HostPath(path))
            kernel.blocking.condition.notify_all()
        say("done")


def main() -> None:
    kernel = build_host(load_host(sys.argv[1]), wait=True)
    threading.Thread(target=obey, args=(kernel,), daemon=True).start()
    serve(kernel, Path(sys.argv[2]), Nodes.FILES, lambda: say("ready"))


if __name__ == "__main__":
    main()
