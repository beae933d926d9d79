"""Support archives of a host: their sections, and how names are hidden."""
