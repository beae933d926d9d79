"""What an installation writes and pulls."""
