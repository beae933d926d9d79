"""`make digests`: records the digests of rendered objects; with --show, prints the objects, to compare two trees."""

import json
import sys

from gpuvirt.kube.kinds.workloads import encoded
from tests.controller.operands.digests import RENDERINGS, differences, digests, objects, record, recorded


def main() -> int:
    """Print the objects, or record their digests and say which have changed."""
    if "--show" in sys.argv[1:]:
        for rendering in RENDERINGS:
            for key, manifest in objects(rendering).items():
                print(f"--- {rendering}: {key}\n{json.dumps(json.loads(encoded(manifest)), indent=1)}")
        return 0
    print("\n".join(differences(recorded(), digests())) or "nothing is rendered otherwise")
    record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
