"""Writes docs/reference/lint.md from the rules. `--check` only compares."""

from pathlib import Path

from generated_page import publish

from blockscale.inspection.rules import RULES, Rule

PAGE = Path(__file__).parent / "reference" / "lint.md"

_INTRO = """# Rules of lint

Made by `make docs` from the rules themselves (`blockscale/inspection/rules.toml`).

    blockscale lint llama-nvfp4                          # files, configs, scales
    blockscale lint llama-nvfp4 --source llama           # and the weights, against the model they were made from
    blockscale lint deepseek-r1-nvfp4 --quick            # headers, configs and single scales: seconds for any size
    blockscale lint llama-nvfp4 --tensor-parallel 8      # and whether 8 GPUs can share the matrices
    blockscale lint llama-nvfp4 --repair llama-mended    # writes a mended copy, if nothing is lost by it

Some faults show only beside the source: nibbles in the wrong order, weights of another model, scales that are wrong
alike everywhere, tensors that every layer lost. Without `--source` a checkpoint with them may pass.

The exit code is 1 where there is an error. `--json` prints the findings for other programs, and in Python
`blockscale.lint("llama-nvfp4").findings` holds them.

An error is what an engine stops at, or computes wrong numbers from. A warning is what costs quality, or stops one
engine and not another. Notes are for your information. Engines are vLLM 0.33, SGLang 0.5.23, TensorRT-LLM and, for
compressed-tensors, transformers 5.24; lists of what stays in 16 bits are read by each one's own rules.

A repair changes no value beyond what its rule says, writes configs and index from the tensors, copies everything else
byte for byte, and lints the result. If one error cannot be mended without loss, nothing is written, and the message
says why; warnings that have no repair stay.
"""
_PARTS = {
    "BS1": "Scales",
    "BS2": "Files",
    "BS3": "Configs and structure",
    "BS4": "Layout and values",
    "BS5": "Limits of engines",
}


def render() -> str:
    """A table of all rules, then a section a rule."""
    rows = [f"| [{rule.code}](#{_anchor(rule)}) | {rule.name} | {rule.severity} |" for rule in RULES.values()]
    sections = [_INTRO, "\n".join(["| code | rule | severity |", "|---|---|---|", *rows]) + "\n"]
    for prefix, title in _PARTS.items():
        sections.append(f"## {title}\n")
        sections += [_section(rule) for rule in RULES.values() if rule.code.startswith(prefix)]
    return "\n".join(sections)


def _section(rule: Rule) -> str:
    lines = [f"### {rule.label}\n", f"*{rule.severity}* {rule.summary}\n", f"**Engines:** {rule.consequence}\n"]
    lines.append(f"**Repair:** {rule.repair or 'none that loses nothing.'}\n")
    return "\n".join(lines)


def _anchor(rule: Rule) -> str:
    return rule.label.lower().replace(" ", "-")


if __name__ == "__main__":
    raise SystemExit(publish(PAGE, render()))
