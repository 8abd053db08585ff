"""What is said of a write that could not be taken to its master.

Note [Two writes, one weight]
-----------------------------
In plain torch a handed-out tensor and its master are one memory, and two writes follow one another. Here they
are two memories, and a write on the handed-out tensor has to be in the master before somebody writes that. So
it is taken there as soon as it can be known of: by a method that writes in place on a tensor that was read
outside a forward (`parameter_proxy.take_writes_to_master`), when the `.data` of such a tensor is gone, when
the outermost call ends, before an optimizer's step, and whenever masters are asked for. What is left is a
write on a view or an alias that is held, or by an operation that is no method, followed by a write to a
master that the program had before. They cannot be put together afterwards, so the master keeps what was
written on it, and the user is told.
"""

from __future__ import annotations

from dynswap_ext._util.warn import warn


def warn_lost(name: str) -> None:
    """Say that what was written on a tensor handed out from the weight of this name is dropped."""
    warn(
        f"what was written in place on a tensor handed out from {name} is dropped: its master was written "
        "before that had reached it, and the master stands. Write on the parameter itself "
        "(`model.get_parameter(name)`), or call `handle.flush()` between the two writes"
    )
