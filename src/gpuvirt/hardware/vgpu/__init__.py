"""The ways in which hosts carry vGPUs, each behind the same Protocol."""
