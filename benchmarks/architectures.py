"""How many architectures of transformers open from their official files, and how much of them stays mapped.

Each model type that can be made small from its config alone is made with random weights, in a process of its
own. `save_pretrained` writes it with official names, experts one by one. The library's own `from_pretrained`
and `checkpoint.from_pretrained` open it, and their weights are compared to the bit.

If the config gives the sizes of matrices, they have at least 16 KiB, like those of real models. Weights that
are fused from parts of less than a page are copied.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch

from common import Record, parser
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext.errors import DynswapError
from isolated import Isolated

#: Larger models are left out, since only the number of architectures counts.
MOST_BYTES = 300 << 20
LAYERS = r"(num|n)_.*layers?$|(encoder|decoder|hidden)_layers$|^n_layer$|^depth$|^num_layers$"
#: Patterns of names of a config's integers, and the values that these get; the first that fits counts.
SIZES = [
    (r"experts_per_tok|topk|top_k|n_group|num_shared|n_shared", None),
    (r"(num|n)_?(routed_|local_)?experts$|moe_num_experts", 4),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"(attention_|_|^)(heads|head)$|n_head$|num_heads$|attention_heads", 4),
    (r"first_k_dense", 1),
    (r"head_dim$|d_kv$", 16),
    (LAYERS, 2),
    (r"intermediate|ffn_dim|d_ff|mlp_dim|ffn_hidden|n_inner", 128),
    (r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|projection_dim|embedding_size|d_embed)$", 64),
    (r"vocab_size$", 512),
]


def shrunk(values: dict[str, Any], default: Any) -> dict[str, Any]:
    """Return small values for the integers of a config, and of the configs in it."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        given = getattr(default, name, value)
        if hasattr(given, "to_dict"):
            small[name] = shrunk(given.to_dict(), given)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.search(pattern, name)), None)
            if size is not None and value > size:
                small[name] = size
        elif name == "layer_types" and value:
            small[name] = value[:2]
    return small


def class_names() -> list[dict[str, Any]]:
    """Return the library's tables from a model type to a class, the more useful ones first."""
    from transformers.models.auto import modeling_auto as tables

    kinds = ("FOR_CAUSAL_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "")
    return [getattr(tables, f"MODEL_{kind}MAPPING_NAMES", {}) for kind in kinds]


def make(model_type: str) -> torch.nn.Module:
    """Return a small model of a type."""
    import transformers

    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    default = kind()
    names = [mapping[model_type] for mapping in class_names() if model_type in mapping]
    problem: Exception | None = None
    for name in names:
        name = name if isinstance(name, str) else name[0]
        small = shrunk(default.to_dict(), default)
        few = {key: value for key, value in small.items() if re.search(LAYERS, key)}
        for options in (small, few):
            try:
                config = kind(**options)
                for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
                    found = getattr(config, special, None)
                    if isinstance(found, int) and found >= 512 and options is small:
                        setattr(config, special, 0)
                with torch.device("meta"):
                    outline = getattr(transformers, name)(config)
                if sum(p.nbytes for p in outline.parameters()) > MOST_BYTES:
                    raise ValueError("too large")
                torch.manual_seed(0)
                return getattr(transformers, name)(config).eval()
            except Exception as error:  # noqa: PERF203  any: a config that does not fit says so in its own way
                problem = error
    raise problem or ValueError("the library has no class for it")


def opened(model_type: str) -> dict[str, Any]:
    """Make and save a model, open it both ways, and compare. Runs in a process of its own."""
    warnings.simplefilter("ignore")
    try:
        model = make(model_type)
    except Exception as error:  # it cannot be made as small, or needs another library
        raise DynswapError(f"not made: {type(error).__name__}: {str(error)[:200]}") from error
    kind = type(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        try:
            plain, loading = kind.from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            raise DynswapError(f"the library: {type(error).__name__}: {str(error)[:200]}") from error
        if missing := sorted(loading["missing_keys"]):  # transformers draws them at random each time
            raise DynswapError(f"the library does not find {missing[0]} in the files that it wrote")
        ours = checkpoint.from_pretrained(kind, folder)
        expected, state = plain.state_dict(), ours.state_dict()
        if expected.keys() != state.keys():
            raise DynswapError("unequal names")
        mappings = FileMappings()
        library_maps = {name: bool(mapped_bytes(t, mappings)) for name, t in expected.items()}
        seen: set[int] = set()
        counts: Counter[str] = Counter()
        for name, tensor in state.items():
            same = tensor.dtype == expected[name].dtype and torch.equal(
                tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor,
                expected[name].contiguous().view(torch.uint8) if tensor.dim() else expected[name],
            )
            if not same:
                raise DynswapError(f"{name} differs")
            if tensor.data_ptr() in seen or not tensor.numel():
                continue
            seen.add(tensor.data_ptr())
            counts["bytes"] += tensor.nbytes
            mapped = mapped_bytes(tensor, mappings)
            counts["mapped"] += mapped
            if not library_maps[name]:
                counts["copied by the library"] += tensor.nbytes
                counts["mapped of those"] += mapped
        return dict(counts)


def mapped_bytes(tensor: torch.Tensor, mappings: FileMappings) -> int:
    """Return how many bytes of a tensor are mapped from files."""
    if not tensor.numel():
        return 0
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found = mappings.overlapping(begin, end - begin)
    return sum(min(mapping.end, end) - max(mapping.begin, begin) for mapping in found)


def unmade(row: dict[str, Any]) -> bool:
    """Return whether there was no model, or the library cannot open what it has written."""
    return str(row.get("failure", "")).startswith(("not made", "the library"))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", help="a pattern of model types")
    given = options.parse_args()
    every = {model_type for table in class_names() for model_type in table}
    types = [t for t in sorted(every) if not given.only or re.search(given.only, t)]
    if given.tiny:
        types = ["llama", "mixtral"]
    record = Record("architectures", given.tiny)
    rows: dict[str, Any] = {}
    import transformers.modeling_utils  # noqa: F401  once, for all processes

    isolated = Isolated("fork")
    for model_type in types:
        try:
            rows[model_type] = isolated.run(opened, model_type, limit=120)
        except (DynswapError, TimeoutError) as error:
            rows[model_type] = {"failure": " ".join(str(error).split())[:300]}
        print(model_type, rows[model_type], flush=True)
    made = {name: row for name, row in rows.items() if not unmade(row)}
    good = {name: row for name, row in made.items() if "failure" not in row}
    sums = Counter[str]()
    for row in good.values():
        sums.update(row)
    record.figures = {
        "types": len(types),
        "made": len(made),
        "opened": len(good),
        **sums,
        "failed": {name: row["failure"] for name, row in made.items() if name not in good},
        "less mapped": {name: row for name, row in good.items() if row["mapped"] < 0.95 * row["bytes"]},
        "not made": " ".join(name for name in rows if name not in made),
    }
    record.bar("opened / made", len(good) / len(made), at_least=1)
    record.bar("mapped / bytes", sums["mapped"] / sums["bytes"], at_least=0.95)
    if sums["copied by the library"]:
        record.bar(
            "mapped / bytes that the library copies", sums["mapped of those"] / sums["copied by the library"]
        )
    return record.finish(given.output)


if __name__ == "__main__":
    raise SystemExit(main())
