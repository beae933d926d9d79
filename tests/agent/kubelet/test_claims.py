"""The kubelet's record of resource claims: its formats, and the claims of init containers."""

import json
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet import recordedallocations
from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import RealClock, Signal
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.kubelet.claims import checked
from gpuvirt_sim.kubelet.containers import Claim, Container
from gpuvirt_sim.kubelet.kubelet import running
from tests.agent.kubelet.givingkubelet import give

# From the kubelet's own tests (pkg/kubelet/cm/dra/state/checkpointer_test.go, Kubernetes 1.32), with its checksum.
OF_132 = (
    r'{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"Entries\":[{'
    r"\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example\",\"Namespace\":\"default\","
    r"\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{"
    r"\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"RequestNames\":[\"test request\"],"
    r'\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}}]}","Checksum":1597924435}'
)
OF_130 = {
    "version": "v1",
    "entries": [
        {
            "DriverName": "gpu.nvidia.com",
            "ClassName": "gpu",
            "ClaimUID": "u",
            "ClaimName": "c",
            "Namespace": "ns",
            "PodUIDs": {"pod-1": {}, "pod-2": {}},
            "ResourceHandles": None,
            "CDIDevices": {"gpu.nvidia.com": ["k8s.gpu.nvidia.com/device=gpu-0"]},
        }
    ],
    "checksum": 1,
}


def found(content: str | bytes) -> list[tuple[str, str, str | None]]:
    parsed = recordedallocations.parse_claims(content.encode() if isinstance(content, str) else content)
    return [(driver, device, consumer.pod_uid) for (driver, device), consumer in parsed]


def test_the_formats_of_the_record() -> None:
    pod = "139cdb46-f989-4f17-9561-ca10cfb509a6"
    assert found(OF_132) == [("test-driver.cdi.k8s.io", "dev-1", pod)]
    assert found(json.dumps(OF_130)) == [
        ("gpu.nvidia.com", "claim ns/c", "pod-1"),
        ("gpu.nvidia.com", "claim ns/c", "pod-2"),
    ], "the devices are not recorded, so the driver's claim stands for any of them"
    assert found(json.dumps({"version": "v1", "checksum": 1})) == []
    assert found(checked({"ClaimInfoStateList": None})) == []


def test_a_claim_that_is_being_prepared_may_be_any_device() -> None:
    claim = {"ClaimName": "c", "Namespace": "ns", "PodUIDs": {"pod": {}}, "DriverState": {"gpu.nvidia.com": {}}}
    assert found(checked({"ClaimInfoStateList": [claim]})) == [("gpu.nvidia.com", "claim ns/c", "pod")]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        OF_132.replace("1597924435", "1"),
        OF_132.replace("dev-1", "dev-2"),
        checked({}).decode(),
        checked({"Claims": []}).decode(),
        checked({"ClaimInfoStateList": [{"ClaimName": "c"}]}).decode(),
    ],
)
def test_a_damaged_record_is_unknown(content: str) -> None:
    with pytest.raises(DamagedError):
        recordedallocations.parse_claims(content.encode())


@pytest.mark.parametrize(
    ("entry", "known"),
    [
        (None, True),
        ("plugins_registry/gpu.nvidia.com-reg.sock", False),
        ("plugins_registry/gpu.nvidia.com-a1b2-reg.sock", False),
        ("plugins_registry/gpu.intel.com-reg.sock", False),
        ("plugins/gpu.amd.com", False),
        ("plugins_registry/csi.nvidia.company-reg.sock", True),
        ("plugins/driver.longhorn.io", True),
    ],
)
def test_without_a_record_claims_are_unknown_if_a_gpu_vendors_driver_is_registered(
    tmp_path: Path, entry: str | None, *, known: bool
) -> None:
    if entry is not None:
        (tmp_path / entry).mkdir(parents=True)
    if known:
        assert recordedallocations.read_claims(KubeletPaths(tmp_path)) == ()
    else:
        with pytest.raises(DamagedError, match="although"):
            recordedallocations.read_claims(KubeletPaths(tmp_path))


class Listener:
    """A listener that keeps the last account and problem."""

    def __init__(self) -> None:
        self.ask_kubelet, self.unsettled, self.awaits_record = Signal(), False, False
        self.hurried, self.hurries = Signal(), False
        self.account: KubeletAccount | None = None
        self.problem: Reason | None = None

    def observe_account(self, account: KubeletAccount | None) -> None:
        self.account = account

    def report_problem(self, _: str, problem: Reason | None) -> None:
        self.problem = problem


CLAIMED = (ResourceName("gpu.nvidia.com"), DeviceId("gpu-0"))


async def test_the_claim_of_an_init_container_alone_is_in_the_account(short_path: Path) -> None:
    """The pod-resources API leaves out init containers, and the device checkpoint has no claims."""
    async with running(short_path, RealClock()) as kubelet:
        listener, recorded = Listener(), RecordedAllocations(kubelet.paths)
        watch = AccountWatch(kubelet.paths, recorded, lambda: (812,), RealClock(), Intervals(), lambda: None)
        claim = Claim(*CLAIMED)
        await kubelet.run_pod("cuda", Container("init", {}, init=True, claims=[claim]), Container("main", {}))
        await watch.ask(listener)
        assert listener.account is not None
        assert listener.account.devices[CLAIMED].pod_uid == kubelet.pods["cuda"].uid
        newest = recorded.read()
        assert not isinstance(newest, Unknown)
        assert CLAIMED in newest, "a step of a change reads it, too"
        kubelet.end_pod("cuda")
        await watch.ask(listener)
        assert CLAIMED not in listener.account.devices


async def test_while_the_checkpoint_is_missing_the_api_names_no_claim_as_a_device_of_the_record(
    short_path: Path,
) -> None:
    """Claims have a record of their own, and would stay in doubt."""
    async with running(short_path, RealClock()) as kubelet:
        listener, recorded = Listener(), RecordedAllocations(kubelet.paths)
        watch = AccountWatch(kubelet.paths, recorded, lambda: (812,), RealClock(), Intervals(), lambda: None)
        await give(kubelet, "nvidia.com/gpu", ["GPU-1"])
        await watch.ask(listener)
        await kubelet.run_pod("claiming", Container("main", {}, claims=[Claim(*CLAIMED)]))
        kubelet.paths.checkpoint.unlink()
        await watch.ask(listener)
        assert recorded.history.is_missing
        assert CLAIMED in await watch._api.consumers()
        assert recorded.history.named == ()


async def test_a_damaged_record_of_claims_makes_the_account_incomplete(short_path: Path) -> None:
    async with running(short_path, RealClock()) as kubelet:
        listener, recorded = Listener(), RecordedAllocations(kubelet.paths)
        watch = AccountWatch(kubelet.paths, recorded, lambda: (812,), RealClock(), Intervals(), lambda: None)
        kubelet.paths.claims.write_text("{")
        await watch.ask(listener)
        assert listener.account is not None
        assert listener.account.partial is not None
        assert "dra_manager_state" in (listener.account.partial.seen or "")
        assert isinstance(recorded.read(), Unknown)
        kubelet.paths.claims.unlink()
        await watch.ask(listener)
        assert listener.problem is None, "a kubelet without DRA has no such file"
        (kubelet.paths.plugins_registry / "gpu.nvidia.com-reg.sock").touch()
        await watch.ask(listener)
        assert listener.problem is not None
