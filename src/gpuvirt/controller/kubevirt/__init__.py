"""KubeVirt's configuration: finds and writes missing entries, so that VMs may use the devices that nodes offer.

The configuration belongs to the admin, HCO or a GitOps tool. So gpuvirt patches single entries, never whole lists
(newer KubeVirts have fields that it does not know), and removes only its own entries that no object names. What pods
request has no influence, since tenants can request any name.

A ConfigMap counts reverted patches, written before the patch is sent: whatever rewrites KubeVirt removes annotations,
too, and a restarted controller must not resume a conflict that its predecessor gave up.

If KubeVirt's own plugin and the agent register one name, the kubelet drops one of them. So an agent registers a new
name only once the controller has compared it (`spec.reviewed`), or after 30 s: a second plugin takes nothing from a VM,
since each device is read again before it is allocated.
"""
