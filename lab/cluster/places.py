"""The places of the lab's clusters on the computer: clusters of two places run at the same time."""

from dataclasses import dataclass, replace
from ipaddress import ip_interface


@dataclass(frozen=True, slots=True)
class Place:
    """The folder, the networks and the ports that one cluster has for itself."""

    folder: str
    """The name of its folder below the labs' folder."""
    bridge: str
    address: str
    """Of the bridge. The API server listens there, so that pods reach it without leaving the computer."""
    port: int
    etcd_port: int
    """For clients; the next port is for peers."""
    services: str

    @property
    def network(self) -> str:
        """The bridge's network."""
        return str(ip_interface(f"{self.address}/16").network)

    @property
    def etcd(self) -> str:
        """Where etcd serves its clients."""
        return f"http://127.0.0.1:{self.etcd_port}"


REAL = Place("cluster", "gvlab0", "10.88.0.1", 16443, 12379, "10.89.0.0/24")
"""Of the cluster with a kubelet and containers."""
SECOND = replace(REAL, folder="secondcluster")
"""Of another one, which the script `second-computer` keeps apart: it alone has what exists once on a computer."""
PLAYED = Place("controlplane", "gvlab1", "10.90.0.1", 17443, 13379, "10.91.0.0/24")
"""Of the cluster whose node is an object that kwok plays."""
