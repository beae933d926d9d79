"""`nvidia-k8s-vgpu-dm` as NVIDIA's operator starts it: required options, ignored options, exit codes."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpuvirt.cli.dropin import k8svgpudm
from gpuvirt.cli.main import nvidia_k8s_vgpu_dm
from tests.cli.commandline import ran

NEEDED = {
    "NODE_NAME": "node01",
    "NAMESPACE": "gpu-operator",
    "CONFIG_FILE": "/vgpu-config/config.yaml",
    "DEFAULT_VGPU_CONFIG": "default",
}


def run(folder: Path, *arguments: str, **environment: str) -> CompletedProcess[str]:
    return ran(*arguments, environment=environment, cwd=folder, program=nvidia_k8s_vgpu_dm)


@pytest.mark.parametrize("missing", sorted(NEEDED))
def test_a_missing_or_empty_option_is_named_and_exits_with_1(tmp_path: Path, missing: str) -> None:
    ended = run(tmp_path, **{**NEEDED, missing: ""})
    assert ended.returncode == 1
    option = missing.lower().replace("_", "-")
    assert f"--{option}: is missing or empty" in ended.stderr


@pytest.mark.parametrize(("option", "value"), [("-n", "Node_1"), ("-ns", "gpu_operator"), ("--namespace", "a.b")])
def test_invalid_names_are_refused(tmp_path: Path, option: str, value: str) -> None:
    ended = run(tmp_path, option, value, **NEEDED)
    assert ended.returncode == 1
    assert f"{value!r} is not a" in ended.stderr


def test_options_without_effect_are_reported_and_a_missing_api_server_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        pytest.fail("an agent starts without an API server, and would run until the test is ended")

    monkeypatch.setattr(k8svgpudm, "run_until_stopped", fail)
    ended = run(tmp_path, "-r", "-w", "-g", "clients.yaml", **NEEDED)
    assert ended.returncode == 1
    for option in ("--with-reboot", "--with-shutdown-host-gpu-clients", "--gpu-clients-file"):
        assert f"{option} has no effect" in ended.stderr
    assert "--kubeconfig: no API server" in ended.stderr
