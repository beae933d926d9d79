"""The parts of an installation that helm can't do, and the removal of all that the controller has created."""
