"""The ClusterPolicy: which one is active, the settings from it, its invalid values, and its status."""
