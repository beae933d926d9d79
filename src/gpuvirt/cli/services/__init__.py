"""The commands that the cluster's workloads run, and the removal of what they leave."""
