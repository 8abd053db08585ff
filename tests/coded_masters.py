"""Models whose masters are coded (`LosslessTensor`), however little that saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynswap_ext.lossless.code import BLOCK, CODABLE, UNIT, encode
from dynswap_ext.lossless.tensor import LosslessTensor

_MOVES_OTHER_BYTES = "as many bytes move as coded masters have"
_ANOTHER_CLASS = "a coded master is no plain Parameter, and has an attribute"
_FIXED_STORAGE = "the storage of a coded master has coded bytes, and keeps its size"
_IN_RAM = "the test's masters are in a file, and are coded in RAM"
_PLAIN_BY_THEN = "that makes a coded master plain, which counts as a change"
_DENSE = "a wrapper shows no lazy views, so it is dense; plain residents that are dense are not refused"
#: Tests, by name and by a part of their id, and why they cannot pass with coded masters.
PLAIN_ONLY = {
    "test_a_pass_after_a_change": _MOVES_OTHER_BYTES,
    "test_steps_of_an_optimizer": _MOVES_OTHER_BYTES,
    "test_only_chosen_experts_move": _MOVES_OTHER_BYTES,
    "test_experts_that_are_all_used_are_fetched_ahead": _MOVES_OTHER_BYTES,
    "test_a_loop_with_clipping_and_accumulation": _MOVES_OTHER_BYTES,
    "test_a_tied_weight_is_planned_and_counted_once": _MOVES_OTHER_BYTES,
    "test_one_transfer_for_all_passes_where_it_stays": _MOVES_OTHER_BYTES,
    "test_a_wrapper_within_a_budget": _MOVES_OTHER_BYTES,
    "test_state_dict_is_the_plain_one": _ANOTHER_CLASS,
    "test_loaded_values_are_seen_by_the_next_pass": _ANOTHER_CLASS,
    "test_after_data_was_assigned": _ANOTHER_CLASS,
    "test_an_access_survives_whatever_runs_in_its_midst[uninstall]": _ANOTHER_CLASS,
    "test_a_master_where_and_what_it_should_be_is_handed_out_itself": _ANOTHER_CLASS,
    "test_what_happens_between_two_reads[freed_memory]": _FIXED_STORAGE,
    "test_a_master_whose_storage_is_emptied_for_a_while": _FIXED_STORAGE,
    "test_a_write_beside_a_plain_model[storage-parameter]": _FIXED_STORAGE,
    "test_a_write_beside_a_plain_model[storage-view of the master]": _FIXED_STORAGE,
    "test_masters_in_a_file_are_read": _IN_RAM,
    "test_mapped_masters_stay_mapped": _IN_RAM,
    "test_nothing_is_moved_again_for_a_look": _PLAIN_BY_THEN,
    "test_uninstall_leaves_no_trace": _PLAIN_BY_THEN,
    "test_one_written_between_forward_and_backward_is_refused[negated-afterwards-resident]": _DENSE,
}


def plain_only(name: str) -> str | None:
    """Return why a test, by its name and id, cannot pass with coded masters; None if it can."""
    base, _, parameters = name.partition("[")
    for key, reason in PLAIN_ONLY.items():
        test, _, part = key.partition("[")
        if test == base and part.removesuffix("]") in parameters:
            return reason
    return None


def coded(tensor: Tensor) -> LosslessTensor:
    """Return a coded tensor of a tensor's values, in raw blocks if the code would not save 5 %."""
    found = encode(tensor)
    return LosslessTensor(_raw(tensor) if found is None else found, tensor.dtype, tensor.shape)


def code_masters(model: nn.Module) -> nn.Module:
    """Replace the parameters that can be coded, and return the model. Ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, master in list(module._parameters.items()):
            if master is None or master.dtype not in CODABLE or master.numel() == 0:
                continue
            if id(master) not in made:
                made[id(master)] = nn.Parameter(coded(master.detach()), master.requires_grad)
            module._parameters[name] = made[id(master)]
    return model


def code_in_place(model: nn.Module) -> None:
    """Code the values of parameters, which stay the same objects, where torch can swap them."""
    with torch.device("cpu"):  # a test may have set another default
        _code_in_place(model)


def _code_in_place(model: nn.Module) -> None:
    for master in model.parameters():
        plain = (
            type(master) is nn.Parameter
            and type(master.data) is Tensor
            and master.layout == torch.strided
            and not master.is_nested
        )
        if not plain or master.dtype not in CODABLE or master.device.type != "cpu" or master.numel() == 0:
            continue
        whole = master.is_contiguous() and master.untyped_storage().nbytes() == master.nbytes
        if not whole or master.is_inference() or master.is_shared():
            continue
        made = nn.Parameter(coded(master.detach()), master.requires_grad)
        made.grad, attributes = master.grad, dict(vars(master))
        try:
            torch.utils.swap_tensors(master, made)
        except RuntimeError:  # somebody has a weak reference to it, or a graph
            continue
        vars(master).update(attributes)


def is_coded(master: Any) -> bool:
    return isinstance(master, LosslessTensor) and master.coded is not None


def stored_bytes(master: Tensor) -> int:
    """Return the bytes of a master that a copy reads: of a coded one, its blocks without their index."""
    coded: Any = getattr(master, "coded", None)
    if coded is None:
        return master.numel() * master.element_size()
    return coded.numel() - int(coded[:8].view(torch.int64))


def _raw(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    blocks = [
        _padded(torch.cat([torch.zeros(UNIT, dtype=torch.uint8), part.view(torch.uint8)]))
        for part in flat.split(BLOCK)
    ]
    sizes = torch.tensor([0, *(len(block) for block in blocks)])
    index = _padded(torch.empty(8 * len(sizes), dtype=torch.uint8))
    offsets = sizes.cumsum(0) + len(index)
    index[: 8 * len(sizes)] = offsets.view(torch.uint8)
    index[8 * len(sizes) :] = 0
    return torch.cat([index, *blocks])


def _padded(data: Tensor) -> Tensor:
    return torch.cat([data, torch.zeros(-len(data) % UNIT, dtype=torch.uint8)])
