"""A vGPU config with a type that the cards of a host do not have: the commands refuse it, as the agent does."""

from pathlib import Path

import pytest

from gpuvirt.cli.main import main, nvidia_vgpu_dm
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import ran

CONFIGS = """version: v1
vgpu-configs:
  other-card: [{devices: all, vgpu-devices: {A100-4C: 6}}]
  other-filter: [{device-filter: ["0x20B010DE"], devices: all, vgpu-devices: {A100-4C: 6}}]
"""
COMMANDS = {
    "gpuvirt vgpu apply": ("gpuvirt", "vgpu", "apply", "--dry-run"),
    "gpuvirt vgpu assert": ("gpuvirt", "vgpu", "assert"),
    "nvidia-vgpu-dm apply": ("nvidia-vgpu-dm", "apply"),
    "nvidia-vgpu-dm assert": ("nvidia-vgpu-dm", "assert"),
}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    path = tmp_path / "configs.yaml"
    path.write_text(CONFIGS)
    return path


def run(configs: Path, name: str, program: str, *command: str) -> tuple[int, str, str]:
    export(build_host(load_host("2xA10-vgpu")), host := configs.with_name("host"))
    environment = {"GPUVIRT_HOST_ROOT": str(host)}
    enter = main if program == "gpuvirt" else nvidia_vgpu_dm
    done = ran(*command, "-f", str(configs), "-c", name, environment=environment, program=enter)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_type_of_another_card_is_refused(configs: Path, command: tuple[str, ...]) -> None:
    code, output, errors = run(configs, "other-card", *command)
    assert code == 1
    assert "ConfigInvalid: " in errors
    assert errors.count("$.vgpu-configs.other-card[0]: 0000:4b:00.0 (10de:2236) is a card without A100-4C") == 1
    assert "names no GPU" not in output


def test_a_filter_of_another_card_is_no_error(configs: Path) -> None:
    code, output, errors = run(configs, "other-filter", *COMMANDS["gpuvirt vgpu apply"])
    assert (code, "ConfigInvalid" in errors) == (0, False)
    assert "names no GPU of this host" in output


def test_a_config_may_be_valid_for_other_hosts(configs: Path) -> None:
    code, _, errors = run(configs, "other-card", *COMMANDS["nvidia-vgpu-dm assert"], "--valid-config")
    assert (code, "ConfigInvalid" in errors) == (0, False)


@pytest.mark.parametrize("command", ["apply", "assert"])
def test_without_a_name_the_configs_for_the_gpus_of_this_host_are_listed(command: str, tmp_path: Path) -> None:
    export(build_host(load_host("2xA10-vgpu")), tmp_path / "host")
    done = ran("vgpu", command, environment={"GPUVIRT_HOST_ROOT": str(tmp_path / "host")})
    assert done.returncode == 2
    assert "--selected-config: is missing; the configs for the GPUs of this host are default, A10-1A, " in done.stderr
    assert "T4-" not in done.stderr
    (tmp_path / "none/sys/bus/pci/devices").mkdir(parents=True)
    done = ran("vgpu", command, environment={"GPUVIRT_HOST_ROOT": str(tmp_path / "none")})
    assert "--selected-config: is missing; no config is for a GPU of this host" in done.stderr
