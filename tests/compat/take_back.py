"""Run by an old Python with an old torch: what becomes there of files that `ckptool.save` wrote.

Takes on stdin a JSON object, path of a file -> case of `training.CASES`; prints one, path ->
`{"error": text}` or `{"read": leaves, "model": leaves, "optimizer": leaves}`: what `torch.load`
gives, and what model and optimizer of the case hold that were built here and loaded it. They must
be able to go on. Python 3.8.
"""

import json
import sys
import warnings

import torch
from read_back import rows
from training import built, step


def leaves(tree):
    """The tensors of a tree, as `read_back` has them, and its other leaves with type and value."""
    return [[*one] for one in (*rows(tree, [], frozenset()), *plain(tree, []))]


def plain(node, path):
    """Type and value of all that is not a tensor; sets in order. Of a container its type."""
    name = type(node).__name__
    if isinstance(node, (dict, list, tuple)):
        yield path, name, len(node)
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from plain(item, [*path, repr(key)])
    elif isinstance(node, (set, frozenset)):
        yield path, name, repr(sorted(node))
    elif not isinstance(node, torch.Tensor):
        yield path, name, repr(node)


def taken(path, case):
    """What one file gives."""
    tree = torch.load(path)
    model, optimizer = built(case)
    model.load_state_dict(tree["state_dict"])
    optimizer.load_state_dict(tree["optimizer"])
    found = {
        "read": leaves(tree),
        "model": leaves(dict(model.state_dict())),
        "optimizer": leaves(optimizer.state_dict()),
    }
    step(case, model, optimizer)
    return found


def tried(path, case):
    """The same, or what was raised."""
    try:
        return taken(path, case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = json.load(sys.stdin)
    json.dump({path: tried(path, case) for path, case in wanted.items()}, sys.stdout)
