"""What a training run says of itself."""

from ckptool.render.training import event_line
from ckptool.trainer.events import Resumed


def test_what_a_checkpoint_lacks_is_told_with_what_that_costs():
    assert event_line(Resumed("last.pth", 4, 52)) == "goes on from last.pth, step 52"
    assert event_line(Resumed("last.pth", 4, 52, ("rng", "progress"))) == (
        "goes on from last.pth, step 52, without rng (dropout draws other numbers than a run that "
        "was not stopped), progress (the next epoch begins with its first step)"
    )
