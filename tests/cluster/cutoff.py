"""A network namespace on the pods' bridge, whose packets to and from the API server can be dropped."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address

from lab.cluster.places import Place

NAMESPACE = "gvcut"
_NUMBER = 200 * 256
"""Of its address on the bridge, from that of the API server on."""
_TABLE = ("inet", "gvcut")


def _rules(address: str, port: int) -> str:
    return f"""
table inet gvcut {{
  chain in {{ type filter hook prerouting priority -300; ip saddr {address} tcp dport {port} drop; }}
  chain out {{ type filter hook output priority -300; ip daddr {address} tcp sport {port} drop; }}
}}
"""


class CutOff:
    """The network of one program, which is whole until it is cut."""

    def __init__(self, place: Place) -> None:
        self._port = place.port
        self.address = str(ip_address(place.address) + _NUMBER)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs in this network."""
        return ["ip", "netns", "exec", NAMESPACE, *command]

    def cut(self) -> None:
        """Drop all packets between this network and the API server."""
        _run("nft", "-f", "-", given=_rules(self.address, self._port))

    def mend(self) -> None:
        """Let the packets pass again."""
        _run("nft", "delete", "table", *_TABLE, check=False)

    def connections(self) -> frozenset[str]:
        """Return the ports of the connections to the API server, with those that the kernel still closes."""
        return frozenset(line[3] for line in self._shown())

    def unsent(self) -> frozenset[str]:
        """Return the ports of those that have bytes which the API server has not acknowledged."""
        return frozenset(line[3] for line in self._shown() if line[0] != "SYN-SENT" and int(line[2]) > 0)

    def _shown(self) -> Sequence[Sequence[str]]:
        """Return the fields of each connection: its state, the bytes received and unsent, both addresses."""
        lines = _run(*self.command(["ss", "-Htan", f"dport = :{self._port}"])).splitlines()
        return [line.split() for line in lines if not line.startswith("TIME-WAIT")]


@contextmanager
def cut_off_network(place: Place) -> Iterator[CutOff]:
    """Create the network, and remove it in the end."""
    found = CutOff(place)
    _clear(found)
    _run("ip", "netns", "add", NAMESPACE)
    try:
        _run("ip", "link", "add", "gvcut0", "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
        _run("ip", "link", "set", "gvcut0", "master", place.bridge, "up")
        _run(*found.command(["ip", "address", "add", f"{found.address}/16", "dev", "eth0"]))
        for link in ("lo", "eth0"):
            _run(*found.command(["ip", "link", "set", link, "up"]))
        yield found
    finally:
        _clear(found)


def _clear(found: CutOff) -> None:
    found.mend()
    _run("ip", "netns", "delete", NAMESPACE, check=False)


def _run(*command: str, given: str | None = None, check: bool = True) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout
