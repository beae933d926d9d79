"""The reasons why Kata's VMs do not get their devices: CDI specs of other programs, settings, mediated devices."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.diagnosis.checks.kata import kata_nodes
from gpuvirt.diagnosis.findings import Finding, Report
from gpuvirt.facts.cdispecs import parse_spec
from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.hardware.host.runtimes import read_kata, read_runtimes, without_secrets
from gpuvirt.model.desired.settings import Settings, VfioNodes
from gpuvirt.model.offers.view import AgentView
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.kernel import SimKernel
from tests.diagnosis.doctor.katahost import (
    COLD,
    CONTAINERD,
    DROP_IN,
    GO,
    HANDLERS,
    RUST,
    handler,
    kata_findings,
    kata_host,
)
from tests.diagnosis.doctor.sickhost import evidence, examine, host
from tests.thoroughness import examples

NAMES = "kind = 'example.com/gpu'"


def spec(*names: str, version: str = "0.6.0", kind: str = "example.com/gpu") -> str:
    edits = {"env": ["A=1"]}
    devices = [{"name": name, "containerEdits": edits} for name in names]
    return json.dumps({"cdiVersion": version, "kind": kind, "devices": devices})


def problems(kernel: SimKernel, own: Settings | None = None) -> list[Finding]:
    return [finding for finding in kata_findings(kernel, own) if finding.level is not Level.OK]


def report_of(files: dict[str, str]) -> Report:
    return examine(kata_host(files))


def test_a_host_without_kata_has_no_findings_of_it() -> None:
    kernel = host(PlatformSpec(files={"/etc/cdi/broken.json": "{", CONTAINERD: "version = 3\n"}))
    assert kata_findings(kernel) == []


def test_a_configuration_that_is_not_toml_is_named_with_its_line() -> None:
    (one,) = problems(kata_host({GO: COLD.replace("[hypervisor.qemu]", "[hypervisor.qemu")}))
    assert (one.code, one.level) == (FindingCode.KATA_SETTINGS_INVALID, Level.ERROR)
    assert (one.seen[0].path, "line 1" in one.seen[0].value) == (GO, True)


def test_settings_of_kata_without_a_handler_are_named() -> None:
    files = {CONTAINERD: "version = 3\n", "/etc/kata-containers/configuration.toml": COLD}
    (one,) = problems(host(PlatformSpec(files=files)))
    assert (one.code, one.level) == (FindingCode.KATA_HAS_NO_HANDLER, Level.WARNING)
    assert [seen.path for seen in one.seen] == ["/etc/kata-containers", CONTAINERD]
    assert CONTAINERD in one.fix[-1]
    assert problems(kata_host({})) == [], "a handler starts it"


def test_specs_that_every_runtime_reads_are_fine() -> None:
    kernel = kata_host({"/etc/cdi/a.json": spec("a"), "/var/run/cdi/b.yaml": spec("a", "b"), "/etc/cdi/notes.txt": "{"})
    assert problems(kernel) == []
    (one, *_) = [found for found in kata_findings(kernel) if found.subject == "Kata"]
    assert one.message == "reads all CDI specs: 2, the newest of version 0.6.0"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "expected JSON or YAML"),
        ("[]", "expected JSON or YAML"),
        (spec(), "expected JSON or YAML"),
        (spec("a", version="six"), "expected JSON or YAML"),
        (spec("a", kind="gpu"), "expected JSON or YAML"),
        (spec("a b"), "expected JSON or YAML"),
        (spec("a", version="0.7.0"), "$.cdiVersion: 0.7.0"),
        (spec("a", version="1.2.0"), "$.cdiVersion: 1.2.0"),
        (spec("a", version="0.5.7"), "$.cdiVersion: there is no version 0.5.7"),
        (spec("7", version="0.4.0"), "$.cdiVersion: 0.4.0, and its fields need 0.5.0"),
        (spec("a", kind="example.com/g"), "a vendor or a class of one letter"),
        (spec("a").replace("A=1", "A"), "a variable without a name or a value"),
        (spec("a").replace('{"env": ["A=1"]}', "{}"), "$.devices[a].containerEdits: empty"),
        (spec("a").replace("env", "envs"), "unknown field `envs`"),
    ],
)
def test_a_spec_that_a_runtime_cannot_use_is_named_with_its_file(text: str, place: str) -> None:
    first, *_ = problems(kata_host({"/etc/cdi/other.json": text}))
    assert (first.code, first.level) == (FindingCode.KATA_CDI_SPEC, Level.ERROR)
    assert first.seen[0].path == "/etc/cdi/other.json"
    assert place in first.seen[0].value


def test_each_runtime_has_its_own_newest_version() -> None:
    def behind(version: str) -> list[str]:
        found = problems(kata_host({"/etc/cdi/a.json": spec("a", version=version)}))
        return [finding.message.partition("and ")[2].partition(" reads")[0] for finding in found]

    def in_rust(version: str) -> bool:
        found = problems(kata_host({"/etc/cdi/a.json": spec("a", version=version)}))
        return any("Kata's runtime in Rust" in line for finding in found for line in finding.fix)

    assert (in_rust("1.1.0"), in_rust("1.2.0")) == (True, False), "it reads versions up to 1.1.0"
    assert behind("0.6.0") == []
    assert behind("1.1.0") == ["kata-qemu"]
    assert sorted(behind("1.2.0")) == ["kata-qemu", "kata-qemu-rs"]


def test_a_device_that_two_specs_of_one_folder_define_is_named_with_both() -> None:
    files = {"/etc/cdi/a.json": spec("a", "b"), "/etc/cdi/b.yaml": spec("b", "c"), "/var/run/cdi/c.json": spec("b")}
    (one,) = problems(kata_host(files))
    assert one.subject == "the CDI device example.com/gpu=b"
    assert [seen.path for seen in one.seen] == ["/etc/cdi/a.json", "/etc/cdi/b.yaml"]


def test_a_runtime_without_cold_plug_reads_no_specs() -> None:
    off = '[hypervisor.qemu]\ncold_plug_vfio = "no-port"\n'
    found = kata_findings(kata_host({GO: off, RUST: "[hypervisor.qemu]\n", "/etc/cdi/broken.json": "{"}))
    assert {finding.code for finding in found} == {FindingCode.KATA_SETTINGS_INVALID}, "no runtime plugs a device"


def test_a_runtime_that_does_not_ask_the_kubelet_is_named_with_its_file() -> None:
    (one,) = problems(kata_host({RUST: COLD.partition("[runtime]")[0]}))
    assert (one.code, one.subject) == (FindingCode.KATA_ASKS_NO_KUBELET, "the Kata runtime kata-qemu-rs")
    assert one.seen[0].path == RUST
    drop_in = RUST.replace("configuration-qemu-rs.toml", "config.d/10.toml")
    asked = {RUST: COLD.partition("[runtime]")[0], drop_in: '[runtime]\npod_resource_api_sock = "/run/x.sock"\n'}
    assert problems(kata_host(asked)) == []


def test_mediated_devices_are_not_plugged_before_the_vm_starts() -> None:
    found = problems(kata_host({}, "4xT4"))
    assert {finding.code for finding in found} == {FindingCode.KATA_PLUGS_NO_MDEV}
    go, rust = sorted(found, key=lambda finding: finding.subject)
    assert "gives the VM the whole GPU" in go.message
    assert "fails" in rust.message


@pytest.mark.parametrize(
    ("path", "named"),
    [(RUST, ["the Kata runtime kata-qemu-rs"]), (GO, [])],
    ids=["Rust takes the GPU below it", "Go plugs it by its code"],
)
def test_mediated_devices_are_plugged_into_a_running_vm_by_the_runtime_in_go_alone(path: str, named: list[str]) -> None:
    found = problems(kata_host({GO: NO_PORTS, RUST: NO_PORTS, path: settings_of(HOT_PORT)}, "4xT4"))
    assert [finding.subject for finding in found] == named
    for finding in found:
        assert finding.code is FindingCode.KATA_PLUGS_NO_MDEV
        assert "the address of the GPU below" in finding.message
        assert (finding.seen[0].path, "hot_plug_vfio = 'root-port'" in finding.seen[0].value) == (path, True)


def test_a_runtime_that_plugs_mediated_devices_by_the_settings_is_not_reported() -> None:
    (one,) = problems(kata_host({}, "4xT4"), Settings(kata_plugs_mdev=("kata-qemu",)))
    assert one.subject == "the Kata runtime kata-qemu-rs"
    assert "gpuvirt doctor --config" in one.fix[-1], "the chart has no value for it"


def test_cri_os_handlers_and_default_configurations_are_read() -> None:
    handlers = (
        '[crio.runtime.runtimes.kata]\nruntime_type = "vm"\nruntime_path = "/usr/bin/containerd-shim-kata-v2"\n'
        '[crio.runtime.runtimes.crun]\nruntime_type = "oci"\n'
    )
    files = {"/etc/crio/crio.conf": handlers, "/usr/share/defaults/kata-containers/configuration.toml": COLD}
    kernel = host(PlatformSpec(files=files))
    (one,) = read_kata(kernel, read_runtimes(kernel))
    assert (one.handler.name, one.handler.is_rust) == ("kata", False)
    assert one.setting("runtime", "pod_resource_api_sock") == (
        "/var/lib/kubelet/x.sock",
        "/usr/share/defaults/kata-containers/configuration.toml",
    )


def test_files_that_may_act_are_not_opened() -> None:
    files = {CONTAINERD: handler("kata-qemu", "/x", "/proc/../dev/vfio/1"), GO: COLD}
    kernel = host(PlatformSpec(files=files))
    (one,) = read_kata(kernel, read_runtimes(kernel))
    assert one.files == ()


TOML = st.sampled_from(
    [HANDLERS[DROP_IN], COLD, "version = 3\n", "password = 'secret'\n", "[runtime]\nvfio_mode = 'se cret'\n",
     "[hypervisor.qemu]\npath = '/secret'\npcie_root_port = 2\n", "hypervisor = 3\n"]
)  # fmt: skip


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(TOML, max_size=4, unique=True).map("".join))
def test_a_redacted_configuration_keeps_handlers_and_settings_alone(text: str) -> None:
    reported = without_secrets(text)
    assert "secret" not in reported
    assert without_secrets(reported) == reported


def test_a_support_archive_has_names_of_devices_and_no_hooks() -> None:
    full = json.loads(spec("a")) | {"containerEdits": {"env": ["TOKEN=secret"], "hooks": [{"path": "/x"}]}}
    kernel = Discreet(kata_host({"/etc/cdi/a.json": json.dumps(full), "/etc/cdi/b.json": "{secret"}))
    kept = kernel.read(HostPath("/etc/cdi/a.json")).decode()
    assert parse_spec(kept) == parse_spec(spec("a"))
    assert "secret" not in kept
    broken = kernel.read(HostPath("/etc/cdi/b.json")).decode()
    assert (parse_spec(broken), "secret" in broken) == (None, False)


def test_our_settings_for_kata_are_those_that_doctor_asks_for() -> None:
    ours = (Path(__file__).parents[3] / "deploy/kata/50-gpus.toml").read_text()
    off = '[hypervisor.qemu]\ncold_plug_vfio = "no-port"\n[runtime]\npod_resource_api_sock = ""\n'
    folder = RUST.rpartition("/")[0]
    files = {GO: off, RUST: off, f"{folder}/config.d/50-gpus.toml": ours}
    assert [finding.message for finding in kata_findings(kata_host(files))] == [
        "reads all CDI specs: there are none",
        "asks the kubelet for a pod's devices",
    ]


def settings_of(hypervisor: str, runtime: str = "") -> str:
    return f'[hypervisor.qemu]\n{hypervisor}\n[runtime]\npod_resource_api_sock = "/run/x.sock"\n{runtime}\n'


@pytest.mark.parametrize(
    ("path", "hypervisor", "runtime", "seen"),
    [
        (GO, 'cold_plug_vfio = "root-port"\nhot_plug_vfio = "root-port"', "", "hot_plug_vfio = 'root-port'"),
        (GO, 'cold_plug_vfio = "rootport"', "", "cold_plug_vfio = 'rootport'"),
        (GO, 'hot_plug_vfio = "port"', "", "hot_plug_vfio = 'port'"),
        (GO, 'hot_plug_vfio = "root-port"', "", "pcie_root_port = None"),
        (GO, 'hot_plug_vfio = "root-port"\npcie_root_port = 0', "", "pcie_root_port = 0"),
        (RUST, 'cold_plug_vfio = "switch-port"', "", "cold_plug_vfio = 'switch-port'"),
        (RUST, 'cold_plug_vfio = "rootport"', "", "cold_plug_vfio = 'rootport'"),
        (GO, 'cold_plug_vfio = "root-port"', 'vfio_mode = "guest_kernel"', "vfio_mode = 'guest_kernel'"),
        (RUST, 'cold_plug_vfio = "root-port"', 'vfio_mode = "none"', "vfio_mode = 'none'"),
    ],
)
def test_a_setting_that_a_runtime_refuses_is_named(path: str, hypervisor: str, runtime: str, seen: str) -> None:
    found = problems(kata_host({path: settings_of(hypervisor, runtime)}))
    (one,) = [finding for finding in found if finding.code is FindingCode.KATA_SETTINGS_INVALID]
    assert one.level is Level.ERROR
    assert one.subject == ("the Kata runtime kata-qemu" if path == GO else "the Kata runtime kata-qemu-rs")
    assert (one.seen[0].path, seen in one.seen[0].value) == (path, True)


@pytest.mark.parametrize(
    ("path", "hypervisor"),
    [
        (GO, 'cold_plug_vfio = "switch-port"\nhot_plug_vfio = "no-port"'),
        (GO, 'hot_plug_vfio = "bridge-port"'),
        (GO, 'hot_plug_vfio = "root-port"\npcie_root_port = 2'),
        (GO, 'cold_plug_vfio = "no-port"\nhot_plug_vfio = "no-port"'),
        (RUST, 'cold_plug_vfio = "root-port"\nhot_plug_vfio = "root-port"'),
    ],
)
def test_settings_that_a_runtime_accepts_are_fine(path: str, hypervisor: str) -> None:
    """A class without devices is fine beside one with them, as kata-deploy installs them."""
    for mode in ("", 'vfio_mode = "vfio"'):
        assert problems(kata_host({path: settings_of(hypervisor, mode)})) == []


def test_a_host_on_which_no_runtime_plugs_devices_is_reported() -> None:
    none = settings_of('cold_plug_vfio = "no-port"\nhot_plug_vfio = "no-port"')
    (one,) = problems(kata_host({GO: none, RUST: none}))
    assert (one.code, one.level) == (FindingCode.KATA_SETTINGS_INVALID, Level.WARNING)


HOT_PORT = 'hot_plug_vfio = "root-port"\npcie_root_port = 2'
NO_PORTS = settings_of("")
BOTH_KINDS, GROUPS = "8xH100", "2xA10"


@pytest.mark.parametrize("files", [{GO: settings_of(HOT_PORT), RUST: NO_PORTS}, {GO: NO_PORTS}])
def test_a_runtime_that_would_plug_two_nodes_of_a_device_is_named(files: dict[str, str]) -> None:
    (one,) = problems(kata_host(files, BOTH_KINDS))
    assert one.code is FindingCode.KATA_GETS_TWO_NODES
    assert ("kata-qemu-rs" if RUST not in files else "kata-qemu") in one.message
    assert "vfio_nodes: iommufd" in one.fix


@pytest.mark.parametrize(
    ("files", "simulated", "chosen"),
    [
        ({}, BOTH_KINDS, VfioNodes.IOMMUFD),
        ({}, BOTH_KINDS, VfioNodes.GROUP),
        ({GO: NO_PORTS, RUST: NO_PORTS}, BOTH_KINDS, VfioNodes.BOTH),
        ({}, GROUPS, VfioNodes.BOTH),
    ],
)
def test_one_node_of_a_device_is_fine(files: dict[str, str], simulated: str, chosen: VfioNodes) -> None:
    found = problems(kata_host(files, simulated), Settings(vfio_nodes=chosen))
    assert FindingCode.KATA_GETS_TWO_NODES not in {finding.code for finding in found}


def test_the_nodes_are_judged_by_the_running_agent() -> None:
    agent = AgentView("test", 1, BEGINNING, plugin_only=False, vfio_nodes=VfioNodes.IOMMUFD)
    found = evidence(kata_host({}, BOTH_KINDS))
    assert list(kata_nodes(found)), "without an agent by the settings"
    assert not list(kata_nodes(replace(found, view=replace(found.view, agent=agent))))
