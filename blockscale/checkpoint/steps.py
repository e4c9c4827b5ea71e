"""Folders inside a model's folder: settings and weights of what an embedding model does after its transformer."""

import json
from pathlib import Path

MODULES_NAME = "modules.json"  # of sentence-transformers: the steps, and the folder of each


def step_folders(path: Path) -> list[Path]:
    """Those that `modules.json` names and that are there. None where it cannot be read, which its readers say."""
    try:
        modules = json.loads((path / MODULES_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    inside = [name for name in names if isinstance(name, str) and name and Path(name).name == name and name[0] != "."]
    return [path / name for name in dict.fromkeys(inside) if (path / name).is_dir()]
