"""A host with Kata Containers and its configuration files, and doctor's findings about it."""

from gpuvirt.diagnosis.findings import Finding
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.kernel import SimKernel
from tests.diagnosis.doctor.sickhost import examine, host

CONTAINERD = "/etc/containerd/config.toml"
DROP_IN = "/opt/kata/containerd/config.d/kata-deploy.toml"
GO = "/opt/kata/share/defaults/kata-containers/configuration-qemu.toml"
RUST = "/opt/kata/share/defaults/kata-containers/runtime-rs/runtimes/qemu-rs/configuration-qemu-rs.toml"
COLD = '[hypervisor.qemu]\ncold_plug_vfio = "root-port"\n[runtime]\npod_resource_api_sock = "/var/lib/kubelet/x.sock"\n'


def handler(name: str, shim: str, config: str) -> str:
    table = f'plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{name}'
    return (
        f'[{table}]\nruntime_type = "io.containerd.{name}.v2"\nruntime_path = "{shim}"\n'
        f'[{table}.options]\nConfigPath = "{config}"\n'
    )


HANDLERS = {
    CONTAINERD: f'version = 3\nimports = ["{DROP_IN}"]\n',
    DROP_IN: handler("kata-qemu", "/opt/kata/bin/containerd-shim-kata-v2", GO)
    + handler("kata-qemu-rs", "/opt/kata/runtime-rs/bin/containerd-shim-kata-v2", RUST),
}


def kata_host(files: dict[str, str], simulated: str = "2xA10") -> SimKernel:
    return host(PlatformSpec(files={**HANDLERS, GO: COLD, RUST: COLD, **files}), simulated)


def kata_findings(kernel: SimKernel, own: Settings | None = None) -> list[Finding]:
    results = examine(kernel, settings=own).results
    return [finding for result in results if "kata" in result.check for finding in result.findings]
