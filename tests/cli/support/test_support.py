"""`gpuvirt support`: an archive with the necessary evidence and without secrets."""

import io
import json
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt import __version__
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.kubelet.checkpoint import Data, PodDevices
from gpuvirt.agent.shares import sharefiles
from gpuvirt.agent.store import agentstate
from gpuvirt.archive import ArchiveManifest
from gpuvirt.cli.support.files import fit_config
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer, Entry, Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.offers.view import AgentView
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.shares.demand import ContainerKind, ContainerName, Units
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.nvidiacdi import Edits
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareRecords
from gpuvirt.model.shares.placement import GpuId
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING, SimClock
from gpuvirt_sim.devices.platform import Boot, Cpu, PlatformSpec
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet import checkpoint
from tests.agent.node.simnode import IDS
from tests.cli.commandline import called, gpuvirt
from tests.cli.support.archives import unpack_with_tar

GPUVIRT = [sys.executable, "-m", "gpuvirt"]
GPU = PciAddress("0000:65:00.0")
A10 = ResourceName("nvidia.com/GA102GL_A10")
UID, OTHER_UID = "5b0c9d7e-8f0e-4a57-9d0f-0d2c52a1b111", "5b0c9d7e-8f0e-4a57-9d0f-0d2c52a1b222"
NODE = "gpu-node-07.secret.example.com"
NAMES = (
    "payroll",
    "virt-launcher-ceo-x7k2p",
    "hunter2",
    "ceo-desktop",
    UID,
    OTHER_UID,
    "gpu-node-07",
    "secret",
    "gpu-3f",
)
"""The names and UIDs that must not be in an archive whose names are hidden."""
AGENT = AgentView("test", 1, BEGINNING, plugin_only=False, node="gpu-3f.example.com")
KUBELET_CONFIG = """\
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
cpuManagerPolicy: static
topologyManagerPolicy: restricted
featureGates: {DynamicResourceAllocation: true}
staticPodURLHeader: {Authorization: [Bearer hunter2]}
clusterDNS: [10.0.0.10]
authentication: {x509: {clientCAFile: /hunter2}}
"""
MAIN = ContainerName("hunter2")
SPEC = "run/cdi/gpuvirt.io-share-5d41402a.json"
SHARE = ContainerRecord(ContainerKind.APP, Units(300), {GpuId("GPU-a"): Units(300)}, "gpuvirt.io/share=5d41402a")
SHARES = ShareRecords({PodUid(OTHER_UID): PodRecord("payroll", "ceo-desktop", {MAIN: SHARE})})
"""Of a pod whose name no other file has."""
EDITS = Edits(
    "0.6.0",
    {
        "env": ["PASSWORD=swordfish", "NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/../swordfish"}],
        "mounts": [{"hostPath": "/swordfish", "containerPath": "/swordfish"}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["--token=swordfish"]}],
    },
)
LOG = f"""\
2026-01-01 allocated {A10} to pod payroll/virt-launcher-ceo-x7k2p
2026-01-01 heard of pod payroll/virt-launcher-other-1 on {NODE}, namespace payroll
2026-01-01 pod {OTHER_UID} is gone, {UID} too
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return called(*arguments, cwd=cwd)


def opened(content: bytes) -> dict[str, bytes]:
    """Return the files of an archive by their paths in its folder."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = [(member, tar.extractfile(member)) for member in tar if member.isreg()]
        return {member.name.partition("/")[2]: file.read() for member, file in files if file is not None}


def manifest_of(files: dict[str, bytes]) -> ArchiveManifest:
    return msgspec.json.decode(files["MANIFEST.json"], type=ArchiveManifest)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A node with an agent's files and a kubelet's, on which two pods have GPUs."""
    root = tmp_path / "node"
    kernel = build_host(load_host("2xA10"))
    export(kernel, root)
    consumer = Consumer(PodUid(UID), "payroll", "virt-launcher-ceo-x7k2p", "hunter2")
    entry = Entry(A10, DeviceId(GPU), Target(GPU), IommuGroup(12), f"kubelet:{UID}:payroll/x/y", BEGINNING, consumer)
    ledger = Ledger((entry,), {"10de:2236": "GA102GL_A10"}, (A10,))
    place = Seen("pod payroll/virt-launcher-ceo-x7k2p", "has it")
    note = Reason(ReasonCode.ALLOCATED_TO_POD, GPU, "is allocated", (place,))
    view = replace(snapshot.take(kernel, Settings(), IDS, SimClock(), ledger), problems=(note,))
    for path, content in {
        "var/lib/gpuvirt/ledger.json": agentstate.LEDGER.encode(ledger),
        "run/gpuvirt/node.json": msgspec.json.encode(replace(view, agent=AGENT)),
        "var/lib/kubelet/config.yaml": KUBELET_CONFIG.encode(),
        "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint": checkpoint.encode(
            Data(
                [
                    PodDevices(UID, "hunter2", A10, {"0": [GPU]}, b"ours"),
                    PodDevices(OTHER_UID, "c", "example.com/tpu", {"0": ["t"]}, b"TOKEN=hunter2"),
                ],
                {A10: [GPU]},
            )
        ),
        "proc/sys/kernel/hostname": NODE.encode(),
        "var/lib/gpuvirt/shares.json": sharefiles.FORMAT.encode(SHARES),
        SPEC: sharespec.spec("5d41402a", PodUid(OTHER_UID), MAIN, SHARES.pods[PodUid(OTHER_UID)], EDITS),
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "agent.log"
    path.write_text(LOG)
    return path


def test_the_archive_contains_all_expected_files(host: Path, log: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# the vault's password is hunter2\noffer: [gpu, audio] # hunter2\n")
    done = run("support", "--host-root", str(host), "--config", "mine.yaml", "--log", str(log), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"")
    (path,) = tmp_path.glob("gpuvirt-support-gpu-node-07.secret.example.com-*Z.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    files = opened(path.read_bytes())
    manifest = manifest_of(files)
    assert (manifest.format, manifest.gpuvirt, manifest.node, manifest.names_hidden) == (1, __version__, NODE, False)
    assert {section.name: section.files for section in manifest.collected if section.name != "host"} == {
        "kubelet": 2, "agent": 3, "shares": 2, "devices": 1, "doctor": 1, "logs": 1,
    }  # fmt: skip
    assert files["config/node.yaml"] == b"offer: [gpu, audio]\n"
    assert files["logs/1-agent.log"].decode() == LOG
    assert files["host/var/lib/gpuvirt/ledger.json"] == (host / "var/lib/gpuvirt/ledger.json").read_bytes()
    assert json.loads(files["devices.json"])["resources"][0]["name"] == A10
    assert json.loads(files["host/run/gpuvirt/node.json"])["gpus"][0]["users"] == [
        "pod payroll/virt-launcher-ceo-x7k2p"
    ]
    reported = done.stderr.decode()
    assert str(path.name) in reported
    assert "Check the content before you send it" in reported
    assert "--hide-names" in reported


def test_the_archive_contains_no_secrets(host: Path, tmp_path: Path) -> None:
    done = run("support", "--host-root", str(host), "-o", "-", cwd=tmp_path)
    files = opened(done.stdout)
    kept = files["host/var/lib/kubelet/config.yaml"].decode()
    assert "topologyManagerPolicy: restricted" in kept
    assert "hunter2" not in kept
    assert "10.0.0.10" not in kept
    data = json.loads(files["host/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"])["Data"]
    assert [entry["AllocResp"] for entry in data["PodDeviceEntries"]] == ["b3Vycw==", None]
    left_out = [entry.what for entry in manifest_of(files).left_out]
    assert any(what.endswith("/config.yaml") for what in left_out)
    assert any(what.endswith("/kubelet_internal_checkpoint") for what in left_out)


def test_the_archive_has_the_shares_of_gpus_without_what_others_wrote(host: Path, tmp_path: Path) -> None:
    files = opened(run("support", "--host-root", str(host), "-o", "-", cwd=tmp_path).stdout)
    assert files["host/var/lib/gpuvirt/shares.json"] == (host / "var/lib/gpuvirt/shares.json").read_bytes()
    assert not [path for path, content in files.items() if b"swordfish" in content]
    ((name, owner),) = sharespec.owners(files[f"host/{SPEC}"])
    assert (name, owner.container, owner.pod) == ("5d41402a", MAIN, SHARES.pods[PodUid(OTHER_UID)])
    (device,) = json.loads(files[f"host/{SPEC}"])["devices"]
    assert device["containerEdits"] == {
        "env": ["NVIDIA_VISIBLE_DEVICES=void", "GPUVIRT_GPUS=GPU-a", "GPUVIRT_UNITS=300"],
        "deviceNodes": [{"path": "/dev/nvidia0"}],
    }
    assert any(entry.what.endswith("/gpuvirt.io-share-*") for entry in manifest_of(files).left_out)


def test_names_are_hidden_in_every_file(host: Path, log: Path, tmp_path: Path) -> None:
    arguments = ("--log", str(log), "--log", "virt-launcher-ceo-x7k2p.log", "--hide-names", "-o", "out.tar.gz")
    done = run("support", "--host-root", str(host), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = opened((tmp_path / "out.tar.gz").read_bytes())
    for path, content in files.items():
        assert not [name for name in NAMES if name.encode() in content], path
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        assert not [name for name in tar.getnames() if "gpu-node-07" in name]
    assert manifest_of(files).names_hidden
    ledger, _ = agentstate.LEDGER.decode(files["host/var/lib/gpuvirt/ledger.json"])
    assert ledger.entries[0].consumer == Consumer(PodUid("uid-1"), "namespace-1", "pod-1", "container-1")
    assert json.loads(files["host/run/gpuvirt/node.json"])["gpus"][0]["users"] == ["pod namespace-1/pod-1"]
    held = json.loads(files["host/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"])["Data"]
    assert [entry["PodUID"] for entry in held["PodDeviceEntries"]] == ["uid-1", "uid-2"]
    assert files["logs/1.log"].decode().splitlines() == [
        f"2026-01-01 allocated {A10} to pod namespace-1/pod-1",
        "2026-01-01 heard of pod namespace-1/pod-3 on node-1, namespace namespace-1",
        "2026-01-01 pod uid-2 is gone, uid-1 too",
    ]


def test_hiding_names_changes_only_names(host: Path, tmp_path: Path) -> None:
    whole = opened(run("support", "--host-root", str(host), "-o", "-", cwd=tmp_path).stdout)
    hidden = opened(run("support", "--host-root", str(host), "-o", "-", "--hide-names", cwd=tmp_path).stdout)
    assert whole.keys() == hidden.keys()
    changed = {path for path in whole if whole[path] != hidden[path]}
    assert {path.rpartition("/")[2] for path in changed} <= {
        "MANIFEST.json", "devices.json", "doctor.json", "node.json", "ledger.json", "kubelet_internal_checkpoint",
        "shares.json", SPEC.rpartition("/")[2],
    }  # fmt: skip


def test_an_empty_host_is_packed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("support", "--host-root", "empty", "-o", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert b"files that do not exist: " in done.stderr
    assert manifest_of(opened(done.stdout)).node == "host"


@pytest.mark.parametrize(
    "name",
    [
        "ledger.json",
        "kubelet_internal_checkpoint",
        "config.yaml",
        "node.json",
        "shares.json",
        SPEC.rpartition("/")[2],
    ],
)
def test_a_damaged_file_is_left_out_and_reported(host: Path, tmp_path: Path, name: str) -> None:
    (path,) = host.rglob(name)
    path.write_bytes(b"\xff[hunter2")
    for hiding in ((), ("--hide-names",)):
        done = run("support", "--host-root", str(host), "-o", "-", *hiding, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        files = opened(done.stdout)
        assert not any(b"\xff[" in content for content in files.values())
        assert any(entry.what == str(path) and "can't be parsed" in entry.why for entry in manifest_of(files).left_out)


@pytest.mark.parametrize("content", [b"- hunter2\n", b"hunter2\n"])
def test_a_kubelet_configuration_that_is_no_mapping_is_damaged(content: bytes) -> None:
    with pytest.raises(DamagedError, match="it is not a mapping"):
        fit_config(content)


def test_invalid_settings_are_packed_and_reported(host: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("offer: [tuba]\n")
    done = run("support", "--host-root", str(host), "--config", "mine.yaml", "-o", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert b"$.offer[0]" in done.stderr
    assert opened(done.stdout)["config/node.yaml"] == b"offer: [tuba]\n"


def test_sockets_are_listed_and_not_read(host: Path, short_path: Path) -> None:
    folder = short_path / "k/device-plugins"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "kubevirt-x.sock"))
        done = run("support", "--host-root", str(host), "--kubelet-dir", str(short_path / "k"), "-o", "-", cwd=folder)
    assert opened(done.stdout)["kubelet/sockets.txt"] == b"device-plugins/kubevirt-x.sock\n"


def test_only_the_end_of_a_long_log_is_packed(host: Path, tmp_path: Path) -> None:
    (tmp_path / "long.log").write_bytes(b"x" * (5 << 20) + b"the end\n")
    arguments = ("--log", "long.log", "--log", "none.log", "-o", "-")
    done = run("support", "--host-root", str(host), *arguments, cwd=tmp_path)
    files = opened(done.stdout)
    assert len(files["logs/1-long.log"]) == 4 << 20
    assert files["logs/1-long.log"].endswith(b"the end\n")
    assert "none.log" in [entry.path for entry in manifest_of(files).unread]
    assert "long.log" in [entry.what for entry in manifest_of(files).left_out]


@pytest.mark.parametrize("arguments", [["-o", "/does/not/exist/x/"], ["--host-root", "/does/not/exist"]])
def test_wrong_usage_is_reported_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    done = run("support", "--host-root", "empty", *arguments, cwd=tmp_path)
    assert done.returncode in {1, 2}
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["4xT4", "4xL40S"])
def test_gpuvirt_devices_shows_the_same_for_an_unpacked_archive_and_its_host(tmp_path: Path, name: str) -> None:
    """The imported host shows the same devices, too."""
    simulated = tmp_path / "simulated"
    export(build_host(load_host(name)), simulated)
    assert run("support", "--host-root", str(simulated), "-o", "a.tar.gz", cwd=tmp_path).returncode == 0
    unpack_with_tar((tmp_path / "a.tar.gz").read_bytes(), tmp_path)
    (unpacked,) = tmp_path.glob("gpuvirt-support-*/host")
    assert run("sim", "import", "a.tar.gz", "-o", "m.yaml", cwd=tmp_path).returncode == 0
    export(build_host(load_host(str(tmp_path / "m.yaml"))), tmp_path / "imported")
    tables = [
        run("devices", "--all", "--host-root", str(root), cwd=tmp_path).stdout.partition(b"\nas of")[0]
        for root in (simulated, unpacked, tmp_path / "imported")
    ]
    assert tables[0] == tables[1] == tables[2]
    assert b"ADDRESS" in tables[0]


def test_doctor_finds_the_same_on_a_host_its_unpacked_archive_and_its_import(tmp_path: Path) -> None:
    files = {
        "/proc/cmdline": "root=/dev/sda1 nomodeset\n",
        "/etc/modprobe.d/no.conf": "# why not\ninstall vfio-pci /bin/false\n",
        "/etc/containerd/config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\nroot = "/data"\n',
        "/etc/containerd/conf.d/cdi.toml": '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = false\n',
    }
    platform = PlatformSpec(cpu=Cpu.AMD, boot=Boot.PROXMOX, kvm=False, unsafe_interrupts=True, files=files)
    (tmp_path / "cdi.yaml").write_text("cdi: answers\n")
    export(build_host(msgspec.structs.replace(load_host("2xA10"), platform=platform)), tmp_path / "simulated")
    assert run("support", "--host-root", "simulated", "-o", "a.tar.gz", cwd=tmp_path).returncode == 0
    unpack_with_tar((tmp_path / "a.tar.gz").read_bytes(), tmp_path)
    (unpacked,) = tmp_path.glob("gpuvirt-support-*/host")
    done = run("sim", "import", "a.tar.gz", "-o", "m.yaml", cwd=tmp_path)
    assert b"no differences from the archive's host" in done.stderr
    export(build_host(load_host(str(tmp_path / "m.yaml"))), tmp_path / "imported")
    arguments = ("--config", "cdi.yaml", "--kubelet-dir", "none", "-o", "json")
    reports = [
        json.loads(run("doctor", "--host-root", str(root), *arguments, cwd=tmp_path).stdout)
        for root in (tmp_path / "simulated", unpacked, tmp_path / "imported")
    ]
    assert reports[0] == reports[1] == reports[2]
    codes = {finding["code"] for result in reports[0]["results"] for finding in result["findings"]}
    assert codes >= {"KvmMissing", "UnsafeInterrupts", "VfioBlocked", "CdiOff"}


def test_an_archive_that_cant_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    done = gpuvirt("sim", "run", "--snapshot", "--", "gpuvirt", "support", "--output", str(tmp_path / ("a" * 300)))
    errors = done.stderr
    assert done.returncode == 2
    assert "--output: " in errors
    assert "can't be written: File name too long; expected a file in a folder where you may write" in errors
    assert "Traceback" not in errors
