"""The decisions of `gpuvirt plan node/NAME` from a GpuNode; nothing here reads or writes a host.

A preview runs the code that will make the change: the agent's planner here, the plan that would be executed for
`--dry-run`, the controller's own rounds for `gpuvirt schedule plan`. A second description of the steps would sooner or
later differ from the code that takes them. What a preview leaves out, it says. The cost: GpuNodes report PCI ids, VFs
and types (1 kB for each GPU). Refused: a plan from the catalog alone, which knows nothing of the host; a request to the
agent, which has no answer while the agent is not running.
"""
