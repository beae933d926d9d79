"""The commands, as a user calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt import __version__
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.store import agentstate
from gpuvirt.cli.output import render
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.vgpu import SchedulerPolicy
from gpuvirt.model.allocation.ledger import Consumer, Entry, Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.offers.view import AgentView, NodeView, SchedulerView
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host
from tests.agent.node.simnode import IDS
from tests.cli.commandline import GPUVIRT, gpuvirt, ran


@pytest.fixture
def host(tmp_path: Path) -> Path:
    export(build_host(load_host("2xA10")), tmp_path / "host")
    return tmp_path / "host"


def test_version_and_help() -> None:
    assert ran("--version").stdout == f"gpuvirt {__version__}\n"
    for command in ("devices", "doctor", "why", "node", "demo", "sim", "support", "vfio"):
        assert command in ran("--help").stdout
        assert ran(command, "--help").returncode == 0


def test_the_agent_loads_no_other_command_and_no_interactive_module() -> None:
    script = """
import sys
from gpuvirt.cli.main import COMMANDS, program_for
program_for(["node"])
loaded = [name for name in COMMANDS if f"gpuvirt.cli.{COMMANDS[name].module}" in sys.modules]
assert loaded == ["node"]
assert not {"rich", "gpuvirt_sim", "gpuvirt.kube"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_under_the_name_of_nvidias_plugin() -> None:
    script = "from gpuvirt.cli.main import nvidia_kubevirt_gpu_device_plugin as main; main()"
    done = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"gpuvirt {__version__}\n")


WIDE = {"COLUMNS": "200"}


def test_devices_as_a_table(host: Path) -> None:
    done = ran("devices", "--host-root", str(host), environment=WIDE)
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if line.startswith("0000:65:00.0"))
    assert first.split() == [
        *("0000:65:00.0", "GA102GL", "[A10]", "passthrough", "vfio-pci", "12", "0"),
        "nvidia.com/GA102GL_A10",
    ]


def test_devices_as_json(host: Path) -> None:
    done = ran("devices", "-o", "json", environment={"GPUVIRT_HOST_ROOT": str(host)})
    view = json.loads(done.stdout)
    assert view["version"] == 1
    assert [gpu["address"] for gpu in view["gpus"]] == ["0000:65:00.0", "0000:ca:00.0"]
    assert view["resources"][0]["name"] == "nvidia.com/GA102GL_A10"


LEDGERS = ["host/var/lib/gpuvirt/ledger.json", "kubelet/device-plugins/gpuvirt/ledger.json"]


@pytest.mark.parametrize("place", LEDGERS)
def test_devices_without_an_agent_use_names_and_allocations_of_the_ledger(
    host: Path, tmp_path: Path, place: str
) -> None:
    target = Target(PciAddress("0000:65:00.0"))
    entry = Entry(
        ResourceName("nvidia.com/OLD"),
        DeviceId(target.gpu),
        target,
        IommuGroup(12),
        "a",
        BEGINNING,
        consumer=Consumer(namespace="default", pod="vm-a"),
    )
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_bytes(agentstate.LEDGER.encode(Ledger((entry,), {"10de:2236": "OLD"})))
    done = ran("devices", "--host-root", str(host), "--kubelet-dir", str(tmp_path / "kubelet"), environment=WIDE)
    assert done.returncode == 0, done.stderr
    assert re.search(r"0000:65:00.0 .* pod default/vm-a +nvidia.com/OLD", done.stdout)
    assert re.search(r"nvidia.com/OLD +2 +2 +1 ", done.stdout)
    assert done.stdout.rstrip().endswith(", read from the host")
    assert [path.name for path in (tmp_path / place).parent.iterdir()] == ["ledger.json"]


@pytest.mark.parametrize("content", [b"", b"torn", b"{}\n{}\n", b"\xff"])
def test_devices_of_a_host_with_a_damaged_ledger(host: Path, content: bytes) -> None:
    (host / "var/lib/gpuvirt").mkdir(parents=True)
    (host / "var/lib/gpuvirt/ledger.json").write_bytes(content)
    done = ran("devices", "--host-root", str(host))
    assert done.returncode == 0, done.stderr
    assert "nvidia.com/GA102GL_A10" in done.stdout


def test_devices_of_a_shared_iommu_group_are_shown_without_a_kubelet(tmp_path: Path) -> None:
    export(build_host(load_host("2xRTX4090-one-group")), tmp_path)
    done = ran("devices", "--host-root", str(tmp_path), "--kubelet-dir", str(tmp_path))
    assert re.search(r"nvidia.com/AD102_GEFORCE_RTX_4090 +3 +3 +0 ", done.stdout)
    assert "AllocationsUnknown" not in done.stdout


def test_devices_without_an_agent_shows_what_an_agent_with_these_settings_would_offer(tmp_path: Path) -> None:
    slots = (
        SlotSpec(at="0000:65:00.0", board="A10", driver="nvidia", group=12),
        SlotSpec(at="0000:ca:00.0", board="A10", driver="vfio-pci", group=22),
    )
    export(build_host(HostSpec(about="two GPUs", slots=slots)), tmp_path / "host")
    (tmp_path / "node.yaml").write_text("mode: shared\n")
    done = ran("devices", "--host-root", str(tmp_path / "host"), "--config", str(tmp_path / "node.yaml"), "-o", "json")
    found = json.loads(done.stdout)
    assert [gpu["desired"] for gpu in found["gpus"]] == ["shared", "shared"]
    assert found["resources"] == [], "a GPU that is to be shared was shown as offered whole"
    assert [gpu["mode"] for gpu in found["gpus"]] == ["shared", "passthrough"]
    assert [reason["code"] for reason in found["gpus"][1]["reasons"]] == ["Withdrawn"]


def test_devices_tells_a_non_root_user_that_processes_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = NodeView(at=BEGINNING)
    render.devices(view, every=False, sees_users=False)
    assert "only root sees which processes use a device" in " ".join(capsys.readouterr().out.split())
    render.devices(view, every=False, sees_users=True)
    assert "only root sees" not in capsys.readouterr().out


def test_devices_shows_the_schedulers_that_the_agent_reports(tmp_path: Path) -> None:
    kernel = build_host(load_host("4xT4"))
    export(kernel, tmp_path)
    without = ran("devices", "--host-root", str(tmp_path))
    assert "SCHEDULER" not in without.stdout, "without an agent nvidia-smi is not queried"
    seen = snapshot.take(kernel, Settings(), IDS, RealClock())
    first, second, *others = seen.gpus
    best = replace(first, scheduler=SchedulerView(SchedulerPolicy.BEST_EFFORT, None))
    equal = replace(second, scheduler=SchedulerView(SchedulerPolicy.EQUAL_SHARE, 4))
    agent = AgentView(version="test", pid=1, started=seen.at, plugin_only=False)
    file = tmp_path / "run/gpuvirt/node.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.json.encode(replace(seen, agent=agent, gpus=(best, equal, *others))))
    shown = ran("devices", "--host-root", str(tmp_path), environment=WIDE).stdout
    assert re.search(rf"{first.address} .* 2 x GRID T4-8Q +best-effort +", shown), shown
    assert re.search(rf"{second.address} .* 4 x GRID T4-1Q +equal-share, 4 ms +", shown)
    assert shown.rstrip().endswith("read from agent test, pid 1")
    reported = json.loads(ran("devices", "-o", "json", "--host-root", str(tmp_path)).stdout)["gpus"]
    equal_4 = {"policy": "equal-share", "timeslice_ms": 4}
    assert [gpu["scheduler"] for gpu in reported[:3]] == [
        {"policy": "best-effort", "timeslice_ms": None},
        equal_4,
        None,
    ]


@pytest.mark.parametrize(("mode", "command"), [("vgpu", "bind"), ("container", "bind"), ("passthrough", "unbind")])
def test_devices_shows_a_gpu_that_is_kept_in_its_mode(tmp_path: Path, mode: str, command: str) -> None:
    kernel = build_host(load_host("4xT4"))
    export(kernel, tmp_path)
    seen = snapshot.take(kernel, Settings(), IDS, RealClock())
    agent = AgentView(version="test", pid=1, started=seen.at, plugin_only=False)
    gpus = (*(replace(gpu, desired=mode) for gpu in seen.gpus[:-1]), seen.gpus[-1])
    (tmp_path / "run/gpuvirt").mkdir(parents=True)
    (tmp_path / "run/gpuvirt/node.json").write_bytes(msgspec.json.encode(replace(seen, agent=agent, gpus=gpus)))
    done = ran("vfio", command, "--dry-run", gpus[0].address, "--host-root", str(tmp_path), environment=WIDE)
    assert done.returncode == 1
    assert f"ManagedByAgent: {gpus[0].address} is kept in mode {mode} by this node's agent" in done.stdout
    other = "unbind" if command == "bind" else "bind"
    for free in ((other, "--all"), (command, gpus[-1].address)):
        assert "ManagedByAgent" not in ran("vfio", *free, "--dry-run", "--host-root", str(tmp_path)).stdout


def test_devices_of_a_host_without_gpus(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    done = ran("devices", "--host-root", str(tmp_path))
    assert done.returncode == 0
    assert "No GPU of NVIDIA, AMD or Intel on this host." in done.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("offer: [gpu, tuba]", "node.yaml:1: $.offer[1]: expected one of: gpu"),
        ("offer: [bridge]", "node.yaml: $.offer[0]: bridge functions can't be offered"),
        ("aliases: {GA102GL_A10: a b}", "node.yaml: $.aliases.GA102GL_A10: 'nvidia.com/a b' is not a resource name"),
        ("alias: {}", "node.yaml:1: $.alias: no such key; expected one of: offer, aliases"),
        (
            "compat: {whole_vfio_folder: maybe}",
            'node.yaml:1: $.compat.whole_vfio_folder: expected true or false, found text "maybe"',
        ),
    ],
)
def test_an_invalid_config_exits_with_2_and_the_path(host: Path, tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "node.yaml").write_text(config)
    for command in ("devices", "node"):
        done = gpuvirt(command, "--host-root", str(host), "--config", str(tmp_path / "node.yaml"))
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_cdi_answers_are_refused_with_plugin_only(host: Path, tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("cdi: answers")
    done = gpuvirt("node", "--plugin-only", "--host-root", str(host), "--config", str(tmp_path / "node.yaml"))
    assert done.returncode == 2
    assert "$.cdi: answers can't name CDI devices with --plugin-only" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["devices", "--output", "xml"],
        ["node", "--host-root", "/does/not/exist"],
        ["node", "--listen", "hello"],
        ["node", "--listen", ":99999"],
        ["node", "--log-format", "xml"],
        ["devices", "--pci-ids", "/does/not/exist"],
        ["sim", "run", "-H", "3xA10", "--", "true"],
        ["demo", "-H", "3xA10"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    done = ran(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("why", "vm"), "gpuvirt: why: 'vm' lacks a name; expected vm/NAME, or vm NAME\n"),
        (("plan", "x", "--vgpu-config", "A10-4Q"), "gpuvirt: plan: expected node/NAME, found 'x'; "),
        (("devices", "--config", "none.yaml"), "gpuvirt: none.yaml: can't be read: No such file or directory\n"),
    ],
)
def test_a_message_has_no_path_within_what_is_no_document(words: tuple[str, ...], message: str) -> None:
    assert ran(*words).stderr.startswith(message)


def test_addresses_may_be_typed_without_their_domain_and_are_printed_with_it(host: Path) -> None:
    done = ran("vfio", "bind", "65:00.0", "--dry-run", "--host-root", str(host), "-o", "json")
    assert [result["gpus"] for result in json.loads(done.stdout)] == [["0000:65:00.0"]]
    assert json.loads(ran("why", "65:00.0", "--host-root", str(host), "-o", "json").stdout)["device"] == "0000:65:00.0"
    assert ran("vgpu", "types", "65:00.0", "--host-root", str(host)).returncode == 0
    assert "0000:66:00.0: this host" in ran("vgpu", "delete", "66:00.0", "--host-root", str(host)).stderr
    assert "0000:66:00.0" in ran("vfio", "bind", "66:00.0", "--host-root", str(host)).stderr


def test_names_from_another_pci_id_database(host: Path, tmp_path: Path) -> None:
    (tmp_path / "pci.ids").write_text("10de  NVIDIA\n\t2236  My [A10]\n")
    done = ran("devices", "--host-root", str(host), "--pci-ids", str(tmp_path / "pci.ids"))
    assert "nvidia.com/MY_A10" in done.stdout


def test_sim_hosts_lists_the_simulated_hosts() -> None:
    lines = ran("sim", "hosts").stdout.splitlines()
    assert any(line.startswith("8xH100 ") for line in lines)


def test_sim_run_runs_a_program_on_a_simulated_host() -> None:
    done = gpuvirt("sim", "run", "--host", "4xRTX2060", "--", *GPUVIRT, "devices")
    assert done.returncode == 0, done.stderr
    assert "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A" in done.stdout


@pytest.mark.parametrize(
    ("command", "code"), [(["sh", "-c", "exit 7"], 7), (["no-such-program"], 127), (["sh", "-c", "kill -KILL $$"], 137)]
)
def test_sim_run_returns_the_exit_code_of_the_program(command: list[str], code: int) -> None:
    assert gpuvirt("sim", "run", "--", *command).returncode == code


@pytest.mark.parametrize("how", [(), ("--snapshot",)])
def test_sim_run_runs_a_program_where_it_was_called(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "here").write_text("found")
    assert gpuvirt("sim", "run", *how, "--", "cat", "here", cwd=tmp_path).stdout == "found"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("sim run 2xA10 -- gpuvirt devices", "sim run -H 2xA10 -- gpuvirt devices"),
        ("sim run HOST=4xt4", "sim run -H 4xT4 -- COMMAND"),
        ("sim run -H 8xH10O -- true", "8xH100"),
        ("demo HOST=8xH100", "demo -H 8xH100"),
        ("demo -H 2xA1O", "2xA10"),
    ],
)
def test_the_simulated_host_that_was_meant_is_guessed(words: str, meant: str) -> None:
    done = gpuvirt(*words.split())
    assert done.returncode in {2, 127}
    assert f"did you mean {'gpuvirt ' if ' ' in meant else ''}{meant}?" in " ".join(done.stderr.split())


def test_sim_run_shows_the_host_to_other_programs() -> None:
    script = 'cat "$GPUVIRT_HOST_ROOT/sys/bus/pci/devices/0000:65:00.0/vendor"; ls "$GPUVIRT_HOST_ROOT/dev/vfio"'
    assert gpuvirt("sim", "run", "--", "sh", "-c", script).stdout == "0x10de\n12\n22\nvfio\n"


def test_programs_of_a_file_snapshot_refuse_with_the_reason() -> None:
    done = gpuvirt("sim", "run", "--snapshot", "-H", "2xA30", "--", "nvidia-smi", "-i", "0", "-mig", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nvidia-smi: this simulated host is a snapshot in files" in done.stderr
    assert "leave that option out" in done.stderr


@pytest.mark.parametrize("simulated", ["2xA10", "4xT4"])
def test_the_demo_runs(simulated: str) -> None:
    done = gpuvirt("demo", "--host", simulated)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for step in range(1, 8):
        assert f"\n{step}. " in done.stdout
    assert "writes to the host: 0" in done.stdout
    assert "FellOffBus" in done.stdout


def test_the_demo_shares_two_gpus_among_four_pods_and_refuses_a_fifth() -> None:
    done = gpuvirt("demo")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert text.count("and gets GPU-") == 4
    assert "NoRoom: nvidia.com/vgpu requests 300 units, which no GPU of this node has left" in text
    assert "300 of 2000 units are free on 2 GPUs; the largest free piece has 200 units." in text


def test_the_demo_on_a_host_that_offers_nothing() -> None:
    done = gpuvirt("demo", "-H", "2xA10-no-iommu")
    assert done.returncode == 0
    assert "NoIommuGroup" in done.stdout
    assert "Nothing can be offered" in done.stdout


def test_the_users_kubeconfig_is_found_as_kubectl_finds_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    none = ran("status", environment=home)
    assert none.returncode == 2
    assert f"nor {tmp_path}/.kube/config; expected a kubeconfig" in none.stderr
    assert "neither --kubeconfig nor the variable KUBECONFIG nor a pod's service account in /var/run" in none.stderr
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text("clusters: []")
    read = ran("status", environment=home)
    assert read.returncode == 2
    assert f"{tmp_path}/.kube/config" in read.stderr
