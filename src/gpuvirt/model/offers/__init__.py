"""The offered devices with their names and their health, and the view of a node."""
