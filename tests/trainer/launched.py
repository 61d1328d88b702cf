"""A worker that ends as it is asked to."""

import os
import signal
import sys
from datetime import timedelta

from ckptool.errors import TrainingError
from ckptool.trainer.launching import record_errors

HOW, OUT, RANK = sys.argv[1], sys.argv[2], int(os.environ["RANK"])


def under_way(event):
    """At the third step."""
    if type(event).__name__ == "Stepped" and event.step == 3:
        if RANK == 0 and HOW == "forever":
            print("under way", flush=True)
        elif RANK == 1 and HOW == "terminated":
            os.kill(os.getpid(), 15)
        elif HOW == "killed in a save":
            killed_among_them()


def killed_among_them():
    """Rank 1 is gone when the ranks next tell each other how a common step went."""
    import torch.distributed

    def gone(*_arguments, **_options):
        os.kill(os.getpid(), 9)

    if RANK == 1:
        torch.distributed.all_gather_object = gone


def fail():
    """Rank 1 ends, before it has torch, and rank 0 waits until it is told to end."""
    if RANK == 0:
        signal.pause()
    elif HOW == "killed":
        os.kill(os.getpid(), 9)
    elif HOW == "exits":
        os._exit(3)
    raise ZeroDivisionError("nobody foresaw this")


def wait_for_the_other():
    """Rank 1 is interrupted, while rank 0 waits for it where no handler of Python's is run."""
    meeting = os.path.join(OUT, "meeting")  # a pipe: either waits there for the other
    if RANK == 1:
        with open(meeting):
            os._exit(130)
    import torch.distributed

    with open(meeting, "w"):
        pass
    torch.distributed.init_process_group("gloo")


def wait_for_ever():
    """Where no handler of Python's is run."""
    import torch.distributed

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*place, is_master=False)
    if RANK == 0:
        print("under way", flush=True)
    store.wait([f"never {RANK}"], timedelta(minutes=20))


def main():
    if HOW == "refuses":
        raise TrainingError("a sentence", hint="what helps")
    if HOW == "words":
        assert sys.argv[3:] == ["$$", "${local_rank}", "a b"]
        assert int(os.environ["OMP_NUM_THREADS"]) >= 1
        return 0
    if HOW in ("killed", "exits", "bug"):
        fail()
    if HOW == "interrupted":
        wait_for_the_other()
    if HOW == "waits":
        wait_for_ever()
    # torch, for which the others need not wait
    from ckptool.trainer.processes import end_if_connected
    from tests.trainer.runs import BytesDone, net, run

    epochs = 1_000_000 if HOW == "forever" else 3
    result = run(OUT, BytesDone(under_way), strategy="ddp", model=net(), epochs=epochs)
    code = 0 if result.stopped is None else 128 + result.stopped
    end_if_connected(code)  # as the command line
    return code


signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as the command line
with record_errors(lambda error: (str(error), getattr(error, "hint", None))):
    sys.exit(main())
