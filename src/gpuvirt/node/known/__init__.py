"""What the agent knows of its node, and what follows for what is offered."""
