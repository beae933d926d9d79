"""The agent of one node: observes and changes devices, and records and answers allocations; without the API server."""
