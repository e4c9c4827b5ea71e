"""What a search found."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from blockscale.errors import UsageError
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.front import FrontPoint
from blockscale.quantization.search.sensitivity import Sensitivity


@dataclass(frozen=True)
class Mixture:
    """recipe        what to quantize with
    formats       option by group
    bits          a weight of the searched linears on average
    num_bytes     of the weight files, and of the KV cache at the budget's context
    figure        what the budget limits, of this mixture
    predicted_kl  nats a token, from the picks' scores
    measured_kl   of the picks together, on windows that no gradient saw
    front         the best mixtures of every size
    """

    recipe: Recipe
    budget: Budget
    formats: Mapping[str, str]
    bits: float
    num_bytes: int
    figure: float
    predicted_kl: float
    measured_kl: float
    sensitivity: Sensitivity
    front: tuple[FrontPoint, ...]
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "recipe": self.recipe.to_yaml()}

    def record(self) -> dict[str, object]:
        """For the checkpoint's own record: how it came about, without what could have been."""
        left_out = ("front", "notices", "recipe")
        data = {key: value for key, value in self.to_dict().items() if key not in left_out}
        data["budget"] = {key: value for key, value in asdict(self.budget).items() if value is not None}
        return data


def check_recipe_path(path: str | Path) -> None:
    """UsageError for a file that `--recipe` would not read."""
    if Path(path).suffix not in (".yaml", ".yml"):
        raise UsageError(f"--save-recipe {path}: a recipe is a .yaml file", hint="--save-recipe mixed.yaml")
