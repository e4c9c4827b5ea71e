"""The page of accuracies says what the measured files say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_results() -> None:
    script = ROOT / "docs" / "generate_accuracy.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "run make docs"
