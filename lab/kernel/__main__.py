"""`python -m lab.kernel prepare|shell`: fetch and build what a guest needs; have a shell in one."""

import sys

from lab.kernel.guest import run_shell
from lab.kernel.kit import prepare


def main() -> int:
    """Do what the one argument says."""
    if sys.argv[1:] not in (["prepare"], ["shell"]):
        print(__doc__, file=sys.stderr)
        return 2
    kit = prepare()
    if sys.argv[1] == "shell":
        print("A guest starts; its shell is yours in about 10 s, and `exit` ends it.")
        return run_shell(kit)
    print(kit.initramfs.parent.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
