"""The processes: each joins the layers it needs, and decides nothing."""
