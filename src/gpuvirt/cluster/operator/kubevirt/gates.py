"""Which of KubeVirt's gates machines with our devices need, by what is installed and asked for; none is taken out."""

from gpuvirt.cluster.operator.kubevirt.names import Names
from gpuvirt.cluster.operator.kubevirt.offered import Offered
from gpuvirt.cluster.operator.kubevirt.subject import Subject
from gpuvirt.cluster.operator.kubevirt.versions import Version, needs_gpu_gate

GPU, HOST_DEVICES = "GPU", "HostDevices"


def gates_needed(subject: Subject, version: Version | None, offered: Offered, names: Names) -> tuple[str, ...]:
    """Return them; HCO has both switched on always."""
    if subject.is_hco:
        return ()
    gpu = (GPU,) if offered and needs_gpu_gate(version) else ()
    host_devices = (HOST_DEVICES,) if names.host_devices & offered.keys() else ()
    return (*gpu, *host_devices)
