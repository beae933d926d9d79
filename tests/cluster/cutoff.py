"""A network namespace on the pods' bridge, whose packets to and from the API server can be dropped."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lab.cluster.settings import BRIDGE, PORT

NAMESPACE = "gvcut"
ADDRESS = "10.88.200.1"
_TABLE = ("inet", "gvcut")
_RULES = f"""
table inet gvcut {{
  chain in {{ type filter hook prerouting priority -300; ip saddr {ADDRESS} tcp dport {PORT} drop; }}
  chain out {{ type filter hook output priority -300; ip daddr {ADDRESS} tcp sport {PORT} drop; }}
}}
"""


class CutOff:
    """The network of one program, which is whole until it is cut."""

    address = ADDRESS

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs in this network."""
        return ["ip", "netns", "exec", NAMESPACE, *command]

    def cut(self) -> None:
        """Drop all packets between this network and the API server."""
        _run("nft", "-f", "-", given=_RULES)

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
        lines = _run(*self.command(["ss", "-Htan", f"dport = :{PORT}"])).splitlines()
        return [line.split() for line in lines if not line.startswith("TIME-WAIT")]


@contextmanager
def cut_off_network() -> Iterator[CutOff]:
    """Create the network, and remove it in the end."""
    found = CutOff()
    _clear(found)
    _run("ip", "netns", "add", NAMESPACE)
    try:
        _run("ip", "link", "add", "gvcut0", "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
        _run("ip", "link", "set", "gvcut0", "master", BRIDGE, "up")
        _run(*found.command(["ip", "address", "add", f"{ADDRESS}/16", "dev", "eth0"]))
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
