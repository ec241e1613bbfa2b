"""What the garbage collector is told by a process that serves."""

import gc


def keep_what_is_there() -> None:
    """Tells the garbage collector that what this process holds now stays to its end.

    A full collection looks at every object with the interpreter's lock held, and libraries alone have hundreds of
    thousands: without this, all requests stand still for 0.2 s whenever enough has come on top of them.
    """
    gc.collect()
    gc.freeze()
