"""The agent stays registered if the kubelet starts late, restarts or drops a plugin, or its socket is taken."""

import asyncio
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.kubelet import sockets
from gpuvirt.agent.kubelet.plugins import DevicePlugin
from gpuvirt.agent.kubelet.registrar import Registrar, register
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.process import pages, run
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.offers.view import ResourceView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.client import PluginClient
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import running
from tests.agent.kubelet.givingkubelet import OpenAllocator
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, agent_on, cluster_on, options_for, until

A10 = "nvidia.com/GA102GL_A10"
SOCKET = "device-plugins/kubevirt-GA102GL_A10.sock"


def unregistered_codes(agent: Agent) -> list[ReasonCode]:
    return [
        resource.not_registered_because.code
        for resource in agent.views.get().resources
        if resource.not_registered_because
    ]


async def test_the_end_of_an_older_plugins_stream_ends_no_simulated_kubelet(short_path: Path) -> None:
    """It closes the connection of the new plugin, whose own stream then never began."""
    client = PluginClient(short_path / "new.sock")
    await client.close()
    async with running(short_path, CLOCK) as kubelet:
        await kubelet._follow(A10, client)
        assert kubelet.allocatable() == {}


async def test_the_agent_registers_with_a_kubelet_that_starts_later(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    (short_path / "device-plugins").mkdir()
    async with agent_on(options_for(kernel, short_path)) as agent:
        await until(lambda: unregistered_codes(agent) == [ReasonCode.KUBELET_AWAY])
        ready = pages(agent)["/readyz"]()
        assert ready.status == 503
        assert "KubeletAway" in ready.body
        async with running(short_path, CLOCK) as kubelet:
            await until(lambda: kubelet.allocatable() == {A10: 2})
            await until(lambda: pages(agent)["/readyz"]().status == 200)


async def test_an_agent_without_the_kubelets_folder_waits_for_it(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(options_for(kernel, short_path)))
        await CLOCK.sleep(0.02)
        async with running(short_path, CLOCK) as kubelet:
            await until(lambda: kubelet.allocatable() == {A10: 2})
            task.cancel()


async def restart(node: Cluster) -> None:
    before = dict(node.kubelet.allocatable())
    await node.kubelet.restart()
    assert set(node.kubelet.capacity().values()) == {0}, "the kubelet counts no device until its plugin has registered"
    await until(lambda: node.kubelet.allocatable() == before)


async def test_every_resource_is_registered_again_after_a_restart_of_the_kubelet(short_path: Path) -> None:
    async with cluster_on("8xA100", short_path) as node:
        for _ in range(3):
            await restart(node)
        assert node.kernel.writes == []


async def test_a_kubelet_that_restarts_is_not_awaited_by_checks_at_intervals(short_path: Path) -> None:
    """The end of its streams tells that it may be back at any moment."""
    kernel = build_host(load_host("2xA10"))
    options = options_for(kernel, short_path)
    never = replace(options, intervals=replace(options.intervals, kubelet_s=1e6))
    async with running(short_path, CLOCK) as kubelet, agent_on(never) as agent:
        node = Cluster(kernel, kubelet, agent)
        await node.until_registered()
        for _ in range(3):
            await restart(node)


async def test_a_kubelet_that_starts_after_the_agent_is_not_awaited_by_checks_at_intervals(short_path: Path) -> None:
    options = options_for(build_host(load_host("2xA10")), short_path)
    (short_path / "device-plugins").mkdir()
    with socket.socket(socket.AF_UNIX) as of_before_the_reboot:
        of_before_the_reboot.bind(str(options.kubelet.registration_socket))
    never = replace(options, intervals=replace(options.intervals, kubelet_s=1e6))
    async with agent_on(never) as agent:
        await until(lambda: unregistered_codes(agent) == [ReasonCode.KUBELET_AWAY])
        assert not agent.telemetry.registrations
        async with running(short_path, CLOCK) as kubelet:
            await until(lambda: kubelet.allocatable() == {A10: 2})


async def test_pods_keep_their_gpus_after_a_restart_of_the_kubelet(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        pod = await node.kubelet.run_pod("vm-a", Container("compute", {A10: 1}))
        await restart(node)
        assert node.kubelet.manager.held == pod.held
        other = await node.kubelet.run_pod("vm-b", Container("compute", {A10: 1}))
        assert set(pod.env().values()).isdisjoint(other.env().values())


async def test_a_resource_without_a_stream_is_registered_again(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        await node.kubelet.end_oldest_stream(A10)
        assert node.kubelet.allocatable() == {A10: 0}
        await until(lambda: node.kubelet.allocatable() == {A10: 2})
        assert node.kubelet.registrations == [A10, A10]


async def test_a_resource_is_registered_again_after_an_old_stream_ended_its_new_plugin(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        await register(node.kubelet.paths, ResourceName(A10), Path(SOCKET).name)
        await node.kubelet.end_oldest_stream(A10)
        assert node.kubelet.allocatable() == {A10: 0}, "the kubelet has dropped the plugin that has just registered"
        await until(lambda: node.kubelet.allocatable() == {A10: 2})


async def test_a_socket_that_another_program_deletes_is_created_again(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        (short_path / SOCKET).unlink()
        await until((short_path / SOCKET).exists)
        await until(lambda: node.kubelet.registrations == [A10, A10])
        await until(lambda: node.kubelet.allocatable() == {A10: 2})


async def test_a_socket_that_another_program_serves_is_not_replaced(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(short_path / SOCKET))
            other.listen()
            identity = sockets.identity(short_path / SOCKET)
            async with agent_on(options_for(kernel, short_path)) as agent:
                await until(lambda: unregistered_codes(agent) == [ReasonCode.SOCKET_TAKEN])
                assert sockets.identity(short_path / SOCKET) == identity
                assert kubelet.registrations == []
                other.close()
                await until(lambda: kubelet.allocatable() == {A10: 2})


async def test_a_stale_socket_is_replaced(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(short_path / SOCKET))
        async with agent_on(options_for(kernel, short_path)):
            await until(lambda: kubelet.allocatable() == {A10: 2})


async def test_a_file_that_is_no_socket_stays_and_is_reported(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet:
        (short_path / SOCKET).write_text("another program's")
        async with agent_on(options_for(kernel, short_path)) as agent:
            await until(lambda: unregistered_codes(agent) == [ReasonCode.SOCKET_TAKEN])
            assert (short_path / SOCKET).read_text() == "another program's"
            (short_path / SOCKET).unlink()
            await until(lambda: kubelet.allocatable() == {A10: 2})


async def test_the_end_of_an_agent_does_not_delete_another_programs_socket(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet:
        with socket.socket(socket.AF_UNIX) as other:
            async with agent_on(options_for(kernel, short_path)) as agent:
                await until(lambda: kubelet.allocatable() == {A10: 2})
                (short_path / SOCKET).unlink()
                other.bind(str(short_path / SOCKET))
                other.listen()
                await until(lambda: unregistered_codes(agent) == [ReasonCode.SOCKET_TAKEN])
            assert (short_path / SOCKET).exists()


async def test_a_failed_registration_is_tried_again(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    paths = KubeletPaths(short_path)
    paths.device_plugins.mkdir()
    # Whether a process reads from a socket of this type can't be told, so a kubelet may run.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unanswered:
        unanswered.bind(str(paths.registration_socket))
        async with agent_on(options_for(kernel, short_path)) as agent:
            await until(lambda: unregistered_codes(agent) == [ReasonCode.NOT_REGISTERED])
            assert agent.telemetry.registrations[A10, "failed"] >= 1
            paths.registration_socket.unlink()
            async with running(short_path, CLOCK) as kubelet:
                await until(lambda: kubelet.allocatable() == {A10: 2})


@pytest.mark.parametrize("target", ["gone", "kubevirt-X.sock", "a file", "a folder", "a stale socket"])
def test_a_link_to_no_listener_is_removed_and_its_target_stays(short_path: Path, target: str) -> None:
    (short_path / "a file").write_text("kept")
    (short_path / "a folder").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(short_path / "a stale socket"))
    link, before = short_path / "kubevirt-X.sock", sorted(short_path.iterdir())
    link.symlink_to(target)
    assert sockets.clear(link)
    assert sorted(short_path.iterdir()) == before


def test_a_socket_of_another_type_stays(short_path: Path) -> None:
    """Whether a process reads from it can't be told: a connection fails with EPROTOTYPE."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(short_path / "kubevirt-X.sock"))
        assert not sockets.clear(short_path / "kubevirt-X.sock")
        assert (short_path / "kubevirt-X.sock").is_socket()


def test_a_link_to_a_listener_stays(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "other"))
        listener.listen()
        (short_path / "kubevirt-X.sock").symlink_to("other")
        assert not sockets.clear(short_path / "kubevirt-X.sock")
        assert (short_path / "kubevirt-X.sock").is_symlink()


def test_sockets_have_the_names_that_other_programs_expect() -> None:
    folder = Path("/var/lib/kubelet/device-plugins")
    assert sockets.socket_path(folder, ResourceName(A10)).name == "kubevirt-GA102GL_A10.sock"
    assert sockets.socket_path(folder, ResourceName("amd.com/X")).name == "gpuvirt-amd.com-X.sock"


def test_a_socket_path_that_is_too_long_gets_a_stable_digest() -> None:
    folder = Path("/var/lib/kubelet/device-plugins")
    path = sockets.socket_path(folder, ResourceName("nvidia.com/" + "A" * 63))
    other_path = sockets.socket_path(folder, ResourceName("nvidia.com/" + "A" * 62 + "B"))
    assert len(str(path)) == len(str(other_path)) == 107
    assert path != other_path
    assert path == sockets.socket_path(folder, ResourceName("nvidia.com/" + "A" * 63))


async def test_a_socket_deleted_while_it_is_created_is_created_again(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet deletes all sockets of its folder when it starts, even a socket that is about to be renamed."""
    kernel, lost, rename = build_host(load_host("2xA10")), list[Path](), Path.rename

    def lose_the_first(path: Path, target: Path) -> Path:
        if path.name.startswith(".") and path.parent.name == "device-plugins" and not lost:
            lost.append(path)
            path.unlink()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", lose_the_first)
    async with running(short_path, CLOCK) as kubelet, agent_on(options_for(kernel, short_path)):
        await until(lambda: kubelet.allocatable() == {A10: 2})
    assert lost


def plugin_at(path: Path) -> DevicePlugin:
    """Return a plugin without devices."""
    allocator = OpenAllocator()
    return DevicePlugin(ResourceView(ResourceName(A10), ()), path, allocator, CLOCK, unknown_numa_is_node_0=False)


async def test_a_socket_that_cannot_be_made_fails_the_start(short_path: Path) -> None:
    """Without a folder for the socket, gRPC raises an error of its own."""
    plugin = plugin_at(short_path / "gone" / "kubevirt-x.sock")
    with pytest.raises(OSError, match=r"/gone/\.\w+: ") as failed:
        await plugin.start()
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert not plugin.serves


async def test_a_plugin_that_waits_for_nothing_is_checked_at_the_interval(short_path: Path) -> None:
    registrar = Registrar(KubeletPaths(short_path), CLOCK, Intervals(), lambda *_: None)
    registrar.add(plugin_at(short_path / "kubevirt-x.sock"))
    assert registrar._pause_s() > 0
