"""One run under every strategy: the same seed, the same global batches, 20 steps in float64."""

from tests.trainer.ranks import main
from tests.trainer.runs import Told, net, run

KINDS = {
    "plain": {"batch_size": 6, "accumulate": 1},  # the last of an epoch are 4
    "adamw": {"batch_size": 4, "accumulate": 1, "optimizer": "adamw", "ema": 0.9},
    "all": {"batch_size": 4, "accumulate": 2, "clip": 0.1, "schedule": "cosine", "warmup": 3},
}
"""Batches that fewer processes share evenly than do not; 2 samples for 3 processes at the end."""
HERE = ("dp", "model-parallel")
SPREAD = ("ddp", "fsdp")


def losses(out, kind, strategy, **options):
    """That of each step, then those of each epoch's validation."""
    told = Told()
    options = {**KINDS[kind], **options}
    if strategy == "model-parallel":
        options["devices"] = ("cpu", "cpu")
    run(
        out / f"{strategy}_{kind}",
        told,
        model=net(dropout=0.0),
        strategy=strategy,
        dtype="float64",
        epochs=10,
        max_steps=20,
        **options,
    )
    return [one.loss for one in told.of("Stepped")] + [
        one.val_loss for one in told.of("EpochEnded")
    ]


def spread(folder):
    """All that runs in several processes."""
    return {f"{name} {kind}": losses(folder, kind, name) for name in SPREAD for kind in KINDS}


if __name__ == "__main__":
    main([spread])
