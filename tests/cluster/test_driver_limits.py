"""Shares that NVIDIA's driver limits: the program by itself, and as the hook of containers on a real kubelet.

No GPU is here: a library stands in for NVML, and a program for CUDA, which gets memory by what that library has set.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.shares.limitfiles import DriverLimits
from gpuvirt.agent.shares.memoryuse import DriverReader
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.shares.node.driverlimit import LimitProgram
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.paths import HostRoots
from tests.cluster.clusterlab import LabNode
from tests.cluster.drivernode import Driver, cgroups
from tests.cluster.sharednode import A, B, Shared, shared_node

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

LIMIT = 4915 << 20
INIT = {"first": "once", "beside": "sidecar"}
"""How init containers run, by their names."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The stand-in of NVIDIA's driver."""
    return Driver(tmp_path_factory.mktemp("driver") / "nvidia")


@pytest.fixture
def answering(driver: Driver) -> Iterator[Driver]:
    """The driver, which answers as it should again after the test."""
    yield driver
    (driver.folder / "answer").unlink(missing_ok=True)


def installed(driver: Driver, folder: Path) -> LimitProgram:
    """Return the program with its C library in a folder."""
    edits: Fields = {"mounts": [{"hostPath": str(driver.library)}]}
    return DriverLimits(folder / "memory-limit", driver.program, cgroups()).ensure(A, edits)


@pytest.fixture
def program(driver: Driver, tmp_path: Path) -> LimitProgram:
    """The program with its C library in a folder."""
    return installed(driver, tmp_path)


@pytest.fixture
def contained() -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a cgroup of its own."""
    group = cgroups() / f"gpuvirt-{os.getpid()}"
    group.mkdir()
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        yield process
        process.kill()
    group.rmdir()


def hooked(
    program: LimitProgram, library: Path, state: str, hard: str = str(LIMIT), gpu: str = A
) -> "subprocess.CompletedProcess[str]":
    """Run the hook as a runtime does."""
    command = replace(program, library=str(library)).command("set", gpu, str(LIMIT), hard)
    return subprocess.run(command, input=state, env={}, capture_output=True, text=True, timeout=30, check=False)


def test_the_limit_is_set_and_read_back(
    answering: Driver, program: LimitProgram, contained: "subprocess.Popen[bytes]"
) -> None:
    state = json.dumps({"annotations": {"pid": 1, 'a "pid": 2': "{}"}, "id": "pid", "pid": contained.pid})
    for hard in (str(LIMIT), "max"):
        done = hooked(program, answering.library, state, hard)
        assert (done.returncode, done.stderr) == (0, "")
    (file,) = answering.folder.glob(f"{A}@*gpuvirt-{os.getpid()}")
    assert [int(text) for text in file.read_text().split()] == [LIMIT, (1 << 64) - 1, 0]
    got = program.command("get", A, f"/gpuvirt-{os.getpid()}", B, "/nowhere")
    assert subprocess.check_output(got, text=True) == "0\n? Not Supported\n"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("3", "nvmlDeviceSetMemoryLimits_v1 GPU-.*: Not Supported"),
        ("7", "nvmlDeviceSetMemoryLimits_v1 GPU-.*: Insufficient Size"),
        ("forget", "nvmlDeviceGetMemoryLimits_v1 GPU-.*: Not Supported"),
        ("halve", rf"the driver has the limits {LIMIT} and {LIMIT // 2}; expected {LIMIT} and {LIMIT}"),
    ],
)
def test_a_limit_that_does_not_hold_is_a_failure(
    answering: Driver, program: LimitProgram, contained: "subprocess.Popen[bytes]", answer: str, text: str
) -> None:
    for file in answering.folder.glob("GPU-*"):
        file.unlink()
    answering.answer(answer)
    done = hooked(program, answering.library, json.dumps({"pid": contained.pid}))
    assert done.returncode == 1
    assert re.search(text, done.stderr), done.stderr


def test_what_is_not_known_is_a_failure(
    driver: Driver, program: LimitProgram, contained: "subprocess.Popen[bytes]"
) -> None:
    state = json.dumps({"pid": contained.pid})
    old, library = driver.old(), driver.library
    ours = json.dumps({"pid": os.getpid()})
    for done, text in (
        (hooked(program, old, state), f"{old} has no nvmlDeviceSetMemoryLimits_v1: NVIDIA's driver is older than 615"),
        (hooked(program, driver.folder / "libnvidia-ml.so.1", state), "cannot open shared object file"),
        (hooked(program, library, "{}"), "names no process"),
        (hooked(program, library, '{"annotations": {"pid": 1}}'), "names no process"),
        (hooked(program, library, state, "4915m"), "4915m: expected bytes, or max"),
        (hooked(program, library, state, gpu="0"), "nvmlDeviceGetHandleByUUID 0: Not Found"),
        (hooked(program, library, ours), "no cgroup of its own (0::/)"),
        (hooked(replace(program, cgroups=driver.folder), library, state), "No such file or directory"),
    ):
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr


def pod(
    shared: Shared, driver: Driver, name: str, *containers: tuple[str, str, int, str], policy: str = "Never"
) -> None:
    """Create a pod: of each container the name, the GPU, the units, and the script."""
    made = [
        {"name": container, "units": units, "script": script} | ({"init": INIT[container]} if container in INIT else {})
        for container, _, units, script in containers
    ]
    manifest = dict(shared.pod(name, *made, gpu=A, policy=policy))
    metadata, spec = manifest["metadata"], manifest["spec"]
    assert isinstance(metadata, dict)
    assert isinstance(spec, dict)
    asked = {container: {gpu: units} for container, gpu, units, _ in containers}
    metadata["annotations"] = {"gpuvirt.io/shares": json.dumps({"containers": asked})}
    spec["volumes"] = [{"name": "driver", "hostPath": {"path": str(driver.folder)}}]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["volumeMounts"] = [{"name": "driver", "mountPath": str(driver.folder)}]
    shared.node.apply(manifest)


def test_containers_have_the_limits_of_their_shares(node: LabNode, answering: Driver, tmp_path: Path) -> None:
    driver = answering

    def get(gpu: str, times: int = 1) -> str:
        client = f"{driver.client} {gpu} {cgroups()}"
        return f"{' & '.join([client] * times)} & wait; echo end"

    def twice(gpu: str, name: str) -> str:
        """Return the script of a container that fails once, when the file `end` is there."""
        end, failed = driver.folder / "end", driver.folder / f"{name}-failed"
        wait = f"until [ -e {end} ]; do sleep 0.2; done"
        return f"{get(gpu)}; {wait}; [ -e {failed} ] || {{ touch {failed}; exit 1; }}; sleep 1000"

    with shared_node(node, tmp_path) as shared:
        shared.mount(driver.library)

        def printed(name: str, container: str) -> list[str]:
            node.until(
                lambda: "end" in node.output(name, container),
                lambda: f"{node.status(name)} {shared.log} {node.kubectl('describe', 'pod', name)}",
            )
            return list(node.output(name, container))

        with shared.agent(driver.folder):
            main, other = f"{get(A, 2)}; sleep 1000", f"{get(B)}; sleep 1000"
            pod(shared, driver, "p", ("first", A, 100, get(A)), ("main", A, 300, main), ("other", B, 200, other))
            assert printed("p", "first") == ["given 1600 MiB", "end"]
            *given, end = printed("p", "main")
            assert sum(int(line.split()[1]) for line in given) == 4900, "both processes together"
            assert (len(given), end) == (2, "end")
            assert printed("p", "other") == ["given 3200 MiB", "end"]
            uid = PodUid(shared.metadata("p").uid)
            program = installed(driver, tmp_path)
            kernel = RealKernel(HostRoots.under(Path("/")))
            reader = DriverReader(kernel, lambda _: program, Path("/"))
            assert reader.read({(uid, "main"): GpuId(A), (uid, "other"): GpuId(B), (uid, "first"): GpuId(A)}) == {
                (uid, "main"): 4900 << 20,
                (uid, "other"): 3200 << 20,
            }
            twins = ("beside", B, 200, twice(B, "beside")), ("main", A, 100, twice(A, "main"))
            pod(shared, driver, "restarts", *twins, policy="OnFailure")
            assert printed("restarts", "beside") == ["given 3200 MiB", "end"]
            assert printed("restarts", "main") == ["given 1600 MiB", "end"]
            node.cluster.stop("containerd")
            node.cluster.start_containerd()
        with shared.agent(driver.folder):
            (driver.folder / "end").touch()

            def starts() -> list[int]:
                status = node.status("restarts")
                return [each.restartCount for each in (*status.initContainerStatuses, *status.containerStatuses)]

            node.until(lambda: starts() == [1, 1], lambda: f"{node.status('restarts')} {shared.log}")
            assert printed("restarts", "beside") == ["given 3200 MiB", "end"]
            assert printed("restarts", "main") == ["given 1600 MiB", "end"]
        driver.answer("3")
        with shared.agent(driver.folder):
            pod(shared, driver, "waits", ("main", A, 100, get(A)))

            def described() -> str:
                return node.kubectl("describe", "pod", "waits")

            node.until(lambda: f"memory-limit: nvmlDeviceSetMemoryLimits_v1 {A}" in described(), described)
            assert "Not Supported" in described()
            driver.answer("hang")
            pod(shared, driver, "hangs", ("main", A, 100, get(A)))
            node.until(lambda: "timeout" in node.kubectl("describe", "pod", "hangs"), lambda: shared.log)
            assert not node.output("hangs", "main")
