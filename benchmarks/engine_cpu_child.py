"""llama.cpp's side of engine_cpu.py. Run by it with the interpreter that has llama-cpp-python.

    PYTHON engine_cpu_child.py quantize IN.gguf OUT.gguf HEAD     IN's weights as Q4_0; embedding and head as they are
                                                                  there (HEAD bf16), or as llama.cpp does it (own)
    PYTHON engine_cpu_child.py serve MODEL.gguf THREADS CONTEXT

`serve` reads jobs from stdin, a line of JSON each: `prompt` (token ids), `num_tokens` to decode, `flash` (whether its
flash attention is used). To each it answers with a line: `prefill_s`, `token_s` of each decoded token and `tokens`.
Tokens are chosen greedily. What is timed is the library's own calls: llama_decode and the largest logit.
"""

import ctypes
import json
import sys
import time

import llama_cpp as lc
import numpy as np

BATCH = 512


def quantize(source: str, target: str, head: str) -> None:
    how = lc.llama_model_quantize_default_params()
    how.ftype = lc.LLAMA_FTYPE_MOSTLY_Q4_0
    if head == "bf16":
        how.token_embedding_type = how.output_tensor_type = 30  # GGML_TYPE_BF16
        how.pure = True
    if lc.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)):
        raise SystemExit(f"llama.cpp does not quantize {source}")


class Session:
    """A model with a context of its own."""

    def __init__(self, path: str, threads: int, context: int, *, is_flash: bool) -> None:
        of_model = lc.llama_model_default_params()
        of_model.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(path.encode(), of_model)
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        settings = lc.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = int(is_flash)  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED
        settings.no_perf = True
        self.context = lc.llama_init_from_model(self.model, settings)
        self.vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))

    def next_token(self, ids: list[int]) -> int:
        """Computes `ids` after what there is, and returns the likeliest token after them."""
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            array = (lc.llama_token * len(part))(*part)
            if lc.llama_decode(self.context, lc.llama_batch_get_one(array, len(part))):
                raise SystemExit("llama_decode failed")
        logits = lc.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())

    def run(self, prompt: list[int], num_tokens: int) -> dict[str, object]:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        token = self.next_token(prompt)
        prefill = time.perf_counter() - begin
        tokens, seconds = [token], []
        while len(tokens) < num_tokens:
            begin = time.perf_counter()
            token = self.next_token([token])
            seconds.append(time.perf_counter() - begin)
            tokens.append(token)
        return {"prefill_s": prefill, "token_s": seconds, "tokens": tokens}


def serve(path: str, threads: int, context: int) -> None:
    facts = {"version": lc.__version__, "system": lc.llama_print_system_info().decode().strip()}
    sessions = {is_flash: Session(path, threads, context, is_flash=is_flash) for is_flash in (False, True)}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(sessions[job["flash"]].run(job["prompt"], job["num_tokens"])), flush=True)


def main() -> None:
    lc.llama_log_set(_silent, ctypes.c_void_p(0))
    what, *rest = sys.argv[1:]
    if what == "quantize":
        quantize(*rest)
    else:
        serve(rest[0], int(rest[1]), int(rest[2]))


@lc.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """The log would stand between the answers."""


if __name__ == "__main__":
    main()
