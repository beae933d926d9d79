"""Starts the programs of the command line: Ctrl-C while their modules still load ends them at once, and in silence.

Loading takes up to a second, in which Python would print the traceback of whatever import was under way. Nothing has
begun by then, so the process may end as any other does. `gpuvirt.cli.main` hands interrupts to the command once it is
loaded.
"""

from gpuvirt.cli.interrupts import end_at_interrupt


def gpuvirt() -> None:
    """Run `gpuvirt`."""
    end_at_interrupt()
    from gpuvirt.cli.main import main  # noqa: PLC0415

    main()


def nvidia_kubevirt_gpu_device_plugin() -> None:
    """Run the agent in place of NVIDIA's plugin."""
    end_at_interrupt()
    from gpuvirt.cli.main import nvidia_kubevirt_gpu_device_plugin as main  # noqa: PLC0415

    main()


def vfio_manage() -> None:
    """Run in place of NVIDIA's vfio-manage."""
    end_at_interrupt()
    from gpuvirt.cli.main import vfio_manage as main  # noqa: PLC0415

    main()


def nvidia_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager on a host."""
    end_at_interrupt()
    from gpuvirt.cli.main import nvidia_vgpu_dm as main  # noqa: PLC0415

    main()


def nvidia_k8s_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager in a cluster."""
    end_at_interrupt()
    from gpuvirt.cli.main import nvidia_k8s_vgpu_dm as main  # noqa: PLC0415

    main()
