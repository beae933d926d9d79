"""The API server's side: what is heard from it, and what is written to it."""
