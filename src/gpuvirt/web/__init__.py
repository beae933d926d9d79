"""The HTTP pages of the agent and the controller: probes and metrics."""
