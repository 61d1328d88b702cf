"""One run under every strategy: the same seed, the same global batches, 20 steps in float64."""

from tests.trainer.ranks import main
from tests.trainer.runs import losses_of, net

KINDS = {
    "plain": {"batch_size": 6, "accumulate": 1},  # the last of an epoch are 4
    "adamw": {"batch_size": 4, "accumulate": 1, "optimizer": "adamw", "ema": 0.9},
    "all": {"batch_size": 4, "accumulate": 2, "clip": 0.1, "schedule": "cosine", "warmup": 3},
}
"""Batches that fewer processes share evenly than do not; 2 samples for 3 processes at the end."""


def losses(out, kind, strategy, **options):
    """The losses of a run of one of `KINDS`."""
    options = {"dtype": "float64", "epochs": 10, "max_steps": 20, **KINDS[kind], **options}
    folder = out / f"{strategy}_{kind}"
    return losses_of(folder, model=net(dropout=0.0), strategy=strategy, **options)


def ddp(folder):
    return {kind: losses(folder, kind, "ddp") for kind in KINDS}


if __name__ == "__main__":
    main([ddp])
