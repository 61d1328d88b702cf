"""Two processes of one run that load together: what each of them was told, as JSON.

Run as `python -m tests.loading.two_ranks_loading FOLDER RANK`, once for each rank.
"""

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ckptool import load, load_into, save
from ckptool.loading import load_into as installing
from tests.loading.two_ranks import adam, parallel, plain


def fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


WRAPS = {"ddp": parallel, "fsdp": fsdp, "fully_sharded": fully_sharded}


def whole(folder):
    return folder / "whole.pth"


def saved(folder):
    """The same, as `save` writes it."""
    return folder / "saved.pth"


def lacking(folder):
    """A file that one rank is given: it lacks a tensor."""
    return folder / "lacking.pth"


def absent(folder):
    return folder / "absent.pth"


def damaged(folder):
    return folder / "damaged.pth"


def write(folder):
    model = plain(5)
    optimizer = adam(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, whole(folder))
    save(saved(folder), model=model, optimizer=optimizer)
    first = next(iter(optimizer.state.values()))
    first["exp_avg"] = first["exp_avg"][0]
    save(factored(folder), model=model, optimizer=optimizer)
    state = model.state_dict()
    data = bytearray(whole(folder).read_bytes())
    data[data.index(state["0.weight"].numpy().tobytes()) + 3] ^= 16
    damaged(folder).write_bytes(data)
    del state["2.bias"]
    torch.save(state, lacking(folder))


def bits(model, optimizer=None):
    """The numbers that this rank has of a model, and what its optimizer keeps."""
    held = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values() if optimizer is not None else ():
        held += state.values()
    return [(one.to_local() if hasattr(one, "to_local") else one).detach().clone() for one in held]


def told(model, source, optimizer=None, **options):
    """How loading went in this rank, and whether anything was touched."""
    before = bits(model, optimizer)
    found = {"loaded": True}
    try:
        load_into(model, source, optimizer=optimizer, **options)
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
        found["hint"] = getattr(error, "hint", None)
    after = bits(model, optimizer)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return {**found, "untouched": same}


def one_of(name):
    """The second rank has a file that does not do."""

    def scene(folder, rank, wrap):
        return told(wrap(plain(rank)), (name if rank else whole)(folder))

    return scene


def raises(*_):
    raise ValueError("not today")


def a_hook(folder, rank, wrap):
    model = wrap(plain())
    if rank:
        list(model.modules())[-1].register_load_state_dict_post_hook(raises)
    return told(model, whole(folder))


def a_read(folder, rank, wrap):
    """The last step fails in one rank: the tensors of the other are filled already."""
    before = installing.fill, installing._Loading._fill_and_replace

    def finish(self, given):
        before[1](self, given)
        if self._fills is None:
            raises()

    try:
        if rank:
            installing.fill, installing._Loading._fill_and_replace = raises, finish
        return told(wrap(plain()), whole(folder))
    finally:
        installing.fill, installing._Loading._fill_and_replace = before


def a_read_of_many(folder, rank, wrap):
    """The same where there is no copy of what is filled."""
    before = installing._MAX_COPIED_BYTES
    try:
        installing._MAX_COPIED_BYTES = 0
        return a_read(folder, rank, wrap)
    finally:
        installing._MAX_COPIED_BYTES = before


def an_optimizer(folder, rank, wrap):
    model = wrap(plain())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters if rank == 0 else parameters[1:])
    return told(model, whole(folder), optimizer, optimizer_order="position")


SCENES = {
    "loaded": one_of(whole), "lacking": one_of(lacking), "absent": one_of(absent),
    "damaged": one_of(damaged), "hook": a_hook, "read": a_read, "read of many": a_read_of_many,
}  # fmt: skip


def on_its_own(folder, rank):
    """A model that nothing spreads."""
    return told(plain(), (lacking if rank else whole)(folder))


def in_a_group_of_one(folder, rank):
    """The other rank does not call at all."""
    alone = dist.new_group([0])
    if rank:
        return None
    model = torch.nn.parallel.DistributedDataParallel(plain(), process_group=alone)
    return told(model, whole(folder))


def optimizer_of_parts(folder, rank):
    """What FSDP, the first, does not get by `load_into`, and how it does: docs/loading.md."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    model = fsdp(plain())
    optimizer = torch.optim.Adam(model.parameters())
    found = told(model, folder / "saved.pth", optimizer)
    held = load(folder / "saved.pth")["optimizer"]
    names = [name for group in held["param_groups"] for name in group["param_names"]]
    for group in held["param_groups"]:
        group["params"] = group.pop("param_names")
    held["state"] = {names[number]: state for number, state in held["state"].items()}
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, held, options=options)
    save(folder / "fsdp_again.pth", model=model, optimizer=optimizer)
    return found


def optimizer_of_dtensors(folder, rank, source, name, **options):
    """State of which each rank takes its part; what of it is saved again is the same."""
    model = fully_sharded(plain())
    optimizer = torch.optim.Adam(model.parameters())
    found = told(model, source(folder), optimizer, **options)
    held = [value for state in optimizer.state.values() for value in state.values()]
    found["bytes"] = sum(
        getattr(value, "_local_tensor", value).untyped_storage().nbytes() for value in held
    )
    save(folder / name, model=model, optimizer=optimizer)
    return found


def factored(folder):
    """A file with state that is not of the parameters' shapes."""
    return folder / "factored.pth"


def main(folder, rank):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if rank == 0:
        write(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    dist.barrier()
    outcomes = {
        f"{scene} {kind}": SCENES[scene](folder, rank, wrap)
        for kind, wrap in WRAPS.items()
        for scene in SCENES
    }
    outcomes["optimizer ddp"] = an_optimizer(folder, rank, parallel)
    outcomes["parts"] = optimizer_of_parts(folder, rank)
    for source, name, order in (
        (saved, "by_names.pth", None),
        (whole, "by_position.pth", "position"),
        (factored, "factored_again.pth", None),
    ):
        outcomes[name] = optimizer_of_dtensors(folder, rank, source, name, optimizer_order=order)
    for scene in (on_its_own, in_a_group_of_one):
        outcomes[scene.__name__] = scene(folder, rank)
    model = parallel(plain())
    dist.barrier()
    if rank:
        dist.destroy_process_group()
    else:  # the other rank has ended
        outcomes["left_alone"] = told(model, whole(folder))
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
