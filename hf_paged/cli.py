"""The command line: `python -m hf_paged demo`, `bench cpu`, `bench memory`, `bench trend`, `bench families`, `support`
and `library-tests`."""

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
    memory = kinds.add_parser("memory", help="blocks saved by beams and samples that share a prompt, on the CPU")
    memory.add_argument("--dataset", default="alpaca", metavar="NAME", help="alpaca (default), sharegpt or both")
    memory.add_argument("--requests", type=int, metavar="N", help="requests of each (default 100; sharegpt 16)")
    memory.add_argument(
        "--block-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N", help="default 1 2 4 8 16 32"
    )
    memory.add_argument(
        "--widths", type=int, nargs="+", default=[2, 4, 6], metavar="N", help="beams and samples (default 2 4 6)"
    )
    memory.add_argument(
        "--max-length", type=int, default=2048, metavar="N", help="tokens that reserving the maximum reserves (2048)"
    )
    memory.add_argument("--json", metavar="FILE", help="write the results there after every case, too")
    trend = kinds.add_parser("trend", help="savings over prompt length, beams or samples, and batch, on the CPU")
    trend.add_argument(
        "--only",
        action="append",
        metavar="CELLS",
        help="such as 'beams width=4 prompt=512'; may be given several times",
    )
    trend.add_argument("--new-tokens", type=int, default=16, metavar="N", help="tokens to generate (default 16)")
    trend.add_argument("--repeat", type=int, default=3, metavar="N", help="alternating repetitions (default 3)")
    trend.add_argument("--json", metavar="FILE", help="write the results there after every cell, too")
    trend.add_argument("--resume", action="store_true", help="keep the cells that the --json file has already")
    trend.add_argument("--plot", metavar="FILE", help="draw them there (.svg or .png; needs matplotlib)")
    families = kinds.add_parser("families", help="the most used model families, random and of middle size, on the CPU")
    families.add_argument("--only", nargs="+", metavar="NAME", help="these families alone")
    families.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="of the longest prompt (512)")
    families.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens to generate (default 32)")
    families.add_argument("--repeat", type=int, default=3, metavar="N", help="alternating repetitions (default 3)")
    families.add_argument("--json", metavar="FILE", help="write the results there after every family, too")
    support = commands.add_parser(
        "support", help="try every model family of the installed Transformers, tiny and random"
    )
    support.add_argument("--only", nargs="+", metavar="NAME", help="these model types or classes alone")
    support.add_argument(
        "--quarter", action="store_true", help="a quarter of them: every kind of attention, the same each time"
    )
    support.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time (default 1)")
    support.add_argument("--json", metavar="FILE", help="write the results there")
    support.add_argument("--markdown", metavar="FILE", help="write a table there, of this run or of --read")
    support.add_argument("--read", nargs="+", metavar="FILE", help="run nothing: take these JSON files, one a version")
    library = commands.add_parser(
        "library-tests", help="run Transformers' own generation tests with and without the paged cache and compare"
    )
    library.add_argument("folder", help="a checkout of Transformers at about the installed version")
    library.add_argument("--family", nargs="+", metavar="NAME", help="these folders of tests/models alone")
    library.add_argument("--files", nargs="+", metavar="FILE", help="these test files in the checkout alone")
    library.add_argument("--tests", default="", metavar="REGEX", help="tests of these names alone")
    library.add_argument(
        "--without", default="compil", metavar="REGEX", help="no tests of these names (default: those that compile)"
    )
    library.add_argument(
        "--early",
        action="store_true",
        help="patch models where they are set to evaluation mode, for tests of forward",
    )
    library.add_argument("--block-size", type=int, default=4, metavar="N", help="tokens per block (default 4)")
    library.add_argument("--seconds", type=float, default=120.0, metavar="N", help="time limit of a test (default 120)")
    library.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time, with pytest-xdist")
    library.add_argument("--output", metavar="FOLDER", help="keep the reports of both sides there")
    return parser


def _library_tests(options: argparse.Namespace) -> int:
    from .commands import library_tests

    return library_tests.run(
        options.folder,
        families=options.family,
        files=options.files,
        tests=options.tests,
        without=options.without,
        early=options.early,
        block_size=options.block_size,
        seconds=options.seconds,
        jobs=options.jobs,
        output=options.output,
    )


def _support(options: argparse.Namespace) -> int:
    from .commands import support

    return support.run(
        only=options.only,
        quarter=options.quarter,
        jobs=options.jobs,
        json_file=options.json,
        markdown_file=options.markdown,
        read=options.read,
    )


def _bench_memory(options: argparse.Namespace) -> int:
    from .commands import bench_memory

    return bench_memory.run(
        dataset=options.dataset,
        requests=options.requests,
        block_sizes=options.block_sizes,
        widths=options.widths,
        max_length=options.max_length,
        json_file=options.json,
    )


def _bench_trend(options: argparse.Namespace) -> int:
    from .commands import bench_trend

    return bench_trend.run(
        only=options.only,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        json_file=options.json,
        plot_file=options.plot,
        resume=options.resume,
    )


def _bench_families(options: argparse.Namespace) -> int:
    from .commands import bench_families

    return bench_families.run(
        only=options.only,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        json_file=options.json,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. 2 for a command line that cannot be run."""
    options = _parser().parse_args(argv)
    from .commands.measure import UsageError
    from .commands.real_model import RealModelMissing

    try:
        if options.command == "demo":
            from .commands import demo

            return demo.run(prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
        if options.command == "support":
            return _support(options)
        if options.command == "library-tests":
            return _library_tests(options)
        if options.kind == "memory":
            return _bench_memory(options)
        if options.kind == "trend":
            return _bench_trend(options)
        if options.kind == "families":
            return _bench_families(options)
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
