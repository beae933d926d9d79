"""The parts of an installation that helm can't do, and the removal of all that the controller has created.

Helm never upgrades a chart's `crds/`, from version 4 on conflicts with or overwrites what another product has defined,
and knows no object of a kind that its own release brings. So Jobs write the CRDs and the ClusterPolicy. gpuvirt's
objects carry `app.kubernetes.io/part-of: gpuvirt`; others are left alone or refused.

An uninstall takes the controller's lease for ten minutes, since a running controller would restore what it removes. The
installation grants the operands' rights whatever the policy says: the controller can grant no right that it lacks. On
OpenShift each account has an SCC with what its pods request; `privileged` would give each operand all of the host.

`gpuvirt install images` reads helm's output and the controller's own renderers; a second mapping would differ one day.
"""
