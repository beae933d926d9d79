"""How fast and how small the agent is, as `make bench` measures it; nothing here is a test."""
