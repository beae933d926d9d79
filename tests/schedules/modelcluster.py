"""The model of a cluster's objects that tests use: the simulator's."""

from gpuvirt_sim.schedules.cluster import BIND_S, ModelCluster, NodeObject, PodObject

__all__ = ["BIND_S", "ModelCluster", "NodeObject", "PodObject"]
