"""NVIDIA's container toolkit on the node: a CDI spec of the mounted host's GPUs, where containerd finds it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lab.cluster import toolkit

from tests.cluster.clusterlab import LabNode


@contextmanager
def nvidias_toolkit(node: LabNode) -> Iterator[Sequence[str]]:
    """Write the spec of the mounted host's GPUs; return their UUIDs in the order of their device nodes."""
    gpus = toolkit.gpus(node.host)
    with node.cdi_folder() as folder:
        toolkit.write_spec(folder, gpus)
        yield [gpus[minor] for minor in sorted(gpus)]
