"""What pods have, and what they get."""
