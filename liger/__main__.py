"""`python -m liger`: what runs where on this machine, and why; `python -m liger explain` answers for a described call,
`python -m liger bench` times one.

The answer is on stdout; `bench` tells on stderr how far it is. Exit status: 0 with an answer (that nothing fits is one too), 2
with one line on stderr for an unusable argument.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch

from . import __version__, explain
from .backends.plan import Plan
from .bench import LEAST_STEPS, Result, bench
from .dispatch import OPS, SHAPE_LETTERS, DeviceInfo, Explanation, Implementation, Op, Request, backends, table
from .dispatch.capability import device_info, installed_version
from .dispatch.registry import AUTO, ENVIRONMENT_VARIABLE
from .functional import GIVEN_OPTIONS, GIVEN_TENSORS
from .options import FLOATING_DTYPES, CrossEntropyOptions, dtype_name
from .vocab_parallel import VocabParallel

DTYPES = {dtype_name(dtype): dtype for dtype in FLOATING_DTYPES}
SHAPES: dict[Op, tuple[int, ...]] = {
    "cross_entropy": (8192, 128256),
    "fused_linear_cross_entropy": (8192, 128256, 4096),
}
"""What the table is about, where a row's rule looks at the shape: a Llama 3 8B batch."""
DISTRIBUTIONS = ("triton", "nvidia-cutlass-dsl")
ENVIRONMENT = (ENVIRONMENT_VARIABLE, "TRITON_INTERPRET")
DRIVERS = ("nvidia", "amdgpu")
WIDTH = 116

DEVICE_HELP = """\
devices:
  cpu, xpu, ...    a kind of device, by torch's name
  rocm             an AMD GPU
  cuda:9.0         an NVIDIA GPU of that compute capability, which need not be here
  cuda, cuda:0     a GPU of this machine, by its index
"""


# What is asked for.


class _Parser(argparse.ArgumentParser):
    """One line per error: the usage, which has a flag per option, would bury it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The command line. Every field of `CrossEntropyOptions` is a flag of `explain`, and of `bench` what one process can do."""
    top = _Parser(prog="python -m liger", description="What runs where on this machine, and why.", allow_abbrev=False)
    top.add_argument("--json", action="store_true", help="for programs")
    commands = top.add_subparsers(dest="command", title="commands")
    ask = commands.add_parser(
        "explain",
        help="what a described call would get, on any device",
        description="Which backend a described call would get, every reason against the others, and the plan.",
        epilog=DEVICE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    dtypes = f"of the logits: {', '.join(DTYPES)}"
    ask.add_argument("--device", required=True, type=_device, help="see below")
    ask.add_argument("--dtype", required=True, type=_dtype, help=dtypes)
    _add_call(ask)
    measure = commands.add_parser(
        "bench",
        help="time and memory of a described call, on this machine",
        description="Forward and backward by every backend that can, and by PyTorch's own functions: medians, extra peak "
        f"memory, and the plan. Each runs at least {LEAST_STEPS} times, so a large shape takes minutes on a CPU, whatever "
        "--seconds is. What is going on is said on stderr.",
        allow_abbrev=False,
    )
    measure.add_argument("--device", type=_device_here, help="default: this machine's GPU, else cpu")
    measure.add_argument("--dtype", type=_dtype, help=f"{dtypes}; default: bfloat16, on a CPU float32")
    measure.add_argument("--ignored", type=float, default=0.0, help="share of ignored rows in [0, 1] (default: 0)")
    measure.add_argument(
        "--seconds", type=float, default=2.0, help=f"about how long to measure (default: 2); {LEAST_STEPS} steps at least"
    )
    _add_call(measure, without="vocab_parallel")  # which needs several processes
    return top


def _add_call(command: argparse.ArgumentParser, without: str = "") -> None:
    """What describes a call, beside where it runs."""
    # SUPPRESS: a default here would overwrite what was given before the command.
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="for programs")
    command.add_argument("--op", required=True, choices=OPS)
    shapes = ", ".join(f"{'x'.join(SHAPE_LETTERS[op])} for {op}" for op in OPS)
    command.add_argument("--shape", required=True, type=_shape, help=f"{shapes}; such as 8192x128256")
    command.add_argument("--backend", help=f"as in a call: {', '.join(('auto', *backends()))}")
    _add_options(command.add_argument_group("options", "as in a call"), without)
    _add_tensors(command.add_argument_group("tensors", "that the call would be given"))


def _add_options(group: argparse._ArgumentGroup, without: str) -> None:
    """One flag per option of a call. An option that is not given stays out of the namespace."""
    hints = get_type_hints(CrossEntropyOptions)
    for field in dataclasses.fields(CrossEntropyOptions):
        if field.name == without:
            continue
        flag, shared = "--" + field.name.replace("_", "-"), dict[str, Any](dest=field.name, default=argparse.SUPPRESS)
        ops = [op for op in OPS if field.name in GIVEN_OPTIONS[op]]
        only = f"of {ops[0]}" if len(ops) == 1 else None
        if hints[field.name] is bool:
            group.add_argument(flag, action="store_true", help=only, **shared)
        else:
            read, metavar = _reader(hints[field.name])
            about = f"default: {field.default}" + (f"; {only}" if only else "")
            group.add_argument(flag, type=read, metavar=metavar, help=about, **shared)


def _reader(hint: Any) -> tuple[Any, str]:
    """How to read a value of an option's type, and what to call it. What is allowed is for the options to say."""
    kinds = {kind for kind in get_args(hint) or (hint,) if kind is not type(None)}
    if torch.dtype in kinds:
        return _dtype, "DTYPE"
    if VocabParallel in kinds:
        return int, "RANKS"
    for kind in (int, float):
        if kind in kinds:
            return kind, kind.__name__.upper()
    return str, "NAME"


def _add_tensors(group: argparse._ArgumentGroup) -> None:
    for name in dict.fromkeys(name for op in OPS for name in GIVEN_TENSORS[op]):
        ops = " and ".join(op for op in OPS if name in GIVEN_TENSORS[op])
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS, help=f"of {ops}")


def _dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with x between them, such as 8192x128256")
    return tuple(map(int, text.split("x")))


def _device(text: str) -> DeviceInfo:
    """The facts about a device that is described, or that this machine has."""
    described = re.fullmatch(r"cuda:(\d+)\.(\d+)", text)
    if described:
        return DeviceInfo("cuda", (int(described[1]), int(described[2])))
    if text == "rocm":
        return DeviceInfo("rocm")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: cpu, xpu, rocm, cuda:9.0, cuda:0, ...") from error
    if device.type != "cuda":
        try:
            return DeviceInfo(device.type)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(
            f"{text}: this machine has {count} such devices; cuda:9.0 is any NVIDIA GPU of compute capability 9.0"
        )
    return device_info(device)


def _device_here(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device of this machine: cpu, cuda:0, ...") from error
    if device.type not in {here.type for here in devices()}:
        raise argparse.ArgumentTypeError(f"{text}: this machine has {', '.join(map(str, devices()))}")
    return device


# This machine.


def versions() -> dict[str, str | None]:
    """What is installed here: name to version, None if absent. The driver's is that of the GPU's kernel module."""
    return {
        "liger": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: installed_version(name) for name in _distributions()},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
    }


def _distributions() -> tuple[str, ...]:
    """Packages to report: those known to matter, and those that a registered row asks for."""
    needed = (package.name for op in OPS for row in table(op) for package in row.capability.packages)
    return tuple(dict.fromkeys((*DISTRIBUTIONS, *needed)))


def _driver() -> str | None:
    for module in DRIVERS:
        version = Path("/sys/module", module, "version")
        if version.is_file():
            return version.read_text().strip()
    return None


def devices() -> tuple[torch.device, ...]:
    """The CPU and every accelerator that torch can use here."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        found += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return tuple(found)


def device_name(device: torch.device) -> str:
    """The device's product name, or its type where nobody knows."""
    if device.type == "cpu":
        return _cpu_name()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()


def verdicts(op: Op, device: DeviceInfo) -> tuple[tuple[Implementation, dict[str, tuple[str, ...]]], ...]:
    """Every row of the table with, per dtype, the reasons against it, $LIGER_BACKEND or not. Loads what has none."""
    requests = {name: Request(op, device, dtype, SHAPES[op]) for name, dtype in DTYPES.items()}
    return tuple((row, {name: row.reasons(request) for name, request in requests.items()}) for row in table(op))


def machine() -> dict[str, Any]:
    """All about this machine, as JSON has it."""
    return {
        "versions": versions(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "devices": [
            {
                "device": str(device),
                "name": device_name(device),
                **_facts(device_info(device)),
                "table": [_support(op, device_info(device)) for op in OPS],
            }
            for device in devices()
        ],
    }


def _facts(device: DeviceInfo) -> dict[str, Any]:
    return {"type": device.type, "capability": device.capability and list(device.capability)}


def _support(op: Op, device: DeviceInfo) -> dict[str, Any]:
    rows = verdicts(op, device)
    return {
        "op": op,
        "shape": list(SHAPES[op]),
        "backends": [
            {"backend": row.backend, "module": row.module, "reasons": {name: list(why) for name, why in found.items()}}
            for row, found in rows
        ],
        "auto": {name: next((row.backend for row, found in rows if not found[name]), None) for name in DTYPES},
    }


# How it is shown.


def machine_text(facts: dict[str, Any]) -> str:
    """`machine()` for people: equal devices share one table."""
    lines = [", ".join(f"{name} {version or 'not installed'}" for name, version in _shown(facts["versions"]))]
    lines += _environment_lines(facts["environment"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for device in facts["devices"]:
        groups.setdefault(json.dumps([device["name"], device["type"], device["capability"]]), []).append(device)
    for group in groups.values():
        lines += ["", _title(group)]
        for support in group[0]["table"]:
            lines += _support_lines(support)
    return "\n".join(lines)


def _shown(found: dict[str, str | None]) -> list[tuple[str, str | None]]:
    """The versions worth a word: a toolkit or a driver that is not here goes without saying."""
    return [(name, version) for name, version in found.items() if version or name not in ("cuda", "hip", "driver")]


def _environment_lines(environment: dict[str, str | None]) -> list[str]:
    lines = [f"{name}={value}" for name, value in environment.items() if value]
    name = environment[ENVIRONMENT_VARIABLE]
    if name and name not in AUTO:
        known = ", ".join(("auto", *backends()))
        effect = "is used instead of auto" if name in backends() else f"is not one of {known}, and refused"
        lines[0] += f" {effect}, where a call does not say backend="
    return lines


def _title(group: list[dict[str, Any]]) -> str:
    facts = group[0]
    names = ", ".join(device["device"] for device in group)
    capability = facts["capability"] and ".".join(map(str, facts["capability"]))
    return f"{names}: {facts['name']}" + (f", compute capability {capability}" if capability else "")


def _support_lines(support: dict[str, Any]) -> list[str]:
    letters = zip(SHAPE_LETTERS[support["op"]], support["shape"], strict=True)
    lines = [f"  {support['op']} ({', '.join(f'{letter}={size}' for letter, size in letters)})"]
    rows = [(row["backend"], _availability(row["reasons"])) for row in support["backends"]]
    rows.append(("auto", _picks(support["auto"])))
    width = max(len(name) for name, _ in rows)
    return lines + [_wrapped(name, width, text, 4) for name, text in rows]


def _wrapped(name: str, width: int, text: str, indent: int) -> str:
    """A line of a table of two columns."""
    first, next_lines = f"{' ' * indent}{name:{width}}  ", " " * (width + indent + 4)
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=next_lines)


def _availability(reasons: dict[str, list[str]]) -> str:
    """For which dtypes a row is available, and every reason against the others, once; what holds for all says enough."""
    good = [name for name, why in reasons.items() if not why]
    each = dict.fromkeys(reason for why in reasons.values() for reason in why)
    always = [reason for reason in each if all(reason in why for why in reasons.values())]
    against = "; ".join(always or each)
    if not against:
        return "available"
    return f"available for {', '.join(good)}; otherwise no: {against}" if good else f"no: {against}"


def _picks(auto: dict[str, str | None]) -> str:
    """What auto picks, by backend: one word where the dtype does not matter."""
    by_backend: dict[str | None, list[str]] = {}
    for name, backend in auto.items():
        by_backend.setdefault(backend, []).append(name)
    if len(by_backend) == 1:
        return f"-> {next(iter(by_backend)) or 'nothing fits'}"
    return "-> " + "; ".join(f"{backend or 'nothing'} for {', '.join(names)}" for backend, names in by_backend.items())


def explanation_json(answer: Explanation) -> dict[str, Any]:
    """An `Explanation` as JSON has it."""
    request = answer.request
    return {
        "op": request.op,
        "device": _facts(request.device),
        "dtype": _plain(request.dtype),
        "shape": list(request.shape),
        "options": {name: _plain(value) for name, value in request.options},
        "chosen": answer.chosen,
        "source": answer.source,
        "backends": [{"backend": backend, "reasons": list(reasons)} for backend, reasons in answer.rows],
        "plan": answer.plan and _plan_json(answer.plan),
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {name: _plain(value) for name, value in dataclasses.asdict(plan).items()} | {"peak_bytes": plan.peak_bytes}


def _plain(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def bench_json(result: Result, device: torch.device) -> dict[str, Any]:
    """A `Result` as JSON has it."""
    return {
        **explanation_json(result.explanation),
        "versions": versions(),
        "device_name": device_name(device),
        "ignored": result.ignored,
        "measured": [dataclasses.asdict(line) for line in result.lines],
    }


def bench_text(result: Result, device: torch.device) -> str:
    """A `Result` for people: one line per implementation."""
    answer = result.explanation
    share = f", {100 * result.ignored:g} % ignored" if result.ignored else ""
    name = device_name(device)
    lines = [f"{answer.request}{share}", f"{name}: forward and backward, median ms, extra peak MiB"]
    width = max(len(line.name) for line in result.lines)
    for line in result.lines:
        if line.ms is None:
            text = f"no: {'; '.join(line.reasons)}"
        else:
            memory = "not known" if line.extra_mib is None else f"{line.extra_mib:.1f}"
            text = f"{line.ms:10.3f}  {memory:>10}" + ("  chosen" if line.name == answer.chosen else "")
        lines.append(_wrapped(line.name, width, text, 2))
    return "\n".join([*lines, *answer.footer()])


def _say(line: str) -> None:
    """Progress, which is no part of the answer."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; the exit status is above."""
    command_line = parser()
    asked = vars(command_line.parse_args(arguments))
    as_json, command = asked.pop("json"), asked.pop("command")
    if command is None:
        facts = machine()
        print(json.dumps(facts, indent=2) if as_json else machine_text(facts))
        return 0
    try:
        if command == "bench":
            device = asked["device"] = asked["device"] or devices()[-1]
            asked["dtype"] = asked["dtype"] or (torch.float32 if device.type == "cpu" else torch.bfloat16)
            result = bench(asked.pop("op"), say=_say, **asked)
            print(json.dumps(bench_json(result, device), indent=2) if as_json else bench_text(result, device))
            return 0
        answer = explain(asked.pop("op"), **asked)
    except ValueError as error:
        command_line.prog += f" {command}"
        command_line.error(str(error))
    print(json.dumps(explanation_json(answer), indent=2) if as_json else answer)
    return 0


def program() -> int:
    """`main`, for a shell: a reader that has seen enough, such as `head`, is no error to speak of."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not flushed again at exit
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(program())
