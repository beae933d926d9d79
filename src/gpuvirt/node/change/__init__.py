"""Changes of isolation units: who may make one, and what the host keeps of it while it is made."""
