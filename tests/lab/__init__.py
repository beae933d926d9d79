"""What the labs and the benchmarks leave behind on a computer."""
