"""Say what a machine runs natively, what it emulates, and which version stands in the way.

Without options: this machine, through its driver; also which kernel serves each op, and a numerical self-test of each.
With --gpu: a machine that is described, wherever it stands.

examples:
  blockscale doctor
  blockscale doctor --gpu b200 --driver 570.86 --cuda 12.8 --torch 2.8
"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.planning.hardware.doctor import Diagnosis, GpuDiagnosis

NAME = "doctor"
HELP = "say what a machine runs natively, and what stands in the way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", metavar="NAME|FILE.toml", help="a GPU of the catalogue or of a file, not this machine's"
    )
    parser.add_argument("--driver", metavar="VERSION", help="its driver")
    parser.add_argument("--cuda", metavar="VERSION", help="CUDA that torch is built with")
    parser.add_argument("--rocm", metavar="VERSION", help="ROCm, on AMD")
    parser.add_argument("--torch", metavar="VERSION", help="torch")
    parser.add_argument("--triton", metavar="VERSION", help="Triton")
    parser.add_argument("--no-self-test", action="store_true", help="name the kernels and do not run them")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import print_json

    versions = {"driver": args.driver, "cuda": args.cuda, "rocm": args.rocm, "torch": args.torch, "triton": args.triton}
    if args.gpu is not None:
        from blockscale.planning.hardware.doctor import doctor  # not through api, which imports torch

        diagnosis = doctor(args.gpu, **versions)
    else:
        from blockscale import api

        diagnosis = api.doctor(self_tests=not args.no_self_test, **versions)
    if args.json:
        print_json(diagnosis.to_dict())
    else:
        print_diagnosis(diagnosis)
    failed = [op for op in diagnosis.ops or () if op["self_test"] == "failed"]
    if failed:
        from blockscale.errors import CheckFailed

        names = ", ".join(f"{op['op']} by {op['kernel']}" for op in failed)
        raise CheckFailed(f"self-tests failed: {names}", hint="please report it with the output of doctor --json")


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    from blockscale.cli.output import print_table, printable
    from blockscale.planning.hardware.doctor import KERNELS_ELSEWHERE

    machine = diagnosis.machine
    whose = "described" if diagnosis.is_described else "this machine"
    versions = (("driver", machine.driver), ("toolkit", machine.toolkit), ("torch", machine.torch))
    said = [f"{name} {value}" if name != "toolkit" else value for name, value in versions if value]
    said += [f"triton {machine.triton}"] if machine.triton else []
    print(printable(f"{whose}: {', '.join(said) or 'no versions given'}"))
    if not diagnosis.gpus:
        print(printable(f"no GPU: {machine.reason}"))
        print("--gpu NAME asks about another machine")
    for gpu in diagnosis.gpus:
        print()
        print(printable(_heading(gpu)))
        if not gpu.is_known:
            print("not in the catalogue: describe it in a file and ask with --gpu FILE.toml")
            continue
        rows = [
            (f.format, f.mode.value, f.operand or "-", printable("; ".join(f.blocking) or f.reason))
            for f in gpu.formats
        ]
        print_table(("format", "runs", "multiplied in", "because"), rows, num_left=3)
    if diagnosis.unchecked:
        why = "given" if diagnosis.is_described else "found"
        print(f"\nnot checked, since not {why}: {', '.join(diagnosis.unchecked)}")
    print()
    if diagnosis.ops is None:
        print(f"kernels: {KERNELS_ELSEWHERE}")
        return
    print_table(
        ("op", "s", "kernel", "mode", "self-test", "because"),
        [
            (
                op["op"],
                f"{op['seconds']:.1f}",
                op["kernel"],
                op["mode"],
                op["self_test"],
                printable(op["detail"] if op["self_test"] == "failed" else op["reason"]),
            )
            for op in diagnosis.ops
        ],
        num_left=4,
    )


def _heading(gpu: "GpuDiagnosis") -> str:
    from blockscale.pages import size

    many = f"{gpu.count} x " if gpu.count > 1 else ""
    return f"{many}{gpu.name}, {size(gpu.memory_bytes)}, capability {gpu.capability}"
