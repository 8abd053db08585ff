"""Twins with everything that is not a call or a training step: writes, copies, functional calls."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import torch

import dynswap_ext
from dynswap_ext import testing
from dynswap_ext._python.master_state import is_sampled
from dynswap_ext._swap.changed_elements import bits
from handed_writes import handed_write
from master_writes import MASTER_WRITES, Dice, MasterWrite, Place, may_go_unseen
from not_yet import waits
from twins import Twins, places, say


class WrittenTwins(Twins):
    """Twins with writes between their calls, and other ways to run them."""

    # Writes -------------------------------------------------------------------------------------------

    def pick(self, number: int, suits: Callable[[Place], bool]) -> tuple[str, Place, Place] | None:
        """Choose a floating master for which `suits` holds; return its name and both places, or None."""
        mine = dict(places(self.model))
        found = [
            (name, mine[name], other)
            for name, other in places(self.plain)
            if other.master.is_floating_point() and suits(other)
        ]
        return found[number % len(found)] if found else None

    def write_master(self, name: str, number: int, dice: Dice, times: int = 1) -> None:
        write: MasterWrite = MASTER_WRITES[name]

        def suits(place: Place) -> bool:
            right = write.of == "both" or place.is_parameter == (write.of == "parameters")
            seen = self.provider.native or not may_go_unseen(name, place.master)
            return right and seen and write.can(place.master)

        self.settle()
        picked = self.pick(number, suits)
        if picked is None:
            return
        what, mine, other = picked
        say("write", name, what, dice)
        frozen = other.is_parameter and not other.master.requires_grad
        if name == "swap_tensors" and frozen and waits("frozen swap"):
            return
        if name == "swap_tensors":  # torch refuses a swap while anything else holds the tensor
            self.let_go()
            self.optimizers = None
            gc.collect()
            if weakref.getweakrefcount(other.master):
                return  # an LSTM keeps weak references to its weights
        with torch.no_grad():
            for place in (other, mine):
                write.do(place, dice)

    def keep_view(self, number: int) -> None:
        """Keep a view of a parameter, on which the program may write even after the parameter is replaced.

        Views of buffers are not kept: if a forward assigns a buffer, the plain model writes it in place
        (`bring_home`).
        """
        picked = self.pick(number, lambda place: place.is_parameter and place.master.dim() > 0)
        if picked is not None:
            say("keep a view", picked[0])
            self.views.append((picked[1].master.detach()[..., :1], picked[2].master.detach()[..., :1]))

    def write_view(self, number: int, dice: Dice) -> None:
        if not self.views:
            return
        say("write on a view", number, dice)
        self.settle()
        views = self.views[number % len(self.views)]
        seen = self.provider.native or not any(map(is_sampled, (view._base for view in views)))
        for view in views:
            view.data.mul_(dice.number) if seen and not dice.seed % 2 else view.mul_(dice.number)

    def write_handed(self, name: str, number: int, dice: Dice, hold: bool) -> None:
        """Write on a handed-out tensor, and make the change in the plain master."""
        picked = self.pick(number, lambda place: place.master.numel() > 0)
        if picked is None:
            return
        what, mine, other = picked
        if not self.pending:
            self.unsettled.clear()
        elif what in self.unsettled:
            self.settle()  # an element that gets its old value again keeps the master's precision
        self.unsettled.add(what)
        say("write on what is handed out", name, what, dice, hold)
        handed = getattr(mine.owner, mine.name)
        if self.direct:
            handed_write(name, getattr(other.owner, other.name), dice)
        else:
            master = other.master
            copied = master.detach().to(*self._as_moved(master), copy=True)
            before = copied.clone()
            testing.assert_bit_equal(handed.detach(), before, f"{what}, handed out")
            handed_write(name, copied, dice)
            written = copied.to(master.device, master.dtype)
            if name == "data assigned":
                master.data = written
            else:  # of a write in place, only elements that differ are taken to the master
                changed = (bits(before) != bits(copied)).to(master.device)
                with torch.no_grad():
                    master[changed] = written[changed]
        handed_write(name, handed, dice)
        self.pending = True
        if hold:
            self.held.append(handed)

    def hold(self, number: int) -> None:
        picked = self.pick(number, lambda _: True)
        if picked is not None:
            say("hold", picked[0])
            self.held.append(getattr(picked[1].owner, picked[1].name))

    def let_go(self) -> None:
        say("let go")
        self.held.clear()

    def load(self, dice: Dice, part: bool, assign: bool) -> None:
        say("load", dice, part, assign)
        self.settle()
        state = {
            name: dice.values(value) if value.is_floating_point() else value.clone()
            for name, value in self.plain.state_dict().items()
        }
        if part:
            state = dict(list(state.items())[dice.seed % 3 :: 2])
        for model in (self.plain, self.model):
            own = {name: value.clone() for name, value in state.items()}
            model.load_state_dict(own, strict=not part, assign=assign)

    def write_state(self, number: int, dice: Dice) -> None:
        """Write to a tensor of `state_dict()`."""
        self.pending = False
        states = [m.state_dict() for m in (self.plain, self.model)]
        names = [name for name, value in states[0].items() if value.is_floating_point()]
        name = names[number % len(names)]
        say("write into the state", name, dice)
        for state in states:
            state[name].mul_(dice.number)

    def cast_masters(self, dtype: torch.dtype) -> None:
        dtype = self.computable(dtype)
        say("cast masters", dtype)
        self.optimizers = None
        self.held.clear()
        for model in (self.plain, self.model):
            model.to(dtype)
        self.dtype, self.pending = dtype, False
        if self.rounds(self.cast):
            self.install(**self.options)

    def toggle(self, number: int, through: str) -> None:
        """Freeze or thaw a parameter."""
        picked = self.pick(number, lambda place: place.is_parameter)
        assert picked is not None
        what, mine, other = picked
        wanted = not other.master.requires_grad
        say("requires_grad", what, wanted, through)
        other.master.requires_grad_(wanted)
        if through == "attribute":
            getattr(mine.owner, mine.name).requires_grad_(wanted)
        else:
            mine.master.requires_grad_(wanted)

    # Other ways to run --------------------------------------------------------------------------------

    def copies(self, seed: int) -> None:
        """Copy both models: the copy of the installed one is plain, and has the plain one's outputs."""
        say("deepcopy", seed)
        self.pending = False
        x = self.kind.input(seed, self.width, torch.device("cpu"), self.dtype)
        outputs = []
        for model in (self.plain, self.model):
            own = copy.deepcopy(model).eval()
            assert not dynswap_ext.is_installed(own)
            with torch.no_grad():
                outputs.append(own(x))
        testing.assert_bit_equal(outputs[1], outputs[0], "output of the copy")

    def functional(self, number: int, dice: Dice) -> None:
        """Call both models with another tensor in place of one parameter."""
        if self.kind.twice:
            return
        picked = self.pick(number, lambda place: place.is_parameter)
        assert picked is not None
        name, _, other = picked
        say("functional_call", name, dice)
        device, dtype = self._as_moved(other.master)
        new = {name: dice.values(other.master).to(device, dtype)}
        stand_in, outputs = self.stand_in().eval(), []
        self.model.eval()
        for model in (stand_in, self.model):
            with torch.no_grad():
                outputs.append(torch.func.functional_call(model, new, (self.input(dice.seed),)))
        if stand_in is not self.plain:
            self.bring_home(stand_in)
        self.pending |= self.kind.writes
        testing.assert_bit_equal(outputs[1], outputs[0], "output of functional_call")
