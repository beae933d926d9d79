"""VgpuSchedules: worker VMs whose vGPUs change with the time of day, a part of gpuvirt's controller and its commands.

`gpuvirt` of the same version runs it, and finds it by its entry points (`gpuvirt.distributions`).
"""

__version__ = "0.1.0"
