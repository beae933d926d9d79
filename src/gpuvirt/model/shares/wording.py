"""The words for requests and pieces, the same in answers to the kube-scheduler, in events and for people."""

from gpuvirt.model.shares.demand import Demand


def requested_text(demand: Demand) -> str:
    """Return what a pod requests in words: `300 units`, `600 + 600 units`."""
    return f"{' + '.join(str(container.units) for container in demand.containers)} units"
