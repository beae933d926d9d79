"""VgpuSchedules in the controller: rounds that read, decide, record and act while a transition is under way.

Decisions follow from a round's readings and the status alone, and each action can be repeated. So a controller may die
anywhere, and the next round goes on. Five requests a second during a switch cost less than a suspension because of a
stale cache. Refused: watches. A schedule has a task only while something is due; a hundred idle ones make no request.

- No VM starts before all that leave or change their vGPU type are confirmed off. An order by sizes would need the
  meaning of the hypervisor's type names.
- A worker's type in each phase is stated in the spec, never remembered, so nothing can be lost on the way back.
- A step that misses its deadline is held: reported, and tried again each 30 s, since only a try shows that a budget
  allows it.
- Between switches nothing is corrected. A switch by hand is an override in the spec, with an end.
- A ready node keeps the cordon of a deleted schedule for 10 minutes, since a suspension may still be carried out. A
  finalizer would keep the namespace from being deleted.
"""
