"""Why a VM or a pod waits for its devices."""
