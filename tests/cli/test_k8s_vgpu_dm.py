"""`nvidia-k8s-vgpu-dm` as NVIDIA's operator starts it: required options, ignored options, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = {
    "NODE_NAME": "node01",
    "NAMESPACE": "gpu-operator",
    "CONFIG_FILE": "/vgpu-config/config.yaml",
    "DEFAULT_VGPU_CONFIG": "default",
}


def run(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    known = {key: value for key, value in os.environ.items() if not key.startswith(("KUBE", "NODE_", "GPUVIRT"))}  # noqa: TID251
    enter = "from gpuvirt.cli.main import nvidia_k8s_vgpu_dm; nvidia_k8s_vgpu_dm()"
    return subprocess.run(
        [sys.executable, "-c", enter, *arguments],
        env=known | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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


def test_options_without_effect_are_reported_and_a_missing_api_server_exits_with_1(tmp_path: Path) -> None:
    ended = run(tmp_path, "-r", "-w", "-g", "clients.yaml", **NEEDED)
    assert ended.returncode == 1
    for option in ("--with-reboot", "--with-shutdown-host-gpu-clients", "--gpu-clients-file"):
        assert f"{option} has no effect" in ended.stderr
    assert "--kubeconfig: no API server" in ended.stderr
