"""The steps of a plan, each under leases, recorded before it is taken."""
