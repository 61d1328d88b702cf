"""What a training run says of itself."""

from ckptool.render.training import event_line
from ckptool.trainer.events import Resumed


def test_what_a_checkpoint_lacks_is_told_with_what_that_costs():
    assert event_line(Resumed("last.pth", 4, 52)) == "resuming from last.pth at step 52"
    assert event_line(Resumed("last.pth", 4, 52, ("rng", "progress"))) == (
        "resuming from last.pth at step 52, without rng (dropout draws other numbers than an "
        "uninterrupted run), progress (the next epoch starts at its first step)"
    )
