"""The processes: each one joins the layers that it needs, and decides nothing itself."""
