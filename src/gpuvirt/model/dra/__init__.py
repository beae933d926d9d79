"""GPUs as devices of Dynamic Resource Allocation: shapes, counters that keep them apart, and ResourceSlices."""
