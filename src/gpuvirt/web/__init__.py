"""What the agent serves on the network: probes and metrics, and nothing else."""
