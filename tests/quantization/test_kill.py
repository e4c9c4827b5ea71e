"""A calibration killed at any of its writes goes on with the same result; and how much memory one takes."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fresh import run_fresh

Find = Callable[[str], Path]

# One process imports once and forks for every run: a child that is killed, then one that goes on.
KILLED = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import torch
    sys.path[:0] = [{tests!r}]
    from faults.dying import count_writes, in_child, killed_at
    from blockscale.checkpoint.output import PROGRESS_NAME
    from blockscale.checkpoint.reader import open_checkpoint
    from blockscale.checkpoint.source import open_source
    from blockscale.quantization.calibrate import calibrate
    from blockscale.quantization.calibration_data import CalibrationData
    from blockscale.quantization.plan import make_plan
    from blockscale.quantization.recipe import RECIPES

    torch.set_num_threads(1)
    path, work = Path({path!r}), Path({work!r})
    checkpoint, linears = open_checkpoint(path), make_plan(open_source(path), RECIPES["nvfp4"]).linears
    ids = torch.randint(256, (10, 32), generator=torch.Generator().manual_seed(4))
    done = []

    def run(folder):
        done.clear()
        found = calibrate(checkpoint, CalibrationData(ids, "digest"), linears, with_kv=True, state_folder=folder,
                          progress=lambda stage, layer, total: done.append(layer))
        return repr((sorted(found.input_amax.items()), sorted(found.kv_amax.items()), found.notices))

    whole = run(work / "whole")  # and all is imported
    total = count_writes(lambda: run(work / "counted"))
    result = dict(total=total, signals=[], layers=[], wrong=[])
    for die_at in range(total):
        folder = work / str(die_at)
        result["signals"].append(killed_at(die_at, lambda: run(folder)))
        resumed, layers = in_child(lambda: (run(folder), list(done)))
        result["layers"].append(layers)
        if resumed != whole or [p.name for p in folder.iterdir()] != [PROGRESS_NAME]:
            result["wrong"].append(die_at)
    """
)


def test_killed_at_every_write(golden_checkpoint: Find, tmp_path: Path) -> None:
    code = KILLED.format(
        path=str(golden_checkpoint("base_llama")), work=str(tmp_path), tests=str(Path(__file__).parents[1])
    )
    found = run_fresh(code, {"OMP_NUM_THREADS": "1"}).result
    assert set(found["signals"]) == {-9}
    assert found["wrong"] == []
    # two batches: three generations of header, bytes and name each, and the state after each layer
    assert found["total"] >= 3 * 2 * 3 + 2
    layers = [tuple(run) for run in found["layers"]]
    assert layers == sorted(layers, key=len, reverse=True), "the later it died, the less is done again"
    assert set(layers) == {(1, 2), (2,), ()}


MEMORY = textwrap.dedent(
    """
    import resource
    from pathlib import Path
    import torch
    import transformers
    from blockscale.checkpoint.reader import open_checkpoint
    from blockscale.checkpoint.source import open_source
    from blockscale.quantization.calibrate import calibrate
    from blockscale.quantization.calibration_data import CalibrationData
    from blockscale.quantization.plan import make_plan
    from blockscale.quantization.recipe import RECIPES

    torch.set_num_threads(1)
    work = Path({work!r})
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=1024, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "model")
    checkpoint = open_checkpoint(work / "model")
    linears = make_plan(open_source(work / "model"), RECIPES["nvfp4"]).linears

    def peak_mb(count):
        ids = torch.randint(128, (count, 256), generator=torch.Generator().manual_seed(4))
        calibrate(checkpoint, CalibrationData(ids, str(count)), linears, with_kv=False, state_folder=work / str(count))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    result = [peak_mb(32), peak_mb(800)]
    """
)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Hidden states of 800 windows are 210 MB, those of a batch 8: of these there are some at once, and some that the
    allocator holds on to."""
    few, many = run_fresh(MEMORY.format(work=str(tmp_path)), {"OMP_NUM_THREADS": "1"}).result
    assert many - few < 6 * 8.4
