"""blockscale: language models in NVFP4 - quantize, prove what it cost, write checkpoints that every engine loads.

    import blockscale as bs
    q = bs.quantize_tensor(weight, format="nvfp4", scale="sweep")
    bs.quantize("model", "model-nvfp4", recipe="nvfp4-sweep", calibration=["calib.txt"])
    mixture = bs.search_recipe("model", budget=bs.Budget(bits=5.0), calibration=["calib.txt"])
    bs.quantize("model", "model-mixed", mixture, calibration=["calib.txt"])
    bs.inspect("model-nvfp4").engines
    bs.lint("model-nvfp4").ok
    bs.convert("model-nvfp4", "model-ct", to="compressed-tensors")
    report = bs.evaluate("model-nvfp4", reference="model", text=["test.txt"])
    bs.LLM("model-nvfp4").generate(["2 + 2 ="], max_tokens=8)
    bs.plan("model", gpu="h200", input=1024, output=1024, concurrency=64).itl_ms

Names are loaded when first used, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockscale.api import convert, doctor, evaluate, quantize
    from blockscale.conversion.repair.lint import lint
    from blockscale.formats.error import mse, sqnr
    from blockscale.formats.tensor import QuantizedTensor
    from blockscale.inspection.inspect import inspect
    from blockscale.llm import LLM
    from blockscale.planning.planner import plan
    from blockscale.quantization.recipe import Recipe
    from blockscale.quantization.search.budget import Budget
    from blockscale.quantization.search.search import search_recipe
    from blockscale.quantization.weight import quantize_tensor

__all__ = [
    "LLM",
    "Budget",
    "QuantizedTensor",
    "Recipe",
    "convert",
    "doctor",
    "evaluate",
    "inspect",
    "lint",
    "mse",
    "plan",
    "quantize",
    "quantize_tensor",
    "search_recipe",
    "sqnr",
]

_HOMES = {
    "LLM": "blockscale.llm",
    "convert": "blockscale.api",
    "doctor": "blockscale.api",
    "evaluate": "blockscale.api",
    "inspect": "blockscale.inspection.inspect",
    "lint": "blockscale.conversion.repair.lint",
    "plan": "blockscale.planning.planner",
    "quantize": "blockscale.api",
    "mse": "blockscale.formats.error",
    "sqnr": "blockscale.formats.error",
    "QuantizedTensor": "blockscale.formats.tensor",
    "Recipe": "blockscale.quantization.recipe",
    "Budget": "blockscale.quantization.search.budget",
    "search_recipe": "blockscale.quantization.search.search",
    "quantize_tensor": "blockscale.quantization.weight",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'blockscale' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
