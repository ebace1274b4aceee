"""Makes the reference of every config group, option and key from the declarations and the config files.

`python -m tests.record_pages` writes it into `dpx/docs/config.md`; a test makes it again and compares.
"""

from collections import defaultdict

from dpx.config import reference
from dpx.config.reference import Key, Option
from dpx.packages import is_own

HEAD = """\
# Every group, option and key

Made from the declarations in the code and the files in `conf/` by `python -m tests.record_pages`; not edited by hand.

A group has options: `clip=quantile`. An option has keys: `clip.target_quantile=0.3`. The value is what the option gives the key;
`by option` means that the options of the table give different values. `python -m dpx --cfg job` prints the values of a composed config.
"""


def page() -> str:
    """Returns the page."""
    told = reference.meanings()
    groups = reference.groups()
    root = [f"| `{name}` | {_cell(sentence)} |" for name, sentence in told.items() if name not in groups]
    parts = [HEAD, "## Keys at the root\n", "| key | meaning |", "| --- | --- |", *root, ""]
    for group in groups:
        parts += [f"## {group}\n", told[group] + "\n", *_of_group(group)]
    return "\n".join(parts)


def _of_group(group: str) -> list[str]:
    options = [option for option in reference.options(group) if is_own(group, option.name)]
    default = reference.defaults().get(group)
    lines = ["| option | what it is |", "| --- | --- |"]
    lines += [f"| `{one.name}`{' (default)' if one.name == default else ''} | {_cell(one.meaning)} |" for one in options]
    alike: dict[tuple[tuple[str, str], ...], list[tuple[Option, list[Key]]]] = defaultdict(list)
    for option in options:
        if keys := reference.keys(option):
            alike[tuple((key.path, key.type) for key in keys)].append((option, keys))
    for same in alike.values():
        names = ", ".join(f"`{option.name}`" for option, _ in same)
        lines += ["", f"Keys of {names}:", "", "| key | type | value | meaning |", "| --- | --- | --- | --- |"]
        for number, key in enumerate(same[0][1]):
            values = {keys[number].value for _, keys in same}
            value = f"`{_cell(_short(key.value))}`" if len(values) == 1 and key.value else "by option" if len(values) > 1 else ""
            lines.append(f"| `{key.path}` | {_cell(key.type)} | {value} | {_cell(key.meaning)} |")
    return [*lines, ""]


def _short(value: str) -> str:
    return value if len(value) <= 60 else value[:57] + "..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
