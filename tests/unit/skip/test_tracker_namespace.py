"""Namespaces stay the same when they are copied."""

import copy
import pickle

from torchgpipe.skip.tracker import Namespace, describe


def test_namespaces():
    ns = Namespace()
    assert ns == copy.deepcopy(ns) == pickle.loads(pickle.dumps(ns))
    assert ns != Namespace()
    assert len({ns, copy.copy(ns), Namespace()}) == 2
    assert repr(ns).startswith("<Namespace ")


def test_description_names_the_namespace():
    ns = Namespace()
    assert describe((None, "x")) == "'x'"
    assert describe((ns, "x")) == f"'x' in {ns}"
