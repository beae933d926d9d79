"""Support archives of a host: their sections, the files of the kubelet in them, and how names are hidden."""
