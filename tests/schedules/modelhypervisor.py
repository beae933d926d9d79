"""The model of a hypervisor that tests use: the simulator's."""

from gpuvirt_sim.schedules.hypervisor import Connection, Fault, ModelHypervisor, Vm

__all__ = ["Connection", "Fault", "ModelHypervisor", "Vm"]
