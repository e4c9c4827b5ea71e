"""Answer OpenAI's API from a checkpoint, until SIGTERM or Ctrl-C.

A key is read from BLOCKSCALE_API_KEY or --api-key-file. Without one, whoever reaches the port may ask.

examples:
  blockscale serve model-nvfp4
  blockscale serve model-nvfp4 --host 0.0.0.0 --kv-cache fp8 --api-key-file key.txt
  blockscale serve model --canary text.txt --write-reference numbers.json
  blockscale serve model-nvfp4 --canary text.txt --reference numbers.json
"""

import argparse
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from blockscale.server.limits import Limits
    from blockscale.server.run import CanaryOptions

NAME = "serve"
HELP = "answer OpenAI's API from a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="port; 0 takes a free one (8000)")
    parser.add_argument(
        "--name", action="append", metavar="NAME", help="name of the model; may be repeated (the folder's)"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key")
    _add_engine(parser.add_argument_group("engine"))
    _add_limits(parser.add_argument_group("limits"))
    _add_canary(parser.add_argument_group("quality canary"))


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", metavar="D", help="cuda, cuda:1 or cpu (default: the GPU, where there is one)")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that the model is divided among (1)"
    )
    group.add_argument("--kv-cache", metavar="F", help="bf16, fp8 or nvfp4 (default: what the checkpoint says)")
    group.add_argument("--max-context", type=int, metavar="N", help="tokens of prompt and output (the model's)")
    group.add_argument("--max-running", type=int, default=64, metavar="N", help="requests computed at once (64)")
    group.add_argument("--memory-share", type=float, default=0.9, metavar="S", help="of the memory, at most (0.9)")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages of the cache (as many as memory has room for)")
    group.add_argument("--num-draft", type=int, default=0, metavar="N", help="tokens proposed from the text (0)")
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    group.add_argument("--seed", type=int, metavar="S", help="of requests that have none")
    group.add_argument(
        "--emulate-activations", action="store_true", help="round activations as FP4 tensor cores would (slower)"
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-body-mb", type=float, default=8.0, metavar="MB", help="of one request (8)")
    group.add_argument("--max-sequences", type=int, default=1024, metavar="N", help="running and waiting (1024)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="new tokens of a sequence (what the context leaves)")
    group.add_argument(
        "--drain-seconds", type=float, default=60.0, metavar="S", help="for what runs when told to end (60)"
    )


def _add_canary(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--canary", type=Path, metavar="FILE", help="text to score at the start and again and again")
    group.add_argument("--reference", type=Path, metavar="NUMBERS.json", help="of the 16-bit model, for this text")
    group.add_argument("--canary-minutes", type=float, default=30.0, metavar="N", help="between scores (30)")
    group.add_argument(
        "--write-reference", type=Path, metavar="NUMBERS.json", help="score --canary, write its numbers and end"
    )


def run(args: argparse.Namespace) -> None:
    if (args.reference or args.write_reference) and not args.canary:
        raise UsageError("a reference without a text", hint="give the text with --canary")
    api_key = _api_key(args.api_key_file)
    try:
        from blockscale.server import run as server
        from blockscale.server.embeddings import embedding_of
        from blockscale.server.facts import facts_of
        from blockscale.server.page import page_router
    except ImportError as error:
        message = f"the server needs the package '{error.name}'"
        raise MissingDependencyError(message, hint="pip install 'blockscale[serve]'") from error
    from blockscale import api
    from blockscale.cli.output import notice, quiet_libraries
    from blockscale.engine.options import EngineOptions
    from blockscale.engine.vocabulary import read_vocabulary

    quiet_libraries()
    limits, canary = _limits(args), _canary(args)
    listener = None if args.write_reference else server.listen(args.host, args.port)
    if listener and api_key is None and args.host not in ("127.0.0.1", "localhost", "::1"):
        notice("there is no API key: whoever reaches the port may ask")
    options = EngineOptions(
        num_pages=args.num_pages,
        memory_share=args.memory_share,
        max_context=args.max_context,
        max_running=args.max_running,
        num_draft=args.num_draft,
        use_prefix_cache=not args.no_prefix_cache,
        seed=args.seed,
        tensor_parallel=args.tensor_parallel,
    )
    names = tuple(args.name or (Path(args.model).name or Path(args.model).resolve().name,))
    engine, tokenizer = api.load_engine(
        args.model,
        device=args.device,
        kv_cache=args.kv_cache,
        emulate_activations=args.emulate_activations,
        options=options,
    )
    with closing(engine):
        vocabulary = read_vocabulary(tokenizer)
        if listener is None:
            numbers = server.make_reference(engine, tokenizer, vocabulary, args.canary, args.write_reference, names[0])
            notice(f"perplexity {numbers.perplexity:.4g} written to {args.write_reference}")
            return
        facts = facts_of(api.locate(args.model), engine.model, emulate_activations=args.emulate_activations)
        settings = server.ServerOptions(names, api_key, limits, canary, embedding_of(api.locate(args.model)))
        server.serve(
            engine, tokenizer, vocabulary, listener, settings, notice, lambda service: [page_router(service, facts)]
        )


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get("BLOCKSCALE_API_KEY") or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not readable: {error}") from error
    if not key:
        raise UsageError(f"{file} holds no key", hint="write one line into it")
    return key


def _limits(args: argparse.Namespace) -> "Limits":
    from blockscale.server.limits import Limits

    for name, is_good in (
        ("--max-body-mb", args.max_body_mb > 0),
        ("--max-sequences", args.max_sequences >= 1),
        ("--max-tokens", args.max_tokens is None or args.max_tokens >= 1),
        ("--drain-seconds", 0 <= args.drain_seconds < 86_400),
        ("--canary-minutes", args.canary_minutes > 0),
        ("--port", 0 <= args.port < 65_536),
    ):
        if not is_good:
            raise UsageError(f"{name} makes no sense", hint="blockscale serve --help")
    return Limits(
        max_body_bytes=int(args.max_body_mb * 1e6),
        max_sequences=args.max_sequences,
        max_tokens=args.max_tokens,
        drain_seconds=args.drain_seconds,
    )


def _canary(args: argparse.Namespace) -> "CanaryOptions | None":
    from blockscale.server.run import CanaryOptions

    return CanaryOptions(args.canary, args.reference, args.canary_minutes * 60) if args.canary else None
