"""Shares on one node: the GPUs that its containers have, and the CDI specs by which they get them."""
