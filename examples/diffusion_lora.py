"""Make images with two LoRA adapters over a diffusion pipeline that does not fit on the device.

    python examples/diffusion_lora.py path/to/stable-diffusion-xl --lora red.safetensors blue.safetensors

The script loads the adapters into the installed pipeline. It makes an image with each, one with both, one
with both fused into the weights, and one without them, and prints what each image copied to the device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import diffusers
import torch

import dynswap_ext


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a diffusers pipeline")
    parser.add_argument("--lora", type=Path, nargs=2, required=True, help="the files of two adapters")
    parser.add_argument("--prompt", default="a photo of a red cat")
    parser.add_argument(
        "--budget", default="auto", help='memory for the denoiser: "6GiB", or "auto" (the default)'
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--output", type=Path, default=Path("images"), help="the folder to write to")
    options = parser.parse_args()

    pipe = diffusers.DiffusionPipeline.from_pretrained(options.folder)
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    handle = dynswap_ext.install(denoiser, device=options.device, budget=options.budget)
    pipe.to(handle.device)  # moves the other parts
    options.output.mkdir(exist_ok=True)

    def paint(name: str) -> None:
        before = handle.stats().bytes_moved
        image = pipe(
            options.prompt,
            num_inference_steps=options.steps,
            height=options.size,
            width=options.size,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        image.save(options.output / f"{name}.png")
        print(f"{name:8} {(handle.stats().bytes_moved - before) / 2**20:.1f} MiB copied")

    for name, file in zip(("first", "second"), options.lora, strict=True):
        pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name=name)
    for name in ("first", "second"):
        pipe.set_adapters(name)
        paint(name)
    pipe.set_adapters(["first", "second"], adapter_weights=[0.7, 0.5])
    paint("both")
    pipe.fuse_lora(adapter_names=["first", "second"])  # writes to the masters, so RAM may grow
    paint("fused")
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    paint("without")
    handle.uninstall()


if __name__ == "__main__":
    main()
