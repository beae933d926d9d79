# What gpuvirt uses of libvirt-python for QEMU alone.

from libvirt import virDomain

def qemuMonitorCommand(domain: virDomain, cmd: str, flags: int) -> str: ...  # noqa: N802
