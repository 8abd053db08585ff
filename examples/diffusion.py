"""Make an image with a diffusion pipeline whose largest part does not fit on the device.

    python examples/diffusion.py path/to/FLUX.1-dev --budget 6GiB --prompt "a photo of a red cat" --steps 28

The folder is a pipeline of diffusers. The script maps its denoiser (`transformer` or `unet`) from the file,
and installs the whole pipeline: text encoders, denoiser and VAE share one budget.
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
    parser.add_argument("--budget", default="auto", help='memory for weights: "6GiB", or "auto"')
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--output", type=Path, default=Path("image.png"))
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    name, denoiser = load_denoiser(options.folder)
    pipe = diffusers.DiffusionPipeline.from_pretrained(options.folder, dtype=dtype, **{name: denoiser})
    handle = dynswap_ext.install(pipe, device=options.device, dtype=dtype, budget=options.budget)

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
    dynswap_ext.uninstall(pipe)


if __name__ == "__main__":
    main()
