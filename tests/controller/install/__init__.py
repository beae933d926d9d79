"""The objects that an installation writes, and the images that it pulls."""
