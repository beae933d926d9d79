"""Fixtures that many tests use."""

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from execnet import XSpec
from hypothesis import HealthCheck, settings
from lab.cluster.binaries import binaries
from lab.cluster.cluster import Cluster, cluster
from lab.cluster.helm import helm as built_helm
from lab.cluster.ourimage import build_images
from lab.cluster.secondcomputer import join_network
from lab.kernel.kit import Flavour
from xdist.remote import Producer

from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, Workers, running_node
from tests.checkedloop import CheckedLoop
from tests.cluster.chartlab import Install, chart_user
from tests.cluster.clusterlab import LabNode, lab_node
from tests.cluster.labnamespace import namespace_of
from tests.comparison import explain
from tests.contract.guesthost import GUESTS, Guests, elsewhere
from tests.contract.hosts import CdevHost, Host, MemoryHost, mounted
from tests.deploy.chart.helmchart import Helm
from tests.distribution import Groups, give_way, set_apart, workers
from tests.durations import seconds_by_folder
from tests.mount.mounting import detach_dead_mounts
from tests.pristine import clear
from tests.rings import RINGS
from tests.secondtry import write_failures
from tests.thoroughness import sized
from tests.web.certificates import Authority, Pair

# The duration of an example depends on the load of the computer.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")

ROOT = Path(__file__).parent.parent
RING_TIMEOUT_S = sized(3600, 600)
ImageBuild = Callable[[], Future[Mapping[str, Path]]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for a second try of failed tests."""
    parser.addoption("--failures-to", type=Path, help="the file that gets the failed tests, where nothing else failed")


def pytest_configure(config: pytest.Config) -> None:
    """Remove what an earlier run has left: dead mounts, and its failures."""
    if not hasattr(config, "workerinput"):
        detach_dead_mounts()
        if (file := config.getoption("--failures-to")) is not None:
            file.unlink(missing_ok=True)


def pytest_asyncio_loop_factories() -> Mapping[str, type[CheckedLoop]]:
    """Run each asynchronous test on a loop of its own."""
    return {"checked": CheckedLoop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of rings that can't run here, and raise the timeout of the others: their peers can be slow.

    In quick runs each test of both real kernels runs on one of them: both together take a quarter of CI's time.
    """
    if left := set(elsewhere(items)):
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    missing = {name: ring.missing() for name, ring in RINGS.items()}
    for item in items:
        for mark in item.iter_markers("ring"):
            item.add_marker(pytest.mark.timeout(RING_TIMEOUT_S, func_only=True))
            if (why := missing[mark.args[0]]) is not None:
                item.add_marker(pytest.mark.skip(reason=f"ring {mark.args[0]}: {why}"))


@pytest.fixture(autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    """Build the programs of a test's ring before the test: its timeout does not count fixtures."""
    for mark in request.node.iter_markers("ring"):
        for build in RINGS[mark.args[0]].builds:
            _outcome(build).result()


@cache
def _outcome(build: Callable[[], object]) -> Future[object]:
    """Return what a build has returned or raised: a test does not repeat a build that has failed in another one."""
    with ThreadPoolExecutor(1, initializer=join_network) as builder:
        return builder.submit(build)


@pytest.fixture(autouse=True)
def _logs_again() -> Iterator[None]:
    """Enable logging again: the demo, which runs in this process, disables it."""
    yield
    logging.disable(logging.NOTSET)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped, the reason, and how to make it run; with durations, also those of folders."""
    if terminalreporter.config.getoption("durations"):
        terminalreporter.section("seconds by folder")
        for folder, taken_s, tests in seconds_by_folder(chain.from_iterable(terminalreporter.stats.values())):
            terminalreporter.line(f"{taken_s:8.0f}s {folder} ({tests} tests)")
    skipped = terminalreporter.getreports("skipped")
    if not skipped:
        return
    places = (report.longrepr for report in skipped if isinstance(report.longrepr, tuple))
    reasons = Counter(reason.removeprefix("Skipped: ") for _, _, reason in places)
    terminalreporter.section("not run here")
    for reason, count in sorted(reasons.items()):
        name = reason.removeprefix("ring ").partition(":")[0]
        terminalreporter.line(f"{count} tests: {reason}")
        if name in RINGS:
            terminalreporter.line(f"    they test {RINGS[name].what}; to run them: {RINGS[name].enable}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail where all tests must run and one was skipped; elsewhere, write which tests have failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # in a worker
        return
    file: Path | None = session.config.getoption("--failures-to")
    must_all_run = os.environ.get("CI") == "true"  # noqa: TID251  the convention of CI systems
    if must_all_run and reporter.getreports("skipped"):
        session.exitstatus = max(exitstatus, pytest.ExitCode.TESTS_FAILED)
    elif file is not None and exitstatus == pytest.ExitCode.TESTS_FAILED:
        write_failures(file, [*reporter.getreports("failed"), *reporter.getreports("error")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    """Choose the scheduler that distributes tests over the workers."""
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """Choose the number of workers for `-n auto`."""
    cpus = yield
    return workers(cpus) if config.getoption("dist") == "loadgroup" else cpus


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Choose where workers run."""
    set_apart(config, specs)


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    """Name the fields that differ between msgspec Structs, of which pytest knows nothing."""
    return explain(left, right, config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)) if op == "==" else None


def pytest_runtest_logstart(nodeid: str) -> None:
    """Share the CPUs between workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # noqa: TID251  xdist's
        give_way(nodeid)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a path short enough for the names of sockets."""
    # A server that is still ending may write there meanwhile.
    with TemporaryDirectory(prefix="gv-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that signs the certificates of servers and clients."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def server(authority: Authority) -> Pair:
    """The certificate of a server on 127.0.0.1."""
    return authority.server("server", alternatives="IP:127.0.0.1")


@pytest.fixture
def simulated() -> Callable[[str], SimKernel]:
    """Build a simulated host by its name."""
    return lambda name: build_host(load_host(name), where=name)


@pytest.fixture
async def two_a10(tmp_path: Path) -> AsyncIterator[SimNode]:
    """A running agent on two A10 that are bound to vfio-pci."""
    async with running_node(build_host(load_host("2xA10")), tmp_path, Settings()) as node:
        yield node


@pytest.fixture(scope="session")
def guests() -> Iterator[Guests]:
    """The guest of this run, booted at its first use."""
    with Guests() as guests:
        yield guests


@pytest.fixture(params=["memory", pytest.param("mount", marks=pytest.mark.ring("mount")), *GUESTS])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """The host of the contract tests in its initial state: simulated in memory, mounted, and in two real kernels."""
    if request.param == "memory":
        yield MemoryHost()
    elif request.param.startswith("guest"):
        guests: Guests = request.getfixturevalue("guests")
        with guests.fresh(Flavour.GROUPS if request.param == "guest" else Flavour.BOTH) as guest:
            yield guest
    else:
        folder = tmp_path / "mount"
        folder.mkdir()
        with mounted(folder) as host:
            yield host


ONE_GUEST = pytest.param("guest", marks=[pytest.mark.ring("kernel"), pytest.mark.xdist_group("guest")])


@pytest.fixture(params=["memory", ONE_GUEST])
def cdevs(request: pytest.FixtureRequest) -> Iterator[CdevHost]:
    """The same host with nodes of devices, and none of groups (VFIO_GROUP=n)."""
    if request.param == "memory":
        yield MemoryHost(iommufd=True, group_nodes=False)
        return
    guests: Guests = request.getfixturevalue("guests")
    with guests.fresh(Flavour.CDEVS) as guest:
        yield guest


@pytest.fixture(params=["memory", ONE_GUEST])
def both(request: pytest.FixtureRequest) -> Iterator[CdevHost]:
    """The same host with nodes of devices and of groups, as in most distributions."""
    if request.param == "memory":
        yield MemoryHost(iommufd=True)
        return
    guests: Guests = request.getfixturevalue("guests")
    with guests.fresh(Flavour.BOTH) as guest:
        yield guest


@pytest.fixture(scope="session")
def image_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBuild]:
    """The build of this tree's images, which begins with the first call."""
    with ThreadPoolExecutor(1, initializer=join_network) as builder:
        yield cache(lambda: builder.submit(build_images, ROOT, tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="session")
def running_lab(request: pytest.FixtureRequest, image_build: ImageBuild) -> Iterator[Cluster]:
    """A real Kubernetes node for all tests of a worker; a computer has one, so other runs wait for it."""
    _outcome(binaries).result()
    lab = cluster()
    with lab.reserved():
        lab.up()
        if any("images" in getattr(item, "fixturenames", ()) for item in request.session.items):
            image_build()  # beside tests that don't need them, and not before: the lab removes what the builder leaves
        try:
            yield lab
        finally:
            lab.down()


@pytest.fixture
def lab(running_lab: Cluster) -> Cluster:
    """The same node, without anything that an earlier test has left in its cluster."""
    clear(running_lab)
    return running_lab


@pytest.fixture(scope="session")
def images(image_build: ImageBuild) -> Mapping[str, Path]:
    """The images of this tree, built from its Dockerfile."""
    return image_build().result()


@pytest.fixture(scope="session")
def image(running_lab: Cluster, images: Mapping[str, Path]) -> None:
    """The same images, imported on the node."""
    for archive in images.values():
        running_lab.import_image(archive)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The helm command, built at its first use."""
    _outcome(built_helm).result()
    return Helm(built_helm())


@pytest.fixture
def node(lab: Cluster, request: pytest.FixtureRequest) -> Iterator[LabNode]:
    """The node with a namespace for this test, and without any device plugin."""
    with lab_node(lab, namespace_of(request.node.name)) as node:
        yield node


@pytest.fixture
def user(lab: Cluster, image: None) -> Iterator[Install]:  # noqa: ARG001
    """A user of the chart, in a cluster without gpuvirt."""
    with chart_user(lab) as user:
        yield user


@pytest.fixture(params=["inline", "paced"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with changes that happen at once, and with changes that yield at each kernel operation."""
    monkeypatch.setattr(Workers, "paced", request.param == "paced")
