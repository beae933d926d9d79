"""The leftovers of the labs and the benchmarks on a computer."""
