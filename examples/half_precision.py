"""Transcribe speech with Whisper in half precision, from a checkpoint in float32.

    python examples/half_precision.py path/to/whisper-large-v3 speech.wav --budget 1GiB

The folder is a checkpoint of transformers. Its weights stay as they are, and are cast on their way to the
device. The results are those of a model that was loaded with `from_pretrained(dtype=...)`: `--compare` loads
that model too, and both have to give the same tokens.
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import dynswap_ext
from dynswap_ext import checkpoint


def read_wav(path: Path) -> torch.Tensor:
    """Return the samples of a WAV file of 16 bits, 16 kHz, one channel."""
    with wave.open(str(path)) as file:
        if (file.getsampwidth(), file.getframerate(), file.getnchannels()) != (2, 16000, 1):
            raise SystemExit(f"{path} is not of 16 bits, 16 kHz and one channel")
        return torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16) / 2**15


def transcribe(model: WhisperForConditionalGeneration, features: torch.Tensor, length: int) -> torch.Tensor:
    """Return the tokens. The features are moved and cast to the device and dtype of the compute."""
    with torch.inference_mode():
        features = features.to(model.device, model.dtype)
        return model.generate(features, max_new_tokens=length, do_sample=False)[0].cpu()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a Whisper checkpoint of transformers")
    parser.add_argument("speech", type=Path, help="a WAV file of 16 bits, 16 kHz, one channel")
    parser.add_argument("--dtype", default="bfloat16", help="in which dtype to compute: bfloat16 or float16")
    parser.add_argument(
        "--budget", default="auto", help='memory for weights: "1GiB", or "auto" (the default)'
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--compare", action="store_true", help="load the model in this dtype too, and compare"
    )
    options = parser.parse_args()

    config = WhisperConfig.from_pretrained(options.folder)
    extractor = WhisperFeatureExtractor(
        feature_size=config.num_mel_bins, chunk_length=config.max_source_positions // 50
    )
    sound = read_wav(options.speech).numpy()
    features = extractor(sound, sampling_rate=16000, return_tensors="pt").input_features

    model = checkpoint.load(lambda: WhisperForConditionalGeneration(config), options.folder).eval()
    handle = dynswap_ext.install(model, device=options.device, dtype=options.dtype, budget=options.budget)
    tokens = transcribe(model, features, options.max_new_tokens)

    print(AutoTokenizer.from_pretrained(options.folder).decode(tokens, skip_special_tokens=True))
    print(handle.report())
    print(f"computes in  {model.dtype}, from masters in {next(model.parameters()).dtype}")
    if options.compare:
        loaded = WhisperForConditionalGeneration.from_pretrained(options.folder, dtype=handle.dtype)
        same = torch.equal(
            tokens, transcribe(loaded.eval().to(handle.device), features, options.max_new_tokens)
        )
        print(f"compared     {'the same tokens' if same else 'OTHER TOKENS'}")
    handle.uninstall()


if __name__ == "__main__":
    main()
