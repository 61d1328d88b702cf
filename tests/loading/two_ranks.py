"""Two processes of one run that save together: what each of them was told, as JSON.

Run as `python -m tests.loading.two_ranks FOLDER RANK`, once for each rank.
"""

import argparse
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ckptool import save
from ckptool.errors import CheckpointError


def net(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)
    )
    model[3].weight = model[0].weight
    return model


def plain(seed=0):
    """As `net`, but without ties, which the first FSDP has not."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)
    )


def trained(model, optimizer):
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def adam(model):
    return trained(model, torch.optim.Adam(model.parameters()))


def parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def replicated(folder, rank):
    model = parallel(net())
    return save(folder / "replicated.pth", model=model, optimizer=adam(model), rank=rank)


def by_itself(folder, rank):
    """What one process has after the same training: each rank saw the same batches."""
    model = net()
    optimizer = adam(model)
    if rank == 0:
        torch.save(
            {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
            folder / "by_itself.pth",
        )


def by_itself_untied(folder, rank):
    model = plain()
    optimizer = adam(model)
    if rank == 0:
        torch.save(
            {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
            folder / "by_itself_untied.pth",
        )


def fsdp(folder, rank, *, keep=True):
    from torch.distributed.fsdp import FullyShardedDataParallel

    def sharded(module):
        return FullyShardedDataParallel(module, use_orig_params=keep, device_id=torch.device("cpu"))

    model = plain()
    model[2] = sharded(model[2])
    model = sharded(model)
    return save(folder / f"fsdp_{keep}.pth", model=model, optimizer=adam(model))


def fsdp_flat(folder, rank):
    return fsdp(folder, rank, keep=False)


def fully_sharded(folder, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return save(folder / "fully_sharded.pth", critic=model, model=model, optimizer=adam(model))


def zero(folder, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = parallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    return save(folder / "zero.pth", model=model, optimizer=trained(model, optimizer))


def no_plain_data(folder, rank):
    return save(folder / "never.pth", config={"args": argparse.Namespace()})


def no_room(folder, rank):
    (folder / "a_folder").mkdir(exist_ok=True)
    return save(folder / "a_folder", epoch=1)


class Unwilling(torch.nn.Linear):
    """A module that cannot tell its state on the second rank."""

    def state_dict(self, *args, **options):
        if dist.get_rank() == 1:
            raise RuntimeError("not today")
        return super().state_dict(*args, **options)


def one_fails(folder, rank):
    return save(folder / "never.pth", model=Unwilling(2, 2))


class Interrupted:
    """State that is interrupted while it is written, which only the first rank does."""

    def state_dict(self):
        return (
            {"weight": torch.ones(2), "bad": argparse.Namespace()} if dist.get_rank() == 0 else {}
        )


def the_writer_fails(folder, rank):
    return save(folder / "never.pth", ema=Interrupted())


def sharded_net():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))


class Scheduler:
    """State that one rank cannot tell, of an object that comes before what is gathered."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        if dist.get_rank() == 1:
            raise self.error
        return {"step": 1}


def one_fails_before_the_parts_are_gathered(folder, rank):
    scheduler = Scheduler(RuntimeError("not today"))
    return save(folder / "never.pth", scheduler=scheduler, model=sharded_net())


class OfTheUsers(CheckpointError):
    """An error that the other processes cannot read: it is made of two arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")

    def __reduce__(self):
        return OfTheUsers, ("one",)


def one_fails_with_an_error_of_the_users(folder, rank):
    return save(folder / "never.pth", scheduler=Scheduler(OfTheUsers("this", "that")))


def other_parts_in_each_rank(folder, rank):
    model = sharded_net()
    held = model if rank == 0 else model[0]
    return save(folder / "never.pth", model=held)


def parts_in_one_rank_alone(folder, rank):
    model = sharded_net()
    return save(folder / "never.pth", epoch=1, model=model if rank == 0 else None)


def no_such_overwrite(folder, rank):
    return save(folder / "never.pth", epoch=1, overwrite="no" if rank else True)


def afterwards(folder, rank):
    return save(folder / "afterwards.pth", rank=rank)


SCENES = (
    by_itself, by_itself_untied, replicated, fsdp, fsdp_flat, fully_sharded, zero, no_plain_data,
    no_room, one_fails, the_writer_fails, one_fails_before_the_parts_are_gathered,
    one_fails_with_an_error_of_the_users, other_parts_in_each_rank, parts_in_one_rank_alone,
    no_such_overwrite, afterwards,
)  # fmt: skip


def left_alone(folder, model):
    """The other rank has ended."""
    return save(folder / "never.pth", model=model)


def told(scene, folder, rank):
    """What one rank was told: the receipt, or the error."""
    try:
        receipt = scene(folder, rank)
    except (CheckpointError, RuntimeError) as error:
        hint = getattr(error, "hint", None)
        return {"error": type(error).__name__, "text": str(error), "hint": hint}
    return receipt and receipt.to_dict()


def main(folder, rank):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    outcomes = {scene.__name__: told(scene, folder, rank) for scene in SCENES}
    model = parallel(net())
    dist.barrier()
    if rank:
        dist.destroy_process_group()
    else:
        outcomes["left_alone"] = told(left_alone, folder, model)
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
