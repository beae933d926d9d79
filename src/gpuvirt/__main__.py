"""Runs the command `gpuvirt` as `python -m gpuvirt`."""

from gpuvirt.cli.entry import gpuvirt

if __name__ == "__main__":
    gpuvirt()
