"""Lets `python -m gpuvirt` do what the command `gpuvirt` does."""

from gpuvirt.cli.main import main

if __name__ == "__main__":
    main()
