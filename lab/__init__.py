"""Labs: real peers on one machine, which keep the simulators honest."""
