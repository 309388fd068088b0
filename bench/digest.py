"""Speed of the weight digest beside the memory's bandwidth, measured in the same run.

The limit is a torch sum over the same bytes, read as int64: one pass, almost no arithmetic.
Usage: python bench/digest.py [--mib 256] [--repeats 5] [--json]
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from trueup.sync.digest import tensor_digest


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(dtype: torch.dtype, nbytes: int, repeats: int) -> dict[str, float | str]:
    """Digest and limit in GB/s for one dtype."""
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    tensor, words = raw.view(dtype), raw.view(torch.int64)
    digest_s = best_seconds(lambda: tensor_digest("w", tensor), repeats)
    limit_s = best_seconds(words.sum, repeats)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "digest_gb_per_s": nbytes / digest_s / 1e9,
        "limit_gb_per_s": nbytes / limit_s / 1e9,
        "share_of_limit": limit_s / digest_s,
    }


def main() -> None:
    """Print one line per dtype; with --json, the last line is one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    rows = [
        measure(dtype, options.mib << 20, options.repeats)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    ]
    if options.json:
        print(json.dumps({"bench": "digest", "mib": options.mib, "threads": 1, "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['dtype']:>9}  digest {row['digest_gb_per_s']:6.2f} GB/s"
            f"  limit {row['limit_gb_per_s']:6.2f} GB/s  share {row['share_of_limit']:.3f}"
        )


if __name__ == "__main__":
    main()
