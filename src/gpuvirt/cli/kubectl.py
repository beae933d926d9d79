"""The plugin of kubectl: `kubectl gpuvirt`, and the completion of its words.

Source: kubectl runs `kubectl-NAME` with the words after NAME, and `kubectl_complete-NAME` with the same words, the last
one incomplete. That prints a candidate on each line, then `:4`: no file names (cobra's ShellCompDirectiveNoFileComp).
"""

import contextlib
import io
import os
import shlex
import sys

from gpuvirt.cli.main import run

NAME = "kubectl gpuvirt"
NO_FILES = ":4"


def plugin() -> None:
    """Run the command line as kubectl's plugin; usage lines then say `kubectl gpuvirt`."""
    run(sys.argv[1:], name=NAME)


def complete() -> None:
    """Print the completions of the last word, which are those of `gpuvirt` in bash."""
    words = sys.argv[1:] or [""]
    os.environ.update(  # noqa: TID251  as bash passes the typed words
        _GPUVIRT_COMPLETE="complete_bash", COMP_WORDS=shlex.join(["gpuvirt", *words]), COMP_CWORD=str(len(words))
    )
    with contextlib.redirect_stdout(io.StringIO()) as found, contextlib.suppress(SystemExit):
        run([])
    print(*filter(None, found.getvalue().splitlines()), NO_FILES, sep="\n")
