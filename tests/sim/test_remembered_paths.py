"""A tree remembers what paths lead to; what it remembers is what a walk finds, whatever was changed between."""

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import Folder, Link, Node, Tree, constant

NAMES = st.sampled_from(["a", "b", "dev"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: HostPath("/sys/" + "/".join(names)))
TARGETS = st.sampled_from(["/sys/a", "/sys/a/b", "b", "../a", "dev", "."])
NODES = st.one_of(st.just("file"), st.just("folder"), TARGETS)
CHANGES = st.tuples(st.sampled_from(["place", "make", "remove"]), PATHS, NODES)


def node_of(text: str) -> Node:
    """Return a new node: a folder, a file with a device number, or a link to the text."""
    return Folder() if text == "folder" else constant("195:0") if text == "file" else Link(text)


def found(tree: Tree, path: HostPath, *, follow: bool, walks: bool) -> object:
    """Return where a path leads and to which node, or the errno."""
    try:
        return (tree._walk_to if walks else tree._resolve)(path, follow=follow)
    except OSError as error:
        return error.errno


def change(tree: Tree, act: str, path: HostPath, text: str) -> None:
    try:
        if act == "place":
            tree.place(path, node_of(text))
        elif act == "make":
            tree.make(path)
        else:
            tree.remove(path)
    except OSError:
        pass  # a file is in the way, or links lead in a circle


@given(st.lists(st.tuples(CHANGES, st.lists(st.tuples(PATHS, st.booleans()), max_size=4)), max_size=20))
def test_a_remembered_path_leads_where_a_walk_leads(
    changes: list[tuple[tuple[str, HostPath, str], list[tuple[HostPath, bool]]]],
) -> None:
    tree, asked = Tree(), set[tuple[HostPath, bool]]()
    for (act, path, text), paths in changes:
        change(tree, act, path, text)
        asked |= {*paths, (path, True), (path, False)}
        for each, follow in asked:
            assert found(tree, each, follow=follow, walks=False) == found(tree, each, follow=follow, walks=True)
