"""The command line: `python -m hf_paged demo`, `python -m hf_paged bench cpu`."""

import argparse
import sys
from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf_paged", description="A paged key-value cache for Hugging Face Transformers' generate()."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run SmolLM2-135M-Instruct with and without the paged cache and compare")
    demo.add_argument("--prompt-tokens", type=int, default=1024, help="length of the long prompt (default 1024)")
    demo.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default 32)")
    bench = commands.add_parser("bench", help="measure time and memory against the library's own caches")
    kinds = bench.add_subparsers(dest="kind", required=True)
    cpu = kinds.add_parser("cpu", help="on the CPU, with SmolLM2-135M-Instruct")
    cpu.add_argument("--case", action="append", metavar="NAME", help="run this case alone; may be given several times")
    cpu.add_argument("--list", action="store_true", help="list the cases and stop")
    cpu.add_argument("--json", metavar="FILE", help="write the results there, too")
    cpu.add_argument("--repeat", type=int, default=5, metavar="N", help="alternating repetitions (default 5)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. 2 for a command line that cannot be run."""
    options = _parser().parse_args(argv)
    from .commands.measure import UsageError
    from .commands.real_model import RealModelMissing

    try:
        if options.command == "demo":
            from .commands import demo

            return demo.run(prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
        from .commands import bench_cpu

        if options.list:
            for name, about in bench_cpu.CASES.items():
                print(f"{name:<12} {about.__doc__.splitlines()[0] if about.__doc__ else ''}")
            return 0
        return bench_cpu.run(cases=options.case, json_file=options.json, repeat=options.repeat)
    except (RealModelMissing, UsageError) as error:
        print(f"hf_paged: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
