"""VgpuSchedules in the controller: rounds that read, decide, record and act while a transition is under way."""
