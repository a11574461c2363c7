"""jsonargparse's messages, nested several levels deep, as one sentence: what was given, what is allowed, the fix."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_mgpu import allreduce

# subcommands beside those of the LightningCLI, and the modules whose `main` they are
TOOLS = {
    "export": "lightning_mgpu.export",
    "sweep": "lightning_mgpu.sweep.cli",
    "benchmark": "lightning_mgpu.benchmark.cli",
}
# what the last part of a key takes a class of, and how a class of one's own is named there
KINDS: dict[str, tuple[type, str]] = {
    "model": (LightningModule, "my_package.MyModel"),
    "data": (LightningDataModule, "my_package.MyData"),
    "optimizer": (Optimizer, "my_package.MyOptimizer"),
    "lr_scheduler": (LRScheduler, "my_package.MyScheduler"),
    "callbacks": (Callback, "my_package.MyCallback"),
    "logger": (Logger, "my_package.MyLogger"),
    "strategy": (Strategy, "my_package.MyStrategy"),
}
ABSTRACT = (
    *("LightningModule", "LightningDataModule", "Classifier", "Callback", "Logger", "ParallelStrategy"),
    "TrainBatchStrategy",
)
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}
# jsonargparse's phrases
KEY = r'[Kk]ey "([\w.]+)"'
NOT_ACCEPTED = r"Option '(\S+?)' is not accepted(?:\. Got value: Namespace\(class_path='([\w.]+)')?"
NO_CALLABLE = "expects a function or a callable class: "
NO_FUNCTION = rf'key "(\w+)":\s+Type .*Callable.* {NO_CALLABLE}(?!Option)(.*?)\. Got value: (\S+)'
NO_PATH = r"(?:Expected a dot import path string|Unexpected import path format): (\S+)"
ALLREDUCES = [name for name in allreduce.__all__ if name.endswith("_allreduce") and not name.startswith("check")]
SEVERAL_CLASSES = r"Multiple subclasses with name \w+\. Give the full class path to avoid ambiguity: ([\w., ]+\w)"
OPTIONS_ALONE = r"import path string: auto|Given value: \{'init_args':"
REQUIRED = (  # the class stands right before, else it is the first one after
    r"class_path '(?P<class_path>[\w.]+)':\s+the following arguments are required: (?P<names>[\w, ]+)",
    r"the following arguments are required: (?P<names>[\w, ]+)(?:[\s\S]*?class_path='(?P<class_path>[\w.]+)')",
)
NO_CLASS = (
    r"Expected a dot import path string: (\S+)",
    r"class_path '([\w.]+)':\s+(?:No module named|module '[\w.]+' has no attribute)",
    r"Import path ([\w.]+) does not correspond to a subclass of",
    r"Import path does not correspond to a subclass of \w+[\s\S]*Given value: (\S+)",
    r"Unexpected import path format: (\S+)",
    rf"{NO_CALLABLE}.*class_path='([^']*)'",
)


def explain(message: str, options_of: Mapping[str, Sequence[str]]) -> str:
    """The sentence for a message of the argument parser.

    Args:
        message: As jsonargparse or argparse wrote it.
        options_of: The names of each subcommand's options, without dashes: `trainer.devices`.
    """
    options = list(dict.fromkeys(name for names in options_of.values() for name in names))
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        return _unrecognized(match[1], options_of)
    if match := re.search(r"does not accept option '(\S+)'", message):
        return f"{match[1]} in the configuration: {_no_option(match[1], options_of)}"
    if match := re.search(r"argument subcommand: invalid choice: '(\S+)' \(choose from (.*)\)", message):
        return no_subcommand(match[1], (*re.findall(r"\w+", match[2]), *TOOLS))
    if match := re.search(r'expected "subcommand" to be one of \{(\S+)\}', message):
        return f"no subcommand given: name one of {', '.join((*match[1].split(','), *TOOLS))}"
    key = ".".join(dict.fromkeys(re.findall(KEY, message)))
    given = _given(key, message)
    if key.startswith("trainer.strategy") and (match := re.search(NO_FUNCTION, message)):
        where = f"--trainer.strategy.{match[1]}={match[3]}"
        return f"{where}: {match[2]}; give the dotted path of a function, my_module.my_function"
    if key == "trainer.strategy.allreduce" and (match := re.search(NO_PATH, message)):
        near = did_you_mean(match[1], [f"lightning_mgpu.allreduce.{name}" for name in ALLREDUCES])
        return f"--{key}={match[1]}: give the dotted path of a function, my_module.my_function{near}"
    if key == "trainer.strategy" and re.search(OPTIONS_ALONE, message):
        return f"{given}: say of which strategy, --trainer.strategy=manual_allreduce"
    if match := re.search(NOT_ACCEPTED, message):
        class_path = match[2] or _last(r"class_path '([\w.]+)'", message[: match.start()])
        return _not_accepted(key, given, match[1], class_path, options)
    if match := re.search(SEVERAL_CLASSES, message):
        return f"{given}: more than one class has this name: say {match[1].replace(', ', ' or ')}"
    if key.rpartition(".")[2] in KINDS:
        matches = (re.search(pattern, message) for pattern in NO_CLASS)
        if name := next((match[1] for match in matches if match), None):
            return _no_class(key, name)
    if match := re.search(r"the following arguments are required: \w+\.(model|data)\b", message):
        return f"--{match[1]}=null: expected the name of a class"
    if match := next((m for pattern in REQUIRED if (m := re.search(pattern, message))), None):
        wanted = " and ".join(f"--{key}.{name.strip()}" for name in match["names"].split(","))
        return f"--{key}={match['class_path'].rpartition('.')[2]} also needs {wanted}"
    if key and (wanted := _expected(message)):
        return f"{given}: expected {wanted}"
    message = re.sub(r'^Parser key "([\w.]+)":', r"--\1:", message)
    return re.sub(r"\s+", " ", re.sub(r"^argument ", "", message)).strip()


def no_subcommand(word: str, choices: Sequence[str]) -> str:
    """That there is none of this name."""
    return f"no subcommand {word!r}{did_you_mean(word, choices)}; choose one of {', '.join(choices)}"


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """' (did you mean X?)' where a known word is, or ends in, nearly this one, else nothing."""
    known = list(known)
    same_end = [name for name in known if name.rpartition(".")[2] == word]
    close = same_end or difflib.get_close_matches(word, known, n=1)
    if not close:  # `Adm`, `devcies`: compare last parts
        ends = {name.rpartition(".")[2].lower(): name for name in known}
        close = [ends[end] for end in difflib.get_close_matches(word.rpartition(".")[2].lower(), ends, n=1)]
    return f" (did you mean {prefix}{min(close, key=len)}?)" if close else ""


def parameters(class_path: str) -> list[str]:
    """The arguments a class is made with, without those it does not name."""
    module, _, name = class_path.rpartition(".")
    try:
        signature = inspect.signature(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def subclasses(base: type) -> list[type]:
    """The imported subclasses of a class, of every depth."""
    direct: list[type] = base.__subclasses__()
    return [found for subclass in direct for found in (subclass, *subclasses(subclass))]


def class_names(base: type) -> list[str]:
    """The names of a class's public, imported subclasses that can be given by name."""
    found = {subclass.__name__ for subclass in subclasses(base) if "<locals>" not in subclass.__qualname__}
    return sorted(name for name in found if not name.startswith("_") and name not in ABSTRACT)


def _unrecognized(argument: str, options_of: Mapping[str, Sequence[str]]) -> str:
    name = argument.lstrip("-").partition("=")[0]
    if argument in options_of:
        return f"{argument}: not expected here; one subcommand comes first"
    if not argument.startswith("--") and (argument[:1] != "-" or any(name in names for names in options_of.values())):
        return f"{argument}: not expected here; options are written --trainer.devices=2"
    return f"{argument}: {_no_option(name, options_of, '--')}"


def _no_option(name: str, options_of: Mapping[str, Sequence[str]], prefix: str = "") -> str:
    """That a subcommand has no such option, and which one has."""
    if owners := [subcommand for subcommand, names in options_of.items() if subcommand and name in names]:
        return f"an option of {' and '.join(owners)} alone: leave it out here"
    options = {option for names in options_of.values() for option in names}
    return f"no such option{did_you_mean(name, sorted(options), prefix)}"


def _not_accepted(key: str, given: str, option: str, class_path: str, options: list[str]) -> str:
    known = [name for name in parameters(class_path) if name != "params"]
    option = option.rpartition(".")[2]
    takes = f"; it takes {', '.join(known)}" if known else ""
    shown = given if given.startswith(f"--{key}.") else f"{key}.{option}"
    deeper = [name for name in options if name.startswith(f"{key}.") and name.endswith(f".{option}")]
    near = did_you_mean(option, known, f"--{key}.") or did_you_mean(option, deeper, "--")
    return f"{shown}: {class_path.rpartition('.')[2]} has no argument {option!r}{near}{takes}"


def _no_class(key: str, name: str) -> str:
    base, example = KINDS[key.rpartition(".")[2]]
    known = class_names(base)
    word = name.rpartition(".")[2]
    near = did_you_mean(word, known) if word not in known else ""
    return f"--{key}={name}: no such {base.__name__}{near}; known are {', '.join(known)}, or a path like {example}"


def _given(key: str, message: str) -> str:
    """The option as the user wrote it, `--data.batch_size=2.5`, as far as the message tells."""
    if match := re.search(r"Given value: NestedArg\(key='([\w.]+)', val=(.*)\)", message):
        value = match[2][1:-1] if match[2][:1] in "'\"" else match[2]
        return f"--{_outer(key, match[1])}.{match[1]}={value}"
    values = [v for v in re.findall(r"(?:Given|Got) value: (.+)", message) if not v.startswith(("Namespace", "{", "["))]
    return f"--{key}={values[0]}" if values else f"--{key}"


def _outer(key: str, nested: str) -> str:
    """`model` for the key `model.optimizer` and the nested `optimizer.lr`."""
    parts = key.split(".")
    first = nested.partition(".")[0]
    return ".".join(parts[: parts.index(first)]) if first in parts[1:] else key


def _expected(message: str) -> str:
    """What the innermost key takes: 'a whole number or null'."""
    lines = message.splitlines()
    start = max((i for i, line in enumerate(lines) if re.search(KEY, line)), default=0)
    indent = len(lines[start]) - len(lines[start].lstrip())
    inner = [lines[start]]
    for line in lines[start + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        inner.append(line)
    wanted = []
    for kind in re.findall(r"Expected a (.+?)(?:\. Got value.*)?$", "\n".join(inner), re.MULTILINE):
        if choices := re.match(r"(?:typing\.)?Literal\[(.*)\]", kind):
            wanted += re.sub(r"['\"]", "", choices[1]).split(", ")
        elif name := re.match(r"<class '(?:[\w.]+\.)?(\w+)'>", kind):
            wanted.append(TYPES.get(name[1], name[1]))
    return " or ".join(dict.fromkeys(wanted))


def _last(pattern: str, text: str) -> str:
    return (re.findall(pattern, text) or [""])[-1]
