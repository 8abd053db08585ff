"""The models of the comparison and how they are called, at three sizes.

`tiny` proves that everything runs. `cpu` is for two cores and a disk: some 100 MB of float32 weights, with
layers narrower than the real ones. `gpu` has the real layer shapes in bfloat16, fewer layers, 1 to 3 GB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = ("tiny", "cpu", "gpu")


class Workload(ABC):
    """A model, and a cycle of `calls` calls of it. Cycles do not depend on each other."""

    name: ClassVar[str]
    model: ClassVar[str]  #: workloads of the same model share its checkpoint
    package: ClassVar[str] = ""  #: that has the model's class
    calls: ClassVar[int] = 1
    begin_calls: ClassVar[int] = 0  #: calls of the model in `begin`
    unit: ClassVar[str] = "pass"
    #: How many processes each baseline has with the weights in RAM. Baselines take turns.
    rounds: ClassVar[int] = 1
    #: The reason why baselines under torch.compile are left out; "" if they are not.
    not_compiled: ClassVar[str] = ""
    sizes: ClassVar[dict[str, dict[str, int]]]

    def __init__(self, size: str) -> None:
        self.size = size
        self.dtype = torch.bfloat16 if size == "gpu" else torch.float32
        self.p = self.sizes[size]

    def build(self) -> nn.Module:
        """Return the model with random weights, ready for inference."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return self.make().eval()
        finally:
            torch.set_default_dtype(before)

    def describe(self) -> str:
        """Return the sizes as text, for the head of a table."""
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.p.items())

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normally distributed numbers, the same in every process."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @abstractmethod
    def make(self) -> nn.Module:
        """Make the model in the default dtype."""

    @abstractmethod
    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the inputs of the calls, on the device."""

    def begin(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Begin a cycle, which is not timed, and return its state for `call`."""
        return dict(inputs)

    @abstractmethod
    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        """Call the model once."""


class Mlp(Workload):
    """A stack of equal layers."""

    name = model = "mlp"
    sizes: ClassVar = {
        "tiny": {"width": 64, "layers": 4, "rows": 2},
        "cpu": {"width": 1536, "layers": 12, "rows": 64},
        "gpu": {"width": 8192, "layers": 12, "rows": 2048},
    }

    def make(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.p["layers"]):
            layers += [nn.Linear(self.p["width"], self.p["width"]), nn.ReLU()]
        return nn.Sequential(*layers)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": self.random(self.p["rows"], self.p["width"]).to(device)}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        y: Tensor = model(state["x"])
        return y


class Narrow(Mlp):
    """200 layers so small that reads of their attributes take most of the time."""

    name = model = "narrow"
    rounds = 3
    sizes: ClassVar = {
        "tiny": {"width": 64, "layers": 8, "rows": 1},
        "cpu": {"width": 64, "layers": 200, "rows": 1},
        "gpu": {"width": 64, "layers": 200, "rows": 1},
    }


class Prefill(Workload):
    """A decoder reads a prompt."""

    name = "prefill"
    model = "llama"
    package = "transformers"
    not_compiled = "compiling a decoder takes longer than the run has"
    sizes: ClassVar = {
        "tiny": {
            "hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "layers": 2, "words": 64, "tokens": 4,
        },
        "cpu": {
            "hidden": 1024, "inner": 3584, "heads": 8, "kv_heads": 2, "layers": 2, "words": 2048,
            "tokens": 64,
        },
        "gpu": {
            "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "layers": 3, "words": 16384,
            "tokens": 2048,
        },
    }  # fmt: skip

    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.p["hidden"],
            intermediate_size=self.p["inner"],
            num_hidden_layers=self.p["layers"],
            num_attention_heads=self.p["heads"],
            num_key_value_heads=self.p["kv_heads"],
            vocab_size=self.p["words"],
            max_position_embeddings=8192,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
        decoder: nn.Module = LlamaForCausalLM(config)
        return decoder

    def inputs(self, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        return {
            "tokens": torch.randint(self.p["words"], (1, self.p["tokens"]), generator=generator).to(device)
        }

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        y: Tensor = model(input_ids=state["tokens"], use_cache=False).logits
        return y


class Decode(Prefill):
    """A decoder generates text, token by token."""

    name = "decode"
    calls, begin_calls = 8, 1
    unit = "token"

    def begin(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        out = model(input_ids=inputs["tokens"], use_cache=True)
        return {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        out = model(input_ids=state["token"], past_key_values=state["cache"], use_cache=True)
        state["cache"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)
        logits: Tensor = out.logits
        return logits


class Diffusion(Workload):
    """FLUX.1's transformer over the steps of a sampler; heads of 128, joint and single blocks."""

    name = model = "diffusion"
    package = "diffusers"
    calls = 8
    unit = "step"
    not_compiled = "compiling a diffusion transformer takes longer than the run has"
    sizes: ClassVar = {
        "tiny": {"heads": 2, "joint": 1, "single": 1, "text": 32, "side": 2, "words": 4},
        "cpu": {"heads": 5, "joint": 1, "single": 2, "text": 1024, "side": 8, "words": 16},
        "gpu": {"heads": 24, "joint": 2, "single": 3, "text": 4096, "side": 64, "words": 512},
    }

    def make(self) -> nn.Module:
        from diffusers import FluxTransformer2DModel

        transformer: nn.Module = FluxTransformer2DModel(
            num_layers=self.p["joint"],
            num_single_layers=self.p["single"],
            attention_head_dim=128,
            num_attention_heads=self.p["heads"],
            joint_attention_dim=self.p["text"],
            guidance_embeds=True,
        )
        return transformer

    def inputs(self, device: torch.device) -> dict[str, Any]:
        side, words = self.p["side"], self.p["words"]
        rows = torch.arange(side * side)
        places = torch.stack([torch.zeros_like(rows), rows // side, rows % side], 1).to(self.dtype)
        made = {
            "x": self.random(1, side * side, 64),
            "encoder_hidden_states": self.random(1, words, self.p["text"], seed=1),
            "pooled_projections": self.random(1, 768, seed=2),
            "img_ids": places,
            "txt_ids": torch.zeros(words, 3, dtype=self.dtype),
            "guidance": torch.full((1,), 3.5),
        }
        return {name: value.to(device) for name, value in made.items()}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        more = {name: value for name, value in state.items() if name != "x"}
        time = torch.full((1,), 1 - number / self.calls, dtype=self.dtype, device=state["x"].device)
        flow = model(hidden_states=state["x"], timestep=time, return_dict=False, **more)[0]
        state["x"] = state["x"] - flow / self.calls
        x: Tensor = state["x"]
        return x


class Unet(Workload):
    """SDXL's UNet: some 1,700 weights, most of them small."""

    name = model = "unet"
    package = "diffusers"
    not_compiled = "compiling the UNet takes longer than the run has"
    sizes: ClassVar = {
        "tiny": {"width": 32, "heads": 1, "layers": 1, "context": 32, "side": 8},
        "cpu": {"width": 32, "heads": 1, "layers": 10, "context": 512, "side": 16},
        "gpu": {"width": 192, "heads": 3, "layers": 10, "context": 2048, "side": 64},
    }

    def make(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        width, heads, layers = self.p["width"], self.p["heads"], self.p["layers"]
        unet: nn.Module = UNet2DConditionModel(
            sample_size=self.p["side"],
            block_out_channels=(width, 2 * width, 4 * width),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, min(2, layers), layers),
            attention_head_dim=(heads, 2 * heads, 4 * heads),
            cross_attention_dim=self.p["context"],
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        return unet

    def inputs(self, device: torch.device) -> dict[str, Any]:
        side = self.p["side"]
        made = {
            "x": self.random(2, 4, side, side),
            "context": self.random(2, 77, self.p["context"], seed=1),
            "text_embeds": self.random(2, 1280, seed=2),
            "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]] * 2, dtype=self.dtype),
            "time": torch.tensor(500),
        }
        return {name: value.to(device) for name, value in made.items()}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        more = {"text_embeds": state["text_embeds"], "time_ids": state["time_ids"]}
        out = model(state["x"], state["time"], state["context"], added_cond_kwargs=more, return_dict=False)
        noise: Tensor = out[0]
        return noise


class Recurrent(nn.Module):
    """A stack of LSTM modules of one layer, as all weights of a module are in use at once."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Lstm(Workload):
    """A recurrent network, whose forward reads its weights without `__getattr__`."""

    name = model = "lstm"
    not_compiled = "torch.compile leaves nn.LSTM as it is"
    sizes: ClassVar = {
        "tiny": {"width": 16, "layers": 2, "batch": 2, "tokens": 3},
        "cpu": {"width": 768, "layers": 8, "batch": 4, "tokens": 8},
        "gpu": {"width": 4096, "layers": 8, "batch": 64, "tokens": 64},
    }

    def make(self) -> nn.Module:
        return Recurrent(self.p["width"], self.p["layers"])

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": self.random(self.p["tokens"], self.p["batch"], self.p["width"]).to(device)}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        y: Tensor = model(state["x"])
        return y


class FeedForward(nn.Module):
    """Two layers whose result is added to their input."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Branches(nn.Module):
    """Stages at each of which one of two branches runs."""

    def __init__(self, width: int, inner: int, stages: int) -> None:
        super().__init__()
        self.left = nn.ModuleList(FeedForward(width, inner) for _ in range(stages))
        self.right = nn.ModuleList(FeedForward(width, inner) for _ in range(stages))

    def forward(self, x: Tensor, route: int) -> Tensor:
        for stage, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            x = x + (right if route >> stage & 1 else left)(x)
        return x


class Conditional(Workload):
    """A model of which a different half runs in each call."""

    name = model = "conditional"
    calls = 8
    not_compiled = "each route would be compiled anew"
    sizes: ClassVar = {
        "tiny": {"width": 32, "inner": 64, "stages": 3, "rows": 2},
        "cpu": {"width": 1024, "inner": 2048, "stages": 3, "rows": 64},
        "gpu": {"width": 4096, "inner": 16384, "stages": 4, "rows": 2048},
    }
    _routes: ClassVar = (0b000000, 0b111111, 0b000000, 0b010101, 0b010101, 0b101100, 0b000000, 0b111111)

    def make(self) -> nn.Module:
        return Branches(self.p["width"], self.p["inner"], self.p["stages"])

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": self.random(self.p["rows"], self.p["width"]).to(device)}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        y: Tensor = model(state["x"], self._routes[number])
        return y


class Mixture(nn.Module):
    """Layers of experts, of which each token uses two."""

    def __init__(self, width: int, inner: int, layers: int, experts: int) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(FeedForward(width, inner) for _ in range(experts)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, norm, experts in zip(self.routers, self.norms, self.experts, strict=True):
            y = norm(x)
            weights, chosen = router(y).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for number in chosen.unique().tolist():
                token, place = torch.where(chosen == number)
                out.index_add_(0, token, experts[number](y[token]) * weights[token, place, None])
            x = x + out
        return x


class Moe(Workload):
    """A mixture of experts with so few tokens that each call runs only some experts."""

    name = model = "moe"
    calls = 8
    not_compiled = "which expert runs is decided by values, at which every graph breaks"
    sizes: ClassVar = {
        "tiny": {"width": 16, "inner": 32, "layers": 2, "experts": 4, "tokens": 2},
        "cpu": {"width": 768, "inner": 1024, "layers": 2, "experts": 8, "tokens": 2},
        "gpu": {"width": 2048, "inner": 8192, "layers": 4, "experts": 8, "tokens": 2},
    }

    def make(self) -> nn.Module:
        return Mixture(self.p["width"], self.p["inner"], self.p["layers"], self.p["experts"])

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": self.random(self.calls, self.p["tokens"], self.p["width"]).to(device)}

    def call(self, model: nn.Module, state: dict[str, Any], number: int) -> Tensor:
        y: Tensor = model(state["x"][number])
        return y


WORKLOADS: dict[str, type[Workload]] = {
    cls.name: cls for cls in (Narrow, Mlp, Prefill, Decode, Diffusion, Unet, Lstm, Conditional, Moe)
}
