"""Continue a text with a pipeline of transformers whose model is larger than the device's memory.

    python examples/transformers_pipeline.py path/to/Llama-3.1-8B-Instruct --budget 4GiB

Nothing but one argument is new: transformers loads the model, and dynswap_ext installs it.
"""

from __future__ import annotations

import argparse

import transformers

import dynswap_ext


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the folder of a transformers checkpoint, or its name on the hub")
    parser.add_argument("--prompt", default="streaming weights means")
    parser.add_argument(
        "--budget", default="auto", help='memory for weights: "4GiB", or "auto" (the default)'
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    pipeline = transformers.pipeline(
        "text-generation",
        model=options.model,
        device=options.device,
        model_kwargs={
            "quantization_config": dynswap_ext.StreamConfig(budget=options.budget, device=options.device)
        },
    )
    written = pipeline(options.prompt, max_new_tokens=options.max_new_tokens, do_sample=False)

    print(written[0]["generated_text"])
    handle = dynswap_ext.handle_of(pipeline.model)
    print(handle.report())


if __name__ == "__main__":
    main()
