"""Print what the torch that runs this finds in folders of DCP, whose paths come as JSON."""

import json
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp


def placed(tree, path, leaf):
    """Put a leaf where it stood, in dicts and lists."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(tree, list):
            tree.extend([None] * (key + 1 - len(tree)))
        if following is None:
            tree[key] = leaf
        elif isinstance(tree, list):
            tree[key] = tree[key] or ([] if isinstance(following, int) else {})
        else:
            tree.setdefault(key, [] if isinstance(following, int) else {})
        tree = tree[key]


def leaves(node, path=""):
    if isinstance(node, (dict, list)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {at: one for k, v in items for at, one in leaves(v, f"{path}/{k}").items()}
    if isinstance(node, torch.Tensor):
        return {path: [str(node.dtype), list(node.shape), node.double().tolist()]}
    return {path: node}


def loaded(folder):
    """Load into a tree made of the index, and hold it against torch's own converter."""
    reader, state = dcp.FileSystemReader(folder), {}
    index = reader.read_metadata()
    for name, one in index.state_dict_metadata.items():
        is_tensor = hasattr(one, "chunks")
        leaf = torch.empty(one.size, dtype=one.properties.dtype) if is_tensor else 0
        placed(state, index.planner_data[name], leaf)
    load = getattr(dcp, "load_state_dict", dcp.load)
    load(state, storage_reader=reader, no_dist=True)
    try:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    except ImportError:  # torch before 2.3
        return leaves(state)
    dcp_to_torch_save(folder, f"{folder}.pth")
    converted = leaves(torch.load(f"{folder}.pth", weights_only=False))
    return leaves(state) if converted == leaves(state) else {"converted": converted}


warnings.simplefilter("ignore")
print(json.dumps({folder: loaded(folder) for folder in json.load(sys.stdin)}))
