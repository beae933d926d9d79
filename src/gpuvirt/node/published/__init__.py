"""Files that the agent writes for other programs: its view, CDI specs, markers, the driver's options."""
