"""Tests of VgpuSchedules."""
