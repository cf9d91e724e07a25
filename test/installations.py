"""Installs the package into fresh virtual environments and asks what it can do there: `python test/installations.py`.

One line per environment goes into a CSV (`--write docs/data/installations.csv`, of which docs/generate.py makes the table of
docs/installation.md). For each Python and torch there is one environment with torch alone; the others lie over it, so that
torch is installed once. What is broken on purpose lies over an environment where it works. The exit status is 1 if an
environment did not say what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import importlib.metadata
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from email.parser import Parser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("environment", "python", "torch", "packages", "triton", "cutedsl", "interpreter", "tests", "verdict", "date")
KEY = COLUMNS[:3]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
OPTIONAL = ("triton", "cutlass", "transformers", "trl", "peft", "accelerate", "numpy")
"""Modules that `import liger` must not load."""
DISTRIBUTIONS = ("triton", "nvidia-cutlass-dsl", "numpy", "transformers", "accelerate", "peft", "trl")
INTEGRATIONS = ("transformers", "trl")
"""Modules of liger.integrations named after the package that they need."""
SECONDS = 600


# What is installed.


@dataclass(frozen=True)
class Environment:
    """What lies over torch, and what the rows of the table must say then: "" if nothing may be against them."""

    name: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """Packages that go in whatever others want."""
    over: str = ""
    """The environment it lies over; torch alone if empty."""
    files: tuple[tuple[str, str], ...] = ()
    """(path in site-packages, text)."""
    triton: str | None = None
    """Part of the reason against it on a GPU; None: ready if torch brought triton, else missing."""
    cutedsl: str = "package nvidia-cutlass-dsl is not installed"
    interpreter: str | None = None
    """Part of the reason against triton on the CPU with TRITON_INTERPRET=1; None: as on a GPU, and NumPy has to be there."""
    tests: tuple[str, ...] = ()
    """What pytest runs there."""


def package(module: str, text: str, name: str = "", version: str = "") -> tuple[tuple[str, str], ...]:
    """The files of an installed package; without a version those of another install are told about it."""
    files = [(f"{module}/__init__.py", text)]
    if module == "cutlass":  # Python looks for it here first: a .pth of the real one sees to it
        files += [("nvidia_cutlass_dsl/__init__.py", ""), (f"nvidia_cutlass_dsl/dsl_packages/{module}/__init__.py", text)]
    return (*files, *(metadata(name, version) if version else ()))


def metadata(name: str, version: str) -> tuple[tuple[str, str], ...]:
    """What pip leaves of a distribution for others to read."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return ((f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text),)


def raising(error: str) -> Environment:
    """Both packages are found, are of the right version, and raise."""
    text = f"raise {error}('out of order')\n"
    said = f"failed to import: {error}: out of order"
    files = (*package("triton", text), *package("cutlass", text))
    return Environment(f"triton and cutlass raise {error}", over=WORKING, files=files, triton=said, cutedsl=said)


def triton(version: str, numpy: str = "numpy", interpreter: str = "") -> Environment:
    """Triton's kernels by that version, interpreted and compiled."""
    tests, beside = () if interpreter else TRITON_TESTS, (f"triton=={version}",)
    name = f"triton {version}, {numpy}"
    return Environment(name, packages=(numpy,), beside=beside, triton="", interpreter=interpreter, tests=tests)


def transformers(version: str) -> Environment:
    """The patch of Hugging Face's models by that version."""
    packages = (f"transformers=={version}",)
    return Environment(f"transformers {version}", extra="transformers", packages=packages, tests=TRANSFORMERS_TESTS)


WORKING = "[triton,cutedsl] and numpy"
NO_NUMPY = "TRITON_INTERPRET=1 needs the package numpy, which is not installed"
OLD_NUMPY = "numpy<2.4"
"""Triton's interpreter before 3.7 fails with a newer one."""
TRITON_TESTS = ("test/test_spec.py", "test/test_triton.py", "-k", "(triton-cpu and equals_torch) or cuda-90")
TRANSFORMERS_TESTS = ("test/test_integrations_transformers.py", "-k", "llama or Llama")
EXTRAS = {
    "triton": Environment("[triton]", extra="triton", triton=""),
    "cutedsl": Environment("[cutedsl]", extra="cutedsl", cutedsl=""),
    "transformers": Environment("[transformers]", extra="transformers", tests=TRANSFORMERS_TESTS),
    "trl": Environment("[trl]", extra="trl", tests=("test/test_integrations_trl.py",)),
}
"""Those of which more is expected than that they install and disturb nothing."""
VERSIONS = (
    *(triton(version, OLD_NUMPY) for version in ("3.3.0", "3.4.0", "3.5.1", "3.6.0")),
    triton("3.6.0", "numpy>=2.4", interpreter="the interpreter of triton 3.6.0 fails with numpy 2.4"),
    *map(triton, ("3.7.0", "3.7.1", "3.8.0", "3.9.0")),
    *map(transformers, ("5.0.0", "5.8.0")),
)
BROKEN = (
    *map(raising, ("ImportError", "RuntimeError", "SystemError", "SystemExit")),
    Environment(
        "triton 3.2.0, cutlass 5.0.0",
        over=WORKING,
        files=metadata("triton", "3.2.0") + metadata("nvidia-cutlass-dsl", "5.0.0"),
        triton="package triton 3.2.0 is outside its window (3.3 <= version < 4)",
        cutedsl="package nvidia-cutlass-dsl 5.0.0 is outside its window (4.8 <= version < 5)",
    ),
    Environment(
        "triton 4.0.0, cutlass of mixed versions",
        over=WORKING,
        files=metadata("triton", "4.0.0") + metadata("nvidia-cutlass-dsl-libs-base", "4.7.0"),
        triton="package triton 4.0.0 is outside its window (3.3 <= version < 4)",
        cutedsl="does not go with nvidia-cutlass-dsl-libs-base 4.7.0: install them in one version",
    ),
    Environment(
        "triton and cutlass blocked",
        over=WORKING,
        files=(("blocked.pth", "import sys; sys.modules.update(triton=None, cutlass=None)\n"),),
        triton="but its module triton is not found",
        cutedsl="but its module cutlass is not found",
    ),
)


def environments(extras: Iterable[str]) -> tuple[Environment, ...]:
    """All that lie over one torch; `extras` are those that the package declares."""
    return (
        Environment("torch alone"),
        *(EXTRAS.get(extra, Environment(f"[{extra}]", extra=extra)) for extra in extras),
        Environment(WORKING, extra="triton,cutedsl", packages=("numpy",), triton="", cutedsl=""),
        *VERSIONS,
        *BROKEN,
    )


# What is asked there: this file runs with --probe in the environment.


def probe(integrations: Iterable[str]) -> dict[str, object]:
    """What the package does and says in this process; everything that may be missing is imported late."""
    import torch

    before = set(sys.modules)
    import liger

    loaded = {name.partition(".")[0] for name in set(sys.modules) - before} & set(OPTIONAL)
    errors = [f"import liger loaded {name}" for name in sorted(loaded)]
    shapes = {"cross_entropy": (6, 32), "fused_linear_cross_entropy": (6, 32, 16)}
    devices = {"cpu": liger.DeviceInfo("cpu"), "cuda": liger.DeviceInfo("cuda", (9, 0))}
    rows: dict[str, dict[str, str]] = {device: {} for device in devices}
    for op, shape in shapes.items():
        for name, device in devices.items():
            dtype = torch.float32 if name == "cpu" else torch.bfloat16
            answer = liger.explain(op, device=device, dtype=dtype, shape=shape)
            for backend, why in answer.rows:
                if rows[name].setdefault(backend, "; ".join(why)) != "; ".join(why):
                    errors.append(f"{backend} says {why} of {op}, {rows[name][backend]!r} of the other")
    errors += [f"{name}: {error}" for name, error in _losses().items() if not error <= 1e-5]
    question = ("explain", "--device", "cuda:9.0", "--dtype", "bfloat16", "--op", "cross_entropy", "--shape", "6x32")
    told = " ".join((_command_line() + _command_line(*question)).split())
    for distribution in ("triton", "nvidia-cutlass-dsl"):
        if f"{distribution} {_version(distribution) or 'not installed'}" not in told:
            errors.append(f"python -m liger does not say which {distribution} is installed")
    errors += [
        f"python -m liger does not say: {why}"
        for why in (rows["cpu"]["triton"], rows["cuda"]["triton"], rows["cuda"]["cutedsl"])
        if why not in told
    ]
    for name in integrations:
        importlib.import_module(f"liger.integrations.{name}")
    packages = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    return {"torch": torch.__version__, "packages": packages, "rows": rows, "errors": errors}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _losses() -> dict[str, float]:
    """The largest difference of each loss, and of its gradients, from PyTorch's own."""
    import torch

    import liger

    torch.manual_seed(0)
    hidden, head = torch.randn(6, 16), torch.randn(32, 16)
    target = torch.tensor([1, -100, 0, 31, 7, 7])

    def graph(loss: object, *leaves: torch.Tensor) -> list[torch.Tensor]:
        leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    def difference(ours: object, theirs: object, *leaves: torch.Tensor) -> float:
        pairs = zip(graph(ours, *leaves), graph(theirs, *leaves), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    cross_entropy = torch.nn.functional.cross_entropy
    return {
        "cross_entropy": difference(
            lambda x: liger.liger_cross_entropy(x, target), lambda x: cross_entropy(x, target), hidden @ head.t()
        ),
        "fused_linear_cross_entropy": difference(
            lambda x, w: liger.liger_fused_linear_cross_entropy(x, w, target),
            lambda x, w: cross_entropy(x @ w.t(), target),
            hidden,
            head,
        ),
    }


def _command_line(*arguments: str) -> str:
    """What `python -m liger` prints."""
    printed, given = io.StringIO(), sys.argv
    sys.argv = ["liger", *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module("liger", run_name="__main__")
    except SystemExit as end:
        if end.code:
            return f"exit status {end.code}"
    finally:
        sys.argv = given
    return printed.getvalue()


# Making them.


class NotRun(Exception):
    """Why there is no such environment."""


class Failed(Exception):
    """Why an environment does not work."""


@dataclass(frozen=True)
class Maker:
    """Makes the environments of one Python in a folder."""

    folder: Path
    python: str
    flags: tuple[str, ...]

    def venv(self, name: str, *under: Path) -> Path:
        """A new virtual environment without pip, over the site-packages of others."""
        place = self.folder / name
        subprocess.run([self.python, "-m", "venv", "--without-pip", "--clear", place], check=True, timeout=SECONDS)
        lay_over(place, *under)
        return place

    def tools(self) -> Path:
        """What installs, builds and tests; no environment sees it but for its tests."""
        place = self.folder / "tools"
        if not place.is_dir():
            subprocess.run([self.python, "-m", "venv", place], check=True, timeout=SECONDS)
            install = [place / "bin/python", "-m", "pip", "install", "-q", *self.flags]
            subprocess.run([*install, "-U", "pip"], check=True, timeout=SECONDS)
            subprocess.run([*install, "hatchling", "pytest", "hypothesis"], check=True, timeout=SECONDS)
        return place

    def pip(self, place: Path | str, *arguments: str | Path) -> str:
        """Run pip for an environment; its standard output.

        Raises:
            NotRun: it failed; with its last words.
        """
        command = [self.tools() / "bin/python", "-m", "pip", "--python", place, *arguments, *self.flags]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
            raise NotRun(lines[-1].removeprefix("ERROR: "))
        return done.stdout

    def wheel(self) -> Path:
        """The package as it is installed."""
        place = self.folder / "wheel"
        self.pip(self.tools(), "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place, ROOT)
        return next(place.glob("liger-*.whl"))

    def torch(self, version: str, max_wheel_mb: int) -> Path:
        """An environment with torch alone.

        Raises:
            NotRun: there is no such torch, or it takes a larger download than allowed.
        """
        place = self.folder / f"torch-{version}"
        if not (place / "installed").is_file():
            self.venv(place.name)
            asked = self.pip(place, "install", "-q", "--dry-run", "--no-deps", "--report", "-", f"torch=={version}")
            self.allow(asked, max_wheel_mb)
            asked = self.pip(place, "install", "-q", "--dry-run", "--report", "-", f"torch=={version}")
            self.allow(asked, max_wheel_mb)
            self.pip(place, "install", "-q", f"torch=={version}")
            (place / "installed").touch()
        return place

    def compiles(self) -> str:
        """Whether this Python takes the sources, where it has no torch to run them with."""
        code = "import pathlib, sys\nfor p in pathlib.Path(sys.argv[1]).rglob('*.py'): compile(p.read_bytes(), str(p), 'exec')"
        done = subprocess.run([self.python, "-c", code, ROOT / "liger"], capture_output=True, text=True, timeout=SECONDS)
        return "compile" if done.returncode == 0 else f"do not compile: {done.stderr.strip().splitlines()[-1]}"

    @staticmethod
    def allow(report: str, max_wheel_mb: int) -> None:
        """Refuse an install that would download a large file."""
        for item in json.loads(report)["install"]:
            size_mb = download_bytes(item["download_info"]["url"]) / 1e6
            if size_mb > max_wheel_mb:
                raise NotRun(f"wheel of {size_mb:.0f} MB ({item['metadata']['name']})")


def download_bytes(url: str) -> int:
    """How large a file is that has to be fetched; 0 for one that is here."""
    if urlsplit(url).scheme == "file":
        return 0 if Path(unquote(urlsplit(url).path)).is_file() else sys.maxsize
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def site_packages(place: Path) -> Path:
    return next(place.glob("lib/python*/site-packages"))


def lay_over(place: Path, *under: Path) -> None:
    """Make what is installed in folders `under` importable in `place`, their .pth files included; its own goes first."""
    lines = "".join(f"import site; site.addsitedir({str(folder)!r})\n" for folder in under)
    with (site_packages(place) / "zz_under.pth").open("a", encoding="utf-8") as file:  # after the .pth files of its own
        file.write(lines)


def write(place: Path, files: Iterable[tuple[str, str]]) -> None:
    """Put files into an environment's site-packages."""
    for name, text in files:
        path = site_packages(place) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def ask(place: Path, integrations: Iterable[str] = (), *, interpret: bool) -> dict:
    """`probe` in an environment.

    Raises:
        Failed: the process failed; with its last words.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LIGER_", "TRITON_", "PYTHON"))}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [place / "bin/python", "-I", "-W", "ignore", __file__, "--probe", *integrations]
    done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise Failed((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def judge(environment: Environment, place: Path) -> dict[str, str]:
    """A line of the table without its key and date: what was said, and what of it should not have been."""
    told = ask(place, set(INTEGRATIONS) & set(environment.extra.split(",")), interpret=True)
    complaints, said = list(told["errors"]), told["rows"]["cuda"]
    triton = environment.triton
    if triton is None:
        triton = "" if "triton" in told["packages"] else "package triton is not installed"
    interpreter = environment.interpreter
    if interpreter is None:
        interpreter = triton or ("" if "numpy" in told["packages"] else NO_NUMPY)
    if not triton or not environment.cutedsl:  # imported without the interpreter
        compiled = ask(place, interpret=False)
        complaints += compiled["errors"]
        said = compiled["rows"]["cuda"]
    found = {"triton": said["triton"], "cutedsl": said["cutedsl"], "interpreter": told["rows"]["cpu"]["triton"]}
    for name, want in {"triton": triton, "cutedsl": environment.cutedsl, "interpreter": interpreter}.items():
        if (want not in found[name]) if want else found[name]:
            complaints.append(f"{name} should say {want or 'nothing'!r}")
    return {
        "torch": told["torch"],
        "packages": ", ".join(f"{name} {version}" for name, version in told["packages"].items()),
        **{name: reason or "ready" for name, reason in found.items()},
        "verdict": "; ".join(dict.fromkeys(complaints)) or "good",
    }


def test(place: Path, arguments: Iterable[str], tools: Path) -> tuple[str, bool]:
    """Run tests of this repository in an environment, against the package that is installed there: the outcome, and if good."""
    copy = place / "tests"
    for name in ("test", "docs/data", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    lay_over(place, site_packages(tools))
    command = [place / "bin/python", "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LIGER_", "TRITON_", "PYTHON"))}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    try:
        done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"more than {SECONDS} s", False
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing said").splitlines()
    counts = re.sub(r", \d+ (deselected|warnings?)| in [\d.]+s.*", "", lines[-1])
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        print("\n".join(lines[-60:]), file=sys.stderr)
    return counts + "".join(f"; {line.split(' - ')[0]}" for line in failures[:3]), done.returncode == 0


# The matrix.


def interpreters(names: Iterable[str]) -> dict[str, str]:
    """Each Python's version and path; those that are not here are absent."""
    found = {}
    for name in names:
        path = shutil.which(name)
        code = "import platform, sys; print(platform.python_version(), sys.executable)"
        done = path and subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done and done.returncode == 0:
            found[name] = done.stdout.strip()
    return found


def line(environment: str, python: str, torch: str, outcome: dict[str, str]) -> dict[str, str]:
    values = {"environment": environment, "python": python, "torch": torch, "date": date.today().isoformat()} | outcome
    return {column: values.get(column, "") for column in COLUMNS}


def matrix(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """The lines of the table, as they come."""
    flags, wanted = tuple(shlex.split(options.pip_flags)), re.compile(options.only)
    names = options.python or PYTHONS
    found, wheel = interpreters(names), None
    for name in names:
        if name not in found:
            yield line("torch alone", name.removeprefix("python"), "", {"verdict": "not run: this Python is not here"})
            continue
        version, path = found[name].split(" ", 1)
        maker = Maker(folder / version, path, flags)
        wheel = wheel or maker.wheel()
        for torch in options.torch or TORCHES:
            try:
                base = maker.torch(torch, options.max_wheel_mb)
            except NotRun as reason:
                yield line("torch alone", version, torch, {"verdict": f"not run: {reason}; the sources {maker.compiles()}"})
                continue
            working = None
            chosen = environments(extras_of(wheel))
            needed = {environment.over for environment in chosen if wanted.search(environment.name)}
            for environment in chosen:
                if not wanted.search(environment.name) and environment.name not in needed:
                    continue
                under = [site_packages(layer) for layer in (working if environment.over else None, base) if layer]
                try:
                    place, outcome = one(maker, environment, wheel, torch, *under)
                except (NotRun, Failed) as reason:
                    outcome = {"verdict": f"{'fails' if isinstance(reason, Failed) else 'does not install'}: {reason}"}
                else:
                    if environment.name == WORKING:
                        working = place
                    else:
                        shutil.rmtree(place)
                if wanted.search(environment.name):
                    yield line(environment.name, version, torch, outcome)


def one(maker: Maker, environment: Environment, wheel: Path, torch: str, *under: Path) -> tuple[Path, dict[str, str]]:
    """Make an environment and judge it."""
    place = maker.venv("environment-" + re.sub(r"\W+", "-", environment.name).strip("-"), *under)
    if not environment.over:
        extra = f"[{environment.extra}]" if environment.extra else ""
        maker.pip(place, "install", "-q", f"{wheel}{extra}", f"torch=={torch}", *environment.packages)
        if environment.beside:  # torch itself may ask for another version
            maker.pip(place, "install", "-q", "--no-deps", *environment.beside)
    write(place, environment.files)
    outcome = judge(environment, place)
    if environment.tests:
        outcome["tests"], passed = test(place, environment.tests, maker.tools())
        if not passed:
            outcome["verdict"] = f"{outcome['verdict'].removeprefix('good')}; tests failed".lstrip("; ")
    return place, outcome


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8")).get_all("Provides-Extra", [])


def over_this(folder: Path, only: str = "") -> Iterator[dict[str, str]]:
    """The broken environments over the packages of the running interpreter: nothing is installed."""
    maker = Maker(folder, sys.executable, ())
    for environment in BROKEN:
        if not re.search(only, environment.name):
            continue
        place = maker.venv("environment", Path(sysconfig.get_path("purelib")))
        write(place, (("aa_liger.pth", f"{ROOT}\n"), *environment.files))
        outcome = judge(environment, place)
        yield line(environment.name, sys.version.split()[0], "", outcome)


def merged(path: Path, lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """The lines of a file, those that have been made anew replaced; sorted by Python and torch."""
    old = list(csv.DictReader(path.read_text("utf-8").splitlines())) if path.is_file() else []
    table = {tuple(row[name].split("+")[0] for name in KEY): row for row in (*old, *lines)}

    def numbers(row: dict[str, str]) -> tuple[list[int], ...]:
        return tuple([int(number) for number in re.findall(r"\d+", row[name].split("+")[0])] for name in ("python", "torch"))

    return sorted(table.values(), key=numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", metavar="NAME", help=f"may be given often; default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"the same; default: {' '.join(TORCHES)}")
    parser.add_argument("--only", default="", metavar="REGEX", help="environments whose name it matches")
    parser.add_argument("--max-wheel-mb", type=int, default=400, metavar="MB", help="largest download for torch (default: 400)")
    parser.add_argument("--pip-flags", default="", metavar="FLAGS", help="passed to pip install, such as '--index-url URL'")
    parser.add_argument("--directory", type=Path, help="keep what is installed of torch here; default: a temporary one")
    parser.add_argument("--broken", action="store_true", help="only what is broken, over this interpreter; installs nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="CSV to write; lines of other environments stay")
    parser.add_argument("--probe", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe is not None:
        print(json.dumps(probe(options.probe)))
        return 0
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.directory or Path(temporary)).resolve()
        for row in over_this(folder, options.only) if options.broken else matrix(options, folder):
            print(" | ".join(value for name, value in row.items() if name != "date" and value), flush=True)
            lines.append(row)
            if options.write:
                with_old = merged(options.write, lines)
                with options.write.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(with_old)
    bad = [row for row in lines if row["verdict"] != "good" and not row["verdict"].startswith("not run")]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
