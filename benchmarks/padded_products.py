"""Whether Inductor pads a product whose sides are not multiples of 16 bytes: what it measures on this GPU.

    python benchmarks/padded_products.py benchmarks/results/padded-products-h200.jsonl

Each product is compiled alone and in a sum with its inputs made by the graph, where Inductor leaves out the copies.
Requires a GPU; writes one JSON line per product that Inductor timed, with its times in milliseconds and its decision.
"""

import json
import sys
from datetime import date
from pathlib import Path

import torch
from torch._inductor.fx_passes import pad_mm

DTYPES = (torch.bfloat16, torch.float32)
# rows, inner side, columns
SHAPES = (
    (4096, 1600, 50257),
    (4096, 50257, 1600),
    (50257, 4096, 1600),
    (4096, 768, 50257),
    (1024, 768, 50257),
    (4096, 4096, 32001),
    (4096, 32001, 4096),
    (32001, 4096, 4096),
    (8192, 2048, 128257),
    (512, 2048, 128257),
    (4096, 1001, 4096),
    (4096, 4096, 1001),
    (2048, 2049, 2048),
    (16384, 513, 513),
    (256, 4096, 1001),
    (64, 4096, 32001),
    (4093, 4096, 4096),
    (1021, 1024, 4096),
)


def main() -> None:
    timed: list[tuple[float, float]] = []
    original = pad_mm.is_padded_faster if hasattr(pad_mm, "is_padded_faster") else pad_mm.should_pad

    def noted(key: str, plain: float, padded: float) -> bool:
        timed.append((plain, padded))
        return bool(original(key, plain, padded))

    name = "is_padded_faster" if hasattr(pad_mm, "is_padded_faster") else "should_pad"
    setattr(pad_mm, name, noted)
    with Path(sys.argv[1]).open("a") as lines:
        for dtype in DTYPES:
            for rows, inner, columns in SHAPES:
                for in_graph in (False, True):
                    torch._dynamo.reset()
                    timed.clear()
                    a = torch.randn(rows, inner, device="cuda", dtype=dtype)
                    b = torch.randn(inner, columns, device="cuda", dtype=dtype)
                    step = torch.compile(lambda a, b: (a * 2) @ (b * 2)) if in_graph else torch.compile(torch.mm)
                    with torch.no_grad():
                        step(a, b)
                    row = {
                        "dtype": str(dtype).removeprefix("torch."),
                        "shape": [rows, inner, columns],
                        "made_in_graph": in_graph,
                        "milliseconds": timed[0] if timed else None,
                        "pads": bool(timed) and timed[0][0] > 1.1 * timed[0][1],
                        "gpu": torch.cuda.get_device_name(),
                        "torch": torch.__version__,
                        "date": str(date.today()),
                    }
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()


if __name__ == "__main__":
    main()
