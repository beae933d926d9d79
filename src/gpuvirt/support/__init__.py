"""Support archives of a host: what each section collects, and how names are hidden."""
