"""Random programs with peft adapters: an installed model gives the same as a moved one, to the bit.

A failure names the seed and the steps.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from programs import bytes_of, library, llama
from seeds import seeds

peft = library("peft")

STEPS = 14
NAMES = ("red", "blue", "green")


def random_adapter_config(draw: random.Random) -> Any:
    targets = draw.choice([["q_proj", "v_proj"], ["o_proj"], ["up_proj", "down_proj", "k_proj"]])
    return peft.LoraConfig(
        r=draw.choice([2, 4, 16]),
        target_modules=targets,
        init_lora_weights=False,
        use_dora=draw.random() < 0.2,
    )


class Program:
    """One program: a plain model, an installed one, and the steps that were done with both."""

    def __init__(self, provider: Provider, seed: int, folder: Path) -> None:
        self.draw, self.provider, self.folder = random.Random(seed), provider, folder
        self.said = [f"seed {seed}"]
        draw = self.draw
        self.plain, self.model = llama().eval().to(provider.device), llama().eval()
        self.mapped = provider.device.type == "cpu" or draw.random() < 0.3
        if self.mapped:
            testing.map_from_file(self.model, folder / f"base{seed}.pt")
        self.whole = bytes_of(self.model)
        self.budget = 0
        self.install()
        first, config = draw.choice(NAMES), random_adapter_config(draw)
        self.plain, self.model = (
            self.seeded(lambda each=each: peft.get_peft_model(each, config, adapter_name=first))
            for each in (self.plain, self.model)
        )
        self.adapters, self.active, self.merged = [first], first, False
        self.moved = 0

    def seeded(self, what: Callable[[], Any]) -> Any:
        torch.manual_seed(len(self.said))
        return what()

    def both(self, what: Callable[[Any], Any]) -> list[Any]:
        return [self.seeded(lambda each=each: what(each)) for each in (self.plain, self.model)]

    def say(self, *words: object) -> None:
        self.said.append(" ".join(map(str, words)))

    # The steps ----------------------------------------------------------------------------------------

    def install(self) -> None:
        self.budget = int(self.whole * self.draw.choice([0.6, 0.8, 4]))
        self.handle = self.provider.install(self.model, budget=self.budget)
        self.say("install", self.budget)

    def reinstall(self) -> None:
        """Install again after a move to RAM, from which adapters that were made on the device then come."""
        self.moved += self.handle.stats().bytes_moved
        self.handle.uninstall()
        self.model.cpu()
        self.install()

    def retune(self) -> None:
        self.budget = int(self.whole * self.draw.choice([0.6, 0.8, 4]))
        self.say("retune", self.budget)
        self.handle.retune(self.budget)
        for _ in range(5):  # it measures some, and then makes the plan
            testing.assert_bit_equal(*self.both(self.logits)[::-1], "logits")
        self.moved += self.handle.stats().bytes_moved
        self.handle.reset_stats()

    def add(self) -> None:
        free = [name for name in NAMES if name not in self.adapters]
        if not free or self.merged:
            return
        name, config, saved = (
            self.draw.choice(free),
            random_adapter_config(self.draw),
            self.draw.random() < 0.5,
        )
        self.say("load" if saved else "add", name, config.target_modules, config.r, config.use_dora)
        if saved:
            lean = self.draw.random() < 0.5
            path = self.folder / f"adapter{len(self.said)}"
            adapted = self.seeded(lambda: peft.get_peft_model(llama(), config))
            adapted.save_pretrained(path)
            self.both(lambda each: each.load_adapter(path, name, low_cpu_mem_usage=lean))
        else:
            self.both(lambda each: each.add_adapter(name, config))
        self.adapters.append(name)

    def switch(self) -> None:
        if self.merged:
            return
        self.active = self.draw.choice(self.adapters)
        self.say("set", self.active)
        self.both(lambda each: each.set_adapter(self.active))

    def delete(self) -> None:
        others = [name for name in self.adapters if name != self.active]
        if not others or self.merged:
            return
        name = self.draw.choice(others)
        self.say("delete", name)
        self.both(lambda each: each.delete_adapter(name))
        self.adapters.remove(name)

    def merge(self) -> None:
        self.merged = not self.merged
        self.say("merge" if self.merged else "unmerge")
        self.both(lambda each: each.merge_adapter() if self.merged else each.unmerge_adapter())

    def train(self) -> None:
        if self.merged:
            return
        self.say("train")

        def step(each: Any) -> torch.Tensor:
            each.train()
            parameters = [p for p in each.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=0.01)
            loss = each(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            optimizer.step()
            each.zero_grad(set_to_none=True)
            each.eval()
            return loss.detach().cpu()

        testing.assert_bit_equal(*self.both(step)[::-1], "loss")

    def cast(self) -> None:
        dtype = self.draw.choice([torch.float32, torch.float64])
        self.say("cast", dtype)
        self.both(lambda each: each.to(dtype))
        self.whole = max(self.whole, bytes_of(self.model))
        self.retune()

    def disabled(self) -> None:
        def call(each: Any) -> Any:
            with each.disable_adapter():
                return self.logits(each)

        if not self.merged:
            self.say("disabled")
            testing.assert_bit_equal(*self.both(call)[::-1], "without adapters")

    # Comparing ----------------------------------------------------------------------------------------

    @property
    def ids(self) -> torch.Tensor:
        return torch.arange(3, 9, device=self.provider.device)[None]

    def logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=self.ids).logits.cpu()
        return out

    def compare(self) -> None:
        for _ in range(self.draw.choice([1, 1, 4])):  # a new plan is made after a few calls
            testing.assert_bit_equal(*self.both(self.logits)[::-1], "logits")
        masters = [
            {name: master.detach().cpu() for name, master in each.state_dict().items()}
            for each in (self.model, self.plain)
        ]
        testing.assert_bit_equal(*masters, "masters")
        stats = self.handle.stats()
        if self.provider.native:
            assert stats.peak_bytes <= self.budget + stats.overflow_bytes

    def run(self) -> None:
        steps = [
            self.add, self.add, self.add, self.switch, self.switch, self.delete, self.delete, self.merge,
            self.train, self.train, self.retune, self.reinstall, self.cast, self.disabled,
        ]  # fmt: skip
        self.compare()
        for _ in range(STEPS):
            self.draw.choice(steps)()
            self.compare()
        self.moved += self.handle.stats().bytes_moved
        if self.provider.native:
            assert self.moved > 0
        dynswap_ext.uninstall(self.model)


def run(provider: Provider, seed: int, folder: Path) -> None:
    program = Program(provider, seed, folder)
    try:
        program.run()
    except Exception as error:
        raise AssertionError("; ".join(program.said)) from error
    finally:
        provider.handles.clear()


@pytest.mark.filterwarnings("ignore")
def test_random_adapters(provider: Provider, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    for seed in seeds(range(4)):
        run(provider, seed, tmp_path)
