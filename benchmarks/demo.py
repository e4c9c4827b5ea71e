"""How long the demo takes and what it finds. `python benchmarks/demo.py`; install and model import are not counted."""

import tempfile
from pathlib import Path

from record import record

from blockscale.checkpoint.locate import locate
from blockscale.cli.demo import run_demo


def main() -> None:
    locate("demo")
    with tempfile.TemporaryDirectory() as folder:
        result = run_demo(Path(folder), "nvfp4-sweep")
    figures = {
        "seconds": {**result.seconds, "total": sum(result.seconds.values())},
        "source_bytes": result.summary.source_bytes,
        "num_bytes": result.summary.num_bytes,
        "texts": [
            {
                "name": text.name,
                "tokens": text.num_tokens,
                "perplexity": text.perplexity.value,
                "reference_perplexity": text.reference_perplexity.value,
                "kl_mean": text.kl_mean.value,
            }
            for text in result.report.texts
        ],
    }
    record("demo", figures)
    print(figures["seconds"])


if __name__ == "__main__":
    main()
