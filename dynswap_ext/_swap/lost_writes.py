"""The warning for a write on a handed-out tensor that could not be taken to the master.

Note [Two writes, one weight]
-----------------------------
In plain torch, what a program reads as a weight and the weight itself share memory, so of two writes the
second adds to the first. Here a handed-out tensor has a memory of its own, and a write on it has to reach the
master before the master is written. So it is taken there as soon as it can be noticed:

- after a method that writes in place on a tensor that was read outside a forward
  (`parameter_proxy.take_writes_to_master`),
- when the `.data` of such a tensor is gone,
- when the outermost call ends,
- before an optimizer's step,
- whenever masters are asked for.

One case remains: a write on a view or an alias that is still held, or by an operation that is not a method,
and then a write to a master that the program has had since before. The two writes cannot be merged
afterwards. So the master keeps what was written on it, and the user is warned.
"""

from __future__ import annotations

from dynswap_ext._util.warn import warn


def warn_lost(name: str) -> None:
    """Warn that what was written on a tensor handed out from the weight of this name is dropped."""
    warn(
        f"what was written in place on a tensor handed out from {name} is dropped: its master was written "
        "before that had reached it, and the master stands. Write on the parameter itself "
        "(`model.get_parameter(name)`), or call `handle.flush()` between the two writes"
    )
