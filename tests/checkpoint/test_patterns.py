"""Regular expressions that anybody may have written into a config."""

import json
import re
from pathlib import Path

import pytest
from faults.raw import copy_golden, edit_json

from blockscale.checkpoint.patterns import compiled, is_pattern, pattern_problem
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.inspection.lint import lint_folder

FOR_EVER = [
    "re:(a+)+b",
    "re:(a|aa)*b",
    "re:((a?){50}){50}b",
    "re:(?:a|a|ab){40}$",
    "re:(?=(.*)*x)y",
    "re:(a)?(?(1)(b+)+|c)d",
    "re:(?>(a*)*)b",
    "re:.*.*.*.*.*.*x",
    "re:" + "a?" * 40 + "a" * 40,
]


@pytest.mark.parametrize("pattern", ["re:(", "re:[z-a]", "re:a{99999999999}", "re:(?P<x>", "re:" + "(" * 9999])
def test_what_is_no_regular_expression_says_why(pattern: str) -> None:
    assert "no regular expression" in (pattern_problem(pattern) or "")
    assert not is_pattern(pattern)


@pytest.mark.parametrize("pattern", FOR_EVER)
def test_what_could_take_for_ever_is_refused(pattern: str) -> None:
    re.compile(pattern[3:])
    assert "for ever" in (pattern_problem(pattern) or "")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("re:.*lm_head", "model.lm_head"),
        (r"re:(?:.*\.)?visual.*", "model.visual.blocks.0"),
        (r"re:.*\.layers\.\d+\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$", "model.layers.3.mlp.experts.17.up_proj"),
        (r"re:model\.layers\.(?:[0-9]|1[0-9]|20|21|30)\.(?:mlp|self_attn)\..*", "model.layers.21.mlp.up_proj"),
        ("re:.*vision.*|.*visual.*|.*audio.*|.*image.*", "model.audio.x"),
        ("re:^(?!.*experts).*_proj$", "model.up_proj"),
        (r"re:(?:a\.){3}b", "a.a.a.b"),
    ],
)
def test_what_lists_really_say_is_taken(pattern: str, name: str) -> None:
    assert pattern_problem(pattern) is None
    assert is_pattern(pattern)
    assert compiled(pattern).match(name)


def test_a_plain_name_is_no_pattern() -> None:
    assert pattern_problem("(a+)+") is None
    assert not is_pattern("(a+)+")


@pytest.mark.parametrize("pattern", FOR_EVER)
def test_no_pattern_keeps_lint_busy(pattern: str, tmp_path: Path) -> None:
    folder = copy_golden("ct_llama_nvfp4", tmp_path)
    hostile = pattern.replace("a", "[a-z0-9._]")
    edit_json(folder / "config.json", lambda config: config["quantization_config"]["ignore"].append(hostile))
    assert {finding.name for finding in lint_folder(folder, quick=True).findings} == {"unknown-algorithm"}


@pytest.mark.parametrize("pattern", FOR_EVER)
def test_no_pattern_keeps_a_reader_busy(pattern: str, tmp_path: Path) -> None:
    folder = copy_golden("ct_llama_nvfp4", tmp_path)
    hostile = pattern.replace("a", "[a-z0-9._]")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [hostile]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="for ever"):
        open_checkpoint(folder)
