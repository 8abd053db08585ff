"""Make an image with a diffusion pipeline whose largest part does not fit on the device.

    python examples/diffusion.py path/to/FLUX.1-dev --budget 6GiB --prompt "a photo of a red cat" --steps 28

The folder is a pipeline of diffusers. The script maps its denoiser (`transformer` or `unet`) from the file,
and streams its weights within the budget. The text encoders and the VAE are loaded and moved as usual;
`--install` names more parts to stream.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import diffusers
import torch

import dynswap_ext
from dynswap_ext import checkpoint


def load_denoiser(folder: Path) -> tuple[str, torch.nn.Module]:
    """Build the pipeline's denoiser without allocating its weights, and map them from the checkpoint."""
    index = json.loads((folder / "model_index.json").read_text())
    name = next(part for part in ("transformer", "unet") if part in index)
    model_class = getattr(diffusers, index[name][1])
    config = model_class.load_config(folder / name)
    return name, checkpoint.load(lambda: model_class.from_config(config), folder / name).eval()


def peak_memory(device: torch.device) -> str:
    """Return the peak memory of the GPU, or else of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB on {device}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of RAM"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a diffusers pipeline")
    parser.add_argument("--prompt", default="a photo of a red cat")
    parser.add_argument("--budget", default="auto", help='memory for the denoiser: "6GiB", or "auto"')
    parser.add_argument("--install", nargs="*", default=[], metavar="PART", help="more parts to stream")
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--output", type=Path, default=Path("image.png"))
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    name, denoiser = load_denoiser(options.folder)
    pipe = diffusers.DiffusionPipeline.from_pretrained(options.folder, dtype=dtype, **{name: denoiser})
    handle = dynswap_ext.install(denoiser, device=options.device, dtype=dtype, budget=options.budget)
    for part in options.install:  # without a budget: each streams all of its weights
        dynswap_ext.install(getattr(pipe, part), device=handle.device, dtype=dtype)
    pipe.to(handle.device)  # moves the other parts; installed parts already compute there

    begin = time.perf_counter()
    image = pipe(
        options.prompt, num_inference_steps=options.steps, height=options.size, width=options.size
    ).images[0]
    seconds = time.perf_counter() - begin

    image.save(options.output)
    print(handle.report())
    print(f"image        {options.output}")
    print(f"seconds      {seconds:.1f} ({seconds / options.steps:.2f} per step, with encoding and decoding)")
    print(f"peak memory  {peak_memory(handle.device)}")
    for part in (name, *options.install):
        dynswap_ext.uninstall(getattr(pipe, part))


if __name__ == "__main__":
    main()
