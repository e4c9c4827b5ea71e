"""What llama.cpp makes of a GGUF file. Run by gguf_llama_cpp.py with the interpreter that has llama-cpp-python.

    PYTHON gguf_llama_cpp_child.py JOB.json

The job: `model`, `text` (to tokenize), `prompt` (to continue), `windows` of token ids and `num_scored` of each.
Prints a JSON object: `nll` of each scored token (nats, float64), `tokens` of the text, `continuation`, `version`.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

THREADS = 2


def negative_log_likelihoods(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Logits [N, V] fp32 and tokens [N] -> float64 [N]; the sum runs in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(-1, dtype=np.float64))
    return total - np.take_along_axis(shifted, targets[:, None], -1)[:, 0].astype(np.float64)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    length = max(len(ids) for ids in job["windows"])
    model = llama_cpp.Llama(
        job["model"], n_ctx=length, n_batch=length, n_ubatch=length, n_threads=THREADS, logits_all=True, verbose=False
    )
    nll: list[float] = []
    for ids, num_scored in zip(job["windows"], job["num_scored"], strict=True):
        model.reset()
        model.eval(ids)
        start = len(ids) - num_scored
        nll += negative_log_likelihoods(model.scores[start - 1 : len(ids) - 1], np.array(ids[start:])).tolist()
    model.reset()
    answer = model(job["prompt"], max_tokens=48, temperature=0.0)["choices"][0]["text"]
    tokens = model.tokenize(job["text"].encode(), add_bos=True, special=False)
    print(json.dumps({"nll": nll, "tokens": tokens, "continuation": answer, "version": llama_cpp.__version__}))


if __name__ == "__main__":
    main()
