"""The options of `make bench-extender` that measure another extender beside ours."""

import argparse
import shlex

from lab.cache import locked
from lab.cluster.cluster import cluster

from bench.contenders import Contender
from bench.dialects import GPUVIRT, PEERS
from bench.peers import PARTS, Amounts, measured


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "another extender beside ours",
        "Both get the same nodes, pods and requests, one after the other, on a real API server and etcd (lab/cluster). "
        "Nodes and pods have the names of both: "
        "gpushare's aliyun.com/gpu-mem, or HAMi's hami.io/node-nvidia-register and nvidia.com/gpumem.",
    )
    group.add_argument("--peer-kind", choices=sorted(PEERS), help="the spelling that the other extender reads")
    group.add_argument("--peer-command", metavar="CMD", help="starts it; its KUBECONFIG leads to the API server")
    group.add_argument("--bindings", type=int, default=1000, help="nodes, and pods that are bound, one on each")
    group.add_argument("--only", choices=PARTS, action="append", help="measure this part; may be repeated")
    group.add_argument("--within", type=float, default=20, metavar="S", help="send no request later, for each figure")


def beside_peer(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Measure both extenders, and return their table."""
    if not arguments.peer_command:
        parser.error("--peer-kind also needs --peer-command, which starts the extender with the KUBECONFIG of the run")
    dialect = PEERS[arguments.peer_kind]
    peer = Contender(dialect, arguments.peer or dialect.url, shlex.split(arguments.peer_command))
    amounts = Amounts(arguments.nodes, arguments.pods, arguments.rounds, arguments.bindings, arguments.within)
    lab = cluster()
    alone = lab.folder.with_name("cluster-alone")
    alone.mkdir(exist_ok=True)
    with locked(alone):
        try:
            return measured(lab, peer, amounts, arguments.only or PARTS).table([GPUVIRT.name, dialect.name])
        finally:
            lab.down()
