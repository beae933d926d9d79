"""The client of a host with libvirt and QEMU, by libvirt-python. It is loaded in children alone.

Source: libvirt's API, and its QEMU driver (`src/qemu`). It is asked over TLS as `qemu:///system`.
"""
