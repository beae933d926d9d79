"""The client of a vCenter, by pyVmomi. It is loaded in children alone.

Source: the vSphere Web Services API, 7.0 or later. Properties are read by paths through the PropertyCollector, never as
whole objects: a value that gpuvirt does not need must not make an object unreadable.
"""
