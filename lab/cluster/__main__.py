"""`python -m lab.cluster up|down|shell|demo|build|base` starts, stops and prepares the lab."""

import argparse
import os
import subprocess
import sys
from dataclasses import replace

from lab.cache import cache_root
from lab.cluster import secondcomputer
from lab.cluster.baseimage import ImageError, base_image
from lab.cluster.cluster import cluster
from lab.cluster.controlplane import ClusterError
from lab.cluster.demo import demo
from lab.cluster.golang import BuildError
from lab.cluster.helm import helm
from lab.cluster.kwok import kwok
from lab.cluster.places import SECOND
from lab.cluster.playedcluster import played_cluster


def main() -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(prog="lab.cluster", description=__doc__)
    parser.add_argument("what", choices=("up", "down", "shell", "demo", "build", "base"))
    arguments = parser.parse_args()
    try:
        if arguments.what == "base":
            base_image()
            return 0
        lab = cluster()
        if arguments.what == "down":
            lab.down()
            if not secondcomputer.is_this():
                _end_clusters_of_tests()
            return 0
        charts = helm()
        if arguments.what == "build":
            kwok()
        if arguments.what == "demo":
            print(demo(lab))
            return 0
        if arguments.what in {"up", "shell"} and not lab.kubeconfig.exists():
            lab.up()
    except (BuildError, ClusterError, ImageError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    if arguments.what == "up":
        print(f"export KUBECONFIG={lab.kubeconfig} PATH={lab.binaries}:{charts.parent}:$PATH")
    if arguments.what == "shell":
        path = f"{lab.binaries}:{charts.parent}:{os.environ['PATH']}"
        print("kubectl get nodes; helm list; exit ends the shell; make lab-down ends the cluster")
        environment = os.environ | {"KUBECONFIG": str(lab.kubeconfig), "PATH": path}
        return subprocess.run([os.environ.get("SHELL", "/bin/sh")], env=environment, check=False).returncode
    return 0


def _end_clusters_of_tests() -> None:
    """End what killed runs have left; the demo's test runs beside others, which start and stop theirs themselves."""
    played, second = played_cluster(), replace(cluster(), folder=cache_root() / SECOND.folder, place=SECOND)
    if not played.is_reserved():
        played.down()
    if not second.is_reserved():
        if second.folder.exists():
            subprocess.run([secondcomputer.COMMAND, sys.executable, "-m", "lab.cluster", "down"], check=True)
        secondcomputer.remove_cgroups()


if __name__ == "__main__":
    sys.exit(main())
