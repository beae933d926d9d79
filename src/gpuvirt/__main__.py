"""Runs the command `gpuvirt` as `python -m gpuvirt`."""

from gpuvirt.cli.main import main

if __name__ == "__main__":
    main()
