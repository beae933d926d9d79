"""The facts about a kubelet's folder for `gpuvirt doctor`: what can't be read is unread, and never absent."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate.gate import plugin_gates
from gpuvirt.agent.kubelet.survey import read_kubelet
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.setup import KubeletConfig
from gpuvirt.paths import HostPath, KubeletPaths


@pytest.fixture
def paths(short_path: Path) -> KubeletPaths:
    found = KubeletPaths(short_path)
    found.device_plugins.mkdir()
    return found


def test_the_facts_of_a_kubelets_folder(paths: KubeletPaths) -> None:
    empty = read_kubelet(paths)
    assert (empty.listens, empty.config, empty.counted, empty.offers_without_gate) == (False, None, None, False)
    (paths.root / "config.yaml").write_text("topologyManagerPolicy: restricted\n")
    data = {"PodDeviceEntries": None, "RegisteredDevices": {"a": ["x"]}}
    paths.checkpoint.write_text(json.dumps({"Data": data, "Checksum": 1}))
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(paths.registration_socket))
        kubelet.listen()
        found = read_kubelet(paths)
    assert isinstance(found.config, KubeletConfig)
    assert found.config.topology_manager_policy == "restricted"
    assert (found.listens, found.counted_by, found.counted) == (True, str(paths.checkpoint), {"a": frozenset({"x"})})


def test_a_kubelet_whose_socket_is_full_listens(paths: KubeletPaths) -> None:
    with socket.socket(socket.AF_UNIX) as kubelet, socket.socket(socket.AF_UNIX) as first:
        kubelet.bind(str(paths.registration_socket))
        kubelet.listen(0)
        first.connect(str(paths.registration_socket))
        assert read_kubelet(paths).listens is True


def test_a_socket_without_a_listener_is_a_trace_of_a_kubelet(paths: KubeletPaths) -> None:
    assert not read_kubelet(paths).ever_ran
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(paths.registration_socket))
    found = read_kubelet(paths)
    assert (found.listens, found.has_socket, found.ever_ran) == (False, True, True)


def test_a_socket_whose_path_is_too_long_is_absent_or_unread(tmp_path: Path) -> None:
    """A copy of a host may lie anywhere."""
    paths = KubeletPaths(tmp_path / ("x" * 100))
    paths.device_plugins.mkdir(parents=True)
    assert read_kubelet(paths).listens is False
    paths.registration_socket.touch()
    assert read_kubelet(paths).listens == Unread(HostPath(str(paths.registration_socket)), errno=errno.ENAMETOOLONG)


def test_an_agent_that_offers_devices_has_the_lock_on_the_folder(paths: KubeletPaths) -> None:
    fd = os.open(paths.device_plugins, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert read_kubelet(paths).offers_without_gate is True
    finally:
        os.close(fd)
    assert read_kubelet(paths).offers_without_gate is False


def loop(path: Path) -> Unread:
    """Make a link that no process can follow, and return what is known of its target."""
    path.symlink_to(path)
    return Unread(HostPath(str(path)), errno=errno.ELOOP)


def test_files_that_cannot_be_read_are_unread(paths: KubeletPaths) -> None:
    config, checkpoint = loop(paths.root / "config.yaml"), loop(paths.checkpoint)
    link = loop(paths.registration_socket)
    found = read_kubelet(paths)
    assert (found.config, found.counted, found.listens) == (config, checkpoint, link)


def test_damaged_files_are_unread(paths: KubeletPaths) -> None:
    for path in (config := paths.root / "config.yaml", paths.checkpoint):
        path.write_text("[")
    found = read_kubelet(paths)
    assert isinstance(found.config, Unread)
    assert isinstance(found.counted, Unread)
    assert (found.config.path, found.counted.path) == (str(config), str(paths.checkpoint))


def test_whether_an_agent_offers_devices_is_unread_with_its_folder(tmp_path: Path) -> None:
    paths = KubeletPaths(tmp_path)
    assert read_kubelet(paths).offers_without_gate is False
    folder = loop(paths.device_plugins)
    assert read_kubelet(paths).offers_without_gate == folder


def test_whether_an_agent_offers_devices_is_unread_with_the_gates(paths: KubeletPaths) -> None:
    gates = plugin_gates(paths.device_plugins)
    gates.parent.mkdir()
    gates.symlink_to(gates)
    found = read_kubelet(paths).offers_without_gate
    assert isinstance(found, Unread)
    assert str(found.path).startswith(str(gates))
