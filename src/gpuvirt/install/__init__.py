"""Installing what helm can't, and uninstalling all that the controller has put into a cluster."""
