"""Labs: real things that keep the simulators honest."""
