"""`gpuvirt install images` lists what an installation pulls: the images that helm and the controller render."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpuvirt import __version__
from tests.cli.commandline import ran
from tests.deploy.chart.helmchart import CHART, NAMESPACE, Helm

VGPU = {"enabled": True, "repository": "registry.example/own", "image": "vgpu-manager", "version": "580.1"}
DRIVERS = {name: {"enabled": False} for name in ("toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd")}


def policy(folder: Path, **spec: object) -> Path:
    written = {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "cluster-policy"},
        "spec": spec,
    }
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(written))
    return file


def test_a_policys_images_are_those_of_its_enabled_operands(tmp_path: Path) -> None:
    file = policy(tmp_path, sandboxWorkloads={"enabled": True}, vgpuManager=VGPU, driver={"enabled": False}, **DRIVERS)
    done = ran("install", "images", str(file), "--os", "ubuntu22.04", "--os", "rhel9", "--image", "mirror/gpuvirt:1")
    assert done.stdout.splitlines() == [
        "mirror/gpuvirt:1",
        "registry.example/own/vgpu-manager:580.1-rhel9",
        "registry.example/own/vgpu-manager:580.1-ubuntu22.04",
    ]
    without = policy(tmp_path, sandboxWorkloads={"enabled": True}, driver={"enabled": False}, **DRIVERS)
    assert ran("install", "images", str(without)).stdout.split() == [f"gpuvirt:{__version__}"]


def test_a_driver_needs_an_operating_system(tmp_path: Path) -> None:
    file = policy(tmp_path, sandboxWorkloads={"enabled": True}, vgpuManager=VGPU, driver={"enabled": False}, **DRIVERS)
    done = ran("install", "images", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert "nvidia-vgpu-manager-daemonset" in done.stderr
    assert "--os ubuntu22.04" in done.stderr


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"driver": {"image": "driver", "repository": "r"}}, "$.spec.driver.version"),
        ({"sandboxWorkloads": {"enabled": True, "mode": "xen"}}, "$.spec.sandboxWorkloads.mode"),
        ({"driver": {"enabled": "yes"}}, "$.spec.driver.enabled"),
    ],
)
def test_an_invalid_policy_lists_nothing(tmp_path: Path, spec: dict[str, object], path: str) -> None:
    done = ran("install", "images", str(policy(tmp_path, **spec)), "--os", "rhel9")
    assert (done.returncode, done.stdout) == (2, "")
    assert path in done.stderr


def test_a_manifest_without_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("kind: Namespace\n")
    done = ran("install", "images", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "helm template" in done.stderr


@pytest.mark.ring("helm")
@pytest.mark.xdist_group("helm")
def test_the_charts_images_come_from_its_values(helm: Helm) -> None:
    registry = "registry.example/mirror"
    values = (
        *(f"image.repository={registry}/gpuvirt", "image.tag=1.2.3", f"nvidiaRegistry={registry}/nvidia"),
        *("extender.enabled=true", "scheduler.enabled=true", f"scheduler.image.repository={registry}/kube-scheduler"),
        *("sandboxWorkloads.enabled=true", "dcgm.enabled=false", "driver.version=595.1"),
    )
    sets = [f"--set={value}" for value in values]
    rendered = helm.run("template", "x", str(CHART), f"--namespace={NAMESPACE}", "--kube-version=1.34.1", *sets)
    assert rendered.returncode == 0, rendered.stderr
    command = [sys.executable, "-m", "gpuvirt", "install", "images", "--os", "ubuntu24.04"]
    done = subprocess.run(command, input=rendered.stdout, capture_output=True, text=True, check=False)
    names = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert all(name.startswith(f"{registry}/") and " " not in name for name in names), "no image is left out or foreign"
    assert {f"{registry}/gpuvirt:1.2.3", f"{registry}/kube-scheduler:v1.34.1"} < set(names)
    assert f"{registry}/nvidia/driver:595.1-ubuntu24.04" in names
    assert [name.rpartition("/")[2].partition(":")[0] for name in names] == [
        *("gpuvirt", "kube-scheduler", "k8s-driver-manager", "driver", "k8s-device-plugin"),
        *("container-toolkit", "dcgm-exporter"),
    ]
