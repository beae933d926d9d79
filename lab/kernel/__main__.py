"""`python -m lab.kernel prepare|shell [FLAVOUR]`: fetch and build the parts of a guest; start a shell in one.

FLAVOUR is groups (Debian's kernel, the default), cdevs or both: the nodes that the kernel has under /dev/vfio.
"""

import sys

from lab.kernel.guest import run_shell
from lab.kernel.kit import Flavour, prepare


def main() -> int:
    """Run the command of the command line."""
    what, name = (*sys.argv[1:], Flavour.GROUPS.value)[:2] if len(sys.argv) in {2, 3} else ("", "")
    if what not in {"prepare", "shell"} or name not in {flavour.value for flavour in Flavour}:
        print(__doc__, file=sys.stderr)
        return 2
    kit = prepare(Flavour(name))
    if what == "shell":
        print("The guest boots. Its shell starts in about 10 s; `exit` ends it.")
        return run_shell(kit)
    print(kit.initramfs.parent.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
