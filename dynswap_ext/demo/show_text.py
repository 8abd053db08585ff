"""The table of sentence similarities."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dynswap_ext.demo.text import TextResult
from dynswap_ext.demo.units import show_bytes


def show_text(result: TextResult, console: Console) -> None:
    """Similarities, and what it took to compute them."""
    table = Table(title="cosine similarity")
    table.add_column("")
    for number in range(1, len(result.sentences) + 1):
        table.add_column(str(number), justify="right")
    for number, (sentence, row) in enumerate(
        zip(result.sentences, result.similarities.tolist(), strict=True), start=1
    ):
        table.add_row(f"{number} {sentence}", *(f"{value:.3f}" for value in row))
    console.print(table)
    stats = result.stats
    console.print(
        f"all-MiniLM-L6-v2, {show_bytes(result.model_bytes)} of weights in a budget of "
        f"{show_bytes(result.budget)} ({stats.provider}, {stats.backend}): at most "
        f"{show_bytes(stats.peak_bytes)} on the device, {show_bytes(stats.bytes_moved)} moved in 3 passes"
    )
    if result.bit_equal:
        console.print("Embeddings equal those of the resident model to the bit.")
    else:
        console.print("[bold red]Embeddings differ from the resident model's.")
